//! What computes a step: one trait for every device.
//!
//! A *step* is a list of [`Row`]s, one shape for prefill chunks and for decode. Steps are
//! enqueued up to [`Backend::queue_depth`] deep and run in the order they were enqueued; a row's
//! input may be the token that an earlier, still queued step will sample for the same *slot*, so
//! the next step never waits for the host. Everything that can be refused is refused by
//! [`Backend::enqueue`], before anything is changed.
//!
//! Nothing is allocated inside a step: all buffers are made at construction from [`Limits`].

mod checks;
pub mod cpu;
pub mod cuda;
mod kv;

use std::sync::Arc;
use std::time::Duration;

use kvrelay_model::SamplingParams;

pub use kv::{DEFAULT_LAYER_GROUPS, KvGeometry, KvPool, Location, copy_blocks};

/// How large a step may be; a backend's buffers are made from it once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Rows in a step.
    pub max_rows: usize,
    /// Tokens in a step, over all rows.
    pub max_tokens: usize,
    /// Positions in a step whose logits are computed (sampled or asked for).
    pub max_logits: usize,
    /// Length of a sequence, in tokens; at most what the model was made for.
    pub max_positions: usize,
    /// Slots, so requests known to the backend at a time.
    pub max_slots: usize,
}

/// One sequence's part of a step: its tokens at `start..start + len`.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// Where the backend keeps the sequence's last sampled token, below [`Limits::max_slots`]; a
    /// slot occurs at most once in a step.
    pub slot: u32,
    /// The ids to run.
    pub input: Input<'a>,
    /// Position of the first of them; the KV of all positions before it must be in the blocks.
    pub start: u32,
    /// The sequence's KV blocks in order of position, enough for `start + len` tokens. What lies
    /// in them beyond that is never read.
    pub blocks: &'a [u32],
    /// How to sample the token that follows the row's last one; `None` for a prefill chunk that
    /// is not the last.
    pub sample: Option<SamplingParams>,
    /// Which logits to hand out.
    pub logits: Logits,
}

/// The ids a row runs.
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// These, at least one: a prefill chunk, or a decode whose token the host knows.
    Tokens(&'a [u32]),
    /// The one token that the latest earlier step with this slot samples.
    LastSampled,
}

impl Input<'_> {
    /// Tokens in the row.
    #[expect(clippy::len_without_is_empty, reason = "a row is never empty")]
    pub fn len(&self) -> usize {
        match self {
            Self::Tokens(ids) => ids.len(),
            Self::LastSampled => 1,
        }
    }
}

/// Which of a row's logits the host wants to see (sampling needs none of this).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Logits {
    /// None of them.
    #[default]
    Nothing,
    /// Those after the row's last token.
    Last,
    /// Those after each of the row's tokens.
    All,
}

/// Names an enqueued step; tickets grow by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// What a row gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowOutput {
    /// The row's slot.
    pub slot: u32,
    /// The sampled token, where one was asked for.
    pub token: Option<u32>,
    /// Number of the row's first logits in [`StepOutput::logits`].
    pub first_logits: usize,
    /// How many of them are the row's: 0, 1, or one for each token.
    pub num_logits: usize,
}

/// What a step gave; borrowed from the backend's buffers.
#[derive(Debug)]
pub struct StepOutput<'a> {
    /// One entry a row, in the order they were enqueued.
    pub rows: &'a [RowOutput],
    /// Logits that were asked for, `[position, vocabulary]` in row order.
    pub logits: &'a [f32],
    /// Time the device worked on the step.
    pub busy: Duration,
}

/// A device that runs steps of one model over one KV pool.
pub trait Backend: Send {
    /// The device and the numeric tier, for people.
    fn name(&self) -> &str;

    /// How large a step may be.
    fn limits(&self) -> &Limits;

    /// Token ids are below this, and logits this long.
    fn vocab_size(&self) -> usize;

    /// Where the KV blocks lie.
    fn pool(&self) -> &Arc<KvPool>;

    /// Steps that may be enqueued and not yet waited for.
    fn queue_depth(&self) -> usize;

    /// Whether the step after the present one is best handed over before this one is waited for: one
    /// that may turn out not to be wanted.
    fn runs_ahead(&self) -> bool {
        false
    }

    /// Hands over a step. It is refused whole, and nothing is changed, when it breaks a limit,
    /// names a block, slot or token that does not exist, or when the queue is full.
    fn enqueue(&mut self, rows: &[Row<'_>]) -> Result<Ticket, BackendError>;

    /// Blocks until the step is done. Steps are waited for in order, each once.
    fn wait(&mut self, ticket: Ticket) -> Result<StepOutput<'_>, BackendError>;

    /// Forgets a slot's last token, after the steps already enqueued.
    fn release(&mut self, slot: u32) -> Result<(), BackendError>;

    /// Tells other threads how far the running step has come.
    fn progress(&self) -> &Arc<Progress>;
}

/// Why a backend refused a step, or could not finish it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// A number of the step is beyond a limit.
    #[error("{what}: at most {limit}, found {found}")]
    Limit {
        /// The number.
        what: &'static str,
        /// The largest allowed.
        limit: usize,
        /// What the step asks for.
        found: usize,
    },
    /// A row does not fit together.
    #[error("row {row}: {what}: expected {expected}, found {found}")]
    Row {
        /// Index of the row in the step.
        row: usize,
        /// The field.
        what: &'static str,
        /// What would have been right.
        expected: String,
        /// What the row says.
        found: String,
    },
    /// A ticket was waited for out of order, twice, or never given out.
    #[error("ticket: expected {expected}, found {found}")]
    Ticket {
        /// The oldest ticket not yet waited for.
        expected: u64,
        /// The one given.
        found: u64,
    },
    /// The model or the device gave something that is no number.
    #[error("row {row} (slot {slot}): {reason}")]
    NotFinite {
        /// Index of the row in the step.
        row: usize,
        /// Its slot.
        slot: u32,
        /// Which logit.
        reason: String,
    },
    /// A description of the backend itself cannot be right.
    #[error("{what}: expected {expected}, found {found}")]
    Config {
        /// The field.
        what: &'static str,
        /// What would have been right.
        expected: String,
        /// What was given.
        found: String,
    },
    /// Two KV pools do not fit each other.
    #[error("KV peer: {what}: here {here}, there {there}")]
    Peer {
        /// The field in which they differ.
        what: &'static str,
        /// Its value at this end.
        here: String,
        /// Its value at the other.
        there: String,
    },
    /// A device's memory is too small for what it is to hold.
    #[error("{device}: {what}: needs {needed} bytes, {free} are free")]
    DeviceMemory {
        /// The device, such as `cuda:0`.
        device: String,
        /// What the memory is for.
        what: &'static str,
        /// Bytes that are asked for.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The driver of a device refused something, or the device failed.
    #[error("{device}: {doing} failed: {reason}")]
    Device {
        /// The device, such as `cuda:0`.
        device: String,
        /// What was being done.
        doing: &'static str,
        /// The driver's words.
        reason: String,
    },
    /// The device, or the thread that drives it, is gone; no later step will run.
    #[error("the backend stopped: {0}")]
    Stopped(String),
}

/// How far the steps of a backend have come, for threads that copy KV while a step still runs.
#[derive(Debug, Default)]
pub struct Progress {
    state: std::sync::Mutex<ProgressState>,
    changed: std::sync::Condvar,
    marks: Option<Arc<dyn Marks>>,
}

/// What tells how far a device has come with steps that it was given.
pub trait Marks: Send + Sync + std::fmt::Debug {
    /// Blocks until the KV that step `ticket` writes in layer groups `0..=group` is complete.
    fn wait(&self, ticket: u64, group: usize) -> Result<(), BackendError>;
}

#[derive(Debug, Default)]
struct ProgressState {
    /// Ticket of the step that runs, or ran last.
    ticket: u64,
    /// Layer groups of it whose KV is written.
    groups: usize,
    /// Whether no more steps will run.
    stopped: bool,
}

impl Progress {
    /// For backends whose [`Progress::advance`] says that the device was given a step, of which
    /// `marks` knows how far it has come.
    pub fn with_marks(marks: Arc<dyn Marks>) -> Self {
        Self { marks: Some(marks), ..Self::default() }
    }

    /// Blocks until the KV that step `ticket` writes in layer groups `0..=group` is complete.
    pub fn wait(&self, ticket: Ticket, group: usize) -> Result<(), BackendError> {
        {
            let mut state = self.lock();
            while (state.ticket, state.groups) < (ticket.0, group + 1) {
                if state.stopped {
                    return Err(BackendError::Stopped(format!("before step {} wrote its KV", ticket.0)));
                }
                state = self.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
            }
        }
        self.marks.as_ref().map_or(Ok(()), |marks| marks.wait(ticket.0, group))
    }

    /// For backends: step `ticket` has written the KV of its first `groups` layer groups.
    pub fn advance(&self, ticket: u64, groups: usize) {
        let mut state = self.lock();
        (state.ticket, state.groups) = (ticket, groups);
        self.changed.notify_all();
    }

    /// For backends: no more steps will run; whoever waits gets an error.
    pub fn stop(&self) {
        self.lock().stopped = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, ProgressState> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
