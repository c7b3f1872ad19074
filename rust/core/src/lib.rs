//! The kvrelay core: every decision, and no I/O.
//!
//! [`scheduler::Scheduler::handle`] is the only place where a decision is made. It is given the
//! instant, reads no clock, and drives a simulated cluster and a real one alike.

pub mod cluster;
pub mod event;
pub mod kv;
pub mod latency;
pub mod metrics;
pub mod policy;
pub mod record;
pub mod request;
pub mod rng;
pub mod scheduler;
pub mod slo;
pub mod stats;
pub mod step;
pub mod time;
pub mod watch;
