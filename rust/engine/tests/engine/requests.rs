//! Requests as their callers see them: answers, refusals, cancellations, threads, shutdown.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use kvrelay_core::policy::{Admission, ClusterView, Decision, Policy, RequestView};
use kvrelay_core::record::{FinishReason, Status};
use kvrelay_core::time::Nanos;
use kvrelay_engine::{Engine, EngineConfig, EngineError, Handle, Output, Submission};
use kvrelay_model::SamplingParams;

use crate::common::{
    BLOCK, alone, answer, config, engine, guarded, ids, model, next, policy, submission, troubled,
};
use crate::doubles::{Gate, Slow, Trouble};

#[test]
fn a_request_gives_its_tokens_text_and_record() {
    for topology in ["1M", "1P1D"] {
        let engine = engine(topology, "disaggregated");
        let answer = answer(&engine.submit(submission(ids(1, 20), 12)).unwrap());
        assert_eq!(answer.ids, alone(&ids(1, 20), 12, SamplingParams::default()));
        assert_eq!(answer.text, model().tokenizer().decode(&answer.ids));
        assert_eq!((answer.record.status, answer.reason), (Status::Finished, Some(FinishReason::Length)));
        assert_eq!((answer.record.prompt_tokens, answer.record.output_tokens), (20, 12));
        let moved = topology == "1P1D";
        assert_eq!(answer.record.prefill_worker == answer.record.decode_worker, !moved);
        assert_eq!(answer.record.transfer_start.is_some(), moved);
        let record = answer.record;
        let parts = record.held().unwrap().0 + record.queue().unwrap().0 + record.prefill().unwrap().0;
        assert_eq!(record.ttft().unwrap().0, parts, "the parts make up the whole");
        engine.check_idle().unwrap();
    }
}

/// What is wrong with one request is an error for it alone, with the names and numbers.
#[test]
fn bad_requests_are_refused_alone() {
    let engine = engine("1P1D", "fcfs");
    let good: Vec<Handle> = (0..3).map(|i| engine.submit(submission(ids(i, 30), 20)).unwrap()).collect();
    let sampled = |sampling| Submission { sampling, ..submission(ids(1, 4), 4) };
    let params = SamplingParams::default();
    let cases = [
        (submission(vec![], 4), "request: prompt: expected at least 1 token, found 0 tokens"),
        (submission(vec![3, 288], 4), "request: prompt: expected token ids below 288, found 288"),
        (submission(vec![3], 0), "request: max_tokens: expected at least 1, found 0"),
        (submission(ids(1, 200), 57), "expected at most 256 tokens (max_model_len), found 200 + 57 = 257"),
        (sampled(SamplingParams { temperature: f32::NAN, ..params }), "temperature: expected"),
        (sampled(SamplingParams { top_k: -2, ..params }), "top_k: expected"),
        (sampled(SamplingParams { top_p: 0.0, ..params }), "top_p: expected"),
    ];
    for (bad, text) in cases {
        let error = engine.submit(bad).unwrap_err().to_string();
        assert!(error.contains(text), "{error} lacks {text}");
    }
    for (i, handle) in good.iter().enumerate() {
        assert_eq!(answer(handle).ids, alone(&ids(i as u64, 30), 20, params));
    }
    engine.check_idle().unwrap();
}

/// A request that fits the model but no pool is refused at once; those behind it run.
#[test]
fn what_no_pool_could_hold_is_refused_with_both_numbers() {
    let config = EngineConfig { kv_blocks: Some(4), ..config("1P1D") };
    let engine = Engine::new(model(), config, policy("disaggregated")).unwrap();
    let large = engine.submit(submission(ids(0, 60), 30)).unwrap();
    let small: Vec<Handle> = (1..6).map(|i| engine.submit(submission(ids(i, 10), 5)).unwrap()).collect();
    let refused = answer(&large);
    assert_eq!((refused.record.status, refused.reason), (Status::Refused, None));
    let reason = refused.record.reason.unwrap();
    assert!(reason.contains("90 tokens needs 6 KV blocks, but the largest pool has 4"), "{reason}");
    for handle in &small {
        assert_eq!(answer(handle).record.status, Status::Finished);
    }
    engine.check_idle().unwrap();
}

/// Each row of a batch has its own settings, and values that mean "off" are off.
#[test]
fn greedy_and_sampled_rows_mix() {
    let engine = engine("1M", "fcfs");
    let settings = [-1, 0, 1, 5, 288, 289, 1_000_000_000].map(|top_k| SamplingParams {
        temperature: if top_k == 5 { 0.0 } else { 1.5 },
        top_k,
        top_p: 0.95,
        seed: 11,
    });
    let submit = |sampling| engine.submit(Submission { sampling, ..submission(ids(4, 25), 15) }).unwrap();
    let handles = settings.map(submit);
    let answers = handles.map(|handle| answer(&handle).ids);
    for (found, sampling) in answers.iter().zip(settings) {
        assert_eq!(*found, alone(&ids(4, 25), 15, sampling), "{sampling:?}");
    }
    assert_eq!(answers[0], answers[1]);
    assert_eq!(answers[0], answers[4]);
    assert_eq!(answers[2], answers[3], "one candidate is greedy");
    engine.check_idle().unwrap();
}

/// Admission holds everybody, for longer than any test.
struct Holding;

impl Policy for Holding {
    fn name(&self) -> String {
        "holding".into()
    }

    fn admit(&mut self, _: &RequestView<'_>, cluster: &ClusterView<'_>) -> Decision<Admission> {
        Ok(Admission::Hold(cluster.now() + Nanos(3_600_000_000_000)))
    }
}

/// Milestones that were not reached are missing, wherever a client leaves.
#[test]
fn a_cancelled_request_has_the_milestones_it_reached() {
    // Held by admission.
    let held = Engine::new(model(), config("1M"), Box::new(Holding)).unwrap();
    let handle = held.submit(submission(ids(1, 20), 5)).unwrap();
    handle.cancel();
    let record = answer(&handle).record;
    assert_eq!((record.status, record.admitted, record.prefill_start), (Status::Cancelled, None, None));
    assert_eq!((record.ttft(), record.tpot(), record.e2e(), record.queue()), (None, None, None, None));
    held.check_idle().unwrap();

    // In prefill.
    let gate = Gate::default();
    let engine = troubled(config("1M"), 0, Trouble::Gate(gate.clone()), "fcfs");
    let _open = gate.at_last();
    let handle = engine.submit(submission(ids(1, 20), 5)).unwrap();
    gate.wait_for(1);
    let queued = engine.submit(submission(ids(2, 20), 5)).unwrap();
    queued.cancel();
    let record = answer(&queued).record;
    assert_eq!((record.status, record.prefill_start, record.queue()), (Status::Cancelled, None, None));
    handle.cancel();
    engine.check_integrity().unwrap();
    gate.open();
    let record = answer(&handle).record;
    assert!(record.prefill_start.is_some());
    assert_eq!((record.first_token, record.prefill(), record.output_tokens), (None, None, 0));
    engine.check_idle().unwrap();
}

/// A block belongs to its request and to its transfer until both let go.
#[test]
fn a_request_cancelled_in_transfer_ends_at_once_and_its_blocks_later() {
    let slow = Slow::default();
    let config = EngineConfig { transport: Some(slow.transport()), ..config("1P1D") };
    let engine = Engine::new(model(), config, policy("disaggregated")).unwrap();
    let handles: Vec<Handle> = (0..3).map(|i| engine.submit(submission(ids(i, 40), 8)).unwrap()).collect();
    slow.wait_for(3);
    handles[1].cancel();
    let cancelled = answer(&handles[1]);
    assert_eq!((cancelled.ids.len(), cancelled.record.output_tokens), (1, 1));
    assert!(cancelled.record.first_token.is_some() && cancelled.record.transfer_start.is_some());
    assert_eq!((cancelled.record.transfer_end, cancelled.record.decode_start), (None, None));
    slow.wait_for_aborts(1);
    engine.check_integrity().unwrap();
    slow.release();
    for (i, handle) in handles.iter().enumerate().filter(|(i, _)| *i != 1) {
        assert_eq!(answer(handle).ids, alone(&ids(i as u64, 40), 8, SamplingParams::default()));
    }
    engine.check_idle().unwrap();
}

/// Dropping a handle cancels: a client that leaves costs no more than the chunk in progress.
#[test]
fn a_dropped_handle_frees_its_blocks() {
    let engine = engine("1P1D", "disaggregated");
    let handle = engine.submit(submission(ids(1, 30), 200)).unwrap();
    assert!(matches!(next(&handle), Some(Output::Token { .. })));
    drop(handle);
    engine.check_idle().unwrap();
}

#[test]
fn threads_submit_at_once() {
    let engine = Arc::new(engine("2M", "fcfs"));
    let threads: Vec<_> = (0..4)
        .map(|thread: u64| {
            let engine = engine.clone();
            std::thread::spawn(move || {
                let prompt = |i: u64| ids(thread * 100 + i, 10 + i as u32 * 7);
                let handles: Vec<Handle> =
                    (0..6).map(|i| engine.submit(submission(prompt(i), 6)).unwrap()).collect();
                for (i, handle) in (0..).zip(&handles) {
                    assert_eq!(answer(handle).ids, alone(&prompt(i), 6, SamplingParams::default()));
                }
                handles.iter().map(|handle| handle.id().0).collect::<Vec<_>>()
            })
        })
        .collect();
    let mut all: Vec<u64> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    all.sort_unstable();
    assert_eq!(all, (0..24).collect::<Vec<_>>());
    engine.check_idle().unwrap();
}

#[test]
fn a_handle_can_be_awaited() {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let engine = engine("1M", "fcfs");
    let handle = engine.submit(submission(ids(1, 20), 30)).unwrap();
    let mut tokens = Vec::new();
    let end = guarded(move || {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        loop {
            match handle.poll_recv(&mut Context::from_waker(&waker)) {
                Poll::Ready(Some(Output::Token { ids, .. })) => tokens.extend(ids),
                Poll::Ready(Some(Output::Finished { record, .. })) => return (tokens, record.status),
                Poll::Ready(None) => panic!("no last piece"),
                Poll::Pending => std::thread::park(),
            }
        }
    });
    assert_eq!(end, (alone(&ids(1, 20), 30, SamplingParams::default()), Status::Finished));
}

#[test]
fn an_engine_that_is_dropped_ends_what_is_live() {
    let engine = engine("1P1D", "disaggregated");
    let handles: Vec<Handle> = (0..8).map(|i| engine.submit(submission(ids(i, 100), 150)).unwrap()).collect();
    guarded(move || drop(engine));
    for handle in &handles {
        let record = answer(handle).record;
        assert!(matches!(record.status, Status::Failed | Status::Finished), "{record:?}");
    }
}

#[test]
fn an_engine_says_what_it_is() {
    let engine = engine("1P1D", "disaggregated");
    let workers = engine.workers();
    let roles: Vec<_> = workers.iter().map(|worker| worker.role.name()).collect();
    assert_eq!(roles, ["prefill", "decode"]);
    assert!(workers.iter().all(|worker| worker.threads == 1 && worker.kv_blocks == 64));
    assert!(workers[0].device.starts_with("cpu (scalar"), "{}", workers[0].device);
    assert_eq!((engine.max_model_len(), engine.limits().block_tokens), (256, BLOCK));
}

/// Nothing is taken before it is known to fit.
#[test]
fn impossible_engines_are_refused_with_the_numbers() {
    let refused = |config: EngineConfig| {
        Engine::new(model(), config, policy("fcfs")).expect_err("it is refused").to_string()
    };
    let text = refused(EngineConfig { kv_blocks: Some(u32::MAX), ..config("2M") });
    assert!(text.contains("(weights 0 MiB, KV 67108864 MiB, buffers"), "{text}");
    let text = refused(EngineConfig { kv_blocks: Some(0), ..config("1M") });
    assert!(text.contains("kv_blocks: expected at least 1, found 0"), "{text}");
    let text = refused(EngineConfig { kv_blocks: None, kv_memory: Some(1000), ..config("1M") });
    assert!(text.contains("kv_memory: expected at least 8192 bytes, one KV block, found 1000"), "{text}");
    let mut long = config("1M");
    long.limits.max_model_len = Some(300);
    assert!(refused(long).contains("at most 256, the model's context length, found 300"));
    let other = EngineConfig { belief: Some(crate::belief::belief(3)), ..config("1M") };
    assert!(refused(other).contains("belief: expected 1 latency models, one a worker, found 3"));
    let few = crate::common::backends(&config("1M"));
    let error = Engine::with_backends(model(), config("1P1D"), few, policy("fcfs")).unwrap_err();
    assert!(matches!(error, EngineError::Config { what: "backends", .. }), "{error}");
}

/// Without a belief the engine measures one, for every worker, in which more work takes longer.
#[test]
fn a_belief_is_measured() {
    use kvrelay_core::step::StepShape;
    let config = EngineConfig { belief: None, ..config("1P1D") };
    let engine = Engine::new(model(), config, policy("goodput")).unwrap();
    let belief = engine.belief();
    assert_eq!(belief.steps.len(), 2);
    let (small, large) = (StepShape::prefill(0, 8), StepShape::prefill(0, 200));
    assert!(belief.steps[0].step(&small).0 > 0);
    assert!(belief.steps[0].step(&small) < belief.steps[1].step(&large));
    assert!(belief.link.bandwidth > 0.0);
    assert_eq!(belief.kv_bytes_per_token, 8192 / 16);
    assert_eq!(answer(&engine.submit(submission(ids(1, 9), 3)).unwrap()).ids.len(), 3);
}

#[test]
fn logits_can_be_looked_at() {
    let engine = engine("1M", "fcfs");
    let prompt = ids(5, 100);
    let chosen = answer(&engine.submit(submission(prompt.clone(), 4)).unwrap()).ids;
    let logits = engine.logits(&[&prompt[..], &chosen].concat()).unwrap();
    assert_eq!((logits.len(), logits[0].len()), (104, 288));
    for (i, token) in chosen.iter().enumerate() {
        assert_eq!(kvrelay_model::sampling::argmax(&logits[99 + i]).unwrap(), *token);
    }
    assert!(engine.logits(&[]).unwrap().is_empty());
    assert!(engine.logits(&vec![3; 257]).is_err());
}
