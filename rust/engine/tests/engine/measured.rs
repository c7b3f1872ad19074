//! Workloads through a real engine.

use std::ops::ControlFlow;

use kvrelay_core::policy::{Batch, ClusterView, Decision, Placement, Policy, RequestView, WorkerView};
use kvrelay_core::record::{Log, RequestRecord, Status};
use kvrelay_core::request::{Arrival, PromptContent, Scheduled, Source};
use kvrelay_core::time::{Nanos, Time};
use kvrelay_core::watch::{Unwatched, Watch};
use kvrelay_engine::{Engine, EngineConfig, EngineError, RunOptions};

use crate::common::{alone, answer, config, engine, guarded, ids, model, policy, submission};
use kvrelay_model::SamplingParams;

/// Arrivals every half a millisecond.
fn arrivals(count: u32) -> Vec<Arrival> {
    let arrival = |i: u32| Arrival {
        at: Time(u64::from(i) * 500_000),
        prompt_tokens: 5 + i * 13 % 70,
        output_tokens: 1 + i * 7 % 20,
        max_tokens: 40,
        ..Arrival::default()
    };
    (0..count).map(arrival).collect()
}

fn source(arrivals: &[Arrival]) -> Box<dyn Source + Send> {
    Box::new(Scheduled::new(arrivals.to_vec()))
}

fn by_id(log: &Log) -> Vec<RequestRecord> {
    let mut records = log.requests.clone();
    records.sort_by_key(|record| record.id);
    records
}

#[test]
fn a_workload_has_its_arrivals_and_its_exact_lengths() {
    for (topology, name) in [("2M", "chunked"), ("1P1D", "goodput"), ("2P2D", "disaggregated")] {
        let engine = engine(topology, "fcfs");
        let all = arrivals(24);
        let run =
            engine.run(source(&all), Some(policy(name)), RunOptions::default(), &mut Unwatched).unwrap();
        assert_eq!(run.policy, name);
        let records = by_id(&run.log);
        assert_eq!(records.len(), 24);
        for (record, arrival) in records.iter().zip(&all) {
            assert_eq!(record.status, Status::Finished);
            assert_eq!((record.arrival, record.output_tokens), (arrival.at, arrival.output_tokens));
            assert!(record.first_token.unwrap() > arrival.at && record.end.unwrap() <= run.end);
        }
        let emitted: u64 = run.log.steps.iter().map(|step| step.emitted).sum();
        assert_eq!(emitted, all.iter().map(|arrival| u64::from(arrival.output_tokens)).sum::<u64>());
        // And the engine serves as before.
        let handle = engine.submit(submission(ids(9, 20), 6)).unwrap();
        assert_eq!(answer(&handle).ids, alone(&ids(9, 20), 6, SamplingParams::default()));
        engine.check_idle().unwrap();
    }
}

#[test]
fn prompts_share_prefixes_where_the_trace_does() {
    let engine = engine("1M", "fcfs");
    let content = PromptContent::HashIds { ids: [7, 8].into(), tokens_per_id: 32 };
    let arrival = |at| Arrival { at: Time(at), content: content.clone(), ..arrivals(1)[0].clone() };
    let shared: Vec<Arrival> =
        [0, 200_000_000].map(|at| Arrival { prompt_tokens: 64, output_tokens: 3, ..arrival(at) }).to_vec();
    let run = engine.run(source(&shared), None, RunOptions::default(), &mut Unwatched).unwrap();
    let cached: Vec<u32> = by_id(&run.log).iter().map(|record| record.cached_tokens).collect();
    assert_eq!(cached, [0, 48], "of a whole prompt in the cache the last token is computed all the same");
    // Each run begins with a cold cache.
    let again = engine.run(source(&shared), None, RunOptions::default(), &mut Unwatched).unwrap();
    assert_eq!(by_id(&again.log)[0].cached_tokens, 0);
}

/// Breaks at its first look.
struct Impatient;

impl Watch for Impatient {
    fn look(&mut self, _: u64, _: u64, _: Time) -> ControlFlow<()> {
        ControlFlow::Break(())
    }
}

#[test]
fn an_interrupted_run_leaves_a_working_engine() {
    let engine = engine("1P1D", "disaggregated");
    let mut long = arrivals(30);
    // Never ends by itself while this test lasts.
    long.push(Arrival { at: Time(3_600_000_000_000), ..long[0].clone() });
    let interrupted = engine.run(source(&long), None, RunOptions::default(), &mut Impatient);
    assert!(matches!(interrupted, Err(EngineError::Interrupted)));
    engine.check_idle().unwrap();
    let run = engine.run(source(&arrivals(5)), None, RunOptions::default(), &mut Unwatched).unwrap();
    assert!(run.log.requests.iter().all(|record| record.status == Status::Finished));
    assert_eq!(run.log.requests.len(), 5);
}

#[test]
fn the_end_of_a_runs_time_cuts_off_what_is_live() {
    let engine = engine("1M", "fcfs");
    let mut all = arrivals(3);
    // The second cannot be over by then; the third never arrives.
    all[1] = Arrival { prompt_tokens: 200, output_tokens: 50, max_tokens: 50, ..all[1].clone() };
    all[2].at = Time(3_600_000_000_000);
    let until = Time(4_000_000);
    let options = RunOptions { until: Some(until), ..RunOptions::default() };
    let run = engine.run(source(&all), None, options, &mut Unwatched).unwrap();
    let records = by_id(&run.log);
    assert_eq!(records.len(), 2);
    assert_eq!((records[1].status, records[1].end), (Status::CutOff, Some(until)));
    assert!(run.end <= until);
    engine.check_idle().unwrap();
}

/// What is submitted while a run is measured waits for its end, and may still be cancelled.
#[test]
fn submissions_wait_for_a_run_and_a_run_for_them() {
    let engine = std::sync::Arc::new(engine("1M", "fcfs"));
    let before = engine.submit(submission(ids(1, 40), 30)).unwrap();
    let (inside, entered) = std::sync::mpsc::channel();
    let measured = {
        let engine = engine.clone();
        std::thread::spawn(move || {
            let all = [arrivals(1)[0].clone(), Arrival { at: Time(400_000_000), ..arrivals(1)[0].clone() }];
            let mut watch = Tell(Some(inside));
            engine.run(source(&all), None, RunOptions::default(), &mut watch)
        })
    };
    entered.recv_timeout(crate::common::HANG).unwrap();
    let during = engine.submit(submission(ids(2, 20), 5)).unwrap();
    let unwanted = engine.submit(submission(ids(3, 20), 5)).unwrap();
    unwanted.cancel();
    assert_eq!(answer(&unwanted).record.status, Status::Cancelled);
    let run = guarded(move || measured.join().unwrap()).unwrap();
    assert_eq!(run.log.requests.len(), 2);
    assert_eq!(answer(&before).ids, alone(&ids(1, 40), 30, SamplingParams::default()));
    assert_eq!(answer(&during).ids, alone(&ids(2, 20), 5, SamplingParams::default()));
    engine.check_idle().unwrap();
}

/// Says once that an arrival has come.
struct Tell(Option<std::sync::mpsc::Sender<()>>);

impl Watch for Tell {
    fn look(&mut self, arrived: u64, _: u64, _: Time) -> ControlFlow<()> {
        if arrived > 0
            && let Some(tell) = self.0.take()
        {
            tell.send(()).unwrap();
        }
        ControlFlow::Continue(())
    }
}

/// A source that lets the next one come only when the last is over.
struct OneByOne {
    left: Vec<Arrival>,
    busy: bool,
    now: Time,
}

impl Source for OneByOne {
    fn next_at(&mut self) -> Option<Time> {
        (!self.busy && !self.left.is_empty()).then_some(self.now)
    }

    fn pull(&mut self) -> Option<Arrival> {
        self.busy = true;
        self.left.pop().map(|arrival| Arrival { at: self.now, ..arrival })
    }

    fn completed(&mut self, _: u64, at: Time) {
        (self.busy, self.now) = (false, at + Nanos(1_000));
    }
}

#[test]
fn closed_loops_are_workloads_like_any_other() {
    let engine = engine("1P1D", "disaggregated");
    let source = OneByOne { left: arrivals(6), busy: false, now: Time::ZERO };
    let run = engine.run(Box::new(source), None, RunOptions::default(), &mut Unwatched).unwrap();
    let records = by_id(&run.log);
    assert_eq!(records.len(), 6);
    assert!(records.windows(2).all(|pair| pair[0].end.unwrap() < pair[1].arrival));
}

/// Fails at the `n`-th batch.
struct Failing(u32);

impl Policy for Failing {
    fn name(&self) -> String {
        "failing".into()
    }

    fn batch(&mut self, worker: &WorkerView<'_>) -> Decision<Batch> {
        self.0 = self.0.saturating_sub(1);
        if self.0 > 0 {
            return Ok(kvrelay_core::policy::default_batch(worker));
        }
        let source = "on purpose".into();
        Err(kvrelay_core::policy::PolicyFault::Raised { method: "batch", source })
    }
}

/// Places nobody.
struct Idle;

impl Policy for Idle {
    fn name(&self) -> String {
        "idle".into()
    }

    fn place(&mut self, _: &RequestView<'_>, _: &ClusterView<'_>) -> Decision<Option<Placement>> {
        Ok(None)
    }
}

#[test]
fn a_policy_that_fails_ends_its_run_and_nobody_else_s() {
    let engine = engine("1M", "fcfs");
    let failed =
        engine.run(source(&arrivals(10)), Some(Box::new(Failing(2))), RunOptions::default(), &mut Unwatched);
    let text = failed.unwrap_err().to_string();
    assert!(text.contains("`batch` failed: on purpose"), "{text}");
    engine.check_idle().unwrap();
    assert_eq!(engine.policy_faults().0, 0, "serving was under another policy");
    assert_eq!(answer(&engine.submit(submission(ids(1, 20), 4)).unwrap()).ids.len(), 4);
}

#[test]
fn serving_goes_on_under_fcfs_when_its_policy_fails() {
    let engine = Engine::new(model(), config("1P1D"), Box::new(Failing(2))).unwrap();
    let handles: Vec<_> = (0..6).map(|i| engine.submit(submission(ids(i, 20), 8)).unwrap()).collect();
    for (i, handle) in handles.iter().enumerate() {
        assert_eq!(answer(handle).ids, alone(&ids(i as u64, 20), 8, SamplingParams::default()));
    }
    let (count, latest) = engine.policy_faults();
    assert_eq!((count, latest.unwrap().contains("on purpose")), (1, true));
    engine.set_policy(policy("goodput")).unwrap();
    assert_eq!(answer(&engine.submit(submission(ids(1, 20), 4)).unwrap()).ids.len(), 4);
    engine.check_idle().unwrap();
}

#[test]
fn a_policy_that_leaves_work_undone_is_an_error_and_no_hang() {
    let engine = Engine::new(model(), config("1P1D"), Box::new(Idle)).unwrap();
    let record = answer(&engine.submit(submission(ids(1, 20), 4)).unwrap()).record;
    assert_eq!(record.status, Status::Failed);
    assert_eq!(record.reason.unwrap().as_ref(), "the policy left it with nothing under way");
    let stalled = engine.run(source(&arrivals(3)), None, RunOptions::default(), &mut Unwatched);
    assert!(matches!(stalled, Err(EngineError::Stalled { num_live: 3, first: 0 })), "{stalled:?}");
    engine.set_policy(policy("fcfs")).unwrap();
    assert_eq!(answer(&engine.submit(submission(ids(1, 20), 4)).unwrap()).ids.len(), 4);
    engine.check_idle().unwrap();
}

/// The loop's thread can be wrapped, and its body runs once.
#[test]
fn the_loop_can_be_wrapped() {
    let (tell, told) = std::sync::mpsc::channel();
    let around_loop: kvrelay_engine::AroundLoop = Box::new(move |body| {
        tell.send("before").unwrap();
        body();
        tell.send("after").unwrap();
    });
    let config = EngineConfig { around_loop: Some(around_loop), ..config("1M") };
    let engine = Engine::new(model(), config, policy("fcfs")).unwrap();
    assert_eq!(told.recv().unwrap(), "before");
    assert_eq!(answer(&engine.submit(submission(ids(1, 20), 4)).unwrap()).ids.len(), 4);
    drop(engine);
    assert_eq!(told.recv().unwrap(), "after");
}
