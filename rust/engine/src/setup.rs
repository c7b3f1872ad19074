//! An engine's description, checked and completed before anything is taken.

use std::thread::JoinHandle;

use kvrelay_core::scheduler::{Belief, Limits};
use kvrelay_model::Model;

use crate::backend::{self, Backend, KvGeometry};
use crate::config::{AroundLoop, EngineConfig};
use crate::error::EngineError;

fn refuse<T>(what: &'static str, expected: impl ToString, found: impl ToString) -> Result<T, EngineError> {
    Err(EngineError::Config { what, expected: expected.to_string(), found: found.to_string() })
}

/// The scheduler's limits: with a length that the model can do, and chunks that fit the buffers.
pub(crate) fn core_limits(model: &Model, config: &EngineConfig) -> Result<Limits, EngineError> {
    let mut limits = config.limits.clone();
    let counts = [
        ("workers", config.topology.num_workers()),
        ("block_tokens", limits.block_tokens),
        ("max_batch", limits.max_batch),
        ("max_prefill_tokens", limits.max_prefill_tokens),
        ("max_chunk_tokens", limits.max_chunk_tokens.unwrap_or(1)),
        ("max_repeat", limits.max_repeat),
        ("max_model_len", limits.max_model_len.unwrap_or(1)),
        ("threads_per_worker", config.threads_per_worker.map_or(1, |threads| threads as u32)),
        ("kv_blocks", config.kv_blocks.unwrap_or(1)),
    ];
    if let Some((what, found)) = counts.into_iter().find(|(_, count)| *count == 0) {
        return refuse(what, "at least 1", found);
    }
    let context = u32::try_from(model.config().context_length).unwrap_or(u32::MAX);
    let longest = limits.max_model_len.unwrap_or(context);
    if longest > context {
        return refuse("max_model_len", format!("at most {context}, the model's context length"), longest);
    }
    // No chunk is longer than a sequence, so buffers for more would be wasted.
    let chunk = limits.max_chunk_tokens.unwrap_or(limits.max_prefill_tokens);
    limits.max_chunk_tokens = Some(chunk.min(limits.max_prefill_tokens));
    limits.max_model_len = Some(longest);
    Ok(limits)
}

/// The largest step that the scheduler may order: chunks up to their limit, and a full batch.
pub(crate) fn step_limits(limits: &Limits) -> backend::Limits {
    let rows = limits.max_batch as usize;
    backend::Limits {
        max_rows: rows,
        max_tokens: limits.max_chunk_tokens.unwrap_or(limits.max_prefill_tokens) as usize + rows,
        max_logits: rows,
        max_positions: limits.max_model_len.map_or(usize::MAX, |longest| longest as usize),
        max_slots: rows,
    }
}

/// KV blocks of each worker, who has so much memory for them unless the caller says.
pub(crate) fn kv_blocks(
    config: &EngineConfig,
    geometry: &KvGeometry,
    default_memory: u64,
) -> Result<u32, EngineError> {
    match config.kv_blocks {
        Some(blocks) => Ok(blocks),
        None => kv_blocks_in(config.kv_memory.unwrap_or(default_memory), geometry),
    }
}

/// KV blocks that so many bytes hold.
pub(crate) fn kv_blocks_in(memory: u64, geometry: &KvGeometry) -> Result<u32, EngineError> {
    let block = geometry.block_bytes() as u64;
    match u32::try_from(memory / block) {
        Ok(0) => refuse("kv_memory", format!("at least {block} bytes, one KV block"), memory),
        Ok(blocks) => Ok(blocks),
        Err(_) => refuse("kv_memory", format!("less than 2^32 KV blocks of {block} bytes"), memory),
    }
}

/// Refuses backends that could not run what the scheduler may order, or could not exchange KV.
pub(crate) fn check_backends(
    config: &EngineConfig,
    limits: &Limits,
    backends: &[Box<dyn Backend>],
) -> Result<(), EngineError> {
    let workers = config.topology.num_workers() as usize;
    if backends.len() != workers {
        return refuse("backends", format!("{workers}, one a worker"), backends.len());
    }
    let needed = step_limits(limits);
    for backend in backends {
        let has = backend.limits();
        let pairs = [
            ("rows in a step", needed.max_rows, has.max_rows),
            ("tokens in a step", needed.max_tokens, has.max_tokens),
            ("logits in a step", needed.max_logits, has.max_logits),
            ("positions", needed.max_positions, has.max_positions),
            ("slots", needed.max_slots, has.max_slots),
        ];
        if let Some((what, needed, has)) = pairs.into_iter().find(|(_, needed, has)| needed > has) {
            return refuse(what, format!("at least {needed} in every backend"), has);
        }
        let geometry = backend.pool().geometry();
        if geometry.block_size != limits.block_tokens as usize {
            return refuse("block size of a backend", limits.block_tokens, geometry.block_size);
        }
        backends[0].pool().geometry().check_peer(geometry)?;
    }
    Ok(())
}

/// A belief says something of every worker.
pub(crate) fn checked_belief(belief: Belief, workers: usize) -> Result<Belief, EngineError> {
    match belief.steps.len() {
        found if found == workers => Ok(belief),
        found => refuse("belief", format!("{workers} latency models, one a worker"), found),
    }
}

/// Starts the loop's thread.
pub(crate) fn start_loop(
    around: Option<AroundLoop>,
    body: Box<dyn FnOnce() + Send>,
) -> Result<JoinHandle<()>, EngineError> {
    let builder = std::thread::Builder::new().name("kvrelay-loop".into());
    let thread = match around {
        Some(around) => builder.spawn(move || around(body)),
        None => builder.spawn(body),
    };
    thread.map_err(EngineError::Thread)
}
