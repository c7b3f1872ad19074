//! DESIGN's laws 2 (blocks), 3 (progress) and 6 (runs), and determinism, over random workloads,
//! policies, latency models and faults.

use std::ops::ControlFlow;

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::metrics::PooledGaps;
use kvrelay_core::policy::{BUILT_IN, Policy, built_in};
use kvrelay_core::record::{Detail, Status};
use kvrelay_core::request::{Arrival, PromptContent, Scheduled};
use kvrelay_core::time::{Nanos, Time};
use kvrelay_core::watch::Watch;
use kvrelay_sim::{Conversion, Injection, Options, SimCluster, SimError, Simulation, simulate};
use kvrelay_tests::{Chaotic, Kinked, cluster, on_a_network};
use proptest::prelude::*;

const TOPOLOGIES: [&str; 5] = ["1M", "2M", "1P1D", "2P2D", "1P1D1M"];

fn latencies() -> impl Strategy<Value = Kinked> {
    (1u64..40_000, 0u64..300, 0u64..3_000, 0u64..60, 0u64..400).prop_map(
        |(constant, per_token, per_row, per_context, kink)| Kinked {
            constant: constant * 777,
            per_token,
            per_row,
            per_context,
            kink,
        },
    )
}

fn arrivals() -> impl Strategy<Value = Vec<Arrival>> {
    let one = (0u64..400_000, 1u32..150, 1u32..60, 0u64..4, -2i32..3, 1u64..60);
    prop::collection::vec(one, 1..40).prop_map(|all| {
        let arrive = |(at, prompt_tokens, output_tokens, family, priority, slo)| {
            let mut arrival = kvrelay_tests::arrival(at, prompt_tokens, output_tokens);
            let ids: Vec<u64> =
                (0..10).map(|i| if i < 3 { family * 100 + i } else { at * 1_000 + i }).collect();
            arrival.content = PromptContent::HashIds { ids: ids.into(), tokens_per_id: 16 };
            arrival.priority = priority;
            arrival.slo = kvrelay_tests::slo(slo as f64 * 1e-5, slo as f64 * 1e-6);
            arrival
        };
        all.into_iter().map(arrive).collect()
    })
}

fn injections(num_workers: u32) -> impl Strategy<Value = Vec<(Time, Injection)>> {
    let one = (0u64..600_000, 0u8..4, any::<prop::sample::Index>(), any::<bool>());
    prop::collection::vec(one, 0..12).prop_map(move |all| {
        let mut injections = Vec::new();
        for (at, kind, pick, quiesced) in all {
            let worker = WorkerId(pick.index(num_workers as usize) as u32);
            injections.push((
                Time(at),
                match kind {
                    0 => Injection::Cancel(pick.index(40) as u64),
                    1 => Injection::FailTransfers { quiesced },
                    2 => Injection::WorkerDown(worker),
                    _ => Injection::Cancel(pick.index(10) as u64),
                },
            ));
            if kind == 2 {
                injections.push((Time(at + 50_000), Injection::WorkerUp(worker)));
            }
        }
        injections
    })
}

fn run(
    cluster: &SimCluster,
    arrivals: &[Arrival],
    policy: Box<dyn Policy>,
    options: &Options,
) -> Result<Simulation, SimError> {
    simulate(cluster, &mut Scheduled::new(arrivals.to_vec()), policy, options, &mut Patience(200))
}

/// Ends a simulation that does not end by itself: so many looks are left.
struct Patience(u32);

impl Watch for Patience {
    fn look(&mut self, _: u64, _: u64, _: Time) -> ControlFlow<()> {
        self.0 -= 1;
        if self.0 == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// A pool just large enough for the longest request is the hardest.
fn pools() -> impl Strategy<Value = u32> {
    prop_oneof![14u32..24, 24u32..200]
}

/// How workers are made and connected.
#[derive(Clone, Copy, Debug)]
struct Wiring {
    shared: bool,
    stages: u32,
    layer_groups: u32,
    unlike_ranks: bool,
}

impl Wiring {
    fn of(self, mut cluster: SimCluster) -> SimCluster {
        for worker in &mut cluster.workers {
            worker.stages = self.stages;
        }
        cluster.layer_groups = self.layer_groups;
        if self.unlike_ranks {
            let ranks = (0..cluster.workers.len() as u32).map(|index| 1 + index % 2).collect();
            cluster.conversion = Some(Conversion { ranks, bandwidth: 3e8 });
        }
        if self.shared { on_a_network(cluster) } else { cluster }
    }
}

fn wirings() -> impl Strategy<Value = Wiring> {
    let mostly_one = || prop_oneof![2 => Just(1u32), 1 => 2u32..5];
    (any::<bool>(), mostly_one(), mostly_one(), any::<bool>()).prop_map(
        |(shared, stages, layer_groups, unlike_ranks)| Wiring { shared, stages, layer_groups, unlike_ranks },
    )
}

proptest! {
    // Counting the books of so many workers takes its time.
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Of very many workers the least loaded is found by an order, which is checked against a scan where
    /// it is asked, and against the books after every instant.
    #[test]
    fn very_many_workers(
        topology in prop::sample::select(vec!["40P30D", "60M", "30P20D10M"]),
        num_blocks in pools(),
        latency in latencies(),
        arrivals in arrivals(),
        injections in injections(60),
        seed in any::<u64>(),
        chaotic in any::<bool>(),
        named in prop::sample::select(BUILT_IN.to_vec()),
    ) {
        let policy = if chaotic { Box::new(Chaotic::new(seed)) as Box<dyn Policy> } else { built_in(named).unwrap() };
        let options = Options { seed, injections, check_integrity: true, ..Options::default() };
        let result = run(&cluster(topology, num_blocks, latency), &arrivals, policy, &options).unwrap();
        prop_assert_eq!(result.log.requests.len(), arrivals.len());
    }
}

proptest! {
    /// Laws 2 and 3: books balance after every instant, and when all is over nothing is held,
    /// whatever a policy does and whatever breaks; nothing is lost and nothing counted twice.
    #[test]
    fn blocks_and_progress_under_faults(
        topology in prop::sample::select(TOPOLOGIES.to_vec()),
        num_blocks in pools(),
        latency in latencies(),
        wiring in wirings(),
        arrivals in arrivals(),
        injections in injections(2),
        seed in any::<u64>(),
        chaotic in any::<bool>(),
        named in prop::sample::select(BUILT_IN.to_vec()),
    ) {
        let cluster = wiring.of(cluster(topology, num_blocks, latency));
        let injections = injections.into_iter().filter(|(_, injection)| match injection {
            Injection::WorkerDown(worker) | Injection::WorkerUp(worker) => worker.index() < cluster.workers.len(),
            _ => true,
        }).collect();
        let policy = if chaotic { Box::new(Chaotic::new(seed)) as Box<dyn Policy> } else { built_in(named).unwrap() };
        let options = Options { seed, injections, check_integrity: true, ..Options::default() };
        let result = run(&cluster, &arrivals, policy, &options).map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert_eq!(result.log.requests.len(), arrivals.len());
        let mut ids: Vec<_> = result.log.requests.iter().map(|record| record.id.0).collect();
        ids.sort_unstable();
        prop_assert_eq!(ids, (0..arrivals.len() as u64).collect::<Vec<_>>());
        let mut sorted = arrivals.clone();
        sorted.sort_by_key(|arrival| arrival.at);
        for record in &result.log.requests {
            prop_assert_ne!(record.status, Status::Live);
            prop_assert_ne!(record.status, Status::CutOff);
            if record.status == Status::Finished {
                prop_assert_eq!(record.output_tokens, sorted[record.id.0 as usize].output_tokens);
                prop_assert!(record.cached_tokens < record.prompt_tokens);
            }
        }
    }

    /// Law 6: runs taken in closed form give exactly the records of single steps.
    #[test]
    fn runs_equal_single_steps(
        topology in prop::sample::select(TOPOLOGIES.to_vec()),
        num_blocks in pools(),
        latency in latencies(),
        wiring in wirings(),
        arrivals in arrivals(),
        seed in any::<u64>(),
        policy in 0usize..=BUILT_IN.len(),
    ) {
        let cluster = wiring.of(cluster(topology, num_blocks, latency));
        let policy = || match BUILT_IN.get(policy) {
            Some(name) => built_in(name).unwrap(),
            None => Box::new(Chaotic::new(seed)),
        };
        let jumped = run(&cluster, &arrivals, policy(), &Options::default()).unwrap();
        let stepped = run(&cluster, &arrivals, policy(), &Options { single_steps: true, ..Options::default() }).unwrap();
        prop_assert_eq!(&jumped.log.requests, &stepped.log.requests);
        prop_assert_eq!(&jumped.log.steps, &stepped.log.steps);
        let percents = [0.0, 10.0, 50.0, 90.0, 99.0, 100.0];
        let (a, b) = (PooledGaps::new(&jumped.log.gaps), PooledGaps::new(&stepped.log.gaps));
        prop_assert_eq!(a.count(), b.count());
        prop_assert_eq!(a.percentiles(&percents), b.percentiles(&percents));
    }

    /// A run's repeat limit decides nothing: one step a run gives the same requests' records, where
    /// the pool is large enough that reserved blocks keep nobody waiting.
    #[test]
    fn the_repeat_limit_changes_no_record(
        topology in prop::sample::select(TOPOLOGIES.to_vec()),
        latency in latencies(),
        arrivals in arrivals(),
        policy in prop::sample::select(vec!["fcfs", "chunked", "disaggregated"]),
    ) {
        let long = cluster(topology, 4_000, latency);
        let mut short = long.clone();
        short.limits.max_repeat = 1;
        let long = run(&long, &arrivals, built_in(policy).unwrap(), &Options::default()).unwrap();
        let short = run(&short, &arrivals, built_in(policy).unwrap(), &Options::default()).unwrap();
        let by_id = |simulation: Simulation| {
            let mut records = simulation.log.requests;
            records.sort_by_key(|record| record.id);
            records
        };
        prop_assert_eq!(by_id(long), by_id(short));
    }

    /// Same inputs, same records, bit for bit.
    #[test]
    fn deterministic(latency in latencies(), arrivals in arrivals(), seed in any::<u64>()) {
        let cluster = cluster("2P2D", 40, latency);
        let twice = [(); 2].map(|()| {
            run(&cluster, &arrivals, Box::new(Chaotic::new(seed)), &Options { seed, ..Options::default() }).unwrap()
        });
        prop_assert_eq!(&twice[0].log, &twice[1].log);
        let options = Options { seed, detail: Detail::RequestsOnly, ..Options::default() };
        let short = run(&cluster, &arrivals, Box::new(Chaotic::new(seed)), &options).unwrap();
        prop_assert_eq!(&short.log.requests, &twice[0].log.requests);
        prop_assert!(short.log.steps.is_empty() && short.log.gaps.is_empty());
    }

    /// C09: held + queue + prefill make up the TTFT exactly; transfer and decode queue lie behind
    /// the first token, in the first gap.
    #[test]
    fn the_parts_of_ttft_add_up(
        latency in latencies(),
        wiring in wirings(),
        arrivals in arrivals(),
        seed in any::<u64>(),
        chaotic in any::<bool>(),
    ) {
        let cluster = wiring.of(cluster("1P1D", 200, latency));
        let policy = if chaotic { Box::new(Chaotic::new(seed)) as Box<dyn Policy> } else { built_in("disaggregated").unwrap() };
        let result = run(&cluster, &arrivals, policy, &Options::default()).unwrap();
        for record in result.log.requests.iter().filter(|record| record.status == Status::Finished) {
            let parts = [record.held(), record.queue(), record.prefill()].map(|part| part.unwrap().0);
            prop_assert_eq!(Nanos(parts.iter().sum()), record.ttft().unwrap());
            if let (Some(start), Some(end)) = (record.transfer_start, record.transfer_end) {
                let first = record.first_token.unwrap();
                prop_assert!(end >= first && end >= start + cluster.unloaded_link().latency);
                prop_assert!(start >= first || cluster.layer_groups > 1);
                if let (Some(decode), 0) = (record.decode_start, record.preemptions) {
                    let parts = [record.awaiting_room(), record.transfer(), record.decode_queue()];
                    prop_assert_eq!(parts.map(|part| part.unwrap().0).iter().sum::<u64>(), (decode - first).0);
                }
                // A preempted one may end while it is recomputed, without a decode step here.
                prop_assert!(record.decode_start.is_some_and(|start| start >= end) || record.preemptions > 0);
            }
            if record.output_tokens > 1 {
                let gap = record.max_gap.unwrap().as_secs_f64();
                prop_assert!(gap >= record.tpot().unwrap() - 1e-9, "the worst gap is no shorter than the mean one");
            }
        }
    }
}
