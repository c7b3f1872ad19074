//! Moving KV blocks from one worker's pool to another's.
//!
//! The scheduler has pinned the blocks of both ends when a [`Job`] starts, and keeps them pinned
//! until its one terminal [`Outcome`] is reported; that is what makes copying without a lock sound.
//! An abort is a request: the blocks are free only once its outcome has come.

mod local;

use std::sync::Arc;
use std::sync::mpsc::Sender;

use kvrelay_core::event::TransferId;
use kvrelay_core::step::Seq;

use crate::backend::{BackendError, KvPool, Progress};
use crate::driver::Message;
use crate::tickets::{Step, Tickets};

pub use local::Local;

/// Blocks to move.
#[derive(Clone, Debug)]
pub struct Job {
    /// Its name.
    pub id: TransferId,
    /// Where the blocks are.
    pub source: Arc<KvPool>,
    /// Where they go.
    pub destination: Arc<KvPool>,
    /// Source and destination block, pairwise.
    pub blocks: Vec<(u32, u32)>,
    /// The run that still computes the last of the source blocks, if one does.
    pub during: Option<During>,
}

/// A run that computes what a job moves: its layer groups may leave as they are done.
#[derive(Clone, Debug)]
pub struct During {
    pub(crate) progress: Arc<Progress>,
    pub(crate) tickets: Arc<Tickets>,
    pub(crate) seq: Seq,
}

impl During {
    /// Blocks until the run has written the KV of layer groups `0..=group`.
    ///
    /// # Errors
    /// [`BackendError::Stopped`] and [`BackendError::Device`] if it never will.
    pub fn wait(&self, group: usize) -> Result<(), BackendError> {
        match self.tickets.wait(self.seq) {
            Step::Enqueued(ticket) => self.progress.wait(ticket, group),
            Step::Over => Ok(()),
            Step::Gone => Err(BackendError::Stopped("its worker ended".into())),
        }
    }
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All blocks are there.
    Complete,
    /// It failed or was aborted. `quiesced`: nothing will be written any more; otherwise the same
    /// job is reported again, quiesced, when that is so.
    Failed {
        /// See above.
        quiesced: bool,
    },
}

/// What moves blocks. Methods return at once; the loop never waits for a byte.
pub trait Transport: Send {
    /// Starts a job.
    fn start(&mut self, job: Job);

    /// Stops a job as soon as may be. A job that is over already is left as it is.
    fn abort(&mut self, id: TransferId);

    /// Whether it heeds [`Job::during`]; otherwise jobs start when their run is over.
    fn follows_runs(&self) -> bool {
        false
    }
}

/// Where a transport reports to, from any thread.
#[derive(Clone)]
pub struct Reports {
    engine: Sender<Message>,
}

impl Reports {
    pub(crate) fn new(engine: Sender<Message>) -> Reports {
        Reports { engine }
    }

    /// Job `id` has ended.
    pub fn ended(&self, id: TransferId, outcome: Outcome) {
        // An engine that is gone has no use for it.
        let _ = self.engine.send(Message::Transfer { id, outcome });
    }
}

/// Makes an engine's transport.
pub type MakeTransport = Box<dyn FnOnce(Reports) -> std::io::Result<Box<dyn Transport>> + Send>;
