//! Which step of a worker's backend the latest run has given it, for transfers that follow a run.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use kvrelay_core::step::Seq;

use crate::backend::Ticket;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Tickets {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The latest run, and its latest step once it has one. Names of runs begin anew with every session
    /// of the loop, so they are compared and not ordered.
    latest: Option<(Seq, Option<Ticket>)>,
    /// The worker's thread has ended.
    gone: bool,
}

/// What became of a run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Its latest step.
    Enqueued(Ticket),
    /// Another run was ordered since, so this one is over.
    Over,
    /// The worker is gone.
    Gone,
}

impl Tickets {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A run is ordered; by the loop, so that a transfer that is started later never finds the run
    /// before.
    pub(crate) fn begin(&self, seq: Seq) {
        self.lock().latest = Some((seq, None));
        self.changed.notify_all();
    }

    /// The latest run has given its backend a step.
    pub(crate) fn enqueued(&self, seq: Seq, ticket: Ticket) {
        self.lock().latest = Some((seq, Some(ticket)));
        self.changed.notify_all();
    }

    /// Blocks until a run, which was ordered, has given its backend a step.
    pub(crate) fn wait(&self, seq: Seq) -> Step {
        let mut state = self.lock();
        loop {
            match state.latest {
                Some((latest, Some(ticket))) if latest == seq => return Step::Enqueued(ticket),
                Some((latest, None)) if latest == seq && !state.gone => {}
                _ if state.gone => return Step::Gone,
                _ => return Step::Over,
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Tells whoever waits that nothing will come, when what this returns is dropped.
    pub(crate) fn gone_at_end(self: Arc<Self>) -> GoneAtEnd {
        GoneAtEnd(self)
    }
}

pub(crate) struct GoneAtEnd(Arc<Tickets>);

impl Drop for GoneAtEnd {
    fn drop(&mut self) {
        self.0.lock().gone = true;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_found_by_its_name() {
        let tickets = Arc::<Tickets>::default();
        let end = tickets.clone().gone_at_end();
        tickets.begin(Seq(9));
        tickets.enqueued(Seq(9), Ticket(7));
        // Of another session.
        tickets.begin(Seq(3));
        assert_eq!(tickets.wait(Seq(9)), Step::Over);
        let waiting = std::thread::spawn({
            let tickets = tickets.clone();
            move || tickets.wait(Seq(3))
        });
        tickets.enqueued(Seq(3), Ticket(8));
        assert_eq!(waiting.join().unwrap(), Step::Enqueued(Ticket(8)));
        tickets.begin(Seq(4));
        drop(end);
        assert_eq!(tickets.wait(Seq(4)), Step::Gone);
    }
}
