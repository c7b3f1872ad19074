//! The virtual-time driver of the kvrelay scheduler, and searches over it.

mod driver;
mod flows;
pub mod network;
mod queue;
mod run;
pub mod search;
mod transfer;

pub use driver::{
    Delays, Injection, Links, Neighbours, Options, SimCluster, SimError, SimWorker, Simulation, simulate,
};
pub use transfer::Conversion;
