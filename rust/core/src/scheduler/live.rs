//! A request while it lives: a small state machine with named phases.

use std::borrow::Cow;

use crate::cluster::WorkerId;
use crate::event::TransferId;
use crate::kv::Table as Blocks;
use crate::record::{RequestRecord, Status};
use crate::request::{Request, RequestId};
use crate::time::{Picos, Time};

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Just arrived; admission has not been asked.
    Fresh,
    /// Admission holds it until then.
    Held(Time),
    /// Admitted; no worker was chosen.
    Unplaced,
    /// In a worker's prefill queue: not started, in chunks, or preempted.
    Waiting(WorkerId),
    /// Its prompt is done; its KV waits for room at a decode worker.
    AwaitingRoom,
    /// Its KV is under way.
    Transferring(TransferId),
    /// Decodes at a worker.
    Decoding(WorkerId),
    /// Over, but a run still works on its blocks.
    Draining,
}

impl Phase {
    /// Whether `next` may follow. Anything else is a bug.
    fn allows(self, next: Phase) -> bool {
        use Phase::{AwaitingRoom, Decoding, Draining, Fresh, Held, Transferring, Unplaced, Waiting};
        match (self, next) {
            (Draining, _) => false,
            (_, Draining) => true,
            (Fresh | Held(_), Held(_) | Unplaced) => true,
            (Unplaced, Waiting(_)) => true,
            (Waiting(_), Decoding(_) | AwaitingRoom | Transferring(_)) => true,
            (AwaitingRoom, Transferring(_)) => true,
            (Transferring(_), Decoding(_) | AwaitingRoom) => true,
            (Decoding(at), Waiting(to)) => at == to,
            // A lost worker, or one that takes prompts no more.
            (Waiting(_) | AwaitingRoom | Transferring(_) | Decoding(_), Unplaced) => true,
            _ => false,
        }
    }
}

/// How a draining request ended; its record is closed when its run is over, with the tokens that
/// had been emitted by then.
#[derive(Clone, Debug)]
pub(crate) struct Ending {
    pub(crate) status: Status,
    pub(crate) reason: Option<Cow<'static, str>>,
    pub(crate) at: Time,
}

/// KV of a request at one worker.
#[derive(Clone, Debug)]
pub(crate) struct Kv {
    pub(crate) worker: WorkerId,
    pub(crate) table: Blocks,
    /// Tokens whose KV is there.
    pub(crate) computed: u32,
}

/// A live request.
#[derive(Clone, Debug)]
pub(crate) struct Live {
    pub(crate) request: Request,
    pub(crate) record: RequestRecord,
    phase: Phase,
    /// Tokens emitted.
    pub(crate) generated: u32,
    pub(crate) kv: Option<Kv>,
    /// Room taken at a decode worker: reserved, or the destination of a transfer.
    pub(crate) incoming: Option<Kv>,
    /// Where placement wants it to decode.
    pub(crate) decode_at: Option<WorkerId>,
    /// The transfer of its KV that began beside its last chunk, while that is under way.
    pub(crate) early: Option<TransferId>,
    /// When its latest token was emitted, exactly.
    pub(crate) last_emit: Option<Picos>,
    /// Admission put it behind the others.
    pub(crate) demoted: bool,
    /// Whether a run that holds it is outstanding.
    pub(crate) in_run: bool,
    /// Set while it drains.
    pub(crate) ending: Option<Ending>,
}

impl Live {
    pub(crate) fn new(request: Request) -> Live {
        Live {
            record: RequestRecord::new(&request),
            request,
            phase: Phase::Fresh,
            generated: 0,
            kv: None,
            incoming: None,
            decode_at: None,
            early: None,
            last_emit: None,
            demoted: false,
            in_run: false,
            ending: None,
        }
    }

    pub(crate) fn id(&self) -> RequestId {
        self.request.id
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    /// Moves on.
    ///
    /// # Panics
    /// When `next` cannot follow: a bug in the scheduler.
    pub(crate) fn enter(&mut self, next: Phase) {
        assert!(self.phase.allows(next), "{:?} cannot go from {:?} to {next:?}", self.id(), self.phase);
        self.phase = next;
    }

    /// Tokens whose KV must exist before the next token can be yielded: prompt and output so far.
    pub(crate) fn target(&self) -> u32 {
        self.request.prompt_tokens + self.generated
    }

    /// Tokens whose KV exists.
    pub(crate) fn computed(&self) -> u32 {
        self.kv.as_ref().map_or(0, |kv| kv.computed)
    }

    /// Tokens whose KV a transfer moves: those that exist once its prompt is computed.
    pub(crate) fn handed_over(&self) -> u32 {
        if self.in_run { self.target() } else { self.computed() }
    }

    /// Tokens still to compute before the next token is yielded: 1 while it decodes.
    pub(crate) fn pending(&self) -> u32 {
        self.target() - self.computed()
    }

    /// Its record, now that it is over.
    pub(crate) fn over(&self, ending: Ending) -> RequestRecord {
        let Ending { status, reason, at } = ending;
        RequestRecord { status, reason, end: Some(at), ..self.record.clone() }
    }

    /// Tokens it may still yield.
    pub(crate) fn remaining(&self) -> u32 {
        self.request.max_tokens - self.generated
    }
}

/// Live requests by id. Ids increase, so a deque from the oldest live one on is an index.
#[derive(Debug, Default)]
pub(crate) struct Table {
    first: u64,
    slots: std::collections::VecDeque<Option<Box<Live>>>,
    len: usize,
}

impl Table {
    /// # Panics
    /// When ids do not increase.
    pub(crate) fn insert(&mut self, live: Live) {
        let id = live.id().0;
        if self.slots.is_empty() {
            self.first = self.first.max(id);
        }
        let next = self.first + self.slots.len() as u64;
        assert!(id >= next, "request ids increase: {id} after {next}");
        self.slots.extend((next..id).map(|_| None));
        self.slots.push_back(Some(Box::new(live)));
        self.len += 1;
    }

    pub(crate) fn get(&self, id: RequestId) -> Option<&Live> {
        let index = id.0.checked_sub(self.first)?;
        self.slots.get(usize::try_from(index).ok()?)?.as_deref()
    }

    pub(crate) fn get_mut(&mut self, id: RequestId) -> Option<&mut Live> {
        let index = id.0.checked_sub(self.first)?;
        self.slots.get_mut(usize::try_from(index).ok()?)?.as_deref_mut()
    }

    pub(crate) fn remove(&mut self, id: RequestId) -> Option<Box<Live>> {
        let index = usize::try_from(id.0.checked_sub(self.first)?).ok()?;
        let live = self.slots.get_mut(index)?.take()?;
        self.len -= 1;
        while matches!(self.slots.front(), Some(None)) {
            self.slots.pop_front();
            self.first += 1;
        }
        Some(live)
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// All that are live, in order.
    pub(crate) fn into_live(self) -> impl Iterator<Item = Box<Live>> {
        self.slots.into_iter().flatten()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Live> {
        self.slots.iter().filter_map(Option::as_deref)
    }
}

impl std::ops::Index<RequestId> for Table {
    type Output = Live;

    fn index(&self, id: RequestId) -> &Live {
        self.get(id).unwrap_or_else(|| panic!("{id:?} is not live"))
    }
}

impl std::ops::IndexMut<RequestId> for Table {
    fn index_mut(&mut self, id: RequestId) -> &mut Live {
        self.get_mut(id).unwrap_or_else(|| panic!("{id:?} is not live"))
    }
}
