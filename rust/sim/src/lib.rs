//! The virtual-time driver of the kvrelay scheduler, and searches over it.

mod driver;
mod queue;
mod run;
pub mod search;

pub use driver::{Injection, Options, SimCluster, SimError, SimWorker, Simulation, simulate};
