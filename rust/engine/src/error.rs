//! What can go wrong, with the names and numbers.

use kvrelay_core::kv::IntegrityError;
use kvrelay_core::policy::PolicyFault;
use kvrelay_kernels::NoCuda;
use kvrelay_model::ModelError;

use crate::backend::BackendError;
use crate::device::DeviceChoice;

/// Why an engine could not be made, or did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A setting of the engine cannot be right.
    #[error("{what}: expected {expected}, found {found}")]
    Config {
        /// The setting.
        what: &'static str,
        /// What would have been right.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A request cannot be right; only it is refused.
    #[error("request: {field}: expected {expected}, found {found}")]
    Request {
        /// The field of the submission.
        field: &'static str,
        /// What would have been right.
        expected: String,
        /// What was given.
        found: String,
    },
    /// The machine has less memory than the engine would take.
    #[error(
        "memory: the engine needs {} ({parts}), but {} are available; lower the KV memory, the workers, or the batch",
        mebibytes(*needed),
        mebibytes(*available)
    )]
    Memory {
        /// All of it, in bytes.
        needed: u64,
        /// What could be had, in bytes.
        available: u64,
        /// Its parts.
        parts: String,
    },
    /// A device has less memory than the engine would take of it.
    #[error(
        "{device}: the engine needs {} ({parts}), but {} are free; lower the KV memory, the workers, or the batch",
        mebibytes(*needed),
        mebibytes(*free)
    )]
    DeviceMemory {
        /// The device.
        device: String,
        /// All of it, in bytes.
        needed: u64,
        /// What is free, in bytes.
        free: u64,
        /// Its parts.
        parts: String,
    },
    /// CUDA was asked for, and is not usable.
    #[error("device {device}: {reason}")]
    NoCuda {
        /// What was asked for.
        device: DeviceChoice,
        /// Why not.
        reason: NoCuda,
    },
    /// A model's file or a parameter was refused.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A backend could not be made, or refused a step.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The policy failed, or answered what cannot be done.
    #[error(transparent)]
    Policy(#[from] PolicyFault),
    /// The policy left requests that nothing would ever move.
    #[error("the policy left {num_live} requests with nothing under way; the first is request {first}")]
    Stalled {
        /// Requests that were left.
        num_live: usize,
        /// The first of them.
        first: u64,
    },
    /// No worker is left that could do the rest.
    #[error("{0}")]
    WorkerLost(String),
    /// The watcher ended the run.
    #[error("interrupted")]
    Interrupted,
    /// The scheduler's books do not balance.
    #[error(transparent)]
    Integrity(#[from] IntegrityError),
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] std::io::Error),
    /// The engine's loop has ended.
    #[error("the engine has stopped")]
    Stopped,
}

/// A number of bytes as people read it, rounded up.
pub(crate) fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}
