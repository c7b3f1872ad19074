//! A worker: a thread that runs steps through its backend, hands tokens out as they come, and
//! reports each run once.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::event::{Done, EndedRow};
use kvrelay_core::request::RequestId;
use kvrelay_core::step::{Seq, Stretch};
use kvrelay_core::time::{Picos, Time};

use crate::backend::{Backend, BackendError, Input, Logits, Row, Ticket};
use crate::clock::Clock;
use crate::driver::Message;
use crate::sequence::Sequence;
use crate::tickets::Tickets;

pub(crate) type SharedSequence = Arc<Mutex<Sequence>>;

/// Locks a sequence, also one that a panic left behind: the loop compares its length with what
/// was delivered before it runs again.
pub(crate) fn lock(sequence: &SharedSequence) -> MutexGuard<'_, Sequence> {
    sequence.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One row of an order.
pub(crate) struct OrderedRow {
    pub(crate) request: RequestId,
    pub(crate) sequence: SharedSequence,
    pub(crate) start: u32,
    pub(crate) len: u32,
    pub(crate) want_logits: bool,
    /// Enough for all repetitions.
    pub(crate) blocks: Vec<u32>,
}

/// A run.
pub(crate) struct Order {
    pub(crate) seq: Seq,
    /// When it was ordered, in engine time: its first step is counted from then.
    pub(crate) at: Time,
    pub(crate) rows: Vec<OrderedRow>,
    pub(crate) repeat: u32,
}

/// A run's end.
pub(crate) struct RunReport {
    pub(crate) done: Done,
    /// Requests whose logits were no numbers, and what was found.
    pub(crate) broken: Vec<(RequestId, String)>,
}

/// What loop and worker tell each other in mid-run. Runs are named by `seq + 1`; 0 is none.
#[derive(Default)]
pub(crate) struct Signals {
    /// The run that is to stop at its next step border.
    cut: AtomicU64,
    /// The run in progress.
    run: AtomicU64,
    /// Steps of it whose tokens were delivered.
    steps: AtomicU32,
}

impl Signals {
    pub(crate) fn cut(&self, seq: Seq) {
        self.cut.store(seq.0 + 1, Ordering::Release);
    }

    fn is_cut(&self, seq: Seq) -> bool {
        self.cut.load(Ordering::Acquire) == seq.0 + 1
    }

    /// A run is ordered; by the loop, so that what it asks next is never about the run before.
    pub(crate) fn begin(&self, seq: Seq) {
        self.cut.store(0, Ordering::Release);
        self.steps.store(0, Ordering::Release);
        self.run.store(seq.0 + 1, Ordering::Release);
    }

    fn delivered(&self, steps: u32) {
        self.steps.store(steps, Ordering::Release);
    }

    /// The latest run, and its steps whose tokens were delivered.
    pub(crate) fn progress(&self) -> Option<(Seq, u32)> {
        let run = self.run.load(Ordering::Acquire).checked_sub(1)?;
        Some((Seq(run), self.steps.load(Ordering::Acquire)))
    }
}

/// The thread's state.
pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) clock: Clock,
    pub(crate) signals: Arc<Signals>,
    pub(crate) tickets: Arc<Tickets>,
    pub(crate) engine: Sender<Message>,
}

/// A run as it goes.
struct Running<'a> {
    order: &'a Order,
    sequences: Vec<MutexGuard<'a, Sequence>>,
    /// Rows that are not broken.
    active: Vec<usize>,
    stretches: Vec<Stretch>,
    emitted: Vec<u32>,
    ended: Vec<EndedRow>,
    broken: Vec<(RequestId, String)>,
}

impl Worker {
    /// Runs what is ordered until the loop hangs up, or the backend breaks.
    pub(crate) fn work(mut self, orders: &Receiver<Order>) {
        let _end = self.tickets.clone().gone_at_end();
        while let Ok(order) = orders.recv() {
            let seq = order.seq;
            let outcome = catch_unwind(AssertUnwindSafe(|| self.run(&order)));
            let reason = match outcome {
                Ok(Ok(report)) => {
                    // Without a loop nobody is left to report to.
                    let _ = self.engine.send(Message::Done(report));
                    continue;
                }
                Ok(Err(error)) => error.to_string(),
                Err(panic) => format!("panic: {}", panic_text(&*panic)),
            };
            let steps_delivered = self.signals.progress().map_or(0, |(_, steps)| steps);
            let _ = self.engine.send(Message::Down { worker: self.id, seq, steps_delivered, reason });
            return;
        }
    }

    fn run(&mut self, order: &Order) -> Result<RunReport, BackendError> {
        let mut running = Running {
            order,
            sequences: order.rows.iter().map(|row| lock(&row.sequence)).collect(),
            active: (0..order.rows.len()).collect(),
            stretches: Vec::with_capacity(order.repeat as usize),
            emitted: vec![0; order.rows.len()],
            ended: Vec::new(),
            broken: Vec::new(),
        };
        let mut before = order.at;
        // The step after the present one, where it was enqueued already.
        let mut ahead = None;
        for step in 0..order.repeat {
            if step > 0 && ahead.is_none() && self.signals.is_cut(order.seq) {
                break;
            }
            let tokens = self.step(&mut running, step, &mut ahead)?;
            let now = self.clock.now();
            running.stretches.push(Stretch::single(Picos::from(now.saturating_since(before))));
            before = now;
            running.deliver(&tokens);
            self.signals.delivered(step + 1);
            if !running.ended.is_empty() || !running.broken.is_empty() {
                break;
            }
        }
        self.discard(ahead)?;
        let Running { stretches, emitted, ended, broken, .. } = running;
        let done = Done { worker: self.id, seq: order.seq, stretches, emitted, ended };
        Ok(RunReport { done, broken })
    }

    /// One step: the sampled token of each row. A row whose logits are no numbers is taken out and
    /// the step is run again without it; the others' KV is written twice with the same numbers.
    fn step(
        &mut self,
        running: &mut Running<'_>,
        step: u32,
        ahead: &mut Option<Ticket>,
    ) -> Result<Vec<(usize, u32)>, BackendError> {
        while !running.active.is_empty() {
            let ticket = match ahead.take() {
                Some(ticket) => ticket,
                None => self.enqueue(running, step, false)?,
            };
            if self.runs_ahead(running, step) {
                *ahead = Some(self.enqueue(running, step + 1, true)?);
            }
            match self.backend.wait(ticket) {
                Ok(output) => {
                    let sampled = running.active.iter().zip(output.rows);
                    return Ok(sampled.filter_map(|(&index, row)| Some((index, row.token?))).collect());
                }
                Err(BackendError::NotFinite { row, reason, .. }) => {
                    // It was fed what is no token.
                    self.discard(ahead.take())?;
                    let index = running.active.remove(row);
                    let request = running.order.rows[index].request;
                    running.broken.push((request, format!("worker {}: {reason}", self.id.0)));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Vec::new())
    }

    /// Whether the step after `step` is to be in the device's queue while it runs: nothing is known
    /// that would end the run before it.
    fn runs_ahead(&self, running: &Running<'_>, step: u32) -> bool {
        self.backend.runs_ahead()
            && step + 1 < running.order.repeat
            && running.broken.is_empty()
            && !self.signals.is_cut(running.order.seq)
            && !running.sequences.iter().any(|sequence| sequence.ends_with_next())
    }

    /// Hands over a repetition; `fed` by the tokens of the one before, which the host has not seen.
    fn enqueue(&mut self, running: &Running<'_>, step: u32, fed: bool) -> Result<Ticket, BackendError> {
        let rows: Vec<Row<'_>> = running.active.iter().map(|&index| running.row(index, step, fed)).collect();
        let ticket = self.backend.enqueue(&rows)?;
        self.tickets.enqueued(running.order.seq, ticket);
        Ok(ticket)
    }

    /// Waits for a step that nobody wants any more: what it writes lies behind the tokens that were
    /// delivered, in blocks that the run still has.
    fn discard(&mut self, ahead: Option<Ticket>) -> Result<(), BackendError> {
        let Some(ticket) = ahead else { return Ok(()) };
        match self.backend.wait(ticket) {
            Ok(_) | Err(BackendError::NotFinite { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

impl Running<'_> {
    /// Row `index` in repetition `step`. Ids are given even for decode where they are known, so a
    /// sequence that comes from another worker needs nothing more than its blocks.
    fn row(&self, index: usize, step: u32, fed: bool) -> Row<'_> {
        let row = &self.order.rows[index];
        let start = row.start + step;
        let sequence = &self.sequences[index];
        Row {
            slot: index as u32,
            input: if fed { Input::LastSampled } else { Input::Tokens(sequence.input(start, row.len)) },
            start,
            blocks: &row.blocks,
            sample: row.want_logits.then(|| sequence.sampling()),
            logits: Logits::Nothing,
        }
    }

    fn deliver(&mut self, tokens: &[(usize, u32)]) {
        for &(index, token) in tokens {
            let sequence = &mut self.sequences[index];
            self.emitted[index] += 1;
            if let Some(reason) = sequence.push(token) {
                let content = sequence.content();
                self.ended.push(EndedRow { row: index as u32, reason, content });
            }
        }
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("of unknown cause")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_names_its_run() {
        let signals = Signals::default();
        assert_eq!(signals.progress(), None);
        signals.begin(Seq(0));
        assert!(!signals.is_cut(Seq(0)), "no run is cut before anybody asks");
        signals.cut(Seq(0));
        assert!(signals.is_cut(Seq(0)) && !signals.is_cut(Seq(1)));
        signals.delivered(3);
        assert_eq!(signals.progress(), Some((Seq(0), 3)));
        signals.begin(Seq(1));
        assert_eq!(signals.progress(), Some((Seq(1), 0)));
    }
}
