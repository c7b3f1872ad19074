//! An instant: events into the scheduler, its actions carried out; and what workers and transfers
//! report made into events.

use std::sync::PoisonError;

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::event::{Action, Event, TransferId};
use kvrelay_core::policy::PolicyFault;
use kvrelay_core::step::{Run, Seq};
use kvrelay_core::time::Time;

use super::session::Early;
use super::{Driver, Link};
use crate::record::ProgressSnapshot;
use crate::transfer::{Job, Outcome};
use crate::worker::{Order, OrderedRow, RunReport};

impl Driver {
    /// The events of this instant.
    pub(super) fn step(&mut self) {
        // Before the clock is read: a step that is counted ended at or before `now`.
        let progress: ProgressSnapshot = self.workers.iter().map(Link::progress).collect();
        let now = self.session.time(self.clock.now());
        self.session.wake(now);
        self.pull_arrivals(now);
        if self.session.events.is_empty() {
            return;
        }
        let events = std::mem::take(&mut self.session.events);
        let anything_runs = self.anything_runs();
        self.session.count_idle(&events, anything_runs);
        if let Some(fault) = self.handle(now, events, progress.clone()) {
            self.fall_back(fault);
            // What the faulty decision was about is still open; `fcfs` does not fail.
            self.handle(now, Vec::new(), progress);
        }
    }

    fn handle(&mut self, now: Time, events: Vec<Event>, progress: ProgressSnapshot) -> Option<PolicyFault> {
        let session = &mut self.session;
        session.snapshot.set(&progress);
        let mut actions = Vec::new();
        let fault = session.scheduler.handle(now, &events, &mut actions).err();
        session.collect_records();
        session.record(now, events, progress, &actions, fault.is_some());
        for action in actions {
            self.carry_out(now, action);
        }
        fault
    }

    fn carry_out(&mut self, now: Time, action: Action) {
        match action {
            Action::Run { worker, seq, run } => self.start_run(now, worker, seq, &run),
            Action::Cut { worker, seq } => self.workers[worker.index()].cut(seq),
            Action::Transfer { id, from, to, blocks, during, .. } => {
                self.session.transfers.insert(id);
                if during.is_some() {
                    self.session.early.insert(id, Early { worker: from, complete: false });
                }
                self.transport.start(Job {
                    id,
                    source: self.workers[from.index()].pool().clone(),
                    destination: self.workers[to.index()].pool().clone(),
                    blocks: blocks.into_iter().map(|(from, to)| (from.0, to.0)).collect(),
                    during: during.map(|seq| self.workers[from.index()].during(seq)),
                });
            }
            Action::Abort { id } => self.transport.abort(id),
            Action::SetRole { worker, role } => {
                let mut roles = self.public.roles.lock().unwrap_or_else(PoisonError::into_inner);
                roles[worker.index()] = role;
            }
            Action::WakeAt(at) => {
                self.session.wakes.insert(at);
            }
            Action::Finish(id) | Action::Refuse(id) => self.session.finish(id, now),
        }
    }

    fn start_run(&mut self, now: Time, worker: WorkerId, seq: Seq, run: &Run) {
        let session = &self.session;
        let row = |row: &kvrelay_core::step::Row| {
            let held = &session.requests[&row.request];
            let table = session.scheduler.block_table(row.request, worker);
            OrderedRow {
                request: row.request,
                sequence: held.sequence.clone(),
                start: row.start,
                len: row.len,
                want_logits: row.want_logits,
                blocks: table.expect("a row's request has blocks").iter().map(|block| block.0).collect(),
            }
        };
        let rows = run.step.rows.iter().map(row).collect();
        let decode: Vec<bool> = run.step.rows.iter().map(|row| row.decode).collect();
        let order = Order { seq, at: session.engine_time(now), rows, repeat: run.repeat };
        self.workers[worker.index()].order(order, &decode);
    }

    pub(super) fn run_done(&mut self, report: RunReport) {
        let RunReport { done, broken } = report;
        let (worker, seq) = (done.worker, done.seq);
        self.workers[worker.index()].run_over();
        let events = &mut self.session.events;
        // Before the run's end, so that what the run says of these rows is not believed.
        events.extend(broken.into_iter().map(|(request, reason)| Event::GivenUp { request, reason }));
        events.push(Event::Done(done));
        events.push(Event::Ready { worker, seq });
        self.early_over(worker);
    }

    /// A worker's run is over: transfers that followed it are like any other, and those that were
    /// complete before it are so now.
    fn early_over(&mut self, worker: WorkerId) {
        let session = &mut self.session;
        session.early.retain(|&id, early| {
            if early.worker == worker && early.complete {
                session.events.push(Event::Transferred { id });
            }
            early.worker != worker
        });
    }

    pub(super) fn worker_down(&mut self, worker: WorkerId, seq: Seq, steps_delivered: u32, reason: String) {
        let reason = format!("worker {} ended in run {}: {reason}", worker.0, seq.0);
        let inconsistent = self.workers[worker.index()].lost(steps_delivered, reason.clone());
        let events = &mut self.session.events;
        events.push(Event::WorkerDown { worker, steps_delivered });
        let give_up = |request| Event::GivenUp { request, reason: reason.clone() };
        events.extend(inconsistent.into_iter().map(give_up));
        self.early_over(worker);
    }

    pub(super) fn transfer_ended(&mut self, id: TransferId, outcome: Outcome) {
        if outcome != (Outcome::Failed { quiesced: false }) {
            self.session.transfers.remove(&id);
        }
        // The scheduler hears that KV has arrived after it hears that it was computed.
        if outcome == Outcome::Complete
            && let Some(early) = self.session.early.get_mut(&id)
        {
            early.complete = true;
            return;
        }
        self.session.early.remove(&id);
        self.session.events.push(match outcome {
            Outcome::Complete => Event::Transferred { id },
            Outcome::Failed { quiesced } => Event::Failed { id, quiesced },
        });
    }
}
