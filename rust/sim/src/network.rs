//! Links that transfers share: ports, switches, network cards.
//!
//! Every transfer takes a path of shared channels. Their bandwidth is divided by max-min fairness
//! (Bertsekas and Gallager, Data Networks, section 6.5.2): no transfer can have more without taking
//! from one that has no more than it. Shares are computed anew whenever a transfer begins or ends,
//! and in between every transfer moves at a constant rate, so ends are exact up to a nanosecond.

use std::collections::BTreeMap;

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::event::TransferId;
use kvrelay_core::latency::Link;
use kvrelay_core::time::{Nanos, Time};

/// What KV travels over between workers.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    /// The node of each worker.
    pub nodes: Vec<u32>,
    /// The network card of each worker; workers that name the same one share it.
    pub nics: Vec<u32>,
    /// Each worker's port inside its node: to the others there, and as much from them.
    pub ports: Vec<Link>,
    /// Bytes per second that all transfers inside one node have together; infinite where only the
    /// ports limit them.
    pub node_bandwidth: f64,
    /// Each network card: to other nodes, and as much from them.
    pub nic: Vec<Link>,
}

/// A network as people describe one: GPUs in nodes, and cards between the nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct Wiring {
    /// The node of each worker.
    pub nodes: Vec<u32>,
    /// Cards that the workers of a node share, in turn; a card for every GPU when `None`.
    pub nics_per_node: Option<u32>,
    /// A GPU's port inside its node.
    pub port: Link,
    /// A network card.
    pub nic: Link,
    /// See [`Network::node_bandwidth`].
    pub node_bandwidth: f64,
}

impl Wiring {
    /// The network of workers of so many GPUs (`ranks`) each, which all send at once.
    pub fn network(self, ranks: &[u32]) -> Result<Network, NetworkError> {
        let wide = |link: Link, ranks: u32| Link { bandwidth: link.bandwidth * f64::from(ranks), ..link };
        let mut nics = Vec::with_capacity(ranks.len());
        let mut cards = Vec::new();
        // The place of a node's next worker, and the card of each place that has one.
        let mut places = BTreeMap::<u32, u32>::new();
        let mut card_of = BTreeMap::new();
        for (node, ranks) in self.nodes.iter().zip(ranks) {
            let place = places.entry(*node).or_insert(0);
            let (slot, width) = match self.nics_per_node {
                Some(count) => (*place % count.max(1), 1),
                None => (*place, *ranks),
            };
            *place += 1;
            let card = *card_of.entry((*node, slot)).or_insert(cards.len() as u32);
            if card as usize == cards.len() {
                cards.push(wide(self.nic, width));
            }
            nics.push(card);
        }
        let ports = ranks.iter().map(|ranks| wide(self.port, *ranks)).collect();
        let network =
            Network { nodes: self.nodes, nics, ports, node_bandwidth: self.node_bandwidth, nic: cards };
        network.check(ranks.len())?;
        Ok(network)
    }
}

/// Why a network cannot be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NetworkError {
    /// A list that is not one entry a worker.
    #[error("network: {what} of {found} workers, the cluster has {expected}")]
    Workers {
        /// Which list.
        what: &'static str,
        /// Its length.
        found: usize,
        /// Workers.
        expected: usize,
    },
    /// A bandwidth that is none.
    #[error("network: {what} is {value} bytes/s; it must be above 0")]
    Bandwidth {
        /// Whose.
        what: String,
        /// The value.
        value: f64,
    },
    /// A worker names a card that is not there.
    #[error("network: worker {worker} uses card {nic}, there are {count}")]
    Nic {
        /// Which worker.
        worker: usize,
        /// The card it names.
        nic: u32,
        /// Cards.
        count: usize,
    },
}

impl Network {
    /// Whether it fits a cluster of so many workers.
    pub fn check(&self, num_workers: usize) -> Result<(), NetworkError> {
        for (what, found) in
            [("nodes", self.nodes.len()), ("cards", self.nics.len()), ("ports", self.ports.len())]
        {
            if found != num_workers {
                return Err(NetworkError::Workers { what, found, expected: num_workers });
            }
        }
        let positive = |what: String, value: f64| {
            if value > 0.0 { Ok(()) } else { Err(NetworkError::Bandwidth { what, value }) }
        };
        positive("bandwidth of a node".to_owned(), self.node_bandwidth)?;
        for (index, port) in self.ports.iter().enumerate() {
            positive(format!("port of worker {index}"), port.bandwidth)?;
        }
        for (index, nic) in self.nic.iter().enumerate() {
            positive(format!("network card {index}"), nic.bandwidth)?;
        }
        let count = self.nic.len();
        match self.nics.iter().position(|nic| *nic as usize >= count) {
            Some(worker) => Err(NetworkError::Nic { worker, nic: self.nics[worker], count }),
            None => Ok(()),
        }
    }

    /// The path of a transfer that has the network to itself.
    pub fn unloaded(&self, from: WorkerId, to: WorkerId) -> Link {
        let (latency, path) = self.path(from, to);
        let capacities = self.capacities();
        let bandwidth = path.iter().map(|channel| capacities[*channel]).fold(f64::INFINITY, f64::min);
        Link { bandwidth, latency }
    }

    /// Latency, and the channels on the way: see [`Network::capacities`] for their numbers.
    fn path(&self, from: WorkerId, to: WorkerId) -> (Nanos, Vec<usize>) {
        let (from, to) = (from.index(), to.index());
        let num_workers = self.nodes.len();
        if self.nodes[from] == self.nodes[to] {
            let node = 2 * num_workers + 2 * self.nic.len() + self.nodes[from] as usize;
            let latency = self.ports[from].latency.max(self.ports[to].latency);
            return (latency, vec![2 * from, 2 * to + 1, node]);
        }
        let (out, into) = (self.nics[from] as usize, self.nics[to] as usize);
        let latency = self.nic[out].latency.max(self.nic[into].latency);
        (latency, vec![2 * num_workers + 2 * out, 2 * num_workers + 2 * into + 1])
    }

    /// Bytes per second of every channel: out of and into each worker's port, out of and into each
    /// network card, each node.
    fn capacities(&self) -> Vec<f64> {
        let num_nodes = self.nodes.iter().max().map_or(0, |node| *node as usize + 1);
        let links = self.ports.iter().chain(&self.nic);
        let both_ways = links.flat_map(|link| [link.bandwidth; 2]);
        both_ways.chain(std::iter::repeat_n(self.node_bandwidth, num_nodes)).collect()
    }
}

/// A transfer on its way.
#[derive(Clone, Debug)]
struct Flow {
    path: Vec<usize>,
    /// Bytes that are not there yet.
    left: f64,
    /// Bytes per second.
    rate: f64,
    /// When it ends if its rate stays.
    end: Time,
}

/// The transfers under way, and their shares.
#[derive(Debug)]
pub(crate) struct Flows {
    network: Network,
    capacities: Vec<f64>,
    /// Latency over, bytes on their way.
    flows: BTreeMap<TransferId, Flow>,
    /// Before their first byte: when that leaves.
    ahead: BTreeMap<TransferId, (Time, Flow)>,
    now: Time,
}

impl Flows {
    pub(crate) fn new(network: Network) -> Flows {
        let capacities = network.capacities();
        Flows { network, capacities, flows: BTreeMap::new(), ahead: BTreeMap::new(), now: Time::ZERO }
    }

    /// A transfer of `bytes` begins at `now`.
    pub(crate) fn begin(&mut self, now: Time, id: TransferId, from: WorkerId, to: WorkerId, bytes: u64) {
        let (latency, path) = self.network.path(from, to);
        let flow = Flow { path, left: bytes as f64, rate: 0.0, end: now };
        self.ahead.insert(id, (now + latency, flow));
        self.advance(now);
    }

    /// A transfer is not wanted any more.
    pub(crate) fn abort(&mut self, now: Time, id: TransferId) {
        if self.ahead.remove(&id).is_none() && self.flows.remove(&id).is_some() {
            self.advance(now);
        }
    }

    /// When a transfer ends or its first byte leaves.
    pub(crate) fn next_at(&self) -> Option<Time> {
        let ends = self.flows.values().map(|flow| flow.end);
        ends.chain(self.ahead.values().map(|(at, _)| *at)).min()
    }

    /// Takes the transfers that have ended by `now`, in their order.
    pub(crate) fn take_ended(&mut self, now: Time) -> Vec<TransferId> {
        self.advance(now);
        let ended: Vec<_> =
            self.flows.iter().filter(|(_, flow)| flow.end <= now).map(|(id, _)| *id).collect();
        for id in &ended {
            self.flows.remove(id);
        }
        if !ended.is_empty() {
            self.share();
        }
        ended
    }

    /// Moves all bytes on to `now`, lets those begin whose latency is over, and shares anew.
    fn advance(&mut self, now: Time) {
        let seconds = (now - self.now).as_secs_f64();
        self.now = now;
        for flow in self.flows.values_mut().filter(|flow| flow.rate.is_finite()) {
            flow.left = (flow.left - flow.rate * seconds).max(0.0);
        }
        let begun: Vec<_> = self.ahead.iter().filter(|(_, (at, _))| *at <= now).map(|(id, _)| *id).collect();
        for id in begun {
            if let Some((_, flow)) = self.ahead.remove(&id) {
                self.flows.insert(id, flow);
            }
        }
        self.share();
    }

    /// Max-min fair rates by progressive filling: the channel that can give its transfers the least
    /// gives it to them, and the rest is divided among the others.
    fn share(&mut self) {
        let mut left = self.capacities.clone();
        let mut users = vec![0u32; left.len()];
        for flow in self.flows.values() {
            for channel in &flow.path {
                users[*channel] += 1;
            }
        }
        let mut open: Vec<TransferId> = self.flows.keys().copied().collect();
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
            // A remainder of rounding is no time at all.
            let nanos = (flow.left / flow.rate * 1e9 - 1e-3).max(0.0);
            flow.end = self.now + Nanos(nanos.ceil() as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn link(bandwidth: f64) -> Link {
        Link { bandwidth, latency: Nanos::ZERO }
    }

    /// Two nodes of two workers, with one card each.
    fn network() -> Network {
        Network {
            nodes: vec![0, 0, 1, 1],
            nics: vec![0, 0, 1, 1],
            ports: vec![link(1e9); 4],
            node_bandwidth: f64::INFINITY,
            nic: vec![link(1e8); 2],
        }
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
            flows.begin(Time(5), TransferId(0), WorkerId(0), WorkerId(to), 1_000_000);
            assert_eq!(ends(&mut flows), [(0, 5 + nanos)]);
        }
        let mut late = network();
        late.nic[1].latency = Nanos(300);
        assert_eq!(late.unloaded(WorkerId(0), WorkerId(3)), Link { bandwidth: 1e8, latency: Nanos(300) });
        let mut flows = Flows::new(late);
        flows.begin(Time(5), TransferId(0), WorkerId(0), WorkerId(2), 1_000_000);
        assert_eq!(ends(&mut flows), [(0, 10_000_305)]);
    }

    #[test]
    fn two_through_one_card_take_turns_and_one_inside_the_node_does_not_wait() {
        let mut flows = Flows::new(network());
        flows.begin(Time(0), TransferId(0), WorkerId(0), WorkerId(2), 1_000_000);
        flows.begin(Time(0), TransferId(1), WorkerId(1), WorkerId(3), 3_000_000);
        flows.begin(Time(0), TransferId(2), WorkerId(1), WorkerId(0), 1_000_000);
        // Half the card each for 20 ms, then the second has it alone for its other 2 MB.
        assert_eq!(ends(&mut flows), [(2, 1_000_000), (0, 20_000_000), (1, 40_000_000)]);
    }

    #[test]
    fn one_that_is_given_up_leaves_its_share() {
        let mut flows = Flows::new(network());
        flows.begin(Time(0), TransferId(0), WorkerId(0), WorkerId(2), 1_000_000);
        flows.begin(Time(0), TransferId(1), WorkerId(1), WorkerId(2), 1_000_000);
        flows.abort(Time(10_000_000), TransferId(1));
        assert_eq!(ends(&mut flows), [(0, 15_000_000)]);
    }

    #[test]
    fn cards_are_shared_in_turn_or_one_a_gpu() {
        let wiring = |nics_per_node| Wiring {
            nodes: vec![0, 0, 0, 1],
            nics_per_node,
            port: link(4e9),
            nic: link(1e9),
            node_bandwidth: f64::INFINITY,
        };
        let shared = wiring(Some(2)).network(&[1, 1, 2, 4]).unwrap();
        assert_eq!((&shared.nics[..], shared.nic.len()), (&[0, 1, 0, 2][..], 3));
        assert_eq!(shared.unloaded(WorkerId(2), WorkerId(3)), link(1e9));
        let own = wiring(None).network(&[1, 1, 2, 4]).unwrap();
        assert_eq!(own.nics, [0, 1, 2, 3]);
        assert_eq!(own.unloaded(WorkerId(2), WorkerId(3)), link(2e9));
        assert_eq!(own.unloaded(WorkerId(0), WorkerId(2)), link(4e9));
        assert!(wiring(None).network(&[1]).is_err());
    }

    #[test]
    fn what_cannot_be_says_so() {
        let told = |network: Network| network.check(4).unwrap_err().to_string();
        assert_eq!(network().check(4), Ok(()));
        let short = Network { nics: vec![0], ..network() };
        assert_eq!(told(short), "network: cards of 1 workers, the cluster has 4");
        let none = Network { nics: vec![0, 0, 1, 7], ..network() };
        assert_eq!(told(none), "network: worker 3 uses card 7, there are 2");
        let slow = Network { node_bandwidth: 0.0, ..network() };
        assert_eq!(told(slow), "network: bandwidth of a node is 0 bytes/s; it must be above 0");
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
                flows.begin(Time(0), TransferId(index as u64), WorkerId(*from), WorkerId(*to), *bytes);
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
                flows.begin(Time(0), TransferId(index as u64), WorkerId(0), WorkerId(2), *bytes);
            }
            let mut sorted = sizes.clone();
            sorted.sort_unstable();
            for (id, at) in ends(&mut flows) {
                let own = sizes[id as usize];
                let through: u64 = sorted.iter().map(|size| (*size).min(own)).sum();
                prop_assert!((at as f64 - through as f64 * 10.0).abs() <= 1.0 + sizes.len() as f64);
            }
            prop_assert!(flows.flows.is_empty() && flows.ahead.is_empty());
        }
    }
}
