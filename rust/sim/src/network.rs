//! Links that transfers share: ports, switches, network cards. Every transfer takes a path of shared
//! channels; [`Flows`](crate::flows::Flows) divides them.

use std::collections::BTreeMap;

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::latency::Link;
use kvrelay_core::time::Nanos;

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
    pub(crate) fn path(&self, from: WorkerId, to: WorkerId) -> (Nanos, Vec<usize>) {
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
    pub(crate) fn capacities(&self) -> Vec<f64> {
        let num_nodes = self.nodes.iter().max().map_or(0, |node| *node as usize + 1);
        let links = self.ports.iter().chain(&self.nic);
        let both_ways = links.flat_map(|link| [link.bandwidth; 2]);
        both_ways.chain(std::iter::repeat_n(self.node_bandwidth, num_nodes)).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn link(bandwidth: f64) -> Link {
        Link { bandwidth, latency: Nanos::ZERO }
    }

    /// Two nodes of two workers, with one card each.
    pub(crate) fn network() -> Network {
        Network {
            nodes: vec![0, 0, 1, 1],
            nics: vec![0, 0, 1, 1],
            ports: vec![link(1e9); 4],
            node_bandwidth: f64::INFINITY,
            nic: vec![link(1e8); 2],
        }
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
}
