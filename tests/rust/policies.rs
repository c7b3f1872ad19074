//! What policies do, and what happens when one fails.

use kvrelay_core::policy::{
    Admission, Batch, ClusterView, Decision, Policy, PolicyFault, Rebalance, RequestView, WorkerView,
    built_in,
};
use kvrelay_core::record::{Status, Verdict};
use kvrelay_core::request::{Arrival, Scheduled};
use kvrelay_core::time::{Nanos, Time};
use kvrelay_core::watch::Unwatched;
use kvrelay_sim::{Options, SimCluster, SimError, Simulation, simulate};
use kvrelay_tests::{Kinked, arrival, cluster, slo};

/// 1 µs a step, 1 ns a token: prompts of 100 take 1.1 µs.
const PLAIN: Kinked = Kinked { constant: 1_000_000, per_token: 1_000, per_row: 0, per_context: 0, kink: 0 };

fn run(
    cluster: &SimCluster,
    arrivals: Vec<Arrival>,
    policy: Box<dyn Policy>,
) -> Result<Simulation, SimError> {
    let options = Options { check_integrity: true, ..Options::default() };
    simulate(cluster, &mut Scheduled::new(arrivals), policy, &options, &mut Unwatched)
}

#[test]
fn a_request_no_pool_can_hold_is_refused_with_both_numbers_and_the_rest_runs() {
    for topology in ["1M", "1P1D"] {
        let mut arrivals = vec![arrival(0, 65 * 16, 1)];
        arrivals.extend((1..6).map(|at| arrival(at, 20, 5)));
        let result = run(&cluster(topology, 64, PLAIN), arrivals, built_in("fcfs").unwrap()).unwrap();
        let refused = &result.log.requests[0];
        let reason = refused.reason.as_deref().unwrap();
        assert_eq!((refused.id.0, refused.status, refused.end), (0, Status::Refused, Some(Time(0))));
        assert!(reason.contains("65 KV blocks") && reason.contains("has 64"), "{reason}");
        assert!(result.log.requests[1..].iter().all(|record| record.status == Status::Finished));
    }
}

#[test]
fn a_workload_of_oversized_requests_ends() {
    let arrivals = (0..20).map(|at| arrival(at, 57 * 16, 4)).collect();
    let result = run(&cluster("1M", 50, PLAIN), arrivals, built_in("chunked").unwrap()).unwrap();
    assert!(result.log.requests.iter().all(|record| record.status == Status::Refused));
    assert!(result.log.steps.is_empty());
}

#[test]
fn prefill_first_stalls_decode_and_chunks_do_not() {
    let worst_gap = |policy: &str| {
        let mut config = cluster("1M", 4_000, PLAIN);
        config.limits.max_prefill_tokens = 8_192;
        let arrivals = vec![arrival(0, 16, 40), arrival(5_000, 8_000, 2)];
        let result = run(&config, arrivals, built_in(policy).unwrap()).unwrap();
        let first = result.log.requests.iter().find(|record| record.id.0 == 0).unwrap();
        first.max_gap.unwrap().0
    };
    assert_eq!(worst_gap("fcfs"), 1_000_000 + 9_000_000, "the whole prompt, then its own step");
    assert_eq!(worst_gap("chunked"), 1_000_000 + 511_000);
}

#[test]
fn goodput_serves_by_deadline_and_the_hopeless_last() {
    // While request 0 runs, three more queue up: a late one, a loose one, an urgent one.
    let with = |at, ttft| Arrival { slo: slo(ttft, 1.0), ..arrival(at, 200, 1) };
    let arrivals = vec![with(0, 1.0), with(10, 100e-9), with(20, 1e-3), with(30, 3.5e-6)];
    let order = |policy: &str| {
        let result = run(&cluster("1P1D", 200, PLAIN), arrivals.clone(), built_in(policy).unwrap()).unwrap();
        let good = result.log.requests.iter().filter(|record| record.verdict() == Verdict::Good).count();
        (result.log.requests.iter().map(|record| record.id.0).collect::<Vec<_>>(), good)
    };
    assert_eq!(order("disaggregated"), (vec![0, 1, 2, 3], 2));
    assert_eq!(order("goodput"), (vec![0, 3, 2, 1], 3));
}

#[test]
fn goodput_preempts_a_long_prompt_at_a_chunk_border() {
    let mut config = cluster("1P1D", 4_000, PLAIN);
    config.limits.max_prefill_tokens = 8_192;
    let long = Arrival { slo: slo(1.0, 1.0), ..arrival(0, 8_000, 1) };
    let short = Arrival { slo: slo(4e-6, 1.0), ..arrival(100, 100, 1) };
    let result = run(&config, vec![long, short], built_in("goodput").unwrap()).unwrap();
    assert_eq!(result.log.requests[0].id.0, 1, "the short one overtakes");
    assert!(result.log.requests.iter().all(|record| record.verdict() == Verdict::Good));
}

#[test]
fn goodput_keeps_a_decode_batch_within_everybodys_tpot() {
    // A step of B rows takes 1 + B µs, so a TPOT of 4.5 µs bears batches of 3.
    let latency = Kinked { per_row: 1_000_000, ..PLAIN };
    let arrivals: Vec<_> =
        (0..6).map(|at| Arrival { slo: slo(1.0, 4.5e-6), ..arrival(at, 16, 50) }).collect();
    let good = |policy: &str| {
        let result =
            run(&cluster("1P1D", 400, latency.clone()), arrivals.clone(), built_in(policy).unwrap()).unwrap();
        let largest = result.log.steps.iter().map(|step| step.shape.num_decode).max().unwrap();
        let good = result.log.requests.iter().filter(|record| record.verdict() == Verdict::Good).count();
        (largest, good)
    };
    let (largest, good_everyone) = good("disaggregated");
    assert_eq!((largest, good_everyone), (6, 0));
    let (largest, good_guarded) = good("goodput");
    assert!(largest <= 5 && good_guarded >= 3, "batches of {largest}, {good_guarded} good");
}

#[test]
fn goodput_outlives_a_decode_worker_that_cannot_keep_up() {
    // A step of B rows takes 1 + B µs: with a TPOT of 9 µs the decode worker bears batches of 8,
    // while the prefill workers could feed it several times as much.
    let latency = Kinked { per_row: 1_000_000, ..PLAIN };
    let with = |at: u64| Arrival { slo: slo(1e-3, 9e-6), ..arrival(at * 8_000, 16, 40) };
    let good = |policy: &str| {
        let arrivals = (0..200).map(with).collect();
        let result =
            run(&cluster("2P1D", 4_000, latency.clone()), arrivals, built_in(policy).unwrap()).unwrap();
        assert!(result.log.requests.iter().all(|record| record.status == Status::Finished));
        result.log.requests.iter().filter(|record| record.verdict() == Verdict::Good).count()
    };
    let (everyone, guarded) = (good("disaggregated"), good("goodput"));
    println!("{guarded} good, and {everyone} without a guard");
    assert!(guarded > 2 * everyone, "{guarded} good, and {everyone} without a guard");
}

#[test]
fn a_started_prompt_goes_on_however_far_back_in_the_queue_it_is() {
    // Tight pools, small batches and mixed deadlines: preempted requests come to the front while a
    // prompt that has its blocks stands behind more of the queue than a batch may hold.
    let mut config = cluster("2M", 40, Kinked { per_row: 400_000, ..PLAIN });
    config.limits.max_batch = 2;
    let arrivals: Vec<_> = (0..120u64)
        .map(|i| {
            let prompt = 20 + (i * 97 % 300) as u32;
            Arrival {
                slo: slo(1e-6 * (1 + i * 13 % 40) as f64, 3e-6),
                ..arrival(i * 900, prompt, 1 + (i * 31 % 60) as u32)
            }
        })
        .collect();
    for policy in ["fcfs", "chunked", "goodput"] {
        let result = run(&config, arrivals.clone(), built_in(policy).unwrap()).unwrap();
        assert!(result.log.requests.iter().all(|record| record.status == Status::Finished), "{policy}");
    }
}

/// Fails in one method, after having worked for a while.
struct Failing {
    method: &'static str,
    calls: u32,
}

#[derive(Debug, thiserror::Error)]
#[error("the {0}th call is one too many")]
struct TooMany(u32);

impl Failing {
    fn call(&mut self, method: &'static str) -> Decision<()> {
        if method != self.method {
            return Ok(());
        }
        self.calls += 1;
        if self.calls < 4 {
            return Ok(());
        }
        Err(PolicyFault::Raised { method, source: Box::new(TooMany(self.calls)) })
    }
}

impl Policy for Failing {
    fn name(&self) -> String {
        "failing".to_owned()
    }

    fn admit(&mut self, _: &RequestView<'_>, _: &ClusterView<'_>) -> Decision<Admission> {
        self.call("admit").map(|()| Admission::Accept)
    }

    fn batch(&mut self, worker: &WorkerView<'_>) -> Decision<Batch> {
        self.call("batch").map(|()| kvrelay_core::policy::default_batch(worker))
    }
}

#[test]
fn a_policys_error_ends_a_simulation_and_comes_out_as_itself() {
    for method in ["admit", "batch"] {
        let arrivals = (0..9).map(|at| arrival(at * 10_000, 20, 5)).collect();
        let error =
            run(&cluster("1M", 64, PLAIN), arrivals, Box::new(Failing { method, calls: 0 })).unwrap_err();
        let SimError::Policy(PolicyFault::Raised { method: told, source }) = error else { panic!("{error}") };
        assert_eq!(told, method);
        assert_eq!(source.downcast_ref::<TooMany>().unwrap().0, 4);
    }
}

/// Answers with one fixed batch or placement.
struct Wrong(Batch);

impl Policy for Wrong {
    fn name(&self) -> String {
        "wrong".to_owned()
    }

    fn batch(&mut self, _: &WorkerView<'_>) -> Decision<Batch> {
        Ok(self.0.clone())
    }
}

#[test]
fn impossible_answers_are_refused_before_anything_changes() {
    use kvrelay_core::request::RequestId;
    let id = RequestId;
    let cases = [
        (
            Batch { prefill: vec![(id(7), 1)], ..Batch::default() },
            "request 7, which does not wait at worker 0",
        ),
        (Batch { prefill: vec![(id(0), 0)], ..Batch::default() }, "0 prompt tokens of request 0"),
        (Batch { decode: Some(vec![id(0)]), ..Batch::default() }, "does not decode at worker 0"),
        (Batch { prefill: vec![(id(0), 1), (id(0), 1)], ..Batch::default() }, "request 0 named twice"),
        (
            Batch { prefill: vec![(id(0), 200), (id(1), 200)], ..Batch::default() },
            "400 prompt tokens in a step, the limit is 256",
        ),
        (Batch { repeat: Some(0), ..Batch::default() }, "repeat of 0"),
        (Batch { wake_at: Some(Time(0)), ..Batch::default() }, "wake_at t=0.000000000s, which is not after"),
    ];
    for (batch, expected) in cases {
        let arrivals = vec![arrival(5_000, 200, 5), arrival(5_000, 200, 5)];
        let error = run(&cluster("1M", 64, PLAIN), arrivals, Box::new(Wrong(batch))).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_policy_that_does_nothing_is_told_so_instead_of_hanging() {
    let arrivals = vec![arrival(5, 20, 5)];
    let idle = Wrong(Batch { decode: Some(Vec::new()), ..Batch::default() });
    let error = run(&cluster("1M", 64, PLAIN), arrivals, Box::new(idle)).unwrap_err();
    assert!(matches!(error, SimError::Stalled { num_live: 1, first: 0, .. }), "{error}");
}

/// Wants to be asked for roles every microsecond, for ever.
struct Ticking;

impl Policy for Ticking {
    fn name(&self) -> String {
        "ticking".to_owned()
    }

    fn rebalance(&mut self, cluster: &ClusterView<'_>) -> Decision<Rebalance> {
        Ok(Rebalance { roles: Vec::new(), next: Some(cluster.now() + Nanos(1_000)) })
    }
}

#[test]
fn a_policy_that_ticks_for_ever_does_not_keep_a_simulation_going() {
    let result = run(&cluster("1M", 64, PLAIN), vec![arrival(5, 20, 5)], Box::new(Ticking)).unwrap();
    assert_eq!(result.log.requests[0].status, Status::Finished);
    assert!(result.end < Time(50_000), "{:?}", result.end);
}

/// Holds every request for a fixed time.
struct Holding(Nanos);

impl Policy for Holding {
    fn name(&self) -> String {
        "holding".to_owned()
    }

    fn admit(&mut self, request: &RequestView<'_>, cluster: &ClusterView<'_>) -> Decision<Admission> {
        let until = request.arrival() + self.0;
        Ok(if cluster.now() < until { Admission::Hold(until) } else { Admission::Accept })
    }
}

#[test]
fn a_hold_is_part_of_the_ttft() {
    let result =
        run(&cluster("1M", 64, PLAIN), vec![arrival(50, 20, 5)], Box::new(Holding(Nanos(3_000)))).unwrap();
    let record = &result.log.requests[0];
    assert_eq!((record.held(), record.queue()), (Some(Nanos(3_000)), Some(Nanos(0))));
    assert_eq!(record.ttft(), Some(Nanos(3_000 + 1_020)));
}
