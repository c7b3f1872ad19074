//! The virtual-time driver of the kvrelay scheduler, and searches over it.

mod cluster;
mod driver;
mod flows;
pub mod network;
mod queue;
mod run;
pub mod search;
mod transfer;
mod wires;

pub use cluster::{Delays, Links, Neighbours, SimCluster, SimWorker};
pub use driver::{Injection, Options, SimError, Simulation, simulate};
pub use transfer::Conversion;
