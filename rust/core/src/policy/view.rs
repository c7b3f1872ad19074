//! What a policy may look at. Views borrow the scheduler's state and copy nothing.
//!
//! A worker in the middle of a run is seen as of its latest step border: the driver is asked how
//! far the run has come, only when a policy looks. Blocks that a run has reserved count as held.

use crate::cluster::{Role, WorkerId};
use crate::latency::LatencyModel;
use crate::request::RequestId;
use crate::scheduler::live::Live;
use crate::scheduler::state::{Limits, State};
use crate::scheduler::worker::Worker;
use crate::slo::Slo;
use crate::step::StepShape;
use crate::time::{Nanos, Picos, Time};

/// A number that workers can be compared by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadMetric {
    /// Prompt tokens still to compute.
    QueuedTokens,
    /// Requests with prompt tokens to compute.
    NumWaiting,
    /// Requests that decode.
    NumRunning,
    /// KV tokens of decoding requests and of those on their way.
    ContextTokens,
    /// KV blocks that somebody holds.
    HeldBlocks,
}

impl LoadMetric {
    /// All, with the names that Python uses.
    pub const ALL: [(&str, LoadMetric); 5] = [
        ("queued_tokens", LoadMetric::QueuedTokens),
        ("num_waiting", LoadMetric::NumWaiting),
        ("num_running", LoadMetric::NumRunning),
        ("context_tokens", LoadMetric::ContextTokens),
        ("held_blocks", LoadMetric::HeldBlocks),
    ];

    /// By name.
    pub fn named(name: &str) -> Option<LoadMetric> {
        LoadMetric::ALL.iter().find(|(known, _)| *known == name).map(|(_, metric)| *metric)
    }
}

/// The whole cluster.
#[derive(Clone, Copy)]
pub struct ClusterView<'a> {
    state: &'a State,
}

/// One worker.
#[derive(Clone, Copy)]
pub struct WorkerView<'a> {
    state: &'a State,
    worker: &'a Worker,
    /// It is asked for a batch while other runs of its pipeline are under way: what these work on is
    /// not shown.
    hides_runs: bool,
}

/// One request.
#[derive(Clone, Copy)]
pub struct RequestView<'a> {
    state: &'a State,
    live: &'a Live,
}

impl<'a> ClusterView<'a> {
    pub(crate) fn new(state: &'a State) -> ClusterView<'a> {
        ClusterView { state }
    }

    /// The instant of the decision.
    pub fn now(&self) -> Time {
        self.state.now
    }

    /// All workers, in order; those that are down too.
    pub fn workers(&self) -> impl Iterator<Item = WorkerView<'a>> + use<'a> {
        let state = self.state;
        state.workers.iter().map(move |worker| WorkerView { state, worker, hides_runs: false })
    }

    /// How many workers there are.
    pub fn num_workers(&self) -> usize {
        self.state.workers.len()
    }

    /// One worker.
    pub fn worker(&self, id: WorkerId) -> Option<WorkerView<'a>> {
        let worker = self.state.workers.get(id.index())?;
        Some(WorkerView { state: self.state, worker, hides_runs: false })
    }

    /// Limits on batches.
    pub fn limits(&self) -> &'a Limits {
        &self.state.limits
    }

    /// Live requests that no worker was chosen for yet.
    pub fn num_unplaced(&self) -> usize {
        self.state.unplaced.len()
    }

    /// Live requests whose KV waits for room at a decode worker.
    pub fn num_awaiting_room(&self) -> usize {
        self.state.awaiting_room.len()
    }

    /// Live requests whose KV waits for room at a decode worker, in the order in which they came.
    pub fn awaiting_room(&self) -> impl Iterator<Item = RequestView<'a>> + use<'a> {
        let state = self.state;
        state.awaiting_room.iter().map(move |id| RequestView { state, live: &state.requests[*id] })
    }

    /// A live request.
    pub fn request(&self, id: RequestId) -> Option<RequestView<'a>> {
        let live = self.state.requests.get(id)?;
        Some(RequestView { state: self.state, live })
    }

    /// The worker with the least of `metric` among those that `eligible` holds for; ties go to the
    /// first.
    pub fn least_loaded(
        &self,
        metric: LoadMetric,
        eligible: impl Fn(&WorkerView<'a>) -> bool,
    ) -> Option<WorkerView<'a>> {
        self.workers().filter(|worker| eligible(worker)).min_by_key(|worker| worker.load(metric))
    }

    /// Of the workers that decode and are up, the one with the least context among those that
    /// `eligible` holds for; ties go to the first.
    pub(crate) fn least_context(&self, eligible: impl Fn(&WorkerView<'a>) -> bool) -> Option<WorkerView<'a>> {
        let Some(ranks) = &self.state.ranks else {
            return self.least_loaded(LoadMetric::ContextTokens, eligible);
        };
        let mut best: Option<(u64, WorkerView<'a>)> = None;
        for (credited, id) in ranks.by_context() {
            if best.is_some_and(|(least, _)| credited > least) {
                break;
            }
            let Some(worker) = self.worker(id).filter(&eligible) else { continue };
            let context = worker.context_tokens();
            if best.is_none_or(|(least, found)| (context, id) < (least, found.id())) {
                best = Some((context, worker));
            }
        }
        let best = best.map(|(_, worker)| worker);
        debug_assert_eq!(
            best.map(|worker| worker.id()),
            self.least_loaded(LoadMetric::ContextTokens, eligible).map(|worker| worker.id()),
        );
        best
    }

    /// Of the workers that take prompts and are up, the one with the fewest queued prompt tokens (then
    /// the fewest requests that decode) among those that `eligible` holds for; ties go to the first.
    pub(crate) fn least_queued(&self, eligible: impl Fn(&WorkerView<'a>) -> bool) -> Option<WorkerView<'a>> {
        let load = |worker: &WorkerView<'_>| (worker.queued_tokens(), worker.num_running());
        let Some(ranks) = &self.state.ranks else {
            return self.workers().filter(eligible).min_by_key(load);
        };
        let best = ranks.by_prompts().filter_map(|id| self.worker(id)).find(&eligible);
        debug_assert_eq!(
            best.map(|worker| worker.id()),
            self.workers().filter(&eligible).min_by_key(load).map(|worker| worker.id()),
        );
        best
    }

    /// Per worker, in order: prompt tokens of the request that its prefix cache holds.
    pub fn prefix_hits(&self, request: &RequestView<'_>) -> Vec<u32> {
        self.workers().map(|worker| worker.prefix_hit(request)).collect()
    }

    /// How long the policy believes that moving the KV of `tokens` tokens takes.
    pub fn predict_transfer(&self, tokens: u64) -> Nanos {
        self.state.belief.link.transfer(tokens * self.state.belief.kv_bytes_per_token)
    }
}

impl<'a> WorkerView<'a> {
    pub(crate) fn new(state: &'a State, id: WorkerId) -> WorkerView<'a> {
        WorkerView { state, worker: &state.workers[id.index()], hides_runs: false }
    }

    /// The worker as its policy is asked for a batch.
    pub(crate) fn for_batch(state: &'a State, id: WorkerId) -> WorkerView<'a> {
        let worker = &state.workers[id.index()];
        WorkerView { state, worker, hides_runs: worker.is_busy() }
    }

    /// The instant of the decision.
    pub fn now(&self) -> Time {
        self.state.now
    }

    /// The whole cluster.
    pub fn cluster(&self) -> ClusterView<'a> {
        ClusterView { state: self.state }
    }

    /// Its index.
    pub fn id(&self) -> WorkerId {
        self.worker.id
    }

    /// What it does.
    pub fn role(&self) -> Role {
        self.worker.role
    }

    /// Whether it is there.
    pub fn is_up(&self) -> bool {
        self.worker.up
    }

    /// Whether a run of it is in progress.
    pub fn is_busy(&self) -> bool {
        self.worker.is_busy()
    }

    /// Limits on batches.
    pub fn limits(&self) -> &'a Limits {
        &self.state.limits
    }

    /// Requests with prompt tokens to compute, in queue order. Where the worker is a pipeline that is
    /// asked for a batch, those that no other run works on.
    pub fn waiting(&self) -> impl Iterator<Item = RequestView<'a>> + use<'a> {
        self.shown(self.worker.waiting.iter())
    }

    /// Requests that decode, in the order in which they joined. Where the worker is a pipeline that is
    /// asked for a batch, those that no other run works on.
    pub fn running(&self) -> impl Iterator<Item = RequestView<'a>> + use<'a> {
        self.shown(self.worker.running.iter())
    }

    fn shown<I: Iterator<Item = &'a RequestId>>(
        &self,
        ids: I,
    ) -> impl Iterator<Item = RequestView<'a>> + use<'a, I> {
        let WorkerView { state, hides_runs, .. } = *self;
        let view = move |id: &RequestId| RequestView { state, live: &state.requests[*id] };
        ids.map(view).filter(move |request| !(hides_runs && request.live.in_run))
    }

    /// Prompt tokens still to compute.
    pub fn queued_tokens(&self) -> u64 {
        self.worker.queued_tokens
    }

    /// Requests with prompt tokens to compute.
    pub fn num_waiting(&self) -> usize {
        if self.hides_runs { self.waiting().count() } else { self.worker.waiting.len() }
    }

    /// Requests that decode.
    pub fn num_running(&self) -> usize {
        if self.hides_runs { self.running().count() } else { self.worker.running.len() }
    }

    /// Requests whose KV is on its way here.
    pub fn num_incoming(&self) -> u32 {
        self.worker.num_incoming
    }

    /// KV tokens of decoding requests and of those on their way.
    pub fn context_tokens(&self) -> u64 {
        self.running_context() + self.worker.incoming_tokens
    }

    /// KV tokens of decoding requests.
    fn running_context(&self) -> u64 {
        let rows = self.worker.repeated().map_or(0, |run| run.run.step.rows.len() as u64);
        self.worker.context_tokens + rows * u64::from(self.state.uncredited_steps(self.worker))
    }

    /// KV blocks in all.
    pub fn num_blocks(&self) -> u32 {
        self.worker.pool.num_blocks()
    }

    /// KV blocks that can be allocated, cached ones included.
    pub fn available_blocks(&self) -> u32 {
        self.worker.pool.num_available()
    }

    /// KV blocks that somebody holds.
    pub fn held_blocks(&self) -> u32 {
        self.worker.pool.num_held()
    }

    /// One of the numbers that workers are compared by.
    pub fn load(&self, metric: LoadMetric) -> u64 {
        match metric {
            LoadMetric::QueuedTokens => self.queued_tokens(),
            LoadMetric::NumWaiting => self.num_waiting() as u64,
            LoadMetric::NumRunning => self.num_running() as u64 + u64::from(self.num_incoming()),
            LoadMetric::ContextTokens => self.context_tokens(),
            LoadMetric::HeldBlocks => u64::from(self.held_blocks()),
        }
    }

    /// Prompt tokens of the request that its prefix cache holds; at most all but one.
    pub fn prefix_hit(&self, request: &RequestView<'_>) -> u32 {
        self.worker.prefix_hit(request.live) * self.worker.pool.block_tokens()
    }

    /// Whether there is room now to start the prompt of a waiting request.
    pub fn can_start(&self, request: &RequestView<'_>) -> bool {
        self.worker.can_start(request.live)
    }

    /// Whether there is room now for the KV of a request that comes to decode here.
    pub fn can_accept(&self, request: &RequestView<'_>) -> bool {
        request.live.incoming.as_ref().is_some_and(|kv| kv.worker == self.id())
            || self.worker.has_room(request.live, u64::from(request.live.target()), request.live.computed())
    }

    /// Whether its pool could hold `tokens` tokens, were they alone.
    pub fn can_ever_hold(&self, tokens: u64) -> bool {
        self.worker.can_ever_hold(tokens)
    }

    /// How long the policy believes that a step of this shape takes here.
    pub fn predict_step(&self, shape: &StepShape) -> Picos {
        self.model().step(shape)
    }

    /// How long the policy believes that it takes to compute `tokens` prompt tokens behind
    /// `prefix` cached ones, alone and in one step.
    pub fn predict_prefill(&self, tokens: u32, prefix: u32) -> Picos {
        self.predict_step(&StepShape::prefill(prefix, tokens))
    }

    /// The step that decodes all running requests, as a shape.
    pub fn decode_shape(&self) -> StepShape {
        let num_decode = self.num_running() as u32;
        StepShape::decode(num_decode, self.running_context() + u64::from(num_decode))
    }

    fn model(&self) -> &'a dyn LatencyModel {
        self.state.belief.steps[self.worker.id.index()].as_ref()
    }
}

impl<'a> RequestView<'a> {
    pub(crate) fn new(state: &'a State, id: RequestId) -> RequestView<'a> {
        RequestView { state, live: &state.requests[id] }
    }

    /// The instant of the decision.
    pub fn now(&self) -> Time {
        self.state.now
    }

    /// Which.
    pub fn id(&self) -> RequestId {
        self.live.id()
    }

    /// Scheduled arrival.
    pub fn arrival(&self) -> Time {
        self.live.request.arrival
    }

    /// Prompt length.
    pub fn prompt_tokens(&self) -> u32 {
        self.live.request.prompt_tokens
    }

    /// The most it may produce.
    pub fn max_tokens(&self) -> u32 {
        self.live.request.max_tokens
    }

    /// Prompt and output at their longest.
    pub fn longest(&self) -> u64 {
        self.live.request.longest()
    }

    /// Tokens emitted so far.
    pub fn generated(&self) -> u32 {
        self.live.generated + self.uncredited_steps()
    }

    fn uncredited_steps(&self) -> u32 {
        let kv = self.live.kv.as_ref().filter(|_| self.live.in_run);
        kv.map_or(0, |kv| self.state.uncredited_steps(&self.state.workers[kv.worker.index()]))
    }

    /// Tokens whose KV exists.
    pub fn computed(&self) -> u32 {
        self.live.computed() + self.uncredited_steps()
    }

    /// Tokens to compute before the next one is emitted.
    pub fn pending(&self) -> u32 {
        self.live.pending()
    }

    /// Whether its blocks are allocated.
    pub fn is_started(&self) -> bool {
        self.live.kv.is_some()
    }

    /// Its objectives.
    pub fn slo(&self) -> &'a Slo {
        &self.live.request.slo
    }

    /// Its SLO class.
    pub fn class(&self) -> u16 {
        self.live.request.class.0
    }

    /// Higher is more important.
    pub fn priority(&self) -> i32 {
        self.live.request.priority
    }

    /// Admission put it behind the others.
    pub fn is_demoted(&self) -> bool {
        self.live.demoted
    }

    /// When its first token was emitted.
    pub fn first_token(&self) -> Option<Time> {
        self.live.record.first_token
    }

    /// When its latest token was emitted; now, if that was in a run that is not over.
    pub fn last_token(&self) -> Option<Time> {
        if self.uncredited_steps() > 0 { Some(self.now()) } else { self.live.record.last_token }
    }

    /// When its first token is due: by its TTFT, or by its end-to-end objective if that is nearer.
    pub fn deadline(&self) -> Option<Time> {
        let request = &self.live.request;
        let whole = request.slo.e2e.map(|e2e| request.arrival + e2e);
        let first = request.slo.first_token_deadline(request.arrival);
        first.into_iter().chain(whole).min()
    }

    /// Whether it can no longer be good: an objective of it is missed, whatever happens.
    pub fn has_missed(&self) -> bool {
        let (record, slo) = (&self.live.record, &self.live.request.slo);
        let late = |due: Option<Time>, at: Time| due.is_some_and(|due| at > due);
        let now = self.now();
        let next_by_gap = self.last_token().zip(slo.max_gap).map(|(at, gap)| at + gap);
        late(self.deadline(), record.first_token.unwrap_or(now))
            || late(slo.e2e.map(|e2e| record.arrival + e2e), now)
            || late(next_by_gap, now)
            || slo.max_gap.zip(record.max_gap).is_some_and(|(limit, gap)| gap > Picos::from(limit))
            || record.late_token
    }

    /// The worker that holds its KV.
    pub fn kv_worker(&self) -> Option<WorkerId> {
        self.live.kv.as_ref().map(|kv| kv.worker)
    }

    /// Where placement wants it to decode.
    pub fn decode_at(&self) -> Option<WorkerId> {
        self.live.decode_at
    }

    /// The whole cluster.
    pub fn cluster(&self) -> ClusterView<'a> {
        ClusterView { state: self.state }
    }
}
