//! The rules of records and metrics, as kinds: outputs of no, one and two tokens; requests that end
//! before a milestone; who counts in goodput.

use kvrelay_core::cluster::{Role, WorkerId};
use kvrelay_core::event::{Action, Done, EndedRow, Event};
use kvrelay_core::kv::Naming;
use kvrelay_core::latency::{LatencyModel, Link};
use kvrelay_core::metrics::{
    Attainment, Distribution, PooledGaps, Rates, Window, goodput, makespan, throughput,
};
use kvrelay_core::policy::{BUILT_IN, built_in};
use kvrelay_core::record::{FinishReason, Log, RequestRecord, Status, Verdict};
use kvrelay_core::request::{Arrival, Request, RequestId, Scheduled};
use kvrelay_core::scheduler::{Belief, Limits, Scheduler, Setup, WorkerConfig};
use kvrelay_core::slo::Slo;
use kvrelay_core::step::Stretch;
use kvrelay_core::time::{Nanos, Picos, Time};
use kvrelay_core::watch::Unwatched;
use kvrelay_sim::{Injection, Options, SimCluster, simulate};
use kvrelay_tests::{Kinked, arrival, cluster, slo};
use proptest::prelude::*;
use std::sync::Arc;

/// 1 µs a step, 1 ns a token: prompts of 100 take 1.1 µs.
const PLAIN: Kinked = Kinked { constant: 1_000_000, per_token: 1_000, per_row: 0, per_context: 0, kink: 0 };

fn run(cluster: &SimCluster, arrivals: &[Arrival], policy: &str, options: &Options) -> Log {
    let mut source = Scheduled::new(arrivals.to_vec());
    let policy = built_in(policy).unwrap();
    let mut log = simulate(cluster, &mut source, policy, options, &mut Unwatched).unwrap().log;
    log.requests.sort_by_key(|record| record.id);
    log
}

fn cancelled(index: u64, at: u64) -> Options {
    Options { injections: vec![(Time(at), Injection::Cancel(index))], ..Options::default() }
}

fn cut_off(at: u64) -> Options {
    Options { until: Some(Time(at)), ..Options::default() }
}

fn tpots(requests: &[RequestRecord]) -> Distribution {
    Distribution::new(requests.iter().filter_map(RequestRecord::tpot))
}

/// What holds of the records of any run whatever.
fn check_records(log: &Log) -> Result<(), TestCaseError> {
    let mut gaps = 0;
    let mut span = 0.0;
    for record in &log.requests {
        let several = record.output_tokens >= 2;
        prop_assert_eq!(record.tpot().is_some(), several, "{:?}", record);
        prop_assert_eq!(record.max_gap.is_some(), several, "{:?}", record);
        prop_assert_eq!(record.first_token.is_some(), record.output_tokens > 0, "{:?}", record);
        prop_assert_eq!(record.last_token.is_some(), record.output_tokens > 0, "{:?}", record);
        prop_assert_eq!(record.ttft().is_some(), record.output_tokens > 0);
        prop_assert!(record.tpot().is_none_or(f64::is_finite));
        // Nothing lasts longer than the request was there: a missing milestone was not subtracted.
        let lived = record.end.unwrap() - record.arrival;
        let parts = [record.held(), record.queue(), record.prefill(), record.ttft(), record.e2e()];
        let between = [record.awaiting_room(), record.transfer(), record.decode_queue()];
        prop_assert!(parts.into_iter().chain(between).flatten().all(|part| part <= lived), "{:?}", record);
        prop_assert!(
            record.transfer_end.is_none_or(|end| record.transfer_start.unwrap() <= end),
            "{:?}",
            record
        );
        prop_assert!(record.last_token.is_none_or(|last| last <= record.end.unwrap()), "{:?}", record);
        if let (Some(first), Some(last)) = (record.first_token, record.last_token) {
            gaps += u64::from(record.output_tokens) - 1;
            span += (last - first).as_secs_f64();
        }
    }
    // Every gap is pooled once, those of requests that did not finish too.
    let pooled = PooledGaps::new(&log.gaps);
    prop_assert_eq!(pooled.count(), gaps);
    prop_assert_eq!(pooled.mean().is_some(), gaps > 0);
    let total = pooled.mean().unwrap_or(0.0) * gaps as f64;
    // Tokens are recorded in whole nanoseconds, gaps in picoseconds.
    let tolerance = 2e-9 * log.requests.len() as f64;
    prop_assert!((total - span).abs() <= tolerance, "gaps of {} s in {} s", total, span);
    prop_assert_eq!(
        tpots(&log.requests).count(),
        log.requests.iter().filter(|record| record.output_tokens >= 2).count()
    );
    Ok(())
}

fn latencies() -> impl Strategy<Value = Kinked> {
    (1u64..4_000, 0u64..300, 0u64..3_000, 0u64..60).prop_map(|(constant, per_token, per_row, per_context)| {
        Kinked { constant: constant * 777, per_token, per_row, per_context, kink: 300 }
    })
}

fn objectives() -> impl Strategy<Value = Slo> {
    let limit = || prop::option::of((1u64..40_000).prop_map(Nanos));
    (limit(), limit(), prop::option::of((1u64..400_000).prop_map(Nanos)), limit(), any::<bool>()).prop_map(
        |(ttft, tpot, e2e, max_gap, token_deadlines)| Slo { ttft, tpot, e2e, max_gap, token_deadlines },
    )
}

/// Many outputs of one and two tokens among longer ones.
fn arrivals() -> impl Strategy<Value = Vec<Arrival>> {
    let outputs = prop_oneof![Just(1u32), Just(2), 3u32..60];
    let one = (0u64..100_000, 1u32..150, outputs, objectives());
    prop::collection::vec(one, 1..20).prop_map(|all| {
        let mut all: Vec<_> = all
            .into_iter()
            .map(|(at, prompt, output, slo)| Arrival { slo, ..arrival(at, prompt, output) })
            .collect();
        all.sort_by_key(|arrival| arrival.at);
        all
    })
}

fn topologies() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["1M", "1P1D", "2P1D", "1P1D1M"])
}

/// Sets one objective.
type Objective = fn(&mut Slo, Nanos);

/// Pools in which reserved blocks keep nobody waiting.
const ROOMY: u32 = 1_000;

proptest! {
    #[test]
    fn records_of_short_outputs_and_lost_workers_are_whole(
        topology in topologies(),
        latency in latencies(),
        arrivals in arrivals(),
        policy in prop::sample::select(BUILT_IN.to_vec()),
        faults in prop::collection::vec((0u64..200_000, 0u64..20, 0u8..3), 0..6),
    ) {
        let cluster = cluster(topology, 40, latency);
        let mut injections = Vec::new();
        for (at, index, kind) in faults {
            let worker = WorkerId((index % cluster.workers.len() as u64) as u32);
            match kind {
                0 => injections.push((Time(at), Injection::FailTransfers { quiesced: true })),
                1 => {
                    injections.push((Time(at), Injection::WorkerDown(worker)));
                    injections.push((Time(at + 30_000), Injection::WorkerUp(worker)));
                }
                _ => injections.push((Time(at), Injection::Cancel(index))),
            }
        }
        check_records(&run(&cluster, &arrivals, policy, &Options { injections, check_integrity: true, ..Options::default() }))?;
    }

    /// A request that its client cancels, or that the end of the run cuts off, keeps what happened
    /// until then and nothing else; how long its worker's runs were planned does not matter.
    #[test]
    fn an_early_end_keeps_the_milestones_before_it_and_no_others(
        topology in topologies(),
        latency in latencies(),
        arrivals in arrivals(),
        policy in prop::sample::select(BUILT_IN.to_vec()),
        share in 0.0..1.0,
        index in any::<prop::sample::Index>(),
        by_client in any::<bool>(),
    ) {
        let index = index.index(arrivals.len());
        let runs = cluster(topology, ROOMY, latency);
        let whole = &run(&runs, &arrivals, policy, &Options::default()).requests[index];
        let lived = (whole.end.unwrap() - whole.arrival).0;
        prop_assume!(lived > 2);
        let at = whole.arrival.0 + 1 + ((lived - 2) as f64 * share) as u64;
        let options = if by_client { cancelled(index as u64, at) } else { cut_off(at) };
        let log = run(&runs, &arrivals, policy, &options);
        check_records(&log)?;
        let early = &log.requests[index];
        prop_assert_eq!(early.status, if by_client { Status::Cancelled } else { Status::CutOff });
        prop_assert_eq!((early.end, early.e2e()), (Some(Time(at)), None));
        let milestones = |record: &RequestRecord| {
            [record.admitted, record.prefill_start, record.first_token, record.transfer_start,
             record.transfer_end, record.decode_start]
        };
        for (early, whole) in milestones(early).into_iter().zip(milestones(whole)) {
            match whole {
                Some(time) if time < Time(at) => prop_assert_eq!(early, whole),
                // What falls on the very instant may go either way.
                Some(time) if time == Time(at) => prop_assert!(early.is_none() || early == whole),
                _ => prop_assert_eq!(early, None),
            }
        }
        // The verdict on an early end is never harder than that on the whole story.
        if whole.verdict() == Verdict::Good {
            prop_assert_eq!(early.verdict(), Verdict::Out, "{:?}", early);
        }
        // The plain twin: one step a run, so that each token is credited when it is emitted.
        let mut steps = runs.clone();
        steps.limits.max_repeat = 1;
        if policy != "goodput" {
            prop_assert_eq!(early, &run(&steps, &arrivals, policy, &options).requests[index]);
        }
    }

    /// Equality meets an objective, and one nanosecond less misses it, for every objective there is.
    #[test]
    fn objectives_hold_to_the_nanosecond(topology in topologies(), latency in latencies(), arrivals in arrivals()) {
        let log = run(&cluster(topology, 60, latency), &arrivals, "disaggregated", &Options::default());
        for record in log.requests.iter().filter(|record| record.status == Status::Finished) {
            let gaps = u64::from(record.output_tokens) - 1;
            let span = (record.last_token.unwrap() - record.first_token.unwrap()).0;
            let with = |change: Objective, value: u64| {
                let mut changed = RequestRecord { slo: Slo::default(), late_token: false, ..record.clone() };
                change(&mut changed.slo, Nanos(value));
                changed.verdict()
            };
            let ttft = record.ttft().unwrap().0;
            let e2e = record.e2e().unwrap().0;
            let mut cases: Vec<(Objective, u64)> = vec![
                (|slo, limit| slo.ttft = Some(limit), ttft),
                (|slo, limit| slo.e2e = Some(limit), e2e),
            ];
            if gaps > 0 {
                cases.push((|slo, limit| slo.tpot = Some(limit), span.div_ceil(gaps)));
                cases.push((|slo, limit| slo.max_gap = Some(limit), record.max_gap.unwrap().0.div_ceil(1_000)));
            } else {
                prop_assert_eq!(with(|slo, limit| slo.tpot = Some(limit), 0), Verdict::Good);
                prop_assert_eq!(with(|slo, limit| slo.max_gap = Some(limit), 0), Verdict::Good);
            }
            for (change, met) in cases {
                prop_assert_eq!(with(change, met), Verdict::Good);
                prop_assert_eq!(with(change, met - 1), Verdict::Miss);
            }
        }
    }
}

#[test]
fn a_workload_of_single_tokens_has_no_tpot_to_report_or_to_miss() {
    let arrivals: Vec<_> =
        (0..9).map(|at| Arrival { slo: slo(1.0, 1e-9), ..arrival(at * 100, 20, 1) }).collect();
    for topology in ["1M", "1P1D"] {
        let log = run(&cluster(topology, 64, PLAIN), &arrivals, "disaggregated", &Options::default());
        check_records(&log).unwrap();
        assert_eq!((tpots(&log.requests).count(), tpots(&log.requests).mean()), (0, None));
        let gaps = PooledGaps::new(&log.gaps);
        assert_eq!((gaps.count(), gaps.mean(), gaps.percentiles(&[50.0])), (0, None, None));
        let counts = Attainment::of(&log.requests, None);
        assert_eq!((counts.good, counts.offered, counts.ratio()), (9, 9, Some(1.0)));
        assert!(throughput(&log.requests).unwrap().0 > 0.0 && goodput(&log.requests).unwrap() > 0.0);
    }
}

#[test]
fn short_outputs_leave_the_averages_of_the_others_alone() {
    let lengths = [1, 2, 1, 5, 2, 1];
    let arrivals: Vec<_> =
        lengths.iter().zip(0..).map(|(output, at)| arrival(at * 100_000, 100, *output)).collect();
    let log = run(&cluster("1M", 64, PLAIN), &arrivals, "fcfs", &Options::default());
    let tpots = tpots(&log.requests);
    assert_eq!(tpots.count(), 3);
    assert!((tpots.mean().unwrap() - 1e-6).abs() < 1e-15, "each decode step takes 1 µs");
    assert_eq!(PooledGaps::new(&log.gaps).count(), 1 + 4 + 1);
}

/// An answer of no tokens: the model ends the sequence at once. Only a real model does, so the
/// scheduler is driven by hand.
#[test]
fn an_answer_of_no_tokens_is_finished_and_has_no_milestones_of_tokens() {
    let latency: Arc<dyn LatencyModel> = Arc::new(PLAIN);
    let setup = Setup {
        workers: vec![WorkerConfig { role: Role::Mixed, num_blocks: 8, stages: 1 }],
        limits: Limits::default(),
        prefix_caching: false,
        naming: Naming::All,
        early_transfers: false,
        belief: Belief { steps: vec![latency], link: Link::INSTANT, kv_bytes_per_token: 1 },
    };
    let mut scheduler = Scheduler::new(setup, built_in("fcfs").unwrap());
    scheduler.begin(Time::ZERO, 0).unwrap();
    let request = |ttft| Request {
        id: RequestId(0),
        arrival: Time(10),
        prompt_tokens: 5,
        max_tokens: 4,
        priority: 0,
        slo: slo(ttft, 1e-9),
        class: kvrelay_core::request::ClassId(0),
        prefix: Arc::default(),
    };
    let mut actions = Vec::new();
    scheduler.handle(Time(10), &[Event::Arrived(request(1e-6))], &mut actions).unwrap();
    let [Action::Run { worker, seq, .. }] = actions[..] else { panic!("{actions:?}") };
    let row = EndedRow { row: 0, reason: FinishReason::Stop, content: Arc::default() };
    let stretches = vec![Stretch::single(Picos(1_000_000))];
    let done = Done { worker, seq, stretches, emitted: vec![0], ended: vec![row] };
    actions.clear();
    scheduler.handle(Time(1_010), &[Event::Done(done), Event::Ready { worker, seq }], &mut actions).unwrap();
    assert_eq!(actions, [Action::Finish(RequestId(0))]);
    scheduler.check_idle().unwrap();
    let log = scheduler.take_log();
    check_records(&log).unwrap();
    let record = &log.requests[0];
    assert_eq!((record.status, record.output_tokens, record.tpot()), (Status::Finished, 0, None));
    assert_eq!((record.ttft(), record.e2e(), record.prefill()), (None, None, None));
    // Its end stands for the tokens it never had: in time here, one nanosecond late there.
    assert_eq!(record.verdict(), Verdict::Good);
    let late = RequestRecord { slo: slo(999e-9, 1e-9), ..record.clone() };
    assert_eq!(late.verdict(), Verdict::Miss);
    assert!(throughput(&log.requests).is_some_and(|(requests, tokens)| requests > 0.0 && tokens == 0.0));
}

/// Request 1 is cancelled while it queues, runs its prompt, moves, decodes.
#[test]
fn a_cancel_in_each_phase_leaves_later_milestones_missing() {
    // Prompts of 100 take 1.1 µs one after the other, 7 blocks of 1,600 bytes 700 ns + 11.2 µs.
    let mut config = cluster("1P1D", 200, PLAIN);
    config.limits.max_prefill_tokens = 100;
    let arrivals = [arrival(0, 100, 30), arrival(0, 100, 30), arrival(0, 100, 30)];
    let reached = |at: u64| {
        let log = run(&config, &arrivals, "disaggregated", &cancelled(1, at));
        check_records(&log).unwrap();
        let record = log.requests[1].clone();
        assert_eq!((record.status, record.end), (Status::Cancelled, Some(Time(at))));
        assert!(log.requests.iter().filter(|other| other.id.0 != 1).all(|other| other.e2e().is_some()));
        record
    };
    let queued = reached(1_000);
    assert_eq!((queued.queue(), queued.ttft(), queued.prefill_start), (None, None, None));
    let in_prefill = reached(2_000);
    assert_eq!((in_prefill.queue(), in_prefill.ttft()), (Some(Nanos(1_100)), None));
    let moving = reached(5_000);
    assert_eq!((moving.ttft(), moving.transfer(), moving.tpot()), (Some(Nanos(2_200)), None, None));
    assert_eq!((moving.awaiting_room(), moving.decode_queue()), (Some(Nanos(0)), None));
    let decoding = reached(20_000);
    assert_eq!((decoding.transfer(), decoding.e2e()), (Some(Nanos(11_900)), None));
    assert!((2..30).contains(&decoding.output_tokens), "in the middle of a run: {}", decoding.output_tokens);
    let since_token = decoding.end.unwrap() - decoding.last_token.unwrap();
    assert!(
        since_token < Nanos(1_000),
        "a step takes 1 µs, so a token came less than that ago: {since_token:?}"
    );
}

/// The five cases of who counts, each at its threshold.
#[test]
fn who_counts_in_goodput() {
    let config = cluster("1P1D", 200, PLAIN);
    // Alone, a prompt of 100 takes 1.1 µs, its move 11.9 µs, a step 1 µs.
    let exact = Slo { ttft: Some(Nanos(1_100)), tpot: Some(Nanos(12_900)), ..Slo::default() };
    let at = |index: u64, slo, output| Arrival { slo, ..arrival(index * 100_000, 100, output) };
    let arrivals = [
        at(0, exact, 2),
        at(1, Slo { ttft: Some(Nanos(1_099)), ..exact }, 2),
        at(2, Slo::default(), 2),
        at(3, exact, 2),
        at(4, exact, 1_000),
    ];
    let options = |until| Options {
        until: Some(Time(until)),
        injections: vec![(Time(305_000), Injection::FailTransfers { quiesced: true })],
        ..Options::default()
    };
    let log = run(&config, &arrivals, "disaggregated", &options(500_000));
    let requests = &log.requests;
    let told: Vec<_> = requests.iter().map(|record| (record.status, record.verdict())).collect();
    assert_eq!(
        told,
        [
            (Status::Finished, Verdict::Good),
            (Status::Finished, Verdict::Miss),
            (Status::Finished, Verdict::Out),
            (Status::Failed, Verdict::Miss),
            (Status::CutOff, Verdict::Out),
        ]
    );
    let counts = Attainment::of(requests, None);
    assert_eq!((counts.good, counts.offered, counts.out, counts.without_slo), (1, 3, 2, 1));
    assert_eq!(counts.ratio(), Some(1.0 / 3.0));
    // Cut off before its first token: in time up to the objective, missed one nanosecond later.
    let tight: Vec<_> = arrivals
        .iter()
        .map(|arrival| Arrival { slo: Slo { ttft: Some(Nanos(1_000)), ..exact }, ..arrival.clone() })
        .collect();
    for (until, verdict) in [(401_000, Verdict::Out), (401_001, Verdict::Miss)] {
        assert_eq!(run(&config, &tight, "disaggregated", &options(until)).requests[4].verdict(), verdict);
    }
}

/// A client that hangs on for a long time and leaves takes nothing from the others' goodput; one
/// that waited in vain does.
#[test]
fn makespan_ends_with_the_last_counted_event() {
    let config = cluster("1M", 64, PLAIN);
    let with = |ttft| Slo { ttft: Some(Nanos(ttft)), ..Slo::default() };
    let arrivals =
        |slo| vec![Arrival { slo, ..arrival(0, 100, 3) }, Arrival { slo, ..arrival(500, 100, 9_000) }];
    let seconds = |slo, options: &Options| {
        let log = run(&cluster("1M", 1_000, PLAIN), &arrivals(slo), "fcfs", options);
        (makespan(&log.requests).unwrap(), log)
    };
    // Both prompts run one after the other, then both decode.
    let (patient, log) = seconds(with(10_000), &cancelled(1, 1_900_000));
    let last = log.requests[1].last_token.unwrap();
    assert_eq!(log.requests[1].verdict(), Verdict::Out);
    assert!((patient - last.as_secs_f64()).abs() < 1e-15, "{patient}");
    let (impatient, log) = seconds(with(1_000), &cancelled(1, 1_900_000));
    assert_eq!(log.requests[1].verdict(), Verdict::Miss);
    assert!((impatient - 1_900_000e-9).abs() < 1e-15, "{impatient}");
    // A single request that leaves before anything happened: no event, no makespan, no goodput.
    let mut held = config;
    held.workers[0].latency = Arc::new(Kinked { constant: 1_000_000_000, ..PLAIN });
    let log =
        run(&held, &[Arrival { slo: with(10_000), ..arrival(0, 100, 3) }], "fcfs", &cancelled(0, 5_000));
    assert_eq!(
        (makespan(&log.requests), goodput(&log.requests), throughput(&log.requests)),
        (None, None, None)
    );
}

/// C05: 10 s of warm-up, 30 s of main phase, requests of 5 s; seven of them around the borders. The
/// arrival decides, and whoever counts keeps all its milestones, those after the border too.
#[test]
fn warm_up_requests_that_reach_into_the_main_phase_do_not_count() {
    const SECOND: u64 = 1_000_000_000;
    let window = Window { start: Time(10 * SECOND), end: Time(40 * SECOND) };
    // Cold: a first token after 4 s. Warm: after 1 s. The objective is 2 s.
    let record = |arrival: u64, ttft: u64| {
        let slo = Slo { ttft: Some(Nanos(2 * SECOND)), ..Slo::default() };
        let mut record = RequestRecord::new(&Request {
            id: RequestId(arrival),
            arrival: Time(arrival),
            prompt_tokens: 100,
            max_tokens: 11,
            priority: 0,
            slo,
            class: kvrelay_core::request::ClassId(0),
            prefix: Arc::default(),
        });
        (record.status, record.output_tokens) = (Status::Finished, 11);
        record.first_token = Some(Time(arrival + ttft * SECOND));
        record.last_token = Some(Time(arrival + 5 * SECOND));
        record.end = record.last_token;
        record
    };
    let border = [
        record(3 * SECOND, 4),      // over before the main phase
        record(7 * SECOND, 4),      // cold, and reaches into it
        record(10 * SECOND - 1, 4), // one nanosecond too early
        record(10 * SECOND, 1),     // the first that counts
        record(25 * SECOND, 1),
        record(40 * SECOND - 1, 1), // the last: its tokens come after the window
        record(40 * SECOND, 4),     // one nanosecond too late
    ];
    let counted: Vec<_> = border.iter().filter(|record| window.holds(record)).cloned().collect();
    assert_eq!(counted, border[3..6]);
    let attained = Attainment::of(&counted, None);
    assert_eq!((attained.good, attained.offered), (3, 3));
    let ttft = Distribution::new(counted.iter().filter_map(|r| r.ttft()).map(Nanos::as_secs_f64));
    assert_eq!((ttft.max(), ttft.mean()), (Some(1.0), Some(1.0)), "no cold start in the tail");
    let rates = Rates::of(&counted, Some(window.seconds())).unwrap();
    assert_eq!((rates.good, rates.finished, rates.output_tokens), (0.1, 0.1, 1.1));
    // All seven, over the makespan of 42 s, say something else: three good in seven.
    assert_eq!(goodput(&border), Some(3.0 / 42.0));
}
