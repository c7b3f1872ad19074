//! A tiny model that the kernels are made for, backends of it, and steps of one row.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use kvrelay_core::record::RequestRecord;
use kvrelay_engine::backend::Limits;
use kvrelay_engine::backend::cpu::{CpuBackend, CpuConfig, CpuWeights, Tier};
use kvrelay_engine::backend::cuda::{CudaBackend, CudaConfig, CudaDevice, CudaWeights};
use kvrelay_engine::{DeviceChoice, EngineConfig, Handle, Numerics, Output, Submission};
use kvrelay_kernels::Driver;
use kvrelay_model::testing::TinyLlama;
use kvrelay_model::{DType, Model};

pub(crate) use crate::belief::belief;
pub(crate) use crate::law::{BLOCK, BLOCKS, alone, bits, ids, row, run, spoil, tables};

/// Longer than anything here takes; a wait that reaches it has hung.
const HANG: Duration = Duration::from_secs(120);

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
