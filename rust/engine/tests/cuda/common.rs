//! A tiny model that the kernels are made for, backends of it, and steps of one row.

use std::sync::Arc;

use kvrelay_engine::backend::cpu::{CpuBackend, CpuConfig, CpuWeights, Tier};
use kvrelay_engine::backend::cuda::{CudaBackend, CudaConfig, CudaDevice, CudaWeights};
use kvrelay_engine::backend::{Backend, Input, Limits, Logits, Row, RowOutput};
use kvrelay_kernels::Driver;
use kvrelay_model::testing::TinyLlama;
use kvrelay_model::{DType, Model};

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
