//! Clusters to simulate, as `kvrelay.Cluster` wraps them.

use std::sync::Arc;

use kvrelay_core::cluster::{Role, Topology};
use kvrelay_core::latency::hardware::{self, GpuSpec};
use kvrelay_core::latency::models::{self, ModelSpec};
use kvrelay_core::latency::pipeline::Pipeline;
use kvrelay_core::latency::profiles::{self, PROFILE_NAMES};
use kvrelay_core::latency::roofline::{Efficiencies, Roofline};
use kvrelay_core::latency::table::Table;
use kvrelay_core::latency::{LatencyModel, Link};
use kvrelay_core::scheduler::{Belief, Limits};
use kvrelay_core::time::Nanos;
use kvrelay_sim::network::{Network, Wiring};
use kvrelay_sim::{Conversion, Delays, Links, Neighbours, SimCluster, SimWorker};
use pyo3::prelude::*;

use crate::error;
use crate::latency::{Callable, LatencyTable, Raised};

/// Workers of a topology, with their latency, KV capacity and link.
#[pyclass(frozen, module = "kvrelay._core")]
pub(crate) struct Cluster {
    pub(crate) topology: Topology,
    /// What latency models by name are made from; `None` for a cluster that was measured.
    hardware: Option<(ModelSpec, GpuSpec)>,
    parallel: [Parallel; 3],
    pub(crate) sim: SimCluster,
    /// What a latency model written in Python raised.
    pub(crate) raised: Raised,
    /// The table that steps are read off, if one is.
    table: Option<Arc<Table>>,
}

/// A latency model as Python gives it: a name, a table, or a callable.
#[derive(FromPyObject)]
enum LatencySpec<'py> {
    Name(String),
    Table(Bound<'py, LatencyTable>),
    Callable(Bound<'py, PyAny>),
}

/// A network, as Python gives it: the node of each worker, cards a node (one a worker when `None`),
/// the link of a GPU's port inside its node and of a card, by name or bandwidth, with their
/// latencies, and what all transfers of a node have together.
#[derive(FromPyObject)]
struct NetworkSpec {
    nodes: Vec<u32>,
    nics_per_node: Option<u32>,
    local: LinkSpec,
    remote: LinkSpec,
    node_bandwidth: f64,
}

/// A link by name, or by bandwidth in bytes per second; and its latency in seconds.
#[derive(FromPyObject)]
struct LinkSpec(Option<String>, Option<f64>, f64);

impl NetworkSpec {
    fn build(self, py: Python<'_>, gpu: &GpuSpec, ranks: &[u32]) -> PyResult<Network> {
        let per_gpu = |spec: &LinkSpec| link(py, gpu, spec.0.as_deref(), spec.1, spec.2, 1);
        let (port, nic) = (per_gpu(&self.local)?, per_gpu(&self.remote)?);
        let NetworkSpec { nodes, nics_per_node, node_bandwidth, .. } = self;
        let wiring = Wiring { nodes, nics_per_node, port, nic, node_bandwidth };
        wiring.network(ranks).map_err(|error| error::config(py, error))
    }
}

/// GPUs of a worker: so many a layer, in so many pipeline stages.
#[derive(Clone, Copy, FromPyObject)]
struct Parallel(u32, u32);

impl Parallel {
    const NONE: Parallel = Parallel(1, 1);

    fn num_gpus(self) -> u32 {
        self.0.saturating_mul(self.1)
    }
}

/// How KV is handed over, as Python gives it: layer groups, and bytes per second at which a rank lays KV
/// out anew (what its memory allows when `None`).
#[derive(FromPyObject)]
struct HandOver(u32, Option<f64>);

/// Index of a role in per-role arrays.
fn role_index(role: Role) -> usize {
    match role {
        Role::Prefill => 0,
        Role::Decode => 1,
        Role::Mixed => 2,
    }
}

/// KV blocks of a cluster: the books of each take some hundred bytes of this machine.
const MAX_BLOCKS: u64 = 1 << 26;

/// The GPU of the published profiles.
const MEASURED_ON: &str = "a100-80gb";

/// A latency model by name: `"roofline"` or a published profile.
fn latency(
    py: Python<'_>,
    name: &str,
    model: &ModelSpec,
    gpu: &GpuSpec,
    parallel: Parallel,
) -> PyResult<Arc<dyn LatencyModel>> {
    let Parallel(tp, pp) = parallel;
    if name == "roofline" {
        let share = Efficiencies::default();
        let roofline =
            Roofline::new(model.clone(), gpu, tp, share).map_err(|error| error::config(py, error))?;
        let roofline: Arc<dyn LatencyModel> = Arc::new(roofline);
        if pp == 1 {
            return Ok(roofline);
        }
        let between = Link {
            bandwidth: gpu.group_bandwidth(parallel.num_gpus()) * share.link_bandwidth,
            latency: Nanos::from_secs_f64(share.stage_latency),
        };
        let activations = 2 * u64::from(model.hidden);
        return Ok(Arc::new(Pipeline::of_whole(roofline, pp, between, activations)));
    }
    if !PROFILE_NAMES.contains(&name) {
        let known = PROFILE_NAMES.join(", ");
        return Err(error::config(py, format!("latency {name:?}; known: roofline, {known}")));
    }
    if gpu.name != MEASURED_ON {
        let message =
            format!("latency {name:?} was measured on {MEASURED_ON} and says nothing of {}", gpu.name);
        return Err(error::config(py, message));
    }
    let stage = profiles::profile(name, &model.name, tp, pp).map_err(|error| error::config(py, error))?;
    let stage: Arc<dyn LatencyModel> = Arc::new(stage);
    Ok(if pp == 1 { stage } else { Arc::new(Pipeline::of_stage(stage, pp)) })
}

/// KV capacity in tokens: a profile uses the published one, the roofline what memory leaves.
fn capacity(
    py: Python<'_>,
    latency: &str,
    model: &ModelSpec,
    gpu: &GpuSpec,
    Parallel(tp, pp): Parallel,
) -> PyResult<u64> {
    if latency == "roofline" {
        return hardware::kv_capacity_tokens(model, gpu, tp, pp).map_err(|error| error::config(py, error));
    }
    profiles::published_kv_capacity_tokens(&model.name, tp, pp).map_err(|error| error::config(py, error))
}

/// A link by name, or by bandwidth in bytes per second; per worker, all its GPUs sending at once.
fn link(
    py: Python<'_>,
    gpu: &GpuSpec,
    name: Option<&str>,
    bandwidth: Option<f64>,
    latency: f64,
    num_gpus: u32,
) -> PyResult<Link> {
    let per_gpu = match (name, bandwidth) {
        (_, Some(bandwidth)) if bandwidth > 0.0 => bandwidth,
        (_, Some(bandwidth)) => {
            return Err(error::config(
                py,
                format!("link bandwidth is {bandwidth} bytes/s; it must be above 0"),
            ));
        }
        (Some("nvlink"), None) => match gpu.nvlink_bandwidth {
            Some(bandwidth) => bandwidth * f64::from(num_gpus),
            None => {
                return Err(error::config(
                    py,
                    format!("{} has no NVLink; its links: pcie, network", gpu.name),
                ));
            }
        },
        (Some("pcie"), None) => gpu.pcie_bandwidth * f64::from(num_gpus),
        (Some("network"), None) => gpu.network_bandwidth * f64::from(num_gpus),
        (Some("instant"), None) => f64::INFINITY,
        (Some(name), None) => {
            return Err(error::config(py, format!("link {name:?}; known: nvlink, pcie, network, instant")));
        }
        (None, None) => gpu.nvlink_bandwidth.unwrap_or(gpu.pcie_bandwidth) * f64::from(num_gpus),
    };
    if !(latency >= 0.0 && latency.is_finite()) {
        return Err(error::config(py, format!("link latency is {latency} s; it must be at least 0")));
    }
    Ok(Link { bandwidth: per_gpu, latency: Nanos::from_secs_f64(latency) })
}

#[pymethods]
impl Cluster {
    /// `parallel` is per role: prefill, decode, mixed. `kv_tokens` replaces the capacity of every worker.
    #[new]
    #[pyo3(signature = (topology, model, gpu, latency_spec, parallel, link_name, link_bandwidth, link_latency, network, hand_over, delays, kv_tokens, block_tokens, max_batch, max_prefill_tokens, max_model_len, prefix_caching))]
    fn new(
        py: Python<'_>,
        topology: &str,
        model: &str,
        gpu: &str,
        latency_spec: LatencySpec<'_>,
        parallel: [Parallel; 3],
        link_name: Option<&str>,
        link_bandwidth: Option<f64>,
        link_latency: f64,
        network: Option<NetworkSpec>,
        hand_over: HandOver,
        delays: (f64, f64),
        kv_tokens: Option<u64>,
        block_tokens: u32,
        max_batch: u32,
        max_prefill_tokens: u32,
        max_model_len: Option<u32>,
        prefix_caching: bool,
    ) -> PyResult<Cluster> {
        let topology: Topology = topology.parse().map_err(|error| error::config(py, error))?;
        let model = models::model(model).map_err(|error| error::config(py, error))?;
        let gpu = hardware::gpu(gpu).map_err(|error| error::config(py, error))?;
        for (name, value) in [
            ("block_tokens", block_tokens),
            ("max_batch", max_batch),
            ("max_prefill_tokens", max_prefill_tokens),
        ] {
            if value == 0 {
                return Err(error::config(py, format!("{name} is 0; it must be at least 1")));
            }
        }
        let limits =
            Limits { block_tokens, max_batch, max_prefill_tokens, max_model_len, ..Limits::default() };
        let raised = Raised::default();
        let mut workers = Vec::new();
        let mut total_blocks = 0;
        for role in topology.roles() {
            let parallel = parallel[role_index(role)];
            let (latency, name) = match &latency_spec {
                LatencySpec::Name(name) => (latency(py, name, &model, &gpu, parallel)?, name.as_str()),
                LatencySpec::Table(table) => {
                    (Arc::clone(&table.get().0) as Arc<dyn LatencyModel>, "roofline")
                }
                LatencySpec::Callable(call) => {
                    let model = Callable::new(call.clone().unbind(), Arc::clone(&raised));
                    (Arc::new(model) as Arc<dyn LatencyModel>, "roofline")
                }
            };
            let tokens = match kv_tokens {
                Some(tokens) => tokens,
                None => capacity(py, name, &model, &gpu, parallel)?,
            };
            let num_blocks = u32::try_from(tokens / u64::from(block_tokens)).unwrap_or(u32::MAX - 1);
            total_blocks += u64::from(num_blocks);
            if total_blocks > MAX_BLOCKS {
                let message = format!(
                    "KV capacity of {total_blocks} blocks or more in all; at most {MAX_BLOCKS} are simulated"
                );
                return Err(error::config(py, message));
            }
            if num_blocks == 0 {
                return Err(error::config(
                    py,
                    format!("KV capacity of {tokens} tokens is less than a block of {block_tokens}"),
                ));
            }
            workers.push(SimWorker { role, num_blocks, stages: parallel.1, latency });
        }
        let of_workers = |of: fn(Parallel) -> u32| -> Vec<u32> {
            topology.roles().into_iter().map(|role| of(parallel[role_index(role)])).collect()
        };
        let (ranks, gpus) = (of_workers(|parallel| parallel.0), of_workers(Parallel::num_gpus));
        // A transfer is as wide as the narrower of its two ends.
        let sending = gpus.iter().copied().min().unwrap_or(1);
        let links = match network {
            Some(network) => Links::Shared(network.build(py, &gpu, &gpus)?),
            None => Links::Apart(link(py, &gpu, link_name, link_bandwidth, link_latency, sending)?),
        };
        let HandOver(layer_groups, conversion) = hand_over;
        if layer_groups > model.num_layers {
            let message =
                format!("layer_groups is {layer_groups}; {} has {} layers", model.name, model.num_layers);
            return Err(error::config(py, message));
        }
        // Every byte is read and written once.
        let by_memory = gpu.hbm_bandwidth * Efficiencies::default().kv_bandwidth / 2.0;
        let conversion = Conversion { ranks, bandwidth: conversion.unwrap_or(by_memory) };
        let sim = SimCluster {
            workers,
            limits,
            prefix_caching,
            links,
            kv_bytes_per_token: model.kv_bytes_per_token(),
            layer_groups,
            conversion: Some(conversion),
            delays: Delays {
                decision: Nanos::from_secs_f64(delays.0),
                role_switch: Nanos::from_secs_f64(delays.1),
            },
            neighbours: None,
            belief: None,
        };
        let table = match &latency_spec {
            LatencySpec::Table(table) => Some(Arc::clone(&table.get().0)),
            _ => None,
        };
        Ok(Cluster { topology, hardware: Some((model, gpu)), parallel, sim, raised, table })
    }

    /// A cluster like an engine: every step by `table`, KV over a measured link (bandwidth, latency),
    /// all workers on one machine, where each slows the others down (prefill, decode).
    #[staticmethod]
    fn measured(
        py: Python<'_>,
        topology: &str,
        table: &LatencyTable,
        link: (f64, f64),
        slowdowns: (f64, f64),
        kv_bytes_per_token: u64,
        kv_blocks: u32,
        block_tokens: u32,
        max_batch: u32,
        max_prefill_tokens: u32,
        max_model_len: u32,
        prefix_caching: bool,
    ) -> PyResult<Cluster> {
        let topology: Topology = topology.parse().map_err(|error| error::config(py, error))?;
        let latency: Arc<dyn LatencyModel> = Arc::clone(&table.0) as Arc<dyn LatencyModel>;
        let worker =
            |role| SimWorker { role, num_blocks: kv_blocks, stages: 1, latency: Arc::clone(&latency) };
        let limits = Limits {
            block_tokens,
            max_batch,
            max_prefill_tokens,
            max_chunk_tokens: Some(max_prefill_tokens),
            max_model_len: Some(max_model_len),
            ..Limits::default()
        };
        let sim = SimCluster {
            workers: topology.roles().into_iter().map(worker).collect(),
            limits,
            prefix_caching,
            links: Links::Apart(Link { bandwidth: link.0, latency: Nanos::from_secs_f64(link.1) }),
            kv_bytes_per_token,
            layer_groups: 1,
            conversion: None,
            delays: Delays::default(),
            neighbours: Some(Neighbours {
                machines: vec![0; topology.roles().len()],
                prefill: slowdowns.0,
                decode: slowdowns.1,
            }),
            belief: None,
        };
        let table = Some(Arc::clone(&table.0));
        Ok(Cluster {
            topology,
            hardware: None,
            parallel: [Parallel::NONE; 3],
            sim,
            raised: Raised::default(),
            table,
        })
    }

    /// The largest step that simulations asked the table for beyond what was measured: tokens, and
    /// tokens of context; zero where none was.
    #[getter]
    fn farthest(&self) -> (u64, u64) {
        self.table.as_ref().map_or((0, 0), |table| table.farthest())
    }

    /// The topology, as it is written.
    #[getter]
    fn topology(&self) -> String {
        self.topology.to_string()
    }

    /// GPUs over all workers.
    #[getter]
    fn num_gpus(&self) -> u32 {
        self.topology.roles().into_iter().map(|role| self.parallel[role_index(role)].num_gpus()).sum()
    }

    /// KV capacity of each worker, in tokens.
    #[getter]
    fn kv_tokens(&self) -> Vec<u64> {
        let tokens =
            |worker: &SimWorker| u64::from(worker.num_blocks) * u64::from(self.sim.limits.block_tokens);
        self.sim.workers.iter().map(tokens).collect()
    }

    /// Bytes per second that a KV transfer has at least, while it is alone.
    #[getter]
    fn link_bandwidth(&self) -> f64 {
        self.sim.unloaded_link().bandwidth
    }

    /// Seconds that `tokens` prompt tokens take on a worker of `role`, alone and unloaded.
    fn prefill_time(&self, py: Python<'_>, tokens: u32, role: &str) -> PyResult<f64> {
        let worker = self.worker_of(py, role)?;
        Ok(worker.latency.step(&kvrelay_core::step::StepShape::prefill(0, tokens)).as_secs_f64())
    }

    /// Seconds that a step with these sums takes on a worker of `role`, alone.
    fn step_time(&self, py: Python<'_>, sums: crate::latency::Sums, role: &str) -> PyResult<f64> {
        let worker = self.worker_of(py, role)?;
        Ok(worker.latency.step(&crate::latency::shape(sums)).as_secs_f64())
    }

    /// Seconds that a decode step takes on a worker of `role`.
    fn decode_time(&self, py: Python<'_>, num_decode: u32, context_tokens: u64, role: &str) -> PyResult<f64> {
        let worker = self.worker_of(py, role)?;
        let shape = kvrelay_core::step::StepShape::decode(num_decode, context_tokens);
        Ok(worker.latency.step(&shape).as_secs_f64())
    }
}

impl Cluster {
    fn worker_of(&self, py: Python<'_>, role: &str) -> PyResult<&SimWorker> {
        let wanted = crate::view::role_named(py, role)?;
        let found = self.sim.workers.iter().find(|worker| worker.role == wanted);
        found.ok_or_else(|| error::config(py, format!("{} has no {role} worker", self.topology)))
    }

    /// What the policy is to believe, by the name of a latency model.
    pub(crate) fn belief(&self, py: Python<'_>, name: &str) -> PyResult<Belief> {
        let (spec, gpu) = self.hardware.as_ref().ok_or_else(|| {
            error::config(
                py,
                format!("belief {name:?}: this cluster was measured, nothing else is known of it"),
            )
        })?;
        let model = |role: Role| latency(py, name, spec, gpu, self.parallel[role_index(role)]);
        Ok(Belief {
            steps: self.topology.roles().into_iter().map(model).collect::<PyResult<_>>()?,
            link: self.sim.unloaded_link(),
            kv_bytes_per_token: self.sim.kv_bytes_per_token,
        })
    }
}

/// Workers of a topology.
#[pyfunction]
pub(crate) fn num_workers(py: Python<'_>, topology: &str) -> PyResult<usize> {
    let topology: Topology = topology.parse().map_err(|error| error::config(py, error))?;
    Ok(topology.roles().len())
}

/// Names of the GPU table.
#[pyfunction]
pub(crate) fn gpu_names() -> Vec<&'static str> {
    hardware::gpu_names().collect()
}

/// Names of the model table.
#[pyfunction]
pub(crate) fn model_names() -> Vec<&'static str> {
    models::model_names().collect()
}

/// Names of the published latency profiles.
#[pyfunction]
pub(crate) fn profile_names() -> Vec<&'static str> {
    PROFILE_NAMES.to_vec()
}
