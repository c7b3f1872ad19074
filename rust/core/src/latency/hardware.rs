//! The GPU table, and what of a GPU's memory is left for KV.
//!
//! Figures are those of AIConfigurator's `systems/*.yaml` (commit 095f58a5, Apache-2.0), dense and
//! per GPU, links in one direction, but for these:
//!
//! * `a100-40gb` follows llm-analysis' `a100-sxm-40gb.json` (Apache-2.0). Inter-node figures of
//!   llm-analysis are Gb/s printed as GB/s and are not used.
//! * `h200`: the source writes 141 GiB for what is sold as 141 GB; a device showed about 139 GiB,
//!   which is used here.
//! * `mi300x`: vendor figures, unchecked. Its links are 128 GB/s in both directions each, 448 GB/s
//!   together in one.
//!
//! A GPU without NVLink (`l40s`, `h100-pcie`) reaches its neighbours over PCIe.

use std::borrow::Cow;

use super::models::{ModelSpec, Precision};
use super::names::{UnknownName, canonical};

/// What a GPU can do, at best. All fields are public: give your own where the table has none.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuSpec {
    /// Lower case, with dashes.
    pub name: Cow<'static, str>,
    /// Dense bf16 operations per second.
    pub bf16_flops: f64,
    /// Dense fp8 operations per second, where there are such units.
    pub fp8_flops: Option<f64>,
    /// Dense fp4 operations per second, where there are such units.
    pub fp4_flops: Option<f64>,
    /// Bytes per second between memory and chip.
    pub hbm_bandwidth: f64,
    /// Memory in bytes.
    pub hbm_bytes: u64,
    /// Bytes per second in one direction over NVLink (or its like), where there is one.
    pub nvlink_bandwidth: Option<f64>,
    /// GPUs that one NVLink domain joins; PCIe joins as many in a host without NVLink.
    pub domain: u32,
    /// Bytes per second in one direction over PCIe.
    pub pcie_bandwidth: f64,
    /// Bytes per second in one direction to another node (or rack).
    pub network_bandwidth: f64,
}

impl GpuSpec {
    /// Dense operations per second on weights of `precision`; `None` without such units.
    pub fn flops(&self, precision: Precision) -> Option<f64> {
        match precision {
            Precision::Bf16 => Some(self.bf16_flops),
            Precision::Fp8 => self.fp8_flops,
            Precision::Fp4 => self.fp4_flops,
        }
    }

    /// Bytes per second in one direction between the ranks of a group of `tp` GPUs: NVLink within
    /// a domain, else PCIe, and the network beyond a domain.
    pub fn group_bandwidth(&self, tp: u32) -> f64 {
        if tp > self.domain {
            self.network_bandwidth
        } else {
            self.nvlink_bandwidth.unwrap_or(self.pcie_bandwidth)
        }
    }
}

const TERA: f64 = 1e12;
const GIGA: f64 = 1e9;
const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// A row of the table, in TFLOPS, TB/s, bytes and GB/s.
struct Row {
    name: &'static str,
    bf16: f64,
    fp8: Option<f64>,
    fp4: Option<f64>,
    hbm: f64,
    bytes: u64,
    nvlink: Option<f64>,
    domain: u32,
    pcie: f64,
    network: f64,
}

/// GPUs without a published PCIe or network figure in the sources get those of their generation:
/// PCIe 4.0 x16 for the A100-40, 5.0 x16 for the MI300X, 400 Gb/s for its network.
#[rustfmt::skip]
const TABLE: &[Row] = &[
    Row { name: "a100-40gb", bf16: 312.0, fp8: None, fp4: None, hbm: 1.555, bytes: 40_000_000_000, nvlink: Some(300.0), domain: 8, pcie: 32.0, network: 25.0 },
    Row { name: "a100-80gb", bf16: 312.0, fp8: None, fp4: None, hbm: 2.039, bytes: 80 * GIB, nvlink: Some(300.0), domain: 8, pcie: 32.0, network: 25.0 },
    Row { name: "h100", bf16: 989.0, fp8: Some(1978.0), fp4: None, hbm: 3.35, bytes: 80 * GIB, nvlink: Some(450.0), domain: 8, pcie: 64.0, network: 50.0 },
    Row { name: "h100-pcie", bf16: 756.5, fp8: Some(1513.0), fp4: None, hbm: 2.0, bytes: 80 * GIB, nvlink: None, domain: 8, pcie: 64.0, network: 50.0 },
    Row { name: "h200", bf16: 989.0, fp8: Some(1978.0), fp4: None, hbm: 4.8, bytes: 139 * GIB, nvlink: Some(450.0), domain: 8, pcie: 64.0, network: 50.0 },
    Row { name: "b200", bf16: 2250.0, fp8: Some(4500.0), fp4: Some(9000.0), hbm: 7.7, bytes: 180 * GIB, nvlink: Some(900.0), domain: 8, pcie: 128.0, network: 100.0 },
    Row { name: "gb200", bf16: 2500.0, fp8: Some(5000.0), fp4: Some(10000.0), hbm: 8.0, bytes: 189_471 * MIB, nvlink: Some(900.0), domain: 72, pcie: 64.0, network: 100.0 },
    Row { name: "b300", bf16: 2250.0, fp8: Some(4500.0), fp4: Some(14000.0), hbm: 7.75, bytes: 2686 * GIB / 10, nvlink: Some(900.0), domain: 8, pcie: 128.0, network: 100.0 },
    Row { name: "gb300", bf16: 2500.0, fp8: Some(5000.0), fp4: Some(15000.0), hbm: 8.0, bytes: 2775 * GIB / 10, nvlink: Some(900.0), domain: 72, pcie: 64.0, network: 100.0 },
    Row { name: "l40s", bf16: 362.0, fp8: Some(733.0), fp4: None, hbm: 0.864, bytes: 45 * GIB, nvlink: None, domain: 8, pcie: 32.0, network: 50.0 },
    Row { name: "mi300x", bf16: 1307.0, fp8: Some(2615.0), fp4: None, hbm: 5.3, bytes: 192_000_000_000, nvlink: Some(448.0), domain: 8, pcie: 64.0, network: 50.0 },
];

/// The GPUs known by name.
pub fn gpu_names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|row| row.name)
}

/// The GPU called `name` (case, blanks and underscores do not matter).
///
/// # Errors
/// [`UnknownName`], with the names there are.
pub fn gpu(name: &str) -> Result<GpuSpec, UnknownName> {
    let wanted = canonical(name);
    let row = TABLE.iter().find(|row| row.name == wanted);
    let row = row.ok_or_else(|| UnknownName::new("GPU", name, gpu_names()))?;
    Ok(GpuSpec {
        name: Cow::Borrowed(row.name),
        bf16_flops: row.bf16 * TERA,
        fp8_flops: row.fp8.map(|flops| flops * TERA),
        fp4_flops: row.fp4.map(|flops| flops * TERA),
        hbm_bandwidth: row.hbm * TERA,
        hbm_bytes: row.bytes,
        nvlink_bandwidth: row.nvlink.map(|bandwidth| bandwidth * GIGA),
        domain: row.domain,
        pcie_bandwidth: row.pcie * GIGA,
        network_bandwidth: row.network * GIGA,
    })
}

/// The share of its memory that an engine uses for weights and KV (0.9 in TensorRT-LLM, and in
/// vLLM up to 0.19).
pub const MEMORY_SHARE: f64 = 0.9;

/// Why a group of GPUs cannot hold a model.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CapacityError {
    /// Weights leave no room for a single token.
    #[error(
        "{model} needs {:.1} GB of weights on {num_gpus} x {gpu}, of which {:.1} GB (0.9 of the memory) are usable: no room for KV; raise tp or pp, or take a larger GPU",
        *weight_bytes as f64 / 1e9,
        *usable_bytes as f64 / 1e9
    )]
    NoRoom {
        /// The model.
        model: String,
        /// The GPU.
        gpu: String,
        /// GPUs in the group.
        num_gpus: u32,
        /// Bytes of weights.
        weight_bytes: u64,
        /// Bytes the group may use.
        usable_bytes: u64,
    },
    /// A group of no GPUs.
    #[error("tp = 0 or pp = 0: a worker has at least 1 GPU")]
    NoGpu,
    /// More pipeline stages than layers.
    #[error("{model} has {num_layers} layers, which do not make pp = {pp} stages")]
    Stages {
        /// The model.
        model: String,
        /// Its layers.
        num_layers: u32,
        /// Stages.
        pp: u32,
    },
}

/// Tokens of KV that `pp` stages of `tp` GPUs each hold beside the weights of `model`:
/// (0.9 · memory · tp · pp − weights) / bytes per token.
///
/// Where the KV heads do not go round (more ranks than heads, or the one latent of MLA), ranks
/// hold copies, and a token takes so much more of the group's memory.
///
/// # Errors
/// [`CapacityError`], when the weights leave no room.
pub fn kv_capacity_tokens(model: &ModelSpec, gpu: &GpuSpec, tp: u32, pp: u32) -> Result<u64, CapacityError> {
    let num_gpus = tp.saturating_mul(pp);
    if num_gpus == 0 {
        return Err(CapacityError::NoGpu);
    }
    if pp > model.num_layers {
        let (model, num_layers) = (model.name.to_string(), model.num_layers);
        return Err(CapacityError::Stages { model, num_layers, pp });
    }
    let usable_bytes = (MEMORY_SHARE * gpu.hbm_bytes as f64 * f64::from(num_gpus)) as u64;
    let weight_bytes = model.weight_bytes();
    let free = usable_bytes.saturating_sub(weight_bytes);
    let tokens = free as f64 / (model.kv_bytes_per_rank(tp) * f64::from(tp));
    if tokens < 1.0 {
        return Err(CapacityError::NoRoom {
            model: model.name.to_string(),
            gpu: gpu.name.to_string(),
            num_gpus,
            weight_bytes,
            usable_bytes,
        });
    }
    Ok(tokens as u64)
}

#[cfg(test)]
mod tests {
    use super::super::models::model;
    use super::*;

    #[test]
    fn names_are_found_and_others_refused_with_the_list() {
        assert_eq!(gpu("A100_80GB").unwrap().name, "a100-80gb");
        assert_eq!(gpu("h200").unwrap().flops(Precision::Fp8), Some(1.978e15));
        assert_eq!(gpu("a100-80gb").unwrap().flops(Precision::Fp8), None);
        let message = gpu("h20").unwrap_err().to_string();
        assert!(message.starts_with("unknown GPU \"h20\"; known, nearest first: h200, "), "{message}");
        assert!(gpu_names().all(|name| message.contains(name)));
    }

    #[test]
    fn groups_talk_over_the_best_link_they_have() {
        let link = |name, tp| gpu(name).unwrap().group_bandwidth(tp) / GIGA;
        assert_eq!((link("h100", 8), link("h100", 16)), (450.0, 50.0));
        assert_eq!((link("gb200", 72), link("l40s", 4)), (900.0, 32.0));
    }

    /// DistServe publishes 66,144 / 163,008 / 356,736 tokens of OPT-13B at TP 1 / 2 / 4.
    #[test]
    fn capacities_are_near_the_published_ones() {
        let a100 = gpu("a100-80gb").unwrap();
        let opt = model("opt-13b").unwrap();
        for (tp, published) in [(1, 66_144.0), (2, 163_008.0), (4, 356_736.0)] {
            let tokens = kv_capacity_tokens(&opt, &a100, tp, 1).unwrap() as f64;
            assert!((tokens / published - 1.0).abs() < 0.06, "tp {tp}: {tokens} against {published}");
        }
    }

    /// Stages hold what as many ranks do.
    #[test]
    fn stages_add_their_memory() {
        let (a100, opt) = (gpu("a100-80gb").unwrap(), model("opt-66b").unwrap());
        assert_eq!(kv_capacity_tokens(&opt, &a100, 2, 2), kv_capacity_tokens(&opt, &a100, 4, 1));
    }

    #[test]
    fn weights_that_do_not_fit_are_refused_with_both_numbers() {
        let a100 = gpu("a100-80gb").unwrap();
        let opt = model("opt-66b").unwrap();
        let error = kv_capacity_tokens(&opt, &a100, 1, 1).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("needs 131.4 GB") && message.contains("77.3 GB (0.9"), "{message}");
        assert_eq!(kv_capacity_tokens(&opt, &a100, 0, 1), Err(CapacityError::NoGpu));
        let error = kv_capacity_tokens(&opt, &a100, 1, 65).unwrap_err().to_string();
        assert_eq!(error, "opt-66b has 64 layers, which do not make pp = 65 stages");
        assert!(kv_capacity_tokens(&opt, &a100, 2, 1).is_ok());
    }

    #[test]
    fn copied_kv_heads_take_their_room() {
        let h200 = gpu("h200").unwrap();
        let llama = model("llama-3.1-8b").unwrap();
        let (eight, sixteen) = (8, 16);
        let per_token = |tp: u32| {
            let free = MEMORY_SHARE * h200.hbm_bytes as f64 * f64::from(tp) - llama.weight_bytes() as f64;
            free / kv_capacity_tokens(&llama, &h200, tp, 1).unwrap() as f64
        };
        assert!((per_token(eight) - 131_072.0).abs() < 1.0);
        assert!((per_token(sixteen) - 262_144.0).abs() < 1.0);
    }
}
