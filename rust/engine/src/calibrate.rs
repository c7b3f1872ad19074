//! What policies predict with, measured at an engine's start.
//!
//! All workers measure at the same time, as they will later run at the same time, and share one
//! fit. A few small steps are always measured, since a fit needs them; larger ones only while they
//! fit in the budget, so a slow machine measures less and not much longer.

use std::sync::Arc;

use kvrelay_core::latency::fitted::{Sample, fit};
use kvrelay_core::latency::linear::Linear;
use kvrelay_core::latency::{LatencyModel, Link};
use kvrelay_core::scheduler::Belief;
use kvrelay_core::step::{Row as CoreRow, StepShape};
use kvrelay_core::time::{Nanos, Picos};
use kvrelay_model::SamplingParams;

use crate::backend::{Backend, BackendError, Input, KvPool, Logits, Row, copy_blocks};
use crate::clock::Clock;

/// Time for each of the two parts.
const BUDGET: Nanos = Nanos(700_000_000);

/// A step is measured again while all its times together stay below this: the shorter a step, the
/// more a disturbance weighs. Its shortest time counts.
const REPEAT_FOR: Nanos = Nanos(30_000_000);

/// Each step is measured this often at most.
const REPEATS: usize = 5;

/// What a transfer costs beside its bytes: two hand-overs between threads.
const TRANSFER_LATENCY: Nanos = Nanos(50_000);

/// Steps to be measured, as two numbers each; the first few always.
struct Part {
    steps: &'static [(u32, u32)],
    always: usize,
    batch: fn(&dyn Backend, u32, u32) -> Option<Batch>,
}

/// By prefix and chunk.
const PREFILL: Part = Part {
    steps: &[(0, 16), (0, 48), (0, 96), (256, 32), (0, 192), (512, 64), (0, 384), (512, 256), (0, 1024)],
    always: 3,
    batch: Batch::prefill,
};

/// By rows and the context of each.
const DECODE: Part = Part {
    steps: &[(1, 16), (8, 16), (1, 512), (4, 128), (16, 32), (8, 512), (16, 256), (32, 128), (64, 64)],
    always: 4,
    batch: Batch::decode,
};

/// Measures the backends' steps and the copying of KV between them.
pub(crate) fn calibrate(backends: &mut [Box<dyn Backend>], clock: Clock) -> Result<Belief, BackendError> {
    let workers = backends.len();
    let measured: Vec<_> = std::thread::scope(|scope| {
        let start = |backend| scope.spawn(move || measure(backend, clock));
        let threads: Vec<_> = backends.iter_mut().map(start).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err(BackendError::Stopped("it panicked while measured".into())))
        };
        threads.into_iter().map(join).collect()
    });
    let mut samples = Vec::new();
    for of_worker in measured {
        samples.extend(of_worker?);
    }
    let model = fit(&samples).unwrap_or_else(|| untold(&samples));
    let model: Arc<dyn LatencyModel> = Arc::new(model);
    let pools: Vec<&Arc<KvPool>> = backends.iter().map(|backend| backend.pool()).collect();
    let (source, destination) = (pools[0], pools[workers - 1]);
    Ok(Belief {
        steps: vec![model; workers],
        link: link(source, destination, clock)?,
        kv_bytes_per_token: source.geometry().token_bytes() as u64,
    })
}

/// The model of a clock that told nothing apart: every step takes one nanosecond.
fn untold(samples: &[Sample]) -> Linear {
    let all = samples.iter().map(|sample| Sample { duration: Picos(1_000), ..*sample });
    fit(&all.collect::<Vec<_>>()).expect("the first step of each part is always measured")
}

fn measure(backend: &mut Box<dyn Backend>, clock: Clock) -> Result<Vec<Sample>, BackendError> {
    let mut samples = Vec::new();
    for part in [PREFILL, DECODE] {
        let end = clock.now() + BUDGET;
        // Limits of one token still allow this one. Its first run warms caches and pages.
        let smallest = (part.batch)(backend.as_ref(), 0, 1);
        let steps = part.steps.iter().map(|&(a, b)| (part.batch)(backend.as_ref(), a, b));
        let mut steps: Vec<Option<Batch>> = steps.collect();
        if steps.iter().all(Option::is_none) {
            steps[0] = smallest;
        }
        let mut latest: Option<Sample> = None;
        for (index, step) in steps.into_iter().enumerate() {
            let Some(step) = step else { continue };
            let expected = latest.map_or(Nanos::ZERO, |sample| in_proportion(&sample, &step.shape()));
            if index >= part.always && clock.now() + expected > end {
                continue;
            }
            if latest.is_none() {
                step.run(backend, clock)?;
            }
            let sample = step.shortest(backend, clock)?;
            latest = Some(sample);
            samples.push(sample);
        }
    }
    Ok(samples)
}

/// How long a step would take if time were a matter of tokens alone: for larger steps, too long.
fn in_proportion(sample: &Sample, shape: &StepShape) -> Nanos {
    let per_token = sample.duration.0 / sample.shape.num_tokens().max(1);
    Nanos(per_token.saturating_mul(shape.num_tokens()) / 1_000)
}

/// A step to be measured. KV of its contexts is what the fresh pool holds: zeros take as long.
struct Batch {
    rows: Vec<CoreRow>,
    tables: Vec<Vec<u32>>,
    ids: Vec<u32>,
}

impl Batch {
    /// One chunk behind a prefix, if the backend's limits allow it.
    fn prefill(backend: &dyn Backend, prefix: u32, chunk: u32) -> Option<Batch> {
        Batch::new(backend, 1, prefix, chunk, false)
    }

    /// `rows` rows, at least one, that attend to `context` tokens each, if the limits allow it.
    fn decode(backend: &dyn Backend, rows: u32, context: u32) -> Option<Batch> {
        Batch::new(backend, rows.max(1), context - 1, 1, true)
    }

    fn new(backend: &dyn Backend, rows: u32, start: u32, len: u32, decode: bool) -> Option<Batch> {
        let limits = backend.limits();
        let fits = (start + len) as usize <= limits.max_positions
            && rows as usize <= limits.max_rows.min(limits.max_slots).min(limits.max_logits)
            && (rows * len) as usize <= limits.max_tokens;
        // The rows share the blocks that they only read; each writes to blocks of its own.
        let block_size = backend.pool().geometry().block_size as u32;
        let shared = start / block_size;
        let own = (start + len).div_ceil(block_size) - shared;
        let enough = (shared + rows * own) as usize <= backend.pool().num_blocks();
        let table = |row: u32| {
            let first = shared + row * own;
            (0..shared).chain(first..first + own).collect()
        };
        (fits && enough).then(|| Batch {
            rows: (0..rows)
                .map(|row| CoreRow {
                    request: kvrelay_core::request::RequestId(u64::from(row)),
                    start,
                    len,
                    want_logits: true,
                    decode,
                })
                .collect(),
            tables: (0..rows).map(table).collect(),
            ids: (0..len).map(|i| i % backend.vocab_size() as u32).collect(),
        })
    }

    fn shape(&self) -> StepShape {
        StepShape::of(&self.rows)
    }

    fn shortest(&self, backend: &mut Box<dyn Backend>, clock: Clock) -> Result<Sample, BackendError> {
        let start = clock.now();
        let mut duration = self.run(backend, clock)?;
        for _ in 1..REPEATS {
            if clock.now().saturating_since(start) > REPEAT_FOR {
                break;
            }
            duration = duration.min(self.run(backend, clock)?);
        }
        Ok(Sample { shape: self.shape(), duration })
    }

    fn run(&self, backend: &mut Box<dyn Backend>, clock: Clock) -> Result<Picos, BackendError> {
        let rows: Vec<Row<'_>> = (0..)
            .zip(self.rows.iter().zip(&self.tables))
            .map(|(slot, (row, table))| Row {
                slot,
                input: Input::Tokens(&self.ids),
                start: row.start,
                blocks: table,
                sample: Some(SamplingParams::default()),
                logits: Logits::Nothing,
            })
            .collect();
        let start = clock.now();
        let ticket = backend.enqueue(&rows)?;
        backend.wait(ticket)?;
        Ok(Picos::from(clock.now().saturating_since(start)))
    }
}

/// How fast blocks are copied from one pool to the other.
fn link(source: &Arc<KvPool>, destination: &Arc<KvPool>, clock: Clock) -> Result<Link, BackendError> {
    const BLOCKS: usize = 64;
    let one_pool = Arc::ptr_eq(source, destination);
    // Within one pool no block may be on both sides.
    let (count, offset) = if one_pool {
        (source.num_blocks() / 2, source.num_blocks() / 2)
    } else {
        (source.num_blocks().min(destination.num_blocks()), 0)
    };
    let pairs: Vec<(u32, u32)> =
        (0..count.min(BLOCKS)).map(|block| (block as u32, (block + offset) as u32)).collect();
    if pairs.is_empty() {
        return Ok(Link::INSTANT);
    }
    let mut shortest = Nanos(u64::MAX);
    for _ in 0..REPEATS {
        let start = clock.now();
        // SAFETY: the engine's workers have not started, so nobody else uses the pools; pairs have
        // different blocks on their two sides where the pool is one.
        unsafe { copy_blocks(source, destination, &pairs, None)? };
        shortest = shortest.min(clock.now().saturating_since(start));
    }
    let bytes = (pairs.len() * source.geometry().block_bytes()) as f64;
    let seconds = shortest.as_secs_f64().max(1e-9);
    Ok(Link { bandwidth: bytes / seconds, latency: TRANSFER_LATENCY })
}
