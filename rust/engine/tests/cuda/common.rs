//! A tiny model that the kernels are made for, backends of it, and steps of one row.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use kvrelay_core::latency::linear::{DecodeTerms, Linear, PrefillTerms};
use kvrelay_core::latency::{LatencyModel, Link};
use kvrelay_core::record::RequestRecord;
use kvrelay_core::scheduler::Belief;
use kvrelay_engine::backend::cpu::{CpuBackend, CpuConfig, CpuWeights, Tier};
use kvrelay_engine::backend::cuda::{CudaBackend, CudaConfig, CudaDevice, CudaWeights};
use kvrelay_engine::backend::{Backend, Input, Limits, Logits, Row, RowOutput};
use kvrelay_engine::{DeviceChoice, EngineConfig, Handle, Numerics, Output, Submission};
use kvrelay_kernels::Driver;
use kvrelay_model::testing::TinyLlama;
use kvrelay_model::{DType, Model};

/// Longer than anything here takes; a wait that reaches it has hung.
const HANG: Duration = Duration::from_secs(120);

pub(crate) const BLOCK: usize = 8;
pub(crate) const BLOCKS: usize = 64;

/// Grouped queries, several layer groups, sizes that are no powers of two; heads of 64, which is the
/// smallest size that kernels are compiled for.
pub(crate) fn tiny(dtype: DType) -> TinyLlama {
    TinyLlama {
        num_layers: 2,
        num_heads: 3,
        num_kv_heads: 1,
        head_dim: 64,
        ffn_size: 160,
        dtype,
        ..TinyLlama::default()
    }
}

pub(crate) fn limits() -> Limits {
    Limits { max_rows: 5, max_tokens: 96, max_logits: 96, max_positions: 128, max_slots: 8 }
}

pub(crate) fn device(ordinal: usize) -> Arc<CudaDevice> {
    let devices = Driver::probe().unwrap_or_else(|reason| panic!("{reason}"));
    CudaDevice::open(&devices, ordinal).unwrap()
}

pub(crate) fn weights(model: &Model) -> Arc<CudaWeights> {
    CudaWeights::new(&device(0), model).unwrap()
}

/// The tiers, as they are configured.
pub(crate) fn fast() -> CudaConfig {
    CudaConfig { block_size: BLOCK, num_blocks: BLOCKS, queue_depth: 3, ..CudaConfig::default() }
}

pub(crate) fn invariant() -> CudaConfig {
    CudaConfig { invariant: true, ..fast() }
}

pub(crate) fn backend(weights: &Arc<CudaWeights>, config: &CudaConfig) -> CudaBackend {
    CudaBackend::new(weights.clone(), config, limits()).unwrap()
}

/// The reference: the CPU's scalar tier.
pub(crate) fn cpu(model: &Model) -> CpuBackend {
    let config =
        CpuConfig { threads: 1, cores: vec![], queue_depth: 3, block_size: BLOCK, num_blocks: BLOCKS };
    CpuBackend::new(Arc::new(CpuWeights::new(model, Tier::Scalar)), &config, limits()).unwrap()
}

pub(crate) fn row<'a>(slot: u32, ids: &'a [u32], start: usize, blocks: &'a [u32]) -> Row<'a> {
    Row {
        slot,
        input: Input::Tokens(ids),
        start: start as u32,
        blocks,
        sample: None,
        logits: Logits::Nothing,
    }
}

/// Ordinary ids, others for every seed.
pub(crate) fn ids(seed: u64, count: usize) -> Vec<u32> {
    (0..count as u64).map(|i| (kvrelay_model::sampling::uniform(seed, i) * 270.0) as u32).collect()
}

/// A block table for each sequence out of one shuffled pool, none shared.
pub(crate) fn tables(seed: u64, sequences: usize) -> Vec<Vec<u32>> {
    let mut order: Vec<u32> = (0..BLOCKS as u32).collect();
    order.sort_by_key(|&b| kvrelay_core::rng::philox4x32([seed as u32, 1], [b, 0, 0, 0])[0]);
    order.chunks(BLOCKS / sequences).take(sequences).map(<[u32]>::to_vec).collect()
}

/// Runs a step; the logits that each row asked for.
pub(crate) fn run(backend: &mut dyn Backend, rows: &[Row<'_>]) -> Vec<Vec<f32>> {
    let vocab = backend.vocab_size();
    let ticket = backend.enqueue(rows).unwrap();
    let output = backend.wait(ticket).unwrap();
    let of = |r: &RowOutput| {
        output.logits[r.first_logits * vocab..(r.first_logits + r.num_logits) * vocab].to_vec()
    };
    output.rows.iter().map(of).collect()
}

/// All logits of `ids`, alone, in one piece.
pub(crate) fn alone(backend: &mut dyn Backend, ids: &[u32]) -> Vec<f32> {
    let blocks: Vec<u32> = (0..BLOCKS as u32).collect();
    let whole = Row { logits: Logits::All, ..row(0, ids, 0, &blocks) };
    run(backend, &[whole]).remove(0)
}

/// Fills every block with numbers that would be noticed.
pub(crate) fn spoil(backend: &dyn Backend) {
    let pool = backend.pool();
    for group in 0..pool.geometry().num_layer_groups {
        let garbage = vec![f32::NAN; pool.geometry().group_range(group).len()];
        for block in 0..pool.num_blocks() as u32 {
            // SAFETY: no step is running.
            unsafe { pool.write_group(block, group, &garbage) };
        }
    }
}

pub(crate) fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// Any belief will do where no test looks at it; measuring would cost time.
pub(crate) fn belief(workers: usize) -> Belief {
    let decode = DecodeTerms { constant: 0.2, per_context: 1e-4, per_row: 0.1 };
    let model = Linear {
        prefill: PrefillTerms { constant: 0.2, per_token: 0.05, per_square: 0.0 },
        decode_small: decode,
        decode_large: decode,
        large_from: u32::MAX,
    };
    let model: Arc<dyn LatencyModel> = Arc::new(model);
    Belief { steps: vec![model; workers], link: Link::INSTANT, kv_bytes_per_token: 1024 }
}

/// An engine with invariant numerics and small pools.
pub(crate) fn config(topology: &str, device: DeviceChoice) -> EngineConfig {
    let config = EngineConfig::new(topology.parse().unwrap());
    let workers = config.topology.num_workers() as usize;
    let limits = kvrelay_core::scheduler::Limits { max_batch: 8, max_prefill_tokens: 64, ..config.limits };
    EngineConfig {
        device,
        numerics: Numerics::Invariant,
        kv_blocks: Some(64),
        belief: Some(belief(workers)),
        limits,
        ..config
    }
}

pub(crate) fn submission(prompt: Vec<u32>, max_tokens: u32) -> Submission {
    Submission { prompt, max_tokens, ignore_eos: true, ..Submission::default() }
}

/// Waits for the end of a request: its tokens and its record.
pub(crate) fn answer(handle: &Handle) -> (Vec<u32>, RequestRecord) {
    let mut tokens = Vec::new();
    loop {
        match handle.recv_timeout(HANG) {
            Poll::Ready(Some(Output::Token { ids, .. })) => tokens.extend(ids),
            Poll::Ready(Some(Output::Finished { record, .. })) => return (tokens, *record),
            Poll::Ready(None) => panic!("request {} ended without a last piece", handle.id().0),
            Poll::Pending => panic!("request {} hangs", handle.id().0),
        }
    }
}

/// Waits for the next piece of a request that goes on.
pub(crate) fn next_token(handle: &Handle) {
    match handle.recv_timeout(HANG) {
        Poll::Ready(Some(Output::Token { .. })) => {}
        other => panic!("request {} gave {other:?}", handle.id().0),
    }
}
