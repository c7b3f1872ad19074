//! The virtual-time driver of the kvrelay scheduler, and searches over it.

mod driver;
pub mod network;
mod queue;
mod run;
pub mod search;

pub use driver::{
    Delays, Injection, Links, Neighbours, Options, SimCluster, SimError, SimWorker, Simulation, simulate,
};
