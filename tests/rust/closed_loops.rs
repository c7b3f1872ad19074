//! Closed loops through the simulator, with faults on purpose: a loop goes on whatever becomes of a
//! request, and never has more of them than it may.

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::policy::{BUILT_IN, Policy, built_in};
use kvrelay_core::record::Status;
use kvrelay_core::time::Time;
use kvrelay_core::watch::Unwatched;
use kvrelay_sim::{Injection, Options, simulate};
use kvrelay_tests::{Chaotic, Kinked, cluster};
use kvrelay_workload::closed::{Sessions, ThinkTime};
use kvrelay_workload::workload::Synthetic;
use kvrelay_workload::{Class, LengthPair, Lengths, Workload};
use proptest::prelude::*;

const LATENCY: Kinked =
    Kinked { constant: 20_000_777, per_token: 150, per_row: 1_000, per_context: 30, kink: 200 };

fn lengths() -> LengthPair {
    LengthPair::independent(Lengths::uniform(1, 60).unwrap(), Lengths::uniform(1, 30).unwrap())
}

fn users(concurrency: usize, think: ThinkTime, seed: u64) -> Workload {
    let what = Synthetic { num_requests: 60, lengths: lengths(), class: Class::default(), seed };
    Workload::closed_loop(concurrency, think, &what).unwrap()
}

fn chats(think: ThinkTime, seed: u64) -> Workload {
    let (turns, class) = (Lengths::uniform(1, 4).unwrap(), Class::default());
    // A pool holds every conversation: 4 turns of at most 90 tokens.
    let what = Sessions { num_sessions: 20, rate: 2e4, turns, lengths: lengths(), think, class, seed };
    Workload::sessions(&what).unwrap()
}

/// Clients that go away, and a worker that is lost and comes back.
fn faults() -> impl Strategy<Value = Vec<(Time, Injection)>> {
    prop::collection::vec((0u64..3_000_000, 0u64..60, 0u8..4), 0..12).prop_map(|all| {
        let mut faults = Vec::new();
        for (at, pick, kind) in all {
            match kind {
                0 => {
                    faults.push((Time(at), Injection::WorkerDown(WorkerId(0))));
                    faults.push((Time(at + 50_000), Injection::WorkerUp(WorkerId(0))));
                }
                _ => faults.push((Time(at), Injection::Cancel(pick))),
            }
        }
        faults
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn loops_go_on_under_faults(
        topology in prop::sample::select(vec!["1M", "2M", "1P1D", "2P2D"]),
        concurrency in 1usize..12,
        think in 0usize..3,
        sessions in any::<bool>(),
        injections in faults(),
        seed in any::<u64>(),
        named in prop::sample::select([BUILT_IN.as_slice(), &["chaotic"]].concat()),
    ) {
        let think = [ThinkTime::default(), ThinkTime { mean: 3e-5, cv: 0.0 }, ThinkTime { mean: 1e-4, cv: 1.0 }][think];
        let workload = if sessions { chats(think, seed) } else { users(concurrency, think, seed) };
        let policy = || built_in(named).unwrap_or_else(|| Box::new(Chaotic::new(seed)) as Box<dyn Policy>);
        let cluster = cluster(topology, 40, LATENCY);
        let run = |single_steps| {
            let injections = injections.clone();
            let options = Options { seed, single_steps, injections, check_integrity: true, ..Options::default() };
            simulate(&cluster, &mut *workload.source(), policy(), &options, &mut Unwatched)
        };
        let result = run(false).map_err(|error| TestCaseError::fail(error.to_string()))?;
        let records = &result.log.requests;
        prop_assert_eq!(records.len(), workload.arrivals.len());
        prop_assert!(records.iter().all(|record| record.status != Status::Live && record.end.is_some()));
        if !sessions {
            let live = |at: Time| {
                records.iter().filter(|one| one.arrival <= at && one.end.is_some_and(|end| at < end)).count()
            };
            prop_assert!(records.iter().all(|record| live(record.arrival) <= concurrency));
        }
        let stepped = run(true).map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert_eq!(format!("{:?}", records), format!("{:?}", stepped.log.requests));
    }
}
