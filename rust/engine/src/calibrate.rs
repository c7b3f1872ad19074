//! What policies predict with, measured at an engine's start.
//!
//! All workers measure at the same time, as they will later run at the same time, and share one
//! fit. Small steps come first, and a step that would not fit in what is left of the budget is left
//! out, so a slow machine measures less and not longer.

use std::collections::VecDeque;
use std::sync::Arc;

use kvrelay_core::latency::fitted::{Sample, fit};
use kvrelay_core::latency::linear::Linear;
use kvrelay_core::latency::{LatencyModel, Link};
use kvrelay_core::scheduler::Belief;
use kvrelay_core::step::{Row as CoreRow, StepShape};
use kvrelay_core::time::{Nanos, Picos, Time};
use kvrelay_model::SamplingParams;

use crate::backend::{Backend, BackendError, Input, KvPool, Logits, Row, copy_blocks};
use crate::clock::Clock;

/// Time for each of the two parts.
const BUDGET: Nanos = Nanos(700_000_000);

/// Each step is measured this often at most, and its shortest time counts: what is longer was
/// disturbed.
const REPEATS: usize = 3;

/// What a transfer costs beside its bytes: two hand-overs between threads.
const TRANSFER_LATENCY: Nanos = Nanos(50_000);

/// Prefix and chunk of the prompt steps, small ones first.
const PREFILLS: [(u32, u32); 7] = [(0, 16), (0, 64), (0, 128), (256, 64), (0, 256), (0, 512), (512, 512)];

/// Rows and context of each, of the decode steps.
const DECODES: [(u32, u32); 9] =
    [(1, 16), (1, 256), (1, 1024), (4, 16), (4, 512), (8, 128), (16, 16), (16, 512), (32, 128)];

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
    for (part, decode) in [(&PREFILLS[..], false), (&DECODES[..], true)] {
        let shapes = part.iter().filter_map(|&(a, b)| {
            if decode {
                Batch::decode(backend.as_ref(), a, b)
            } else {
                Batch::prefill(backend.as_ref(), a, b)
            }
        });
        let mut shapes: VecDeque<Batch> = shapes.collect();
        let smallest = if decode { Batch::decode } else { Batch::prefill };
        // Limits of one token still allow this one.
        shapes.extend(if shapes.is_empty() {
            smallest(backend.as_ref(), u32::from(decode), 1)
        } else {
            None
        });
        let end = clock.now() + BUDGET;
        // Warms caches and pages; nobody's later step is the first.
        if let Some(first) = shapes.front() {
            first.run(backend, clock)?;
        }
        let mut slowest_token = 0.0f64;
        while let Some(batch) = shapes.pop_front() {
            let expected = Nanos((slowest_token * batch.shape().num_tokens() as f64) as u64);
            if slowest_token > 0.0 && clock.now() + expected > end {
                continue;
            }
            let sample = batch.shortest(backend, clock, end)?;
            let per_token = sample.duration.0 as f64 * 1e-3 / sample.shape.num_tokens() as f64;
            // The latest, thus largest so far, tells most about those to come.
            slowest_token = per_token;
            samples.push(sample);
        }
    }
    Ok(samples)
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

    /// `rows` rows that attend to `context` tokens each, if the backend's limits allow it.
    fn decode(backend: &dyn Backend, rows: u32, context: u32) -> Option<Batch> {
        Batch::new(backend, rows, context - 1, 1, true)
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

    fn shortest(
        &self,
        backend: &mut Box<dyn Backend>,
        clock: Clock,
        end: Time,
    ) -> Result<Sample, BackendError> {
        let mut duration = self.run(backend, clock)?;
        for _ in 1..REPEATS {
            if clock.now() > end {
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
