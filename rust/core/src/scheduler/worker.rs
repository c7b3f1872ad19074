//! A worker as the scheduler sees it: its queues, its pool, its run in progress.

use std::collections::VecDeque;

use super::live::{Live, Table};
use super::state::WorkerConfig;
use crate::cluster::{Role, WorkerId};
use crate::kv::BlockPool;
use crate::request::RequestId;
use crate::step::{Run, Seq, StepShape};
use crate::time::{PicoClock, Picos, Time};

/// A run that was ordered and is not over.
#[derive(Clone, Debug)]
pub(crate) struct Outstanding {
    pub(crate) seq: Seq,
    pub(crate) run: Run,
    pub(crate) start: Time,
    /// When it started, exactly.
    pub(crate) begun: Picos,
    pub(crate) shape: StepShape,
    pub(crate) held_blocks: u32,
    pub(crate) cut: bool,
}

/// One worker.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    pub(crate) role: Role,
    pub(crate) up: bool,
    /// It said that it can take a run.
    pub(crate) ready: bool,
    /// Something changed since its policy was last asked for a batch; set by [`State::touch`] alone.
    ///
    /// [`State::touch`]: super::state::State::touch
    pub(super) dirty: bool,
    pub(crate) pool: BlockPool,
    /// Requests with prompt tokens to compute, in queue order; preempted ones in front.
    pub(crate) waiting: VecDeque<RequestId>,
    /// Requests that decode here, in the order in which they joined.
    pub(crate) running: Vec<RequestId>,
    /// Pipeline stages.
    pub(crate) stages: u32,
    /// Runs under way, in order; at most one a stage. Only a run of a worker with one stage is repeated.
    pub(crate) outstanding: Vec<Outstanding>,
    pub(crate) clock: PicoClock,
    pub(crate) next_seq: u64,
    /// Its policy is to be asked again then.
    pub(crate) wake_at: Option<Time>,
    /// Prompt tokens that the waiting ones have still to compute.
    pub(crate) queued_tokens: u64,
    /// KV tokens of the running ones.
    pub(crate) context_tokens: u64,
    /// KV tokens on their way here.
    pub(crate) incoming_tokens: u64,
    /// Requests on their way here.
    pub(crate) num_incoming: u32,
}

impl Worker {
    pub(crate) fn new(id: WorkerId, config: &WorkerConfig, pool: BlockPool) -> Worker {
        Worker {
            id,
            role: config.role,
            stages: config.stages.max(1),
            up: true,
            ready: true,
            dirty: false,
            pool,
            waiting: VecDeque::new(),
            running: Vec::new(),
            outstanding: Vec::new(),
            clock: PicoClock::default(),
            next_seq: 0,
            wake_at: None,
            queued_tokens: 0,
            context_tokens: 0,
            incoming_tokens: 0,
            num_incoming: 0,
        }
    }

    /// Whether its policy is to be asked for a batch now.
    pub(crate) fn wants_batch(&self) -> bool {
        let has_work = !self.waiting.is_empty() || !self.running.is_empty();
        self.up && self.ready && self.dirty && self.outstanding.len() < self.stages as usize && has_work
    }

    /// Whether a run is under way.
    pub(crate) fn is_busy(&self) -> bool {
        !self.outstanding.is_empty()
    }

    /// Its run of several steps, if one is under way.
    pub(crate) fn repeated(&self) -> Option<&Outstanding> {
        self.outstanding.first().filter(|outstanding| outstanding.run.repeat > 1)
    }

    /// Whether its pool could hold the request's KV to its very end, were it alone.
    pub(crate) fn can_ever_hold(&self, tokens: u64) -> bool {
        self.pool.blocks_for(tokens) <= u64::from(self.pool.num_blocks())
    }

    /// Blocks kept free for the running ones when others take room.
    fn watermark(&self) -> u32 {
        if self.running.is_empty() || !self.role.decodes() {
            0
        } else {
            (self.pool.num_blocks() / 100).max(1)
        }
    }

    /// How many prefix blocks of `live` are in the pool; at least the last token is always left to
    /// compute, since only a computed token yields logits.
    pub(crate) fn prefix_hit(&self, live: &Live) -> u32 {
        let limit = (live.target() - 1) / self.pool.block_tokens();
        self.pool.lookup_len(&live.request.prefix, limit)
    }

    /// Whether there is room to start a waiting request; one already started has its blocks.
    pub(crate) fn can_start(&self, live: &Live) -> bool {
        live.kv.is_some() || self.has_room(live, u64::from(live.target()), live.target() - 1)
    }

    /// Whether `tokens` tokens of `live` find room beside the rest, using what the prefix cache
    /// holds of the first `shared_tokens`.
    pub(crate) fn has_room(&self, live: &Live, tokens: u64, shared_tokens: u32) -> bool {
        let hits = self.pool.lookup(&live.request.prefix, shared_tokens / self.pool.block_tokens());
        let missing = self.pool.blocks_for(tokens) - u64::from(hits.len());
        let taken = missing + u64::from(self.pool.count_unheld(&hits)) + u64::from(self.watermark());
        taken <= u64::from(self.pool.num_available())
    }

    /// Queues a request: before the others if it was preempted, else behind them; but the demoted
    /// stay behind all others.
    pub(crate) fn enqueue(&mut self, requests: &Table, live: &Live, first: bool) {
        let demoted = self.waiting.iter().rev().take_while(|id| requests[**id].demoted).count();
        let at = match (first, live.demoted) {
            (true, _) => 0,
            (false, true) => self.waiting.len(),
            (false, false) => self.waiting.len() - demoted,
        };
        self.waiting.insert(at, live.id());
        self.queued_tokens += u64::from(live.pending());
    }

    /// Takes a request out of the prefill queue.
    pub(crate) fn dequeue(&mut self, live: &Live) {
        let at = self.waiting.iter().position(|id| *id == live.id());
        self.waiting.remove(at.expect("a waiting request is in its worker's queue"));
        self.queued_tokens -= u64::from(live.pending());
    }

    /// A request decodes here from now on.
    pub(crate) fn join(&mut self, live: &Live) {
        self.running.push(live.id());
        self.context_tokens += u64::from(live.computed());
    }

    /// A request decodes here no more.
    pub(crate) fn leave(&mut self, live: &Live) {
        let at = self.running.iter().position(|id| *id == live.id());
        self.running.remove(at.expect("a decoding request is in its worker's batch"));
        self.context_tokens -= u64::from(live.computed());
    }

    /// The queues' sums, counted anew: `(queued_tokens, context_tokens)`.
    pub(crate) fn count_tokens(&self, requests: &Table) -> (u64, u64) {
        let queued = self.waiting.iter().map(|id| u64::from(requests[*id].pending())).sum();
        let context = self.running.iter().map(|id| u64::from(requests[*id].computed())).sum();
        (queued, context)
    }
}
