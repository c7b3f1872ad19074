//! The transfers under way, on links of their own or on a network that they share.

use std::collections::BTreeSet;

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::event::TransferId;
use kvrelay_core::latency::Link;
use kvrelay_core::time::Time;

use crate::cluster::Links;
use crate::flows::Flows;
use crate::queue::{Planned, Queue};
use crate::transfer::{Part, alone};

/// What transfers are under way, and on what. It plans their ends.
pub(crate) struct Wires {
    under_way: BTreeSet<TransferId>,
    on: On,
}

enum On {
    Apart(Link),
    Shared {
        flows: Flows,
        /// When the latest look at them is planned.
        looks_at: Option<Time>,
    },
}

impl Wires {
    pub(crate) fn new(links: &Links) -> Wires {
        let on = match links {
            Links::Apart(link) => On::Apart(*link),
            Links::Shared(network) => On::Shared { flows: Flows::new(network.clone()), looks_at: None },
        };
        Wires { under_way: BTreeSet::new(), on }
    }

    /// A transfer of `parts`, in order, begins at `now`.
    pub(crate) fn begin(
        &mut self,
        now: Time,
        id: TransferId,
        (from, to): (WorkerId, WorkerId),
        parts: Vec<Part>,
        queue: &mut Queue,
    ) {
        self.under_way.insert(id);
        match &mut self.on {
            On::Apart(link) => queue.push(alone(*link, &parts), Planned::TransferEnds { id }),
            On::Shared { flows, .. } => {
                flows.begin(now, id, from, to, parts);
                self.plan(queue);
            }
        }
    }

    /// One on a link of its own has ended; false if it was stopped before.
    pub(crate) fn remove(&mut self, id: TransferId) -> bool {
        self.under_way.remove(&id)
    }

    /// A transfer is not wanted any more.
    pub(crate) fn stop(&mut self, now: Time, id: TransferId, queue: &mut Queue) {
        self.under_way.remove(&id);
        if let On::Shared { flows, .. } = &mut self.on {
            flows.abort(now, id);
            self.plan(queue);
        }
    }

    /// All, in their order.
    pub(crate) fn under_way(&self) -> Vec<TransferId> {
        self.under_way.iter().copied().collect()
    }

    /// A planned look at those that share a network: takes the ones that have ended.
    pub(crate) fn take_ended(&mut self, now: Time, queue: &mut Queue) -> Vec<TransferId> {
        let On::Shared { flows, looks_at } = &mut self.on else { return Vec::new() };
        // One planned for shares that have changed since finds nothing.
        if *looks_at != Some(now) {
            return Vec::new();
        }
        *looks_at = None;
        let ended = flows.take_ended(now);
        for id in &ended {
            self.under_way.remove(id);
        }
        self.plan(queue);
        ended
    }

    /// Looks again when one of them ends or begins to send, unless that is planned.
    fn plan(&mut self, queue: &mut Queue) {
        let On::Shared { flows, looks_at } = &mut self.on else { return };
        let next = flows.next_at();
        if let Some(at) = next.filter(|_| next != *looks_at) {
            queue.push(at, Planned::Flows);
        }
        *looks_at = next;
    }
}
