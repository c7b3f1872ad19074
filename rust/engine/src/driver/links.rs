//! The loop's end of a worker.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::request::RequestId;
use kvrelay_core::step::Seq;

use super::Message;
use crate::backend::{Backend, KvPool, Progress};
use crate::clock::Clock;
use crate::tickets::Tickets;
use crate::transfer::During;
use crate::worker::{Order, SharedSequence, Signals, Worker, lock};

/// One row of a run in progress, as it was when the run was ordered.
struct Given {
    request: RequestId,
    sequence: SharedSequence,
    produced: usize,
    decode: bool,
}

/// A worker's thread, and what it was given.
pub(crate) struct Link {
    pool: Arc<KvPool>,
    progress: Arc<Progress>,
    signals: Arc<Signals>,
    tickets: Arc<Tickets>,
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
    running: Option<Vec<Given>>,
    /// Why its thread ended.
    down: Option<String>,
}

impl Link {
    /// Starts a worker's thread.
    pub(crate) fn start(
        id: WorkerId,
        backend: Box<dyn Backend>,
        clock: Clock,
        engine: Sender<Message>,
    ) -> std::io::Result<Link> {
        let (pool, progress) = (backend.pool().clone(), backend.progress().clone());
        let (signals, tickets) = (Arc::<Signals>::default(), Arc::<Tickets>::default());
        let (orders, inbox) = channel();
        let worker =
            Worker { id, backend, clock, signals: signals.clone(), tickets: tickets.clone(), engine };
        let thread = std::thread::Builder::new()
            .name(format!("kvrelay-worker-{}", id.0))
            .spawn(move || worker.work(&inbox))?;
        let (orders, thread) = (Some(orders), Some(thread));
        Ok(Link { pool, progress, signals, tickets, orders, thread, running: None, down: None })
    }

    pub(super) fn pool(&self) -> &Arc<KvPool> {
        &self.pool
    }

    /// The latest step of a run, for a transfer that follows it.
    pub(super) fn during(&self, seq: Seq) -> During {
        During { progress: self.progress.clone(), tickets: self.tickets.clone(), seq }
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    pub(super) fn is_down(&self) -> bool {
        self.down.is_some()
    }

    pub(super) fn why_down(&self) -> Option<String> {
        self.down.clone()
    }

    /// The latest run, and its steps delivered.
    pub(super) fn progress(&self) -> Option<(Seq, u32)> {
        self.signals.progress()
    }

    /// Hands over a run; `decode` says of each row whether it decodes.
    pub(super) fn order(&mut self, order: Order, decode: &[bool]) {
        let given = order.rows.iter().zip(decode).map(|(row, &decode)| Given {
            request: row.request,
            produced: lock(&row.sequence).produced(),
            sequence: row.sequence.clone(),
            decode,
        });
        self.running = Some(given.collect());
        self.signals.begin(order.seq);
        self.tickets.begin(order.seq);
        if let Some(orders) = &self.orders {
            // A thread that has just ended says so in a message that is already on its way.
            let _ = orders.send(order);
        }
    }

    pub(super) fn cut(&self, seq: Seq) {
        self.signals.cut(seq);
    }

    pub(super) fn run_over(&mut self) {
        self.running = None;
    }

    /// Its thread has ended. Requests of its run whose sequences have other tokens than the steps
    /// delivered would give: what their readers saw can not be told any more.
    pub(super) fn lost(&mut self, steps_delivered: u32, reason: String) -> Vec<RequestId> {
        self.down = Some(reason);
        let given = self.running.take().unwrap_or_default();
        let inconsistent = |row: &Given| {
            let steps = if row.decode { steps_delivered as usize } else { 0 };
            lock(&row.sequence).produced() != row.produced + steps
        };
        given.iter().filter(|row| inconsistent(row)).map(|row| row.request).collect()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // What ended it was reported when it happened.
            let _ = thread.join();
        }
    }
}
