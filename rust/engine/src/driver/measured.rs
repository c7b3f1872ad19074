//! A measured run: a workload's arrivals at their scheduled times, in a session of its own.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::event::Event;
use kvrelay_core::policy::{Fcfs, Policy, PolicyFault};
use kvrelay_core::record::{Log, Status};
use kvrelay_core::request::{Arrival, Request, RequestId, Source};
use kvrelay_core::time::Time;

use super::session::Session;
use super::{Driver, Waiting};
use crate::config::RunOptions;
use crate::digest::BlockHasher;
use crate::engine::EngineRun;
use crate::error::EngineError;
use crate::sequence::Sequence;

/// How far a run has come, for its caller to look at.
#[derive(Default)]
pub(crate) struct RunShared {
    /// Requests that have arrived.
    pub(crate) arrived: AtomicU64,
    /// Requests that are over.
    pub(crate) over: AtomicU64,
    /// Nanoseconds since its start, at its latest arrival or end.
    pub(crate) now: AtomicU64,
}

/// A run as its caller asks for it.
pub(crate) struct RunRequest {
    /// Names it.
    pub(crate) number: u64,
    pub(crate) source: Box<dyn Source + Send>,
    /// The serving policy when `None`.
    pub(crate) policy: Option<Box<dyn Policy>>,
    pub(crate) options: RunOptions,
    pub(crate) shared: Arc<RunShared>,
    pub(crate) reply: Sender<Result<EngineRun, EngineError>>,
}

/// A run in progress.
pub(super) struct Measured {
    number: u64,
    source: Box<dyn Source + Send>,
    options: RunOptions,
    shared: Arc<RunShared>,
    reply: Sender<Result<EngineRun, EngineError>>,
    /// Nothing more arrives.
    closed: bool,
    num_arrived: u64,
    /// What it will end with instead of a log.
    error: Option<EngineError>,
    /// Live at the end of its time, when that came.
    cut_off: BTreeSet<RequestId>,
    policy: String,
    /// The serving policy, where the run has one of its own.
    serving: Option<Box<dyn Policy>>,
    /// The run's policy, once it has failed.
    failed: Option<Box<dyn Policy>>,
}

impl Measured {
    /// When the next arrival is due; `None` if none is, or none until a completion.
    pub(super) fn next_at(&mut self) -> Option<Time> {
        if self.closed { None } else { self.source.next_at() }
    }

    /// The next arrival that is due at `now`, unless it comes after the run's time.
    fn pull(&mut self, now: Time) -> Option<(RequestId, Arrival)> {
        let latest = self.ends_at().map_or(now, |until| until.min(now));
        self.next_at().filter(|at| *at <= latest)?;
        let Some(arrival) = self.source.pull() else {
            // One that announces what it does not have has nothing more.
            self.closed = true;
            return None;
        };
        let id = RequestId(self.num_arrived);
        self.num_arrived += 1;
        self.shared.arrived.store(self.num_arrived, Ordering::Relaxed);
        self.shared.now.store(now.0, Ordering::Relaxed);
        Some((id, arrival))
    }

    /// When its time is over, unless that has come.
    pub(super) fn ends_at(&self) -> Option<Time> {
        self.options.until.filter(|_| !self.closed)
    }

    pub(super) fn fail(&mut self, error: EngineError) {
        self.closed = true;
        self.error.get_or_insert(error);
    }

    pub(super) fn policy_failed(&mut self, fault: PolicyFault, policy: Box<dyn Policy>) {
        self.fail(EngineError::Policy(fault));
        self.failed.get_or_insert(policy);
    }

    pub(super) fn completed(&mut self, id: RequestId, now: Time) {
        self.source.completed(id.0, now);
        self.shared.over.fetch_add(1, Ordering::Relaxed);
        self.shared.now.store(now.0, Ordering::Relaxed);
    }

    /// The log, with those that the end of its time found alive as what they are.
    fn mend(&self, mut log: Log) -> Log {
        for record in &mut log.requests {
            if record.status == Status::Cancelled && self.cut_off.contains(&record.id) {
                (record.status, record.end) = (Status::CutOff, self.options.until);
            }
        }
        log
    }
}

impl Driver {
    /// Starts a run; nothing is live or under way.
    pub(super) fn begin_run(&mut self, request: RunRequest) {
        let serving = self.session.scheduler.replace_policy(Box::new(Fcfs));
        let (policy, serving) = match request.policy {
            Some(policy) => (policy, Some(serving)),
            None => (serving, None),
        };
        let name = policy.name();
        let now = self.clock.now();
        let fault = self.exchange_session(policy, now, now, request.options.seed);
        let mut run = Measured {
            number: request.number,
            source: request.source,
            options: request.options,
            shared: request.shared,
            reply: request.reply,
            closed: false,
            num_arrived: 0,
            error: None,
            cut_off: BTreeSet::new(),
            policy: name,
            serving,
            failed: None,
        };
        if let Some(fault) = fault {
            run.policy_failed(fault, self.session.scheduler.replace_policy(Box::new(Fcfs)));
        }
        self.session.run = Some(run);
    }

    /// Ends the session, which must be idle, and begins the next.
    fn exchange_session(
        &mut self,
        policy: Box<dyn Policy>,
        base: Time,
        now: Time,
        seed: u64,
    ) -> Option<PolicyFault> {
        let (next, fault) = Session::begin(&self.settings, policy, base, now, seed);
        let before = std::mem::replace(&mut self.session, next);
        self.recordings.extend(before.recording);
        for (index, _) in self.workers.iter().enumerate().filter(|(_, link)| link.is_down()) {
            let worker = WorkerId(index as u32);
            self.session.events.push(Event::WorkerDown { worker, steps_delivered: 0 });
        }
        *self.public.roles.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = self.settings.roles();
        fault
    }

    /// Takes the arrivals that are due; at the end of the run's time cuts off what is live.
    pub(super) fn pull_arrivals(&mut self, now: Time) {
        while let Some((id, arrival)) = self.session.run.as_mut().and_then(|run| run.pull(now)) {
            let (request, sequence) = self.arrive(id, &arrival);
            self.session.hold(id, Arc::new(Mutex::new(sequence)), None);
            self.session.events.push(Event::Arrived(request));
        }
        let Some(run) = &mut self.session.run else { return };
        if run.ends_at().is_some_and(|until| until <= now) {
            run.closed = true;
            run.cut_off = self.session.requests.keys().copied().collect();
            self.session.cancel_all();
        }
    }

    /// A request of a workload: made-up ids, its exact length, end of sequence ignored.
    fn arrive(&self, id: RequestId, arrival: &Arrival) -> (Request, Sequence) {
        let options = self.session.run.as_ref().map(|run| run.options.clone()).unwrap_or_default();
        let limits = &self.settings.limits;
        let longest = u64::from(arrival.prompt_tokens) + u64::from(arrival.max_tokens);
        // One that is too long is refused and needs no tokens.
        let fits = limits.max_model_len.is_none_or(|limit| longest <= u64::from(limit));
        let prompt = if fits { self.prompts.make(options.seed, id.0, arrival) } else { Vec::new() };
        let mut hasher = self.settings.prefix_caching.then(|| BlockHasher::new(limits.block_tokens));
        let prefix = hasher.as_mut().map_or(Arc::default(), |hasher| hasher.extend(&prompt).into());
        let request = Request {
            id,
            arrival: arrival.at,
            prompt_tokens: arrival.prompt_tokens,
            max_tokens: arrival.max_tokens,
            priority: arrival.priority,
            slo: arrival.slo,
            class: arrival.class,
            prefix,
        };
        let limit = arrival.output_tokens.min(arrival.max_tokens);
        (request, Sequence::new(prompt, limit, options.sampling, Arc::default(), None, hasher))
    }

    /// The caller of a run does not wait for it any more.
    pub(super) fn interrupt(&mut self, number: u64) {
        self.waiting.retain(|waiting| !matches!(waiting, Waiting::Run(run) if run.number == number));
        if let Some(run) = self.session.run.as_mut().filter(|run| run.number == number) {
            run.fail(EngineError::Interrupted);
            self.session.cancel_all();
        }
    }

    /// A run whose last request is over gives its log, and serving begins anew.
    pub(super) fn end_run_if_over(&mut self) {
        if self.session.next_arrival().is_some() || !self.is_idle() {
            return;
        }
        let Some(mut run) = self.session.run.take() else { return };
        let now = self.clock.now();
        let end = self.session.time(now);
        let end = run.options.until.map_or(end, |until| until.min(end));
        let policy = self.session.scheduler.replace_policy(Box::new(Fcfs));
        let log = self.session.scheduler.take_log();
        let outcome = match run.error.take() {
            Some(error) => Err(error),
            None => Ok(EngineRun { log: run.mend(log), end, policy: std::mem::take(&mut run.policy) }),
        };
        let serving = run.serving.or(run.failed).unwrap_or(policy);
        let seed = self.settings.seed;
        if let Some(fault) = self.exchange_session(serving, Time::ZERO, now, seed) {
            self.fall_back(fault);
        }
        // A caller that was interrupted has gone.
        let _ = run.reply.send(outcome);
    }
}
