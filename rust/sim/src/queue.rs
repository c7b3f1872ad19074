//! What will happen, in a total order: by time; at one time ends of runs first, for a transfer may end
//! with the run that computes the last of its KV; then by the order in which it was planned.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::event::TransferId;
use kvrelay_core::step::Seq;
use kvrelay_core::time::Time;

use crate::driver::Injection;

/// A planned happening.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Planned {
    /// A worker's run ends, unless it was replanned since (`version`).
    RunEnds { worker: WorkerId, seq: Seq, version: u32 },
    /// The first stage of a pipeline has passed its run on.
    StageFree { worker: WorkerId, seq: Seq },
    /// A transfer ends.
    TransferEnds { id: TransferId },
    /// A transfer over shared links ends, or its first byte leaves.
    Flows,
    /// A transfer fails, its destination quiesced or not.
    TransferFails { id: TransferId, quiesced: bool },
    /// The scheduler asked to be woken.
    Wake,
    /// A test's or a user's fault.
    Inject(Injection),
}

impl Planned {
    /// Wake-ups, which a policy may ask for for ever, and faults.
    fn is_idle(&self) -> bool {
        matches!(self, Planned::Wake | Planned::Inject(_))
    }
}

/// One entry of the heap, in the order that the module's documentation gives.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    at: Time,
    number: u64,
    planned: Planned,
}

impl Entry {
    fn key(&self) -> (Time, bool, u64) {
        (self.at, !matches!(self.planned, Planned::RunEnds { .. }), self.number)
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Entry) -> Ordering {
        other.key().cmp(&self.key())
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Entry) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A heap of planned happenings, the earliest on top.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    heap: BinaryHeap<Entry>,
    num_planned: u64,
    num_idle: usize,
}

impl Queue {
    pub(crate) fn push(&mut self, at: Time, planned: Planned) {
        self.num_idle += usize::from(planned.is_idle());
        self.heap.push(Entry { at, number: self.num_planned, planned });
        self.num_planned += 1;
    }

    pub(crate) fn next_at(&self) -> Option<Time> {
        self.heap.peek().map(|entry| entry.at)
    }

    /// Takes the next happening if it is due at `now`.
    pub(crate) fn pop_due(&mut self, now: Time) -> Option<Planned> {
        self.heap.peek().filter(|entry| entry.at <= now)?;
        let planned = self.heap.pop()?.planned;
        self.num_idle -= usize::from(planned.is_idle());
        Some(planned)
    }

    /// Whether nothing is planned that matters once all requests are over.
    pub(crate) fn only_idle(&self) -> bool {
        self.heap.len() == self.num_idle
    }
}
