//! Steps and runs: what a worker is asked to do, and how long it took.

use std::sync::Arc;

use crate::request::RequestId;
use crate::time::Picos;

/// Names a run of one worker; increases by one with each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Seq(pub u64);

/// One request's part of a step: positions `start .. start + len`. Prefill chunks and decode have
/// the same shape; a decode row has `len` 1 and its input id is at the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Whose row it is.
    pub request: RequestId,
    /// Tokens of the request already in its KV blocks.
    pub start: u32,
    /// Tokens this row adds to them.
    pub len: u32,
    /// Whether the row's last position yields a token.
    pub want_logits: bool,
    /// Whether the row continues a request that already yielded a token.
    pub decode: bool,
}

impl Row {
    /// Tokens attended by the row's last position, itself included.
    pub fn context(&self) -> u64 {
        u64::from(self.start) + u64::from(self.len)
    }
}

/// The rows that one forward pass works on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Decode rows and prefill chunks, in the policy's order.
    pub rows: Arc<[Row]>,
}

/// The sums of a step that latency models are functions of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepShape {
    /// Prefill chunks.
    pub num_prefill: u32,
    /// Prompt tokens over all chunks.
    pub prefill_tokens: u64,
    /// Sum over chunks of prefix + chunk: tokens whose KV is read.
    pub prefill_context: u64,
    /// Sum over chunks of (prefix + chunk)² − prefix²: twice the attended pairs of a causal mask.
    pub prefill_square: u64,
    /// Decode rows.
    pub num_decode: u32,
    /// Sum over decode rows of the tokens attended, the row's own included.
    pub decode_context: u64,
}

impl StepShape {
    /// Adds one row.
    pub fn push(&mut self, row: &Row) {
        if row.decode && row.len == 1 {
            self.num_decode += 1;
            self.decode_context += row.context();
        } else {
            let (start, end) = (u64::from(row.start), row.context());
            self.num_prefill += 1;
            self.prefill_tokens += u64::from(row.len);
            self.prefill_context += end;
            self.prefill_square += end * end - start * start;
        }
    }

    /// The shape of a step.
    pub fn of(rows: &[Row]) -> StepShape {
        let mut shape = StepShape::default();
        for row in rows {
            shape.push(row);
        }
        shape
    }

    /// A decode-only shape, which may be repeated.
    pub fn decode(num_decode: u32, decode_context: u64) -> StepShape {
        StepShape { num_decode, decode_context, ..StepShape::default() }
    }

    /// One prompt chunk of `chunk` tokens behind `prefix` tokens already in the cache.
    pub fn prefill(prefix: u32, chunk: u32) -> StepShape {
        StepShape::of(&[Row {
            request: RequestId(0),
            start: prefix,
            len: chunk,
            want_logits: true,
            decode: false,
        }])
    }

    /// The same batch `steps` decode steps later.
    pub fn after(mut self, steps: u64) -> StepShape {
        self.decode_context += u64::from(self.num_decode) * steps;
        self
    }

    /// Tokens the step computes, over all rows.
    pub fn num_tokens(&self) -> u64 {
        self.prefill_tokens + u64::from(self.num_decode)
    }

    /// Rows over all kinds.
    pub fn num_rows(&self) -> u32 {
        self.num_prefill + self.num_decode
    }
}

impl std::ops::Add for StepShape {
    type Output = StepShape;

    /// The rows of both in one step.
    fn add(self, other: StepShape) -> StepShape {
        StepShape {
            num_prefill: self.num_prefill + other.num_prefill,
            prefill_tokens: self.prefill_tokens + other.prefill_tokens,
            prefill_context: self.prefill_context + other.prefill_context,
            prefill_square: self.prefill_square + other.prefill_square,
            num_decode: self.num_decode + other.num_decode,
            decode_context: self.decode_context + other.decode_context,
        }
    }
}

/// Consecutive steps whose durations are `first`, `first + delta`, `first + 2·delta`, ….
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Duration of the first step.
    pub first: Picos,
    /// What each step lasts longer than the one before it, in picoseconds; may be negative.
    pub delta: i64,
    /// How many steps, at least 1.
    pub steps: u32,
}

impl Stretch {
    /// One step.
    pub fn single(first: Picos) -> Stretch {
        Stretch { first, delta: 0, steps: 1 }
    }

    /// Duration of step `index` (from 0); never below zero.
    pub fn step(&self, index: u32) -> Picos {
        if self.first.0 < 1 << 61 && self.delta.unsigned_abs() < 1 << 29 {
            let duration = self.first.0 as i64 + self.delta * i64::from(index);
            return Picos(duration.max(0) as u64);
        }
        let duration = i128::from(self.first.0) + i128::from(self.delta) * i128::from(index);
        Picos(u64::try_from(duration.max(0)).unwrap_or(u64::MAX))
    }

    /// Duration of the first `steps` steps together. Exact while no single step would be negative,
    /// which [`crate::latency::LatencyModel`] promises.
    pub fn total(&self, steps: u32) -> Picos {
        // Steps below 17 s that grow by less than 2 ms each: no product of these leaves 63 bits.
        if self.first.0 < 1 << 44 && self.delta.unsigned_abs() < 1 << 31 && steps < 1 << 16 {
            let n = i64::from(steps);
            let total = n * self.first.0 as i64 + self.delta * (n * (n - 1) / 2);
            return Picos(total.max(0) as u64);
        }
        let n = i128::from(steps);
        let total = n * i128::from(self.first.0) + i128::from(self.delta) * (n * (n - 1) / 2);
        Picos(u64::try_from(total.max(0)).unwrap_or(u64::MAX))
    }

    /// The longest step of the stretch.
    pub fn longest(&self) -> Picos {
        self.step(0).max(self.step(self.steps - 1))
    }

    /// Steps that are over once `elapsed` has passed.
    pub fn steps_within(&self, elapsed: Picos) -> u32 {
        if elapsed < self.first {
            return 0;
        }
        // A guess that is mostly right bounds the search to two steps; it decides nothing.
        let (first, delta, elapsed_f) = (self.first.0 as f64, self.delta as f64, elapsed.0 as f64);
        let linear = first - 0.5 * delta;
        let root = (linear * linear + 2.0 * delta * elapsed_f).max(0.0).sqrt();
        let guess = (2.0 * elapsed_f / (linear + root)) as u32;
        let (mut low, mut high) = (0, self.steps);
        let (below, above) = (guess.saturating_sub(1).min(high), guess.saturating_add(1).min(high));
        if self.total(below) <= elapsed {
            low = below;
        }
        if above < high && self.total(above) > elapsed {
            high = above - 1;
        }
        while low < high {
            let mid = high - (high - low) / 2;
            if self.total(mid) <= elapsed {
                low = mid;
            } else {
                high = mid - 1;
            }
        }
        low
    }

    /// The stretch without its first `steps` steps, if any remain.
    pub fn skip(&self, steps: u32) -> Option<Stretch> {
        (steps < self.steps).then(|| Stretch {
            first: self.step(steps),
            delta: self.delta,
            steps: self.steps - steps,
        })
    }
}

/// A worker's order: a step, repeated up to `repeat` times.
///
/// A repeated run holds decode rows only; each repetition moves every row on by one position. It
/// ends early at a step border when a row ends or the run is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// What to compute.
    pub step: Step,
    /// At most so many repetitions, at least 1. The rows' block tables, which the driver reads
    /// from the scheduler, already hold the blocks for all of them.
    pub repeat: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn closed_forms_equal_single_steps(first in 0u64..1_000_000, delta in -50i64..50, steps in 1u32..400) {
            prop_assume!(i128::from(first) + i128::from(delta) * i128::from(steps) >= 0);
            let stretch = Stretch { first: Picos(first), delta, steps };
            let mut elapsed = Picos::ZERO;
            for done in 0..steps {
                prop_assert_eq!(stretch.total(done), elapsed);
                let within = stretch.steps_within(elapsed);
                prop_assert!(within >= done && stretch.total(within) == elapsed);
                let rest = stretch.skip(done).unwrap();
                prop_assert_eq!(stretch.total(done) + rest.total(rest.steps), stretch.total(steps));
                elapsed += stretch.step(done);
            }
            prop_assert_eq!(stretch.longest(), (0..steps).map(|i| stretch.step(i)).max().unwrap());
        }
    }
}
