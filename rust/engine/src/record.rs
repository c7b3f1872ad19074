//! What the loop gave its scheduler and what came of it, and the same once more without an engine.
//!
//! A recording holds all that a decision may depend on: the instants, the events and how far the
//! runs in progress had come. A fresh scheduler of the same setup under the same policy, given the
//! same, must order the same (law 6).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::event::{Action, Event, Progress};
use kvrelay_core::kv::Naming;
use kvrelay_core::policy::{Fcfs, Policy};
use kvrelay_core::scheduler::{Belief, Limits, Scheduler, Setup, WorkerConfig};
use kvrelay_core::step::Seq;
use kvrelay_core::time::Time;

/// How far each worker's latest run had come: its name and the steps delivered.
pub type ProgressSnapshot = Vec<Option<(Seq, u32)>>;

/// One call of [`Scheduler::handle`].
#[derive(Clone, Debug)]
pub enum Entry {
    /// All events of an instant.
    Handle {
        /// When.
        now: Time,
        /// What happened.
        events: Vec<Event>,
        /// How far runs in progress had come.
        progress: ProgressSnapshot,
        /// What was ordered.
        actions: Vec<Action>,
        /// Whether the policy failed; from then on `fcfs` decides.
        fault: bool,
    },
    /// The policy was exchanged by the caller: what follows is another's decisions.
    PolicyExchanged,
}

/// A scheduler's life, from its start on.
#[derive(Clone)]
pub struct Recording {
    /// Workers and their first roles.
    pub workers: Vec<WorkerConfig>,
    /// Limits on batches.
    pub limits: Limits,
    /// Whether prefixes were shared.
    pub prefix_caching: bool,
    /// Whether KV was transferred while the last of its prompt was computed.
    pub early_transfers: bool,
    /// What the policy predicted with.
    pub belief: Belief,
    /// When it began.
    pub start: Time,
    /// Seed of the policy's random numbers.
    pub seed: u64,
    /// The policy's name.
    pub policy: String,
    /// In order.
    pub entries: Vec<Entry>,
}

impl Recording {
    /// What a scheduler like the recorded one is made of.
    pub fn setup(&self) -> Setup {
        Setup {
            workers: self.workers.clone(),
            limits: self.limits.clone(),
            prefix_caching: self.prefix_caching,
            naming: Naming::All,
            early_transfers: self.early_transfers,
            belief: self.belief.clone(),
        }
    }
}

/// Where a replay and its recording differ.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ReplayError {
    /// The policy's start failed.
    #[error("the policy failed at its start: {0}")]
    Begin(String),
    /// The scheduler ordered something else.
    #[error("entry {entry}: the replay ordered {replayed:?}, the recording {recorded:?}")]
    Differs {
        /// Index of the entry.
        entry: usize,
        /// What the replay ordered.
        replayed: Vec<Action>,
        /// What was recorded.
        recorded: Vec<Action>,
    },
    /// One failed where the other did not.
    #[error("entry {entry}: the policy failed in the {0} only", if *.in_replay { "replay" } else { "recording" })]
    Fault {
        /// Index of the entry.
        entry: usize,
        /// Which of the two.
        in_replay: bool,
    },
    /// What follows was decided by a policy that the caller set later.
    #[error("entry {entry}: the policy was exchanged; only what is before it can be replayed")]
    PolicyExchanged {
        /// Index of the entry.
        entry: usize,
    },
}

/// The latest snapshot: what the driver took, for the scheduler to ask. One instant, one answer,
/// however often a policy looks and however fast the workers go on.
#[derive(Clone, Default)]
pub(crate) struct Snapshot(Arc<Mutex<ProgressSnapshot>>);

impl Snapshot {
    fn lock(&self) -> MutexGuard<'_, ProgressSnapshot> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self, progress: &ProgressSnapshot) {
        self.lock().clone_from(progress);
    }
}

impl Progress for Snapshot {
    fn steps_done(&self, worker: WorkerId, seq: Seq, _: Time) -> u32 {
        let known = self.lock().get(worker.index()).copied().flatten();
        known.filter(|(run, _)| *run == seq).map_or(0, |(_, steps)| steps)
    }
}

/// Gives a recording's events to a fresh scheduler under `policy`, which must be in the state in
/// which the recorded one began, and compares every action.
pub fn replay(recording: &Recording, policy: Box<dyn Policy>) -> Result<(), ReplayError> {
    let mut scheduler = Scheduler::new(recording.setup(), policy);
    let begun = scheduler.begin(recording.start, recording.seed);
    begun.map_err(|fault| ReplayError::Begin(fault.to_string()))?;
    let snapshot = Snapshot::default();
    scheduler.watch_progress(Box::new(snapshot.clone()));
    for (index, entry) in recording.entries.iter().enumerate() {
        let Entry::Handle { now, events, progress, actions: recorded, fault } = entry else {
            return Err(ReplayError::PolicyExchanged { entry: index });
        };
        snapshot.set(progress);
        let mut replayed = Vec::new();
        let failed = scheduler.handle(*now, events, &mut replayed).is_err();
        if replayed != *recorded {
            return Err(ReplayError::Differs { entry: index, replayed, recorded: recorded.clone() });
        }
        if failed != *fault {
            return Err(ReplayError::Fault { entry: index, in_replay: failed });
        }
        if failed {
            scheduler.replace_policy(Box::new(Fcfs));
        }
    }
    Ok(())
}
