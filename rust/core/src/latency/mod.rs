//! How long a step or a transfer takes.
//!
//! A [`LatencyModel`] answers in integer picoseconds and for several steps at once: the next steps
//! of a batch cost `a`, `a + d`, `a + 2d`, … up to its next breakpoint. That is what lets a decode
//! run be jumped over in closed form.

pub mod fitted;
pub mod hardware;
mod least_squares;
pub mod linear;
pub mod models;
pub mod names;
pub mod pipeline;
pub mod profiles;
pub mod roofline;
pub mod table;

use crate::step::{StepShape, Stretch};
use crate::time::{Nanos, Picos};

/// A model of step times. Deterministic: the same shape, the same answer.
pub trait LatencyModel: Send + Sync {
    /// The durations of the next steps of this batch: of one step if `shape` holds prompt chunks,
    /// otherwise of between 1 and `max_steps` decode steps, in which every row moves on by one
    /// position a step.
    ///
    /// The answer must be exact: step `j` of the stretch lasts precisely what
    /// `stretch(shape.after(j), 1)` says, and none of them is negative.
    fn stretch(&self, shape: &StepShape, max_steps: u32) -> Stretch;

    /// The duration of one step.
    fn step(&self, shape: &StepShape) -> Picos {
        self.stretch(shape, 1).first
    }
}

/// A point-to-point link that KV is transferred over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Bytes per second, above zero; infinite means that only `latency` counts.
    pub bandwidth: f64,
    /// Time before the first byte arrives.
    pub latency: Nanos,
}

impl Link {
    /// A link on which nothing takes time.
    pub const INSTANT: Link = Link { bandwidth: f64::INFINITY, latency: Nanos::ZERO };

    /// How long `bytes` take.
    pub fn transfer(&self, bytes: u64) -> Nanos {
        let wire = Nanos::from_secs_f64(bytes as f64 / self.bandwidth);
        Nanos(self.latency.0.saturating_add(wire.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_is_latency_plus_bytes_over_bandwidth() {
        let link = Link { bandwidth: 1e9, latency: Nanos(500) };
        assert_eq!(link.transfer(2_000), Nanos(2_500));
        assert_eq!(Link::INSTANT.transfer(u64::MAX), Nanos::ZERO);
    }
}
