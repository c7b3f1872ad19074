//! The scheduler: all events of an instant in, actions out.
//!
//! [`Scheduler::handle`] first applies what happened, which asks nobody, and then decides:
//! admission, placement, hand-over, batches, in that order. Each decision is asked of the policy,
//! validated, and only then committed, so a policy that fails leaves nothing half done. Work is
//! O(events + decisions); a batch costs O(its rows).

mod batching;
mod commands;
pub(crate) mod handoff;
pub(crate) mod live;
mod progress;
mod ranks;
pub(crate) mod state;
pub(crate) mod worker;

use crate::cluster::WorkerId;
use crate::event::{Action, Done, Event, Progress};
use crate::kv::{BlockId, BlockPool, IntegrityError, Naming};
use crate::policy::{ClusterView, Decision, Outcome, Policy, PolicyFault};
use crate::record::{Detail, Log, RequestRecord, Status};
use crate::request::RequestId;
use crate::time::{Nanos, Time};
use live::{Ending, Live};
use progress::Ran;
use state::State;
pub use state::{Belief, Limits, WorkerConfig};
use worker::Worker;

/// What a scheduler is made of.
pub struct Setup {
    /// Workers, in order.
    pub workers: Vec<WorkerConfig>,
    /// Limits on batches.
    pub limits: Limits,
    /// Whether prompts share the KV of equal prefixes.
    pub prefix_caching: bool,
    /// Which KV blocks have names: all, where a driver reads [`Scheduler::block_table`].
    pub naming: Naming,
    /// Whether KV may be transferred while the last of its prompt is computed.
    pub early_transfers: bool,
    /// What policies predict with.
    pub belief: Belief,
}

/// Decides; see the module's documentation.
pub struct Scheduler {
    state: State,
    policy: Box<dyn Policy>,
    rebalance_at: Option<Time>,
    /// The last wake-up asked for.
    wake_sent: Option<Time>,
    /// Runs that are over and were not yet shown to the policy.
    ran: Vec<Ran>,
    /// Records in the log that the policy was shown.
    num_observed: usize,
    /// Records that were taken out of the log before the policy was shown them.
    unobserved: Vec<RequestRecord>,
}

/// How far before the present a time may lie that a policy means as the present: its seconds went
/// through floating point.
const ROUNDING: Nanos = Nanos(1_000);

/// Whether `at` can be no time to be asked again: it was over before `now`, by more than rounding
/// explains, or no run lasts so long.
fn is_out_of_reach(now: Time, at: Time) -> bool {
    at + ROUNDING < now || at > Time::LONGEST
}

/// `at`, but after `now`, so that a policy is not asked twice in an instant.
fn later_than(now: Time, at: Time) -> Time {
    at.max(now + Nanos(1))
}

impl Scheduler {
    /// A scheduler whose workers are up and idle. Call [`begin`](Scheduler::begin) before events.
    pub fn new(setup: Setup, policy: Box<dyn Policy>) -> Scheduler {
        let block_tokens = setup.limits.block_tokens;
        let worker = |(index, config): (usize, &WorkerConfig)| {
            let pool = BlockPool::new(config.num_blocks, block_tokens, setup.prefix_caching, setup.naming);
            Worker::new(WorkerId(index as u32), config, pool)
        };
        let workers = setup.workers.iter().enumerate().map(worker).collect();
        Scheduler {
            state: State {
                early_transfers: setup.early_transfers,
                ..State::new(setup.limits, setup.belief, workers)
            },
            policy,
            rebalance_at: None,
            wake_sent: None,
            ran: Vec::new(),
            num_observed: 0,
            unobserved: Vec::new(),
        }
    }

    /// Starts a run at `now`: the policy forgets all and is asked for roles.
    pub fn begin(&mut self, now: Time, seed: u64) -> Decision<()> {
        self.state.now = now;
        self.rebalance_at = Some(now);
        self.policy.begin(&ClusterView::new(&self.state), seed)
    }

    /// Lets policies see how far runs in progress have come; without it they see each as it began.
    pub fn watch_progress(&mut self, progress: Box<dyn Progress>) {
        self.state.progress = Some(progress);
    }

    /// What to log beside the requests from now on.
    pub fn log_detail(&mut self, detail: Detail) {
        self.state.detail = detail;
    }

    /// Exchanges the policy in mid-run, as a driver does after a fault. Nothing else changes.
    pub fn replace_policy(&mut self, policy: Box<dyn Policy>) -> Box<dyn Policy> {
        self.rebalance_at = None;
        for index in 0..self.state.workers.len() {
            self.state.touch(WorkerId(index as u32));
        }
        (self.state.place_dirty, self.state.accept_dirty) = (true, true);
        std::mem::replace(&mut self.policy, policy)
    }

    /// Takes all events of the instant `now`, and decides. Actions that were committed before a
    /// fault stand in `actions` and hold; what the faulty decision was about stays undecided.
    ///
    /// # Panics
    /// When `now` is earlier than the instant before, or an event names what does not exist: bugs
    /// of the driver.
    pub fn handle(&mut self, now: Time, events: &[Event], actions: &mut Vec<Action>) -> Decision<()> {
        assert!(now >= self.state.now, "time went back: {now:?} after {:?}", self.state.now);
        self.state.now = now;
        self.num_observed = self.num_observed.min(self.state.log.requests.len());
        self.fire_timers();
        for event in events {
            self.apply(event, actions);
        }
        let decided = self.decide(actions);
        self.ask_to_be_woken(actions);
        decided
    }

    fn apply(&mut self, event: &Event, actions: &mut Vec<Action>) {
        match event {
            Event::Arrived(request) => {
                self.state.requests.insert(Live::new(request.clone()));
                self.state.fresh.push_back(request.id);
            }
            Event::Ready { worker, seq } => {
                let entry = self.state.worker(*worker);
                if entry.up && seq.0 + 1 == entry.next_seq {
                    entry.ready = true;
                    self.state.touch(*worker);
                }
            }
            Event::Done(done) => self.ran.extend(self.state.run_done(done, actions)),
            Event::Transferred { id } => self.state.transferred(*id, actions),
            Event::Failed { id, quiesced } => self.state.transfer_failed(*id, *quiesced, actions),
            Event::Cancelled(id) => self.state.stop(*id, Status::Cancelled, None, actions),
            Event::GivenUp { request, reason } => {
                self.state.stop(*request, Status::Failed, Some(reason.clone().into()), actions);
            }
            Event::WorkerUp { worker } => self.state.worker_up(*worker),
            Event::WorkerDown { worker, steps_delivered } => {
                self.state.worker_down(*worker, *steps_delivered, actions);
            }
            Event::Wake => {}
        }
    }

    fn decide(&mut self, actions: &mut Vec<Action>) -> Decision<()> {
        self.observe()?;
        self.rebalance(actions)?;
        self.admit_all(actions)?;
        self.place_all(actions)?;
        self.accept_all(actions)?;
        self.batch_all(actions)?;
        if self.state.early_transfers {
            // Last chunks that have just been ordered.
            self.accept_all(actions)?;
        }
        self.break_deadlock(actions)
    }

    fn observe(&mut self) -> Decision<()> {
        for ran in std::mem::take(&mut self.ran) {
            let Ran { worker, shape, steps, duration } = ran;
            self.policy.observe(Outcome::Ran { worker, shape: &shape, steps, duration })?;
        }
        for record in std::mem::take(&mut self.unobserved) {
            self.policy.observe(Outcome::Ended(&record))?;
        }
        while let Some(record) = self.state.log.requests.get(self.num_observed) {
            self.num_observed += 1;
            self.policy.observe(Outcome::Ended(record))?;
        }
        Ok(())
    }

    fn rebalance(&mut self, actions: &mut Vec<Action>) -> Decision<()> {
        if self.rebalance_at.is_none_or(|at| at > self.state.now) {
            return Ok(());
        }
        let answer = self.policy.rebalance(&ClusterView::new(&self.state))?;
        self.state.validate_roles(&answer.roles)?;
        if let Some(next) = answer.next.filter(|next| is_out_of_reach(self.state.now, *next)) {
            let message = format!(
                "next tick at {next:?}, which is not after {:?}, or beyond the 213 days of a run",
                self.state.now
            );
            return Err(PolicyFault::Invalid { method: "rebalance", message });
        }
        self.rebalance_at = answer.next.map(|next| later_than(self.state.now, next));
        for (worker, role) in answer.roles {
            self.state.set_role(worker, role, actions);
        }
        Ok(())
    }

    fn fire_timers(&mut self) {
        let now = self.state.now;
        while self.state.timers.first().is_some_and(|(at, _)| *at <= now) {
            let (_, worker) = self.state.timers.pop_first().expect("looked at");
            self.state.worker(worker).wake_at = None;
            self.state.touch(worker);
        }
        while self.state.held.first().is_some_and(|(until, _)| *until <= now) {
            let (_, id) = self.state.held.pop_first().expect("looked at");
            self.state.fresh.push_back(id);
        }
    }

    fn ask_to_be_woken(&mut self, actions: &mut Vec<Action>) {
        let held = self.state.held.first().map(|(until, _)| *until);
        let timers = self.state.timers.first().map(|(at, _)| *at);
        let next = [held, timers, self.rebalance_at].into_iter().flatten().min();
        let Some(next) = next else { return };
        let pending = self.wake_sent.filter(|sent| *sent > self.state.now);
        if pending.is_none_or(|sent| next < sent) {
            actions.push(Action::WakeAt(next));
            self.wake_sent = Some(next);
        }
    }

    /// Live requests.
    pub fn num_live(&self) -> usize {
        self.state.requests.len()
    }

    /// The blocks of a live request at a worker, in the order of its tokens: where it is computed,
    /// or where its transfer goes to. Of blocks that have no names, nothing.
    pub fn block_table(&self, request: RequestId, worker: WorkerId) -> Option<&[BlockId]> {
        let live = self.state.requests.get(request)?;
        let here = live.kv.iter().chain(&live.incoming).find(|kv| kv.worker == worker)?;
        Some(here.table.named())
    }

    /// The state as policies see it.
    pub fn view(&self) -> ClusterView<'_> {
        ClusterView::new(&self.state)
    }

    /// Takes what was logged since the last call. The policy is shown the same as without it.
    pub fn take_log(&mut self) -> Log {
        self.unobserved.extend_from_slice(&self.state.log.requests[self.num_observed..]);
        self.num_observed = 0;
        std::mem::take(&mut self.state.log)
    }

    /// Ends the run at `at`: what is still live is cut off there. `under_way` tells the steps of runs
    /// in progress that had ended by then, so that tokens already emitted are counted.
    pub fn into_log(mut self, at: Time, under_way: &[Done]) -> Log {
        for done in under_way {
            self.state.run_done(done, &mut Vec::new());
        }
        for mut live in std::mem::take(&mut self.state.requests).into_live() {
            let cut_off = Ending { status: Status::CutOff, reason: None, at };
            let ending = live.ending.take().unwrap_or(cut_off);
            self.state.log.requests.push(live.over(ending));
        }
        self.state.log
    }

    /// The first live request if nothing is under way that could ever move any: no run, no
    /// transfer, no timer. Then the policy has left work undone for good, unless a worker returns.
    pub fn stalled(&self) -> Option<RequestId> {
        let state = &self.state;
        let under_way = state.anything_moves() || !state.held.is_empty() || !state.timers.is_empty();
        if under_way { None } else { self.first_live() }
    }

    /// The live request that arrived first.
    pub fn first_live(&self) -> Option<RequestId> {
        self.state.requests.iter().map(Live::id).next()
    }

    /// Counts all books anew; cheap enough for tests and for `engine.check_integrity()`.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        self.state.check_integrity()
    }

    /// Whether every block is free or cached: the state that an idle scheduler returns to.
    pub fn check_idle(&self) -> Result<(), IntegrityError> {
        self.check_integrity()?;
        IntegrityError::check("live requests", self.num_live() as u64, 0)?;
        for worker in &self.state.workers {
            let held = u64::from(worker.pool.num_held());
            IntegrityError::check(format!("held blocks of worker {}", worker.id.0), held, 0)?;
        }
        Ok(())
    }
}
