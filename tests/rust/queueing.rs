//! The simulator against what is known exactly: waiting times of simple queues, Little's law, nothing
//! lost, the same log from every thread, and one run's hash for good.

use std::sync::Arc;
use std::thread;

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::policy::{BUILT_IN, built_in};
use kvrelay_core::record::{Log, RequestRecord, Status};
use kvrelay_core::request::{Arrival, Scheduled};
use kvrelay_core::rng::{Purpose, Stream};
use kvrelay_core::stats;
use kvrelay_core::time::{Nanos, Time};
use kvrelay_core::watch::Unwatched;
use kvrelay_sim::{Injection, Options, SimCluster, simulate};
use kvrelay_tests::{Chaotic, Kinked, arrival, cluster, record_hash};
use kvrelay_workload::workload::Synthetic;
use kvrelay_workload::{Class, LengthPair, Lengths, Workload};
use proptest::prelude::*;

/// Nanoseconds that a request of one token is served for on average.
const SERVICE: f64 = 1e6;

/// One mixed worker that serves one request at a time.
fn single_server(latency: Kinked) -> SimCluster {
    let mut cluster = cluster("1M", 100_000, latency);
    cluster.limits.max_batch = 1;
    cluster.limits.max_prefill_tokens = 1 << 20;
    cluster
}

fn run(cluster: &SimCluster, arrivals: Vec<Arrival>, policy: &str, options: &Options) -> Log {
    let mut source = Scheduled::new(arrivals);
    let mut log =
        simulate(cluster, &mut source, built_in(policy).unwrap(), options, &mut Unwatched).unwrap().log;
    log.requests.sort_by_key(|record| record.id);
    log
}

/// Poisson arrivals at `load` of a server, of single tokens; `prompt` draws the prompt lengths.
fn poisson(load: f64, count: usize, seed: u64, prompt: impl Fn(&mut Stream) -> u32) -> Vec<Arrival> {
    let mut at = 0.0;
    let mut stream = Stream::new(seed, Purpose(101), 0);
    let mut next = |_| {
        at += stream.exponential() * SERVICE / load;
        arrival(at as u64, prompt(&mut stream), 1)
    };
    (0..count).map(&mut next).collect()
}

/// The mean wait in units of service, with its standard error by batch means, against `expected`.
fn check_wait(arrivals: Vec<Arrival>, latency: Kinked, expected: f64) {
    let log = run(&single_server(latency), arrivals, "fcfs", &Options::default());
    let waits: Vec<f64> = log.requests.iter().map(|r| r.queue().unwrap().0 as f64 / SERVICE).collect();
    // One standard error is the half-width over the t quantile.
    let found = stats::mean(&waits, 0.95).unwrap();
    let quantile = stats::student_quantile(0.975, (found.num_batches - 1) as f64);
    let error = 0.5 * (found.high - found.low) / quantile;
    assert!(error < 0.1 * expected, "no test: the error is {error} of {expected}");
    assert!((found.value - expected).abs() < 3.0 * error, "{} +- {error}, not {expected}", found.value);
}

const CONSTANT: Kinked =
    Kinked { constant: 1_000_000_000, per_token: 0, per_row: 0, per_context: 0, kink: 0 };
/// 10 ns a token: prompts of 100,000 tokens on average.
const BY_LENGTH: Kinked = Kinked { constant: 0, per_token: 10_000, per_row: 0, per_context: 0, kink: 0 };

/// M/D/1: the mean wait is ρ / (2 (1 − ρ)) services (Pollaczek and Khinchine).
#[test]
fn constant_service_waits_as_m_d_1() {
    for (seed, load) in [(1, 0.3), (2, 0.5), (3, 0.7), (4, 0.85)] {
        check_wait(poisson(load, 100_000, seed, |_| 8), CONSTANT, load / (2.0 * (1.0 - load)));
    }
}

/// M/M/1: the mean wait is ρ / (1 − ρ) services. Prompts of exponential length make service exponential.
#[test]
fn exponential_service_waits_as_m_m_1() {
    let exponential =
        |stream: &mut Stream| ((stream.exponential() * 100_000.0) as u32).clamp(1, (1 << 20) - 1);
    for (seed, load) in [(5, 0.3), (6, 0.5), (7, 0.7)] {
        check_wait(poisson(load, 100_000, seed, exponential), BY_LENGTH, load / (1.0 - load));
    }
}

/// M/G/1 with service of either 0.5 or 1.5: ρ (1 + c²) / (2 (1 − ρ)) with c² = 1/4.
#[test]
fn two_lengths_wait_as_m_g_1() {
    let either = |stream: &mut Stream| if stream.below(2) == 0 { 50_000 } else { 150_000 };
    let load = 0.6;
    check_wait(poisson(load, 100_000, 8, either), BY_LENGTH, load * 1.25 / (2.0 * (1.0 - load)));
}

/// The integral over time of the requests in the system, in requests times nanoseconds.
fn integral(requests: &[RequestRecord]) -> u128 {
    let mut changes: Vec<(u64, i64)> =
        requests.iter().flat_map(|r| [(r.arrival.0, 1), (r.end.unwrap().0, -1)]).collect();
    changes.sort_unstable();
    let (mut since, mut present, mut sum) = (0, 0i64, 0u128);
    for (at, change) in changes {
        sum += u128::from(at - since) * present as u128;
        (since, present) = (at, present + change);
    }
    assert_eq!(present, 0);
    sum
}

fn arrivals() -> impl Strategy<Value = Vec<Arrival>> {
    let one = (0u64..300_000, 1u32..150, 1u32..40);
    prop::collection::vec(one, 1..60).prop_map(|mut all| {
        all.sort_unstable();
        all.into_iter().map(|(at, prompt, output)| arrival(at, prompt, output)).collect()
    })
}

const LATENCY: Kinked =
    Kinked { constant: 700_123, per_token: 9_001, per_row: 1_003, per_context: 17, kink: 300 };

proptest! {
    /// Little's law, exactly, and conservation: whoever arrives ends once, in one of the ways.
    #[test]
    fn little_and_conservation(
        arrivals in arrivals(),
        topology in prop::sample::select(vec!["1M", "2M", "1P1D", "2P1D", "1P1D1M"]),
        policy in 0usize..=BUILT_IN.len(),
        faults in prop::collection::vec((0u64..300_000, 0u64..60, 0u8..3), 0..5),
        until in prop::option::of(1u64..400_000),
    ) {
        let cluster = cluster(topology, 60, LATENCY);
        let mut injections = Vec::new();
        for (at, index, kind) in faults {
            match kind {
                0 => injections.push((Time(at), Injection::Cancel(index))),
                1 => injections.push((Time(at), Injection::FailTransfers { quiesced: true })),
                _ => {
                    injections.push((Time(at), Injection::WorkerDown(WorkerId(0))));
                    injections.push((Time(at + 30_000), Injection::WorkerUp(WorkerId(0))));
                }
            }
        }
        let policy = BUILT_IN.get(policy).map_or_else(|| Box::new(Chaotic::new(7)) as _, |name| built_in(name).unwrap());
        let options = Options { injections, until: until.map(Time), ..Options::default() };
        let mut source = Scheduled::new(arrivals.clone());
        let log = simulate(&cluster, &mut source, policy, &options, &mut Unwatched).unwrap().log;
        // What had not arrived by the end of the run is no part of it.
        let arrived = arrivals.iter().filter(|arrival| until.is_none_or(|until| arrival.at <= Time(until))).count();
        let ended = |status| log.requests.iter().filter(|record| record.status == status).count();
        let ways = [Status::Finished, Status::Refused, Status::Failed, Status::Cancelled, Status::CutOff].map(ended);
        prop_assert_eq!(ways.iter().sum::<usize>(), log.requests.len());
        prop_assert!(log.requests.len() == arrived || until.is_some_and(|_| log.requests.len() <= arrived));
        let stays: u128 = log.requests.iter().map(|record| u128::from((record.end.unwrap() - record.arrival).0)).sum();
        prop_assert_eq!(integral(&log.requests), stays);
    }
}

/// A seeded run with everything that draws or computes: gamma arrivals, correlated log-normal lengths,
/// the goodput policy, a latency model with fractions of nanoseconds.
fn seeded(seed: u64) -> Log {
    let lengths = LengthPair::correlated(
        Lengths::lognormal(120.0, 150.0).unwrap(),
        Lengths::uniform(1, 60).unwrap(),
        0.4,
    );
    let what = Synthetic {
        num_requests: 400,
        lengths: lengths.unwrap(),
        class: Class { slo: kvrelay_tests::slo(50e-6, 5e-6), ..Class::default() },
        seed,
    };
    let workload = Workload::gamma(40_000.0, 2.0, &what).unwrap();
    let mut cluster = cluster("1P1D1M", 900, LATENCY);
    cluster.limits.max_prefill_tokens = 4_096;
    let options = Options { seed, ..Options::default() };
    run(&cluster, workload.arrivals, "goodput", &options)
}

#[test]
fn four_threads_give_identical_logs() {
    let expected = Arc::new(seeded(11));
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let expected = Arc::clone(&expected);
            thread::spawn(move || assert_eq!(seeded(11), *expected))
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

/// The records of one run, as they are on every platform. A change of it is a change of what the
/// simulator says: right if it was meant, and then this number is new.
#[test]
fn the_records_of_a_seeded_run_never_change() {
    let log = seeded(2024);
    assert!(log.requests.iter().any(|record| record.transfer() > Some(Nanos::ZERO)));
    assert_eq!(record_hash(&log.requests), GOLDEN, "{:#018x}", record_hash(&log.requests));
}

const GOLDEN: u64 = 0x9ee2_cc4c_73ed_2a84;
