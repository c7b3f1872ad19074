//! What is simulated: workers, what they are connected by, what passes before a run can begin.

use std::sync::Arc;

use kvrelay_core::cluster::{Role, WorkerId};
use kvrelay_core::kv::Naming;
use kvrelay_core::latency::{LatencyModel, Link};
use kvrelay_core::scheduler::{Belief, Limits, Setup, WorkerConfig};
use kvrelay_core::time::Nanos;

use crate::network::Network;
use crate::transfer::Conversion;

/// A simulated worker.
#[derive(Clone)]
pub struct SimWorker {
    /// What it does.
    pub role: Role,
    /// KV blocks it has.
    pub num_blocks: u32,
    /// Pipeline stages, each an equal part of every step: so many runs may be under way at once.
    pub stages: u32,
    /// How long its steps take, in truth, through all stages.
    pub latency: Arc<dyn LatencyModel>,
}

/// What KV is transferred over.
#[derive(Clone, Debug, PartialEq)]
pub enum Links {
    /// Every transfer has a link to itself.
    Apart(Link),
    /// Transfers share a network; it fits the cluster's workers (see [`Network::check`]).
    Shared(Network),
}

/// What passes between an order and the first step of its run, as part of that step's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delays {
    /// Before every run: the time that a scheduler takes to decide, and to tell.
    pub decision: Nanos,
    /// Before the first run after a change of role: weights, graphs, pools.
    pub role_switch: Nanos,
}

/// Workers that share a machine's memory or a device, and slow each other down while they compute.
#[derive(Clone, Debug, PartialEq)]
pub struct Neighbours {
    /// The machine of each worker.
    pub machines: Vec<u32>,
    /// How much longer a step with prompts takes for each other worker of its machine that computes: 0.5
    /// is half as long again.
    pub prefill: f64,
    /// The same of a step that only decodes.
    pub decode: f64,
}

impl Neighbours {
    pub(crate) fn slowdown(&self, has_prefill: bool, others: u32) -> f64 {
        1.0 + f64::from(others) * if has_prefill { self.prefill } else { self.decode }
    }
}

/// A simulated cluster.
#[derive(Clone)]
pub struct SimCluster {
    /// Workers, in order.
    pub workers: Vec<SimWorker>,
    /// Limits on batches.
    pub limits: Limits,
    /// Whether prompts share the KV of equal prefixes.
    pub prefix_caching: bool,
    /// What KV is transferred over.
    pub links: Links,
    /// Groups of layers in which KV leaves while its prompt's last chunk is computed; after the prompt
    /// when 1.
    pub layer_groups: u32,
    /// What KV takes to be laid out anew between workers of unlike ranks; nothing when `None`.
    pub conversion: Option<Conversion>,
    /// What passes before a run can begin.
    pub delays: Delays,
    /// Workers that share a machine and slow each other down; none when `None`.
    pub neighbours: Option<Neighbours>,
    /// Bytes of KV per token.
    pub kv_bytes_per_token: u64,
    /// What the policy predicts with; the truth when `None`.
    pub belief: Option<Belief>,
}

impl SimCluster {
    /// The slowest link that a transfer between two of its workers may have to itself: what policies
    /// believe of a network.
    pub fn unloaded_link(&self) -> Link {
        let network = match &self.links {
            Links::Apart(link) => return *link,
            Links::Shared(network) => network,
        };
        let index = |index: usize| WorkerId(index as u32);
        let ends = |takes: fn(Role) -> bool| {
            let fits = move |(_, worker): &(usize, &SimWorker)| takes(worker.role);
            self.workers.iter().enumerate().filter(fits).map(move |(at, _)| index(at))
        };
        let pairs = ends(Role::takes_prompts).flat_map(|from| ends(Role::decodes).map(move |to| (from, to)));
        let links = pairs.filter(|(from, to)| from != to).map(|(from, to)| network.unloaded(from, to));
        links.min_by(|a, b| a.bandwidth.total_cmp(&b.bandwidth)).unwrap_or(Link::INSTANT)
    }

    pub(crate) fn setup(&self, name_all: bool) -> Setup {
        let truth = || Belief {
            steps: self.workers.iter().map(|worker| Arc::clone(&worker.latency)).collect(),
            link: self.unloaded_link(),
            kv_bytes_per_token: self.kv_bytes_per_token,
        };
        let config = |worker: &SimWorker| WorkerConfig {
            role: worker.role,
            num_blocks: worker.num_blocks,
            stages: worker.stages,
        };
        Setup {
            workers: self.workers.iter().map(config).collect(),
            limits: self.limits.clone(),
            prefix_caching: self.prefix_caching,
            early_transfers: self.layer_groups > 1,
            naming: if name_all { Naming::All } else { Naming::Shareable },
            belief: self.belief.clone().unwrap_or_else(truth),
        }
    }
}
