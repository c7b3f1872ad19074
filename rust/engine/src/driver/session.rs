//! The life of one scheduler: its requests, and what is planned.

use std::collections::{BTreeMap, BTreeSet};

use kvrelay_core::cluster::{Role, WorkerId};
use kvrelay_core::event::{Event, TransferId};
use kvrelay_core::kv::Naming;
use kvrelay_core::policy::{Policy, PolicyFault};
use kvrelay_core::record::RequestRecord;
use kvrelay_core::request::RequestId;
use kvrelay_core::scheduler::{Belief, Limits, Scheduler, Setup, WorkerConfig};
use kvrelay_core::time::Time;

use super::measured::Measured;
use super::{STALL_AFTER, Submitted};
use crate::error::EngineError;
use crate::handle::StreamEnd;
use crate::record::{Entry, ProgressSnapshot, Recording, Snapshot};
use crate::worker::SharedSequence;

/// What every session of an engine is made of.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) workers: Vec<WorkerConfig>,
    pub(crate) limits: Limits,
    pub(crate) prefix_caching: bool,
    /// Whether transfers follow the runs that compute what they move.
    pub(crate) early_transfers: bool,
    pub(crate) belief: Belief,
    pub(crate) seed: u64,
    pub(crate) record: bool,
    /// Ids that end a sequence, sorted.
    pub(crate) end_ids: std::sync::Arc<[u32]>,
}

impl Settings {
    fn setup(&self) -> Setup {
        Setup {
            workers: self.workers.clone(),
            limits: self.limits.clone(),
            prefix_caching: self.prefix_caching,
            naming: Naming::All,
            early_transfers: self.early_transfers,
            belief: self.belief.clone(),
        }
    }

    fn recording(&self, start: Time, seed: u64, policy: String) -> Recording {
        Recording {
            workers: self.workers.clone(),
            limits: self.limits.clone(),
            prefix_caching: self.prefix_caching,
            early_transfers: self.early_transfers,
            belief: self.belief.clone(),
            start,
            seed,
            policy,
            entries: Vec::new(),
        }
    }

    pub(crate) fn roles(&self) -> Vec<Role> {
        self.workers.iter().map(|worker| worker.role).collect()
    }
}

/// A live request.
pub(super) struct Held {
    pub(super) sequence: SharedSequence,
    /// `None` when nobody reads its output.
    end: Option<StreamEnd>,
    /// Closed already, though a run still works on its blocks.
    pub(super) record: Option<RequestRecord>,
}

/// A transfer that follows a run.
pub(super) struct Early {
    pub(super) worker: WorkerId,
    /// Its last block has arrived, which the scheduler will hear when the run is over.
    pub(super) complete: bool,
}

pub(super) struct Session {
    /// The scheduler's time zero, in engine time.
    base: Time,
    pub(super) scheduler: Scheduler,
    /// Ordered, so that what is done to all is done in the same order every time.
    pub(super) requests: BTreeMap<RequestId, Held>,
    /// To be given to the scheduler at the next instant.
    pub(super) events: Vec<Event>,
    /// When the scheduler wants to be woken.
    pub(super) wakes: BTreeSet<Time>,
    /// Transfers that have not ended.
    pub(super) transfers: BTreeSet<TransferId>,
    /// Those that follow a run which is not over.
    pub(super) early: BTreeMap<TransferId, Early>,
    /// How far runs had come, for the scheduler to ask.
    pub(super) snapshot: Snapshot,
    pub(super) recording: Option<Recording>,
    /// Instants in a row at which there was nothing but a wake-up.
    pub(super) num_idle: u64,
    /// Since when nothing that is under way could move any request.
    pub(super) stalled_since: Option<Time>,
    /// The measured run it serves, if it serves one.
    pub(super) run: Option<Measured>,
}

impl Session {
    /// A session whose scheduler's time zero is `base`, begun at `now` (both in engine time), and
    /// the policy's fault if its start failed.
    pub(super) fn begin(
        settings: &Settings,
        policy: Box<dyn Policy>,
        base: Time,
        now: Time,
        seed: u64,
    ) -> (Session, Option<PolicyFault>) {
        let start = Time(now.saturating_since(base).0);
        let recording = settings.record.then(|| settings.recording(start, seed, policy.name()));
        let mut scheduler = Scheduler::new(settings.setup(), policy);
        let fault = scheduler.begin(start, seed).err();
        let snapshot = Snapshot::default();
        scheduler.watch_progress(Box::new(snapshot.clone()));
        let session = Session {
            base,
            scheduler,
            requests: BTreeMap::new(),
            // The policy is asked for roles before the first arrival.
            events: vec![Event::Wake],
            wakes: BTreeSet::new(),
            transfers: BTreeSet::new(),
            early: BTreeMap::new(),
            snapshot,
            recording,
            num_idle: 0,
            stalled_since: None,
            run: None,
        };
        (session, fault)
    }

    /// Engine time as the scheduler counts it.
    pub(super) fn time(&self, engine: Time) -> Time {
        Time(engine.saturating_since(self.base).0)
    }

    /// The scheduler's time in engine time.
    pub(super) fn engine_time(&self, time: Time) -> Time {
        Time(self.base.0.saturating_add(time.0))
    }

    /// When there is something to do though no message comes, in engine time.
    pub(super) fn deadline(&mut self) -> Option<Time> {
        let stall = self.stalled_since.map(|since| since + STALL_AFTER);
        let until = self.run.as_ref().and_then(Measured::ends_at);
        let planned = [self.next_arrival(), self.wakes.first().copied(), stall, until];
        let next = planned.into_iter().flatten().min()?;
        Some(self.engine_time(next))
    }

    /// When the next arrival of a measured run is due.
    pub(super) fn next_arrival(&mut self) -> Option<Time> {
        self.run.as_mut().and_then(Measured::next_at)
    }

    pub(super) fn submit(&mut self, submitted: Submitted) {
        let Submitted { request, sequence, end } = submitted;
        self.hold(request.id, sequence, Some(end));
        self.events.push(Event::Arrived(request));
    }

    pub(super) fn hold(&mut self, id: RequestId, sequence: SharedSequence, end: Option<StreamEnd>) {
        self.requests.insert(id, Held { sequence, end, record: None });
    }

    /// Fires what is due at `now`.
    pub(super) fn wake(&mut self, now: Time) {
        let later = self.wakes.split_off(&Time(now.0.saturating_add(1)));
        if !std::mem::replace(&mut self.wakes, later).is_empty() {
            self.events.push(Event::Wake);
        }
    }

    /// Keeps count of instants that bring nothing new while nothing is under way.
    pub(super) fn count_idle(&mut self, events: &[Event], anything_runs: bool) {
        let woken_only = events.iter().all(|event| matches!(event, Event::Wake));
        let idle = woken_only && !anything_runs && self.transfers.is_empty();
        self.num_idle = if idle { self.num_idle + 1 } else { 0 };
    }

    /// Takes the records of requests that are closed. While a run is measured they stay in the log.
    pub(super) fn collect_records(&mut self) {
        if self.run.is_some() {
            return;
        }
        for record in self.scheduler.take_log().requests {
            if let Some(held) = self.requests.get_mut(&record.id) {
                held.record = Some(record);
            }
        }
    }

    /// A request is over, and nothing works on its blocks any more.
    pub(super) fn finish(&mut self, id: RequestId, now: Time) {
        let Some(held) = self.requests.remove(&id) else { return };
        if let (Some(end), Some(record)) = (held.end, held.record) {
            end.finish(record);
        }
        if let Some(run) = &mut self.run {
            run.completed(id, now);
        }
    }

    /// Every live request fails, for this reason.
    pub(super) fn give_up_all(&mut self, reason: &str) {
        let give_up = |id: &RequestId| Event::GivenUp { request: *id, reason: reason.to_owned() };
        self.events.extend(self.requests.keys().map(give_up));
    }

    /// Every live request is cancelled.
    pub(super) fn cancel_all(&mut self) {
        self.events.extend(self.requests.keys().map(|id| Event::Cancelled(*id)));
    }

    /// The measured run, if there is one, ends with an error: its policy's, or its workers'.
    pub(super) fn run_cannot_go_on(&mut self, lost: Option<String>) {
        let first = self.requests.keys().next().map_or(0, |id| id.0);
        let stalled = EngineError::Stalled { num_live: self.requests.len(), first };
        if let Some(run) = &mut self.run {
            run.fail(lost.map_or(stalled, EngineError::WorkerLost));
        }
    }

    pub(super) fn record(
        &mut self,
        now: Time,
        events: Vec<Event>,
        progress: ProgressSnapshot,
        actions: &[kvrelay_core::event::Action],
        fault: bool,
    ) {
        if let Some(recording) = &mut self.recording {
            recording.entries.push(Entry::Handle { now, events, progress, actions: actions.to_vec(), fault });
        }
    }

    pub(super) fn policy_exchanged(&mut self) {
        self.events.push(Event::Wake);
        if let Some(recording) = &mut self.recording {
            recording.entries.push(Entry::PolicyExchanged);
        }
    }
}
