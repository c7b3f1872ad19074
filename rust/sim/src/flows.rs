//! Transfers under way on shared links.
//!
//! The bandwidth of the channels on their paths is divided by max-min fairness (Bertsekas and
//! Gallager, Data Networks, section 6.5.2): no transfer can have more without taking from one that has
//! no more than it. Shares are computed anew whenever a transfer gets or runs out of bytes to send, and
//! in between every transfer moves at a constant rate, so ends are exact up to a nanosecond.

use std::collections::{BTreeMap, VecDeque};

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::event::TransferId;
use kvrelay_core::time::{Nanos, Time};

use crate::network::Network;
use crate::transfer::Part;

/// A transfer on its way.
#[derive(Clone, Debug)]
struct Flow {
    path: Vec<usize>,
    /// What may leave later, in order.
    coming: VecDeque<Part>,
    /// Bytes that may leave and are not there yet.
    left: f64,
    /// Bytes per second; none while it has none to send.
    rate: f64,
    /// When it next has or lacks something to send, or ends, if its rate stays.
    next: Time,
}

impl Flow {
    /// It moves on by so many seconds.
    fn advance(&mut self, seconds: f64) {
        self.left = if self.rate.is_finite() { self.left - self.rate * seconds } else { 0.0 };
        // A remainder of rounding is no time at all.
        if self.left <= self.rate * 1e-12 {
            self.left = 0.0;
        }
    }

    /// Lets go what may leave by `now`.
    fn release(&mut self, now: Time) {
        while self.coming.front().is_some_and(|part| part.at <= now) {
            self.left += self.coming.pop_front().map_or(0.0, |part| part.bytes);
        }
    }

    fn has_ended(&self) -> bool {
        self.left == 0.0 && self.coming.is_empty()
    }

    fn plan(&mut self, now: Time) {
        let nanos = (self.left / self.rate * 1e9 - 1e-3).max(0.0).ceil();
        let drained = (self.left > 0.0).then(|| now + Nanos(nanos as u64));
        let released = self.coming.front().map(|part| part.at);
        self.next = drained.into_iter().chain(released).min().unwrap_or(now);
    }
}

/// The transfers under way, and their shares.
#[derive(Debug)]
pub(crate) struct Flows {
    network: Network,
    capacities: Vec<f64>,
    flows: BTreeMap<TransferId, Flow>,
    now: Time,
}

impl Flows {
    pub(crate) fn new(network: Network) -> Flows {
        let capacities = network.capacities();
        Flows { network, capacities, flows: BTreeMap::new(), now: Time::ZERO }
    }

    /// A transfer of `parts`, in the order in which they may leave, is known of at `now`.
    pub(crate) fn begin(
        &mut self,
        now: Time,
        id: TransferId,
        from: WorkerId,
        to: WorkerId,
        parts: impl IntoIterator<Item = Part>,
    ) {
        let (latency, path) = self.network.path(from, to);
        let after_latency = |part: Part| Part { at: part.at.max(now) + latency, ..part };
        let coming = parts.into_iter().map(after_latency).collect();
        self.flows.insert(id, Flow { path, coming, left: 0.0, rate: 0.0, next: now });
        self.advance(now);
    }

    /// A transfer is not wanted any more.
    pub(crate) fn abort(&mut self, now: Time, id: TransferId) {
        if self.flows.remove(&id).is_some() {
            self.advance(now);
        }
    }

    /// When a transfer ends, gets or runs out of bytes to send.
    pub(crate) fn next_at(&self) -> Option<Time> {
        self.flows.values().map(|flow| flow.next).min()
    }

    /// Takes the transfers that have ended by `now`, in their order.
    pub(crate) fn take_ended(&mut self, now: Time) -> Vec<TransferId> {
        self.advance(now);
        let ended: Vec<_> =
            self.flows.iter().filter(|(_, flow)| flow.has_ended()).map(|(id, _)| *id).collect();
        for id in &ended {
            self.flows.remove(id);
        }
        if !ended.is_empty() {
            self.share();
        }
        ended
    }

    /// Moves all bytes on to `now`, lets go what may leave by then, and shares anew.
    fn advance(&mut self, now: Time) {
        let seconds = (now - self.now).as_secs_f64();
        self.now = now;
        for flow in self.flows.values_mut() {
            flow.advance(seconds);
            flow.release(now);
        }
        self.share();
    }

    /// Max-min fair rates by progressive filling: the channel that can give its transfers the least
    /// gives it to them, and the rest is divided among the others.
    fn share(&mut self) {
        let mut left = self.capacities.clone();
        let mut users = vec![0u32; left.len()];
        let mut open = Vec::with_capacity(self.flows.len());
        for (id, flow) in &mut self.flows {
            flow.rate = 0.0;
            if flow.left > 0.0 {
                open.push(*id);
                for channel in &flow.path {
                    users[*channel] += 1;
                }
            }
        }
        while !open.is_empty() {
            let used = (0..left.len()).filter(|channel| users[*channel] > 0);
            let share = |channel: &usize| left[*channel] / f64::from(users[*channel]);
            let tightest = used.min_by(|a, b| share(a).total_cmp(&share(b)));
            let rate = tightest.as_ref().map_or(f64::INFINITY, share);
            open.retain(|id| {
                let flow = self.flows.get_mut(id).expect("open transfers are under way");
                if tightest.is_some_and(|channel| !flow.path.contains(&channel)) {
                    return true;
                }
                flow.rate = rate;
                for channel in &flow.path {
                    users[*channel] -= 1;
                    // Infinite channels stay so.
                    if rate.is_finite() {
                        left[*channel] = (left[*channel] - rate).max(0.0);
                    }
                }
                false
            });
        }
        for flow in self.flows.values_mut() {
            flow.plan(self.now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvrelay_core::latency::Link;
    use proptest::prelude::*;

    use crate::network::tests::network;
    use crate::transfer::alone;

    fn whole(bytes: u64) -> [Part; 1] {
        [Part { at: Time::ZERO, bytes: bytes as f64 }]
    }

    fn ends(flows: &mut Flows) -> Vec<(u64, u64)> {
        let mut ends = Vec::new();
        while let Some(at) = flows.next_at() {
            ends.extend(flows.take_ended(at).into_iter().map(|id| (id.0, at.0)));
        }
        ends
    }

    #[test]
    fn alone_a_transfer_has_the_narrowest_channel_to_itself() {
        for (to, nanos) in [(1, 1_000_000), (2, 10_000_000)] {
            let mut flows = Flows::new(network());
            flows.begin(Time(5), TransferId(0), WorkerId(0), WorkerId(to), whole(1_000_000));
            assert_eq!(ends(&mut flows), [(0, 5 + nanos)]);
        }
        let mut late = network();
        late.nic[1].latency = Nanos(300);
        assert_eq!(late.unloaded(WorkerId(0), WorkerId(3)), Link { bandwidth: 1e8, latency: Nanos(300) });
        let mut flows = Flows::new(late);
        flows.begin(Time(5), TransferId(0), WorkerId(0), WorkerId(2), whole(1_000_000));
        assert_eq!(ends(&mut flows), [(0, 10_000_305)]);
    }

    #[test]
    fn two_through_one_card_take_turns_and_one_inside_the_node_does_not_wait() {
        let mut flows = Flows::new(network());
        flows.begin(Time(0), TransferId(0), WorkerId(0), WorkerId(2), whole(1_000_000));
        flows.begin(Time(0), TransferId(1), WorkerId(1), WorkerId(3), whole(3_000_000));
        flows.begin(Time(0), TransferId(2), WorkerId(1), WorkerId(0), whole(1_000_000));
        // Half the card each for 20 ms, then the second has it alone for its other 2 MB.
        assert_eq!(ends(&mut flows), [(2, 1_000_000), (0, 20_000_000), (1, 40_000_000)]);
    }

    #[test]
    fn one_that_is_given_up_leaves_its_share() {
        let mut flows = Flows::new(network());
        flows.begin(Time(0), TransferId(0), WorkerId(0), WorkerId(2), whole(1_000_000));
        flows.begin(Time(0), TransferId(1), WorkerId(1), WorkerId(2), whole(1_000_000));
        flows.abort(Time(10_000_000), TransferId(1));
        assert_eq!(ends(&mut flows), [(0, 15_000_000)]);
    }

    proptest! {
        /// No channel carries more than it can, and every transfer has a full channel on its way in
        /// which nobody has more than it: the definition of max-min fairness.
        #[test]
        fn shares_are_max_min_fair(
            pairs in prop::collection::vec((0u32..4, 0u32..4, 1u64..1_000_000), 1..12),
            node in prop::sample::select(vec![1.5e9, 4e8, f64::INFINITY]),
        ) {
            let mut flows = Flows::new(Network { node_bandwidth: node, ..network() });
            for (index, (from, to, bytes)) in pairs.iter().filter(|(from, to, _)| from != to).enumerate() {
                flows.begin(Time(0), TransferId(index as u64), WorkerId(*from), WorkerId(*to), whole(*bytes));
            }
            let load = |channel: usize| -> f64 {
                flows.flows.values().filter(|flow| flow.path.contains(&channel)).map(|flow| flow.rate).sum()
            };
            for (channel, capacity) in flows.capacities.iter().enumerate() {
                prop_assert!(load(channel) <= capacity * (1.0 + 1e-9));
            }
            for flow in flows.flows.values() {
                let bottleneck = flow.path.iter().any(|channel| {
                    let full = load(*channel) >= flows.capacities[*channel] * (1.0 - 1e-9);
                    let others = flows.flows.values().filter(|other| other.path.contains(channel));
                    full && { others }.all(|other| other.rate <= flow.rate * (1.0 + 1e-9))
                });
                prop_assert!(bottleneck);
            }
        }

        /// Transfers that begin together through one card end as in processor sharing: the k-th
        /// shortest when it and all shorter ones are through, and the longer ones have had as much.
        #[test]
        fn sharing_one_card_is_processor_sharing(sizes in prop::collection::vec(1u64..2_000_000, 1..8)) {
            let mut flows = Flows::new(network());
            for (index, bytes) in sizes.iter().enumerate() {
                flows.begin(Time(0), TransferId(index as u64), WorkerId(0), WorkerId(2), whole(*bytes));
            }
            let mut sorted = sizes.clone();
            sorted.sort_unstable();
            for (id, at) in ends(&mut flows) {
                let own = sizes[id as usize];
                let through: u64 = sorted.iter().map(|size| (*size).min(own)).sum();
                prop_assert!((at as f64 - through as f64 * 10.0).abs() <= 1.0 + sizes.len() as f64);
            }
            prop_assert!(flows.flows.is_empty());
        }

        /// Parts that leave in turn through a card of its own end where the chain of them says, and beside
        /// others no byte is lost: the card is never idle while one of them has something to send.
        #[test]
        fn parts_leave_in_turn(
            parts in prop::collection::vec((0u64..30_000_000, 0u64..1_000_000), 1..6),
            beside in prop::collection::vec(0u64..1_000_000, 0..4),
        ) {
            let mut parts: Vec<Part> =
                parts.iter().map(|(at, bytes)| Part { at: Time(*at), bytes: *bytes as f64 }).collect();
            parts.sort_by_key(|part| part.at);
            let card = Link { bandwidth: 1e8, latency: Nanos::ZERO };
            let chain = alone(card, &parts);
            let mut flows = Flows::new(network());
            flows.begin(Time(0), TransferId(0), WorkerId(0), WorkerId(2), parts.clone());
            let (_, at) = ends(&mut flows)[0];
            prop_assert!(at.abs_diff(chain.0) <= 1 + parts.len() as u64, "{} and {}", at, chain.0);

            let mut flows = Flows::new(network());
            flows.begin(Time(0), TransferId(0), WorkerId(0), WorkerId(2), parts.clone());
            for (index, bytes) in beside.iter().enumerate() {
                flows.begin(Time(0), TransferId(1 + index as u64), WorkerId(1), WorkerId(3), whole(*bytes));
            }
            let last = ends(&mut flows).into_iter().map(|(_, at)| at).max().unwrap();
            let all: Vec<Part> = beside.iter().flat_map(|bytes| whole(*bytes)).chain(parts).collect();
            let together = alone(card, &all);
            prop_assert!(last.abs_diff(together.0) <= 2 + all.len() as u64 * 2, "{} and {}", last, together.0);
        }
    }
}
