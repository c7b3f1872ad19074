//! What several law tests share: odd latency models, a chaotic policy, small clusters.

use std::sync::Arc;

use kvrelay_core::cluster::{Topology, WorkerId};
use kvrelay_core::latency::{LatencyModel, Link};
use kvrelay_core::policy::{
    Acceptance, Admission, Batch, ClusterView, Decision, Placement, Policy, RequestView, WorkerView,
};
use kvrelay_core::record::RequestRecord;
use kvrelay_core::request::Arrival;
use kvrelay_core::scheduler::Limits;
use kvrelay_core::slo::Slo;
use kvrelay_core::step::{StepShape, Stretch};
use kvrelay_core::time::{Nanos, Picos, Time};
use kvrelay_sim::network::Network;
use kvrelay_sim::{Delays, Links, SimCluster, SimWorker};

/// A latency model with a kink: beyond `kink` tokens of context a token costs more. Its numbers
/// are whatever a test draws, fractions of nanoseconds included.
#[derive(Clone, Debug)]
pub struct Kinked {
    /// Picoseconds of every step.
    pub constant: u64,
    /// Picoseconds per prompt token.
    pub per_token: u64,
    /// Picoseconds per decode row.
    pub per_row: u64,
    /// Picoseconds per context token.
    pub per_context: u64,
    /// Context tokens beyond which each costs twice as much again.
    pub kink: u64,
}

impl Kinked {
    fn decode(&self, context: u64) -> u64 {
        self.per_context * (context + 2 * context.saturating_sub(self.kink))
    }
}

impl LatencyModel for Kinked {
    fn stretch(&self, shape: &StepShape, max_steps: u32) -> Stretch {
        let rows = u64::from(shape.num_decode);
        let context = shape.decode_context;
        let first = self.constant
            + self.per_token * shape.prefill_tokens
            + self.per_row * rows
            + self.decode(context);
        if shape.num_prefill > 0 || rows == 0 {
            return Stretch::single(Picos(first));
        }
        // Steps j = 0.. of this stretch keep context + j * rows on one side of the kink, the last
        // one included.
        let (slope, steps) = if context >= self.kink {
            (3, u64::from(max_steps))
        } else {
            (1, (self.kink - context) / rows + 1)
        };
        let steps = steps.min(u64::from(max_steps)).max(1) as u32;
        Stretch { first: Picos(first), delta: (slope * self.per_context * rows) as i64, steps }
    }
}

/// A policy that decides by a stream of random numbers: everything it answers is allowed, little
/// of it is wise.
pub struct Chaotic {
    state: u64,
}

impl Chaotic {
    /// With its own stream.
    pub fn new(seed: u64) -> Chaotic {
        Chaotic { state: seed }
    }

    /// The next number below `n` (SplitMix64).
    fn below(&mut self, n: usize) -> usize {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }
}

impl Policy for Chaotic {
    fn name(&self) -> String {
        "chaotic".to_owned()
    }

    fn admit(&mut self, _: &RequestView<'_>, cluster: &ClusterView<'_>) -> Decision<Admission> {
        Ok(match self.below(10) {
            0 => Admission::Hold(cluster.now() + Nanos(1 + self.below(50_000) as u64)),
            1 => Admission::Demote,
            2 => Admission::Refuse {
                reason: "by chance".to_owned(),
                numbers: [("die".to_owned(), 2.0)].into(),
            },
            _ => Admission::Accept,
        })
    }

    fn place(&mut self, request: &RequestView<'_>, cluster: &ClusterView<'_>) -> Decision<Option<Placement>> {
        let holds = |id: u32, tokens| {
            cluster.worker(WorkerId(id)).is_some_and(|worker| worker.is_up() && worker.can_ever_hold(tokens))
        };
        let all = 0..cluster.num_workers() as u32;
        let decode: Vec<u32> = all
            .clone()
            .filter(|id| cluster.worker(WorkerId(*id)).is_some_and(|worker| worker.role().decodes()))
            .filter(|id| holds(*id, request.longest()))
            .collect();
        let prefill: Vec<u32> = all.filter(|id| holds(*id, request.longest())).collect();
        if prefill.is_empty() || decode.is_empty() {
            return Ok(None);
        }
        let decode = WorkerId(decode[self.below(decode.len())]);
        let named = self.below(2) == 0;
        Ok(Some(Placement {
            prefill: WorkerId(prefill[self.below(prefill.len())]),
            decode: named.then_some(decode),
            reserve: named && self.below(3) == 0,
        }))
    }

    fn accept(&mut self, request: &RequestView<'_>, worker: &WorkerView<'_>) -> Decision<Acceptance> {
        let cluster = worker.cluster();
        let others: Vec<_> = cluster
            .workers()
            .filter(|other| other.role().decodes() && other.can_ever_hold(request.longest()))
            .map(|other| other.id())
            .collect();
        Ok(match self.below(4) {
            0 => Acceptance::Other(others[self.below(others.len())]),
            _ => Acceptance::Now,
        })
    }

    fn batch(&mut self, worker: &WorkerView<'_>) -> Decision<Batch> {
        let mut batch = Batch { repeat: Some(1 + self.below(40) as u32), ..Batch::default() };
        let mut left = worker.limits().max_prefill_tokens;
        for request in worker.waiting() {
            let chunk = (1 + self.below(request.pending() as usize) as u32).min(left);
            if chunk > 0 && self.below(3) > 0 && batch.prefill.len() < worker.limits().max_batch as usize {
                left -= chunk;
                batch.prefill.push((request.id(), chunk));
            }
        }
        let mut decode = Vec::new();
        for request in worker.running() {
            match self.below(12) {
                0 => batch.preempt.push(request.id()),
                1 if self.below(8) == 0 => batch.drop.push(request.id()),
                2 => {}
                _ => decode.push(request.id()),
            }
        }
        decode.truncate(worker.limits().max_batch as usize - batch.prefill.len());
        batch.decode = Some(decode);
        // Even a batch of nothing is asked about again.
        batch.wake_at = Some(worker.now() + Nanos(1 + self.below(20_000) as u64));
        Ok(batch)
    }
}

/// Workers of a topology, all alike.
pub fn cluster(topology: &str, num_blocks: u32, latency: impl LatencyModel + 'static) -> SimCluster {
    let latency: Arc<dyn LatencyModel> = Arc::new(latency);
    let topology: Topology = topology.parse().expect("a topology");
    let worker = |role| SimWorker { role, num_blocks, stages: 1, latency: Arc::clone(&latency) };
    SimCluster {
        workers: topology.roles().into_iter().map(worker).collect(),
        limits: Limits { max_batch: 16, max_prefill_tokens: 256, ..Limits::default() },
        prefix_caching: true,
        links: Links::Apart(Link { bandwidth: 1e9, latency: Nanos(700) }),
        kv_bytes_per_token: 100,
        layer_groups: 1,
        conversion: None,
        delays: Delays::default(),
        neighbours: None,
        belief: None,
    }
}

/// Workers in nodes of two that share a card, instead of links of their own.
pub fn on_a_network(mut cluster: SimCluster) -> SimCluster {
    let link = |bandwidth| Link { bandwidth, latency: Nanos(700) };
    let count = cluster.workers.len() as u32;
    cluster.links = Links::Shared(Network {
        nodes: (0..count).map(|worker| worker / 2).collect(),
        nics: (0..count).map(|worker| worker / 2).collect(),
        ports: vec![link(2e9); count as usize],
        node_bandwidth: 3e9,
        nic: vec![link(1e9); count.div_ceil(2) as usize],
    });
    cluster
}

/// One arrival of a kind.
pub fn arrival(at: u64, prompt_tokens: u32, output_tokens: u32) -> Arrival {
    Arrival {
        at: Time(at),
        prompt_tokens,
        output_tokens,
        max_tokens: output_tokens + 3,
        ..Arrival::default()
    }
}

/// Objectives in seconds.
pub fn slo(ttft: f64, tpot: f64) -> Slo {
    Slo { ttft: Some(Nanos::from_secs_f64(ttft)), tpot: Some(Nanos::from_secs_f64(tpot)), ..Slo::default() }
}

/// FNV-1a, 64 bits (Fowler, Noll and Vo), of every field of the records, in their order: numbers as
/// little-endian `u64`, a missing one as all ones, text as its length and bytes. It depends on no
/// platform and on no hasher of the standard library.
pub fn record_hash(requests: &[RequestRecord]) -> u64 {
    let mut hash = 0xCBF2_9CE4_8422_2325_u64;
    let mut feed = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3);
        }
    };
    for record in requests {
        let time = |time: Option<Time>| time.map_or(u64::MAX, |time| time.0);
        let worker = |worker: Option<WorkerId>| worker.map_or(u64::MAX, |worker| u64::from(worker.0));
        let nanos = |nanos: Option<Nanos>| nanos.map_or(u64::MAX, |nanos| nanos.0);
        let numbers = [
            record.id.0,
            u64::from(record.class.0),
            nanos(record.slo.ttft),
            nanos(record.slo.tpot),
            nanos(record.slo.e2e),
            nanos(record.slo.max_gap),
            u64::from(record.slo.token_deadlines),
            record.arrival.0,
            u64::from(record.prompt_tokens),
            u64::from(record.max_tokens),
            u64::from(record.output_tokens),
            u64::from(record.cached_tokens),
            worker(record.prefill_worker),
            worker(record.decode_worker),
            time(record.admitted),
            time(record.prefill_start),
            time(record.first_token),
            time(record.transfer_start),
            time(record.transfer_end),
            time(record.decode_start),
            time(record.last_token),
            time(record.end),
            record.max_gap.map_or(u64::MAX, |gap| gap.0),
            u64::from(record.preemptions),
            u64::from(record.late_token),
        ];
        numbers.iter().for_each(|number| feed(&number.to_le_bytes()));
        for text in [record.status.name(), record.reason.as_deref().unwrap_or_default()] {
            feed(&(text.len() as u64).to_le_bytes());
            feed(text.as_bytes());
        }
    }
    hash
}
