//! What drivers tell the scheduler, and what it orders.

use std::sync::Arc;

use crate::cluster::{Role, WorkerId};
use crate::kv::BlockId;
use crate::record::FinishReason;
use crate::request::{BlockHash, Request, RequestId};
use crate::step::{Run, Seq, Stretch};
use crate::time::Time;

/// Names a KV transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

/// A row that will yield no more tokens; only the driver knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedRow {
    /// Index of the row in the run's first step.
    pub row: u32,
    /// Why.
    pub reason: FinishReason,
    /// Chained hashes of the full blocks of prompt *and* output, where the driver knows the
    /// tokens: a follow-up turn then finds them. Empty otherwise.
    pub content: Arc<[BlockHash]>,
}

/// A run is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// Whose run.
    pub worker: WorkerId,
    /// Which run.
    pub seq: Seq,
    /// How long its steps took, in order; their number is the steps done, at least 1.
    pub stretches: Vec<Stretch>,
    /// Tokens that each row yielded.
    pub emitted: Vec<u32>,
    /// Rows that ended, in row order.
    pub ended: Vec<EndedRow>,
}

impl Done {
    /// Steps done.
    pub fn steps(&self) -> u32 {
        self.stretches.iter().map(|stretch| stretch.steps).sum()
    }
}

/// What happened. All events of an instant are given together.
#[derive(Clone, Debug)]
pub enum Event {
    /// A request arrived.
    Arrived(Request),
    /// A worker can take another run; `seq` is the latest it was given.
    Ready {
        /// Who.
        worker: WorkerId,
        /// After which run.
        seq: Seq,
    },
    /// A run is over.
    Done(Done),
    /// A KV transfer is complete.
    Transferred {
        /// Which.
        id: TransferId,
    },
    /// A KV transfer failed or was aborted.
    Failed {
        /// Which.
        id: TransferId,
        /// Whether nothing will be written any more. If not, the destination blocks stay in
        /// quarantine until the same event comes again with `quiesced`.
        quiesced: bool,
    },
    /// A client went away.
    Cancelled(RequestId),
    /// The driver cannot go on with a request: it fails, for this reason.
    GivenUp {
        /// Which.
        request: RequestId,
        /// What broke, with the names and numbers.
        reason: String,
    },
    /// A worker is back, its pool empty.
    WorkerUp {
        /// Who.
        worker: WorkerId,
    },
    /// A worker is lost, with all its KV.
    WorkerDown {
        /// Who.
        worker: WorkerId,
        /// Steps of its run in progress whose tokens were delivered.
        steps_delivered: u32,
    },
    /// A time that [`Action::WakeAt`] asked for has come.
    Wake,
}

/// What the scheduler orders. Every run and every transfer gets exactly one terminal event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start a run.
    Run {
        /// Where.
        worker: WorkerId,
        /// Its name.
        seq: Seq,
        /// What.
        run: Run,
    },
    /// Stop a run at its next step border.
    Cut {
        /// Whose.
        worker: WorkerId,
        /// Which.
        seq: Seq,
    },
    /// Move KV blocks.
    Transfer {
        /// Its name.
        id: TransferId,
        /// Whose KV.
        request: RequestId,
        /// Source.
        from: WorkerId,
        /// Destination.
        to: WorkerId,
        /// How many blocks.
        num_blocks: u32,
        /// Source and destination of those that have names, pairwise.
        blocks: Vec<(BlockId, BlockId)>,
        /// The run at `from` that still computes the last of it, if one does: layers may leave as they
        /// are done, and the transfer ends after the run.
        during: Option<Seq>,
    },
    /// Stop a transfer; its terminal event still comes.
    Abort {
        /// Which.
        id: TransferId,
    },
    /// A worker has another role from now on.
    SetRole {
        /// Whose.
        worker: WorkerId,
        /// Which.
        role: Role,
    },
    /// Send [`Event::Wake`] then, at the latest.
    WakeAt(Time),
    /// Nothing more will be ordered for the request; its record is in the log.
    Finish(RequestId),
    /// Turned away; its record, with the reason, is in the log.
    Refuse(RequestId),
}

/// How far runs in progress have come. Policies see a worker in the middle of a run as it is now,
/// not as it was when the run began; only the driver knows, and is asked only when one looks.
pub trait Progress: Send {
    /// Steps of run `seq` of `worker` that ended at or before `now`.
    fn steps_done(&self, worker: WorkerId, seq: Seq, now: Time) -> u32;
}
