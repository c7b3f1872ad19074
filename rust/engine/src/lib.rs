//! The wall-clock driver of the kvrelay scheduler: real workers, KV transfer.
//!
//! One thread, the *loop*, owns the scheduler. Callers, workers and transfers send it messages;
//! it gives all that lie there to [`Scheduler::handle`] as the events of one instant and carries
//! out the actions. Each worker is a thread with a backend of its own; it runs what it is ordered
//! and hands tokens to the user as they come, on the CPU or on a CUDA device. Transfers copy KV on a
//! thread of their own.
//!
//! [`Scheduler::handle`]: kvrelay_core::scheduler::Scheduler::handle

pub mod backend;
mod calibrate;
mod clock;
mod config;
mod cores;
mod device;
mod digest;
mod driver;
mod engine;
mod error;
mod fleet;
mod handle;
mod memory;
mod prompt;
mod record;
mod sequence;
mod setup;
mod tickets;
pub mod transfer;
mod worker;

pub use config::{AroundLoop, EngineConfig, Numerics, RunOptions, Submission};
pub use device::DeviceChoice;
pub use digest::BlockHasher;
pub use engine::{Engine, EngineRun, WorkerInfo};
pub use error::EngineError;
pub use handle::{Handle, Output};
pub use record::{Entry, ProgressSnapshot, Recording, ReplayError, replay};
