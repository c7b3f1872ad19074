//! Arrivals, lengths, presets and trace formats for kvrelay.
//!
//! A [`Workload`] is a list of arrivals in time order, made once and then driven through a
//! simulation or an engine. Everything made up is a function of (seed, purpose, request), so that
//! the same arguments give the same workload on every platform.

pub mod arrivals;
pub mod error;
pub mod lengths;
pub mod intensity;
pub mod preset;
pub mod record;
pub mod trace;
pub mod workload;

pub use error::WorkloadError;
pub use lengths::{LengthPair, Lengths};
pub use record::{Class, Record};
pub use workload::Workload;
