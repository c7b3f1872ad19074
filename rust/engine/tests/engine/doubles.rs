//! Stand-ins that stop, break or tell lies at the right moment.

use std::sync::{Arc, Condvar, Mutex};

use kvrelay_core::event::TransferId;
use kvrelay_engine::backend::{
    Backend, BackendError, Input, KvPool, Limits, Progress, Row, StepOutput, Ticket,
};
use kvrelay_engine::transfer::{Job, Local, MakeTransport, Outcome, Reports, Transport};

use crate::common::HANG;

/// Holds up whoever passes until it is opened.
#[derive(Clone, Default)]
pub(crate) struct Gate(Arc<(Mutex<GateState>, Condvar)>);

#[derive(Default)]
struct GateState {
    open: bool,
    arrived: usize,
}

impl Gate {
    fn pass(&self) {
        let (state, changed) = &*self.0;
        let mut state = state.lock().unwrap();
        state.arrived += 1;
        changed.notify_all();
        drop(changed.wait_while(state, |state| !state.open).unwrap());
    }

    /// Waits until `count` have arrived.
    pub(crate) fn wait_for(&self, count: usize) {
        let (state, changed) = &*self.0;
        let short = |state: &mut GateState| state.arrived < count;
        let (guard, late) = changed.wait_timeout_while(state.lock().unwrap(), HANG, short).unwrap();
        drop(guard);
        assert!(!late.timed_out(), "{count} never arrive");
    }

    pub(crate) fn open(&self) {
        let (state, changed) = &*self.0;
        state.lock().unwrap().open = true;
        changed.notify_all();
    }

    /// Opens it when a test ends early: an engine cannot end while a step waits.
    pub(crate) fn at_last(&self) -> OpenAtLast {
        OpenAtLast(self.clone())
    }
}

pub(crate) struct OpenAtLast(Gate);

impl Drop for OpenAtLast {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// What a backend does beside its work.
#[derive(Clone)]
pub(crate) enum Trouble {
    /// Every step waits at a gate.
    Gate(Gate),
    /// Step `n` (from 0) and all later ones fail.
    Fail(usize),
    /// Step `n` panics.
    Panic(usize),
    /// Rows that hold this id have logits that are no numbers.
    Poison(u32),
}

/// A backend in trouble.
pub(crate) struct Troubled {
    inner: Box<dyn Backend>,
    trouble: Trouble,
    steps: usize,
    poisoned: Option<(usize, u32)>,
}

impl Troubled {
    pub(crate) fn boxed(inner: Box<dyn Backend>, trouble: Trouble) -> Box<dyn Backend> {
        Box::new(Troubled { inner, trouble, steps: 0, poisoned: None })
    }
}

impl Backend for Troubled {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    fn pool(&self) -> &Arc<KvPool> {
        self.inner.pool()
    }

    fn queue_depth(&self) -> usize {
        self.inner.queue_depth()
    }

    fn enqueue(&mut self, rows: &[Row<'_>]) -> Result<Ticket, BackendError> {
        if let Trouble::Poison(id) = self.trouble {
            let holds = |row: &Row<'_>| matches!(row.input, Input::Tokens(ids) if ids.contains(&id));
            self.poisoned = rows.iter().position(holds).map(|row| (row, rows[row].slot));
        }
        self.inner.enqueue(rows)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOutput<'_>, BackendError> {
        let step = self.steps;
        self.steps += 1;
        match &self.trouble {
            Trouble::Gate(gate) => gate.pass(),
            Trouble::Fail(first) if step >= *first => {
                self.inner.wait(ticket)?;
                return Err(BackendError::Stopped("on purpose".into()));
            }
            Trouble::Panic(at) => assert_ne!(step, *at, "on purpose"),
            _ => {}
        }
        let output = self.inner.wait(ticket)?;
        match self.poisoned.take() {
            Some((row, slot)) => Err(BackendError::NotFinite { row, slot, reason: "on purpose".into() }),
            None => Ok(output),
        }
    }

    fn release(&mut self, slot: u32) -> Result<(), BackendError> {
        self.inner.release(slot)
    }

    fn progress(&self) -> &Arc<Progress> {
        self.inner.progress()
    }
}

struct Held {
    /// Not started yet.
    jobs: Vec<Job>,
    aborted: Vec<TransferId>,
    open: bool,
    inner: Local,
    reports: Reports,
}

/// The test's end of a transport that holds every job until it is released; an abort is
/// acknowledged only then.
#[derive(Clone, Default)]
pub(crate) struct Slow(Arc<(Mutex<Option<Held>>, Condvar)>);

impl Slow {
    pub(crate) fn transport(&self) -> MakeTransport {
        let shared = self.clone();
        Box::new(move |reports| {
            let inner = Local::new(reports.clone())?;
            let held = Held { jobs: vec![], aborted: vec![], open: false, inner, reports };
            *shared.0.0.lock().unwrap() = Some(held);
            Ok(Box::new(shared))
        })
    }

    fn with<T>(&self, body: impl FnOnce(&mut Held) -> T) -> T {
        let result = body(self.0.0.lock().unwrap().as_mut().expect("the engine has started"));
        self.0.1.notify_all();
        result
    }

    /// Waits until `count` jobs are held.
    pub(crate) fn wait_for(&self, count: usize) {
        let short = |held: &mut Option<Held>| held.as_ref().is_none_or(|held| held.jobs.len() < count);
        let (guard, late) = self.0.1.wait_timeout_while(self.0.0.lock().unwrap(), HANG, short).unwrap();
        drop(guard);
        assert!(!late.timed_out(), "{count} transfers never start");
    }

    /// Waits until `count` of the jobs held are to be aborted.
    pub(crate) fn wait_for_aborts(&self, count: usize) {
        let short = |held: &mut Option<Held>| held.as_ref().is_none_or(|held| held.aborted.len() < count);
        let (guard, late) = self.0.1.wait_timeout_while(self.0.0.lock().unwrap(), HANG, short).unwrap();
        drop(guard);
        assert!(!late.timed_out(), "{count} aborts never come");
    }

    /// Lets all jobs go, and those to come.
    pub(crate) fn release(&self) {
        self.with(|held| {
            held.open = true;
            for job in std::mem::take(&mut held.jobs) {
                if held.aborted.contains(&job.id) {
                    held.reports.ended(job.id, Outcome::Failed { quiesced: true });
                } else {
                    held.inner.start(job);
                }
            }
        });
    }
}

impl Transport for Slow {
    fn start(&mut self, job: Job) {
        self.with(|held| if held.open { held.inner.start(job) } else { held.jobs.push(job) });
    }

    fn abort(&mut self, id: TransferId) {
        self.with(|held| {
            if held.jobs.iter().any(|job| job.id == id) {
                held.aborted.push(id);
            } else {
                held.inner.abort(id);
            }
        });
    }
}

/// A transport whose first `broken` jobs fail, every other of them with a writer that stops only
/// when it is told to.
pub(crate) struct Broken {
    left: usize,
    inner: Local,
    reports: Reports,
}

impl Broken {
    pub(crate) fn transport(broken: usize) -> MakeTransport {
        Box::new(move |reports| {
            let inner = Local::new(reports.clone())?;
            Ok(Box::new(Broken { left: broken, inner, reports }))
        })
    }
}

impl Transport for Broken {
    fn start(&mut self, job: Job) {
        if self.left == 0 {
            return self.inner.start(job);
        }
        self.left -= 1;
        self.reports.ended(job.id, Outcome::Failed { quiesced: self.left.is_multiple_of(2) });
    }

    fn abort(&mut self, id: TransferId) {
        self.reports.ended(id, Outcome::Failed { quiesced: true });
    }
}
