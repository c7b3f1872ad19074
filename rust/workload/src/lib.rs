//! Arrivals, lengths, presets and trace formats for kvrelay.
//!
//! A [`Workload`] is a list of arrivals, made once and then driven through a simulation or an engine:
//! in time order, or, in a closed loop, as completions let them come. Everything made up is a function of (seed, purpose, request), so that
//! the same arguments give the same workload on every platform.

pub mod arrivals;
pub mod closed;
pub mod error;
pub mod intensity;
pub mod lengths;
pub mod preset;
pub mod record;
pub mod trace;
pub mod workload;

pub use error::WorkloadError;
pub use lengths::{LengthPair, Lengths};
pub use record::{Class, Record};
pub use workload::Workload;
