//! The scheduler's state: what views borrow and decisions change.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::handoff::Transfer;
use super::live::Phase;
use super::live::Table as Requests;
use super::ranks::Ranks;
use super::worker::Worker;
use crate::cluster::{Role, WorkerId};
use crate::event::{Progress, TransferId};
use crate::kv::{IntegrityError, Table};
use crate::latency::{LatencyModel, Link};
use crate::record::{Detail, Log};
use crate::request::RequestId;
use crate::step::Row;
use crate::time::Time;

/// Limits on batches, the same for all workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens a KV block holds.
    pub block_tokens: u32,
    /// Requests in a step.
    pub max_batch: u32,
    /// Prompt tokens in a step; one longer prompt goes alone.
    pub max_prefill_tokens: u32,
    /// Prompt tokens in a step that the workers' buffers hold: longer prompts are chunked, whatever
    /// the policy says.
    pub max_chunk_tokens: Option<u32>,
    /// Repetitions of a decode step in one run.
    pub max_repeat: u32,
    /// Prompt and output at their longest.
    pub max_model_len: Option<u32>,
}

impl Default for Limits {
    /// Blocks of 16 tokens, 256 requests and 8,192 prompt tokens a step.
    fn default() -> Limits {
        Limits {
            block_tokens: 16,
            max_batch: 256,
            max_prefill_tokens: 8192,
            max_chunk_tokens: None,
            max_repeat: 256,
            max_model_len: None,
        }
    }
}

/// One worker's role, KV capacity and depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerConfig {
    /// What it does.
    pub role: Role,
    /// KV blocks it has.
    pub num_blocks: u32,
    /// Pipeline stages: so many runs, each of other requests, may be under way at once.
    pub stages: u32,
}

/// What policies predict with; the truth may differ.
#[derive(Clone)]
pub struct Belief {
    /// Per worker, how long a step takes.
    pub steps: Vec<Arc<dyn LatencyModel>>,
    /// How long a transfer takes.
    pub link: Link,
    /// Bytes of KV per token.
    pub kv_bytes_per_token: u64,
}

/// Everything that views show.
pub(crate) struct State {
    pub(crate) now: Time,
    pub(crate) limits: Limits,
    pub(crate) belief: Belief,
    pub(crate) requests: Requests,
    pub(crate) workers: Vec<Worker>,
    /// Blocks of the largest pool, and of the largest one of a worker that decodes.
    pub(crate) largest_pool: u32,
    pub(crate) largest_decode_pool: u32,
    /// Kept where there are very many workers.
    pub(crate) ranks: Option<Ranks>,
    /// Arrived; admission has not been asked.
    pub(crate) fresh: VecDeque<RequestId>,
    /// Held by admission, by the time it is asked again.
    pub(crate) held: BTreeSet<(Time, RequestId)>,
    /// Admitted, without a worker.
    pub(crate) unplaced: VecDeque<RequestId>,
    /// Prompt done, without room at a decode worker.
    pub(crate) awaiting_room: VecDeque<RequestId>,
    /// Whose last chunk is under way, without room at a decode worker; kept for early transfers.
    pub(crate) in_last_chunk: Vec<RequestId>,
    /// Whether transfers may begin beside the last chunk of their prompt.
    pub(crate) early_transfers: bool,
    pub(crate) transfers: BTreeMap<TransferId, Transfer>,
    /// Destination blocks whose writer has not confirmed that it stopped.
    pub(crate) quarantine: BTreeMap<TransferId, (WorkerId, Table)>,
    pub(crate) next_transfer: u64,
    /// Workers whose policy wants to be asked again at a time, whatever happens.
    pub(crate) timers: BTreeSet<(Time, WorkerId)>,
    /// Workers that have work and were given nothing to do: what they wait for may be anywhere.
    pub(crate) idle: BTreeSet<WorkerId>,
    /// Rows of the batch that is being made; kept for its memory.
    pub(crate) rows: Vec<Row>,
    /// Workers whose `dirty` is set.
    pub(crate) touched: Vec<WorkerId>,
    /// Room came free or a hand-over began somewhere since the idle ones were asked.
    pub(crate) idle_dirty: bool,
    /// Something changed that may let an unplaced request be placed.
    pub(crate) place_dirty: bool,
    /// Something changed that may let a decode worker accept.
    pub(crate) accept_dirty: bool,
    pub(crate) log: Log,
    pub(crate) detail: Detail,
    pub(crate) progress: Option<Box<dyn Progress>>,
}

impl State {
    pub(crate) fn new(limits: Limits, belief: Belief, workers: Vec<Worker>) -> State {
        let mut state = State {
            now: Time::ZERO,
            limits,
            belief,
            requests: Requests::default(),
            largest_pool: 0,
            largest_decode_pool: 0,
            ranks: Ranks::of(&workers),
            workers,
            fresh: VecDeque::new(),
            held: BTreeSet::new(),
            unplaced: VecDeque::new(),
            awaiting_room: VecDeque::new(),
            in_last_chunk: Vec::new(),
            early_transfers: false,
            transfers: BTreeMap::new(),
            quarantine: BTreeMap::new(),
            next_transfer: 0,
            timers: BTreeSet::new(),
            idle: BTreeSet::new(),
            rows: Vec::new(),
            touched: Vec::new(),
            idle_dirty: false,
            place_dirty: false,
            accept_dirty: false,
            log: Log::default(),
            detail: Detail::default(),
            progress: None,
        };
        state.measure_pools();
        state
    }

    pub(crate) fn worker(&mut self, id: WorkerId) -> &mut Worker {
        &mut self.workers[id.index()]
    }

    /// Whether a run or a transfer is under way.
    pub(crate) fn anything_moves(&self) -> bool {
        !self.transfers.is_empty() || self.workers.iter().any(Worker::is_busy)
    }

    /// Steps of the worker's repeated run that are done and not yet credited.
    pub(crate) fn uncredited_steps(&self, worker: &Worker) -> u32 {
        let (Some(run), Some(progress)) = (worker.repeated(), &self.progress) else { return 0 };
        progress.steps_done(worker.id, run.seq, self.now).min(run.run.repeat)
    }

    /// Blocks became available at `worker`.
    pub(crate) fn room_changed(&mut self, worker: WorkerId) {
        self.accept_dirty = true;
        self.place_dirty = true;
        self.idle_dirty = true;
        self.touch(worker);
    }

    /// Something changed at `worker`: its policy is to be asked for a batch.
    pub(crate) fn touch(&mut self, worker: WorkerId) {
        if !std::mem::replace(&mut self.workers[worker.index()].dirty, true) {
            self.touched.push(worker);
        }
        self.rank(worker);
    }

    /// Roles are new.
    pub(crate) fn measure_pools(&mut self) {
        let largest = |takes: fn(Role) -> bool| {
            let workers = self.workers.iter().filter(|worker| takes(worker.role));
            workers.map(|worker| worker.pool.num_blocks()).max().unwrap_or(0)
        };
        (self.largest_pool, self.largest_decode_pool) = (largest(|_| true), largest(Role::decodes));
    }

    /// What is queued, decodes or comes in at `worker` has changed.
    pub(crate) fn rank(&mut self, worker: WorkerId) {
        if let Some(ranks) = &mut self.ranks {
            ranks.update(&self.workers[worker.index()]);
        }
    }

    /// Counts everything anew: holders of blocks, queues, sums, phases.
    pub(crate) fn check_integrity(&self) -> Result<(), IntegrityError> {
        let mut holders = vec![[0u64; 3]; self.workers.len()];
        for live in self.requests.iter() {
            for kv in live.kv.iter().chain(&live.incoming) {
                holders[kv.worker.index()][0] += u64::from(kv.table.len());
            }
        }
        for transfer in self.transfers.values() {
            holders[transfer.from.index()][1] += u64::from(transfer.sources.len());
            holders[transfer.to.index()][1] += u64::from(transfer.destinations.len());
        }
        for (worker, blocks) in self.quarantine.values() {
            holders[worker.index()][2] += u64::from(blocks.len());
        }
        for (worker, holders) in self.workers.iter().zip(holders) {
            worker.pool.check_integrity(holders)?;
            let (queued, context) = worker.count_tokens(&self.requests);
            IntegrityError::check(
                format!("queued tokens of worker {}", worker.id.0),
                worker.queued_tokens,
                queued,
            )?;
            IntegrityError::check(
                format!("context tokens of worker {}", worker.id.0),
                worker.context_tokens,
                context,
            )?;
        }
        if let Some(ranks) = &self.ranks {
            ranks.check(&self.workers)?;
        }
        self.check_phases()
    }

    /// Every live request stands exactly where its phase says.
    fn check_phases(&self) -> Result<(), IntegrityError> {
        let listed = |here: bool| u64::from(here);
        for live in self.requests.iter() {
            let id = live.id();
            let expected = u64::from(live.phase() != Phase::Draining);
            let found = match live.phase() {
                Phase::Fresh => listed(self.fresh.contains(&id)),
                Phase::Held(until) => listed(self.held.contains(&(until, id)) || self.fresh.contains(&id)),
                Phase::Unplaced => listed(self.unplaced.contains(&id)),
                Phase::Waiting(at) => listed(self.workers[at.index()].waiting.contains(&id)),
                Phase::AwaitingRoom => listed(self.awaiting_room.contains(&id)),
                Phase::Transferring(transfer) => listed(self.transfers.contains_key(&transfer)),
                Phase::Decoding(at) => listed(self.workers[at.index()].running.contains(&id)),
                Phase::Draining => 0,
            };
            IntegrityError::check(
                format!("lists that hold request {} ({:?})", id.0, live.phase()),
                found,
                expected,
            )?;
            let early = live.early.and_then(|transfer| self.transfers.get(&transfer));
            IntegrityError::check(
                format!("early transfers of request {}", id.0),
                u64::from(early.is_some_and(|transfer| transfer.request == Some(id))),
                u64::from(live.early.is_some()),
            )?;
        }
        let queues: usize =
            self.workers.iter().map(|worker| worker.waiting.len() + worker.running.len()).sum();
        let lists = self.fresh.len() + self.held.len() + self.unplaced.len() + self.awaiting_room.len();
        let early = self.requests.iter().filter(|live| live.early.is_some()).count();
        let moving = self.transfers.values().filter(|transfer| transfer.request.is_some()).count() - early;
        let draining = self.requests.iter().filter(|live| live.phase() == Phase::Draining).count();
        let listed = (queues + lists + moving + draining) as u64;
        IntegrityError::check("requests in lists", listed, self.requests.len() as u64)
    }
}
