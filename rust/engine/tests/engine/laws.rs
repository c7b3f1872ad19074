//! Law 1a (tokens), 2 (blocks) and 3 (progress) on real workers.

use kvrelay_core::policy::{Batch, Decision, Policy, WorkerView, built_in};
use kvrelay_core::record::Status;
use kvrelay_core::rng::{Purpose, Stream};
use kvrelay_core::time::Nanos;
use kvrelay_engine::{Engine, EngineConfig, Handle, Output, Submission};
use kvrelay_model::SamplingParams;

use crate::common::{Answer, BLOCK, alone, answer, config, ids, model, next, submission};

/// Prefills in chunks of any size, decodes some, and preempts others for no reason at all.
struct Unsteady(Stream);

impl Unsteady {
    fn boxed(seed: u64) -> Box<dyn Policy> {
        Box::new(Unsteady(Stream::new(seed, Purpose::POLICY, 0)))
    }
}

impl Policy for Unsteady {
    fn name(&self) -> String {
        "unsteady".into()
    }

    fn batch(&mut self, worker: &WorkerView<'_>) -> Decision<Batch> {
        let mut batch = Batch { repeat: Some(1 + self.0.below(8) as u32), ..Batch::default() };
        for request in worker.waiting().take(8) {
            batch.prefill.push((request.id(), 1 + self.0.below(u64::from(request.pending())) as u32));
        }
        let mut decode = Vec::new();
        for request in worker.running() {
            match self.0.below(8) {
                0 => batch.preempt.push(request.id()),
                1 => {}
                _ => decode.push(request.id()),
            }
        }
        decode.truncate(8);
        batch.decode = Some(decode);
        // Even a batch of nothing is asked about again.
        batch.wake_at = Some(worker.now() + Nanos(50_000));
        Ok(batch)
    }
}

/// Topologies and policies, a pool of so many blocks, and whether prefixes are shared.
fn settings() -> Vec<(&'static str, Box<dyn Policy>, u32, bool)> {
    let chunked = || Box::new(kvrelay_core::policy::Chunked { token_budget: 7 });
    let named = |name| built_in(name).unwrap();
    vec![
        ("1M", named("fcfs"), 64, true),
        ("1P1D", named("disaggregated"), 64, true),
        ("2P2D", named("disaggregated"), 64, false),
        ("1P1D", named("goodput"), 64, false),
        ("1P1D1M", named("goodput"), 64, true),
        ("1M", chunked(), 64, true),
        ("2P2D", chunked(), 24, true),
        // Room for little more than one request: preemption by need.
        ("1M", named("fcfs"), 8, false),
        ("1P1D", named("disaggregated"), 8, true),
        // And for no reason.
        ("2M", Unsteady::boxed(1), 64, true),
        ("1P1D", Unsteady::boxed(2), 64, false),
        ("2P2D", Unsteady::boxed(3), 12, true),
    ]
}

fn sampled(seed: u64) -> SamplingParams {
    SamplingParams { temperature: 1.2, top_k: 50, top_p: 0.95, seed }
}

/// Prompts around the borders of blocks, greedy and sampled.
fn requests() -> Vec<Submission> {
    let lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 61];
    let request = |(i, length): (u64, u32)| Submission {
        sampling: if i.is_multiple_of(2) { SamplingParams::default() } else { sampled(i) },
        ..submission(ids(i / 3, length), 20 + i as u32)
    };
    (0..).zip(lengths.into_iter().chain(lengths)).map(request).collect()
}

/// Law 1a: with invariant numerics a request's tokens are its own, whatever else happens.
#[test]
fn tokens_are_those_of_the_request_alone() {
    let requests = requests();
    let expected: Vec<Vec<u32>> =
        requests.iter().map(|r| alone(&r.prompt, r.max_tokens, r.sampling)).collect();
    let mut preemptions = 0;
    for (topology, policy, blocks, prefix_caching) in settings() {
        let what = format!("{topology}, {}, {blocks} blocks, sharing {prefix_caching}", policy.name());
        let config = EngineConfig { kv_blocks: Some(blocks), prefix_caching, ..config(topology) };
        let engine = Engine::new(model(), config, policy).unwrap();
        let handles: Vec<Handle> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
        for (i, (handle, expected)) in handles.iter().zip(&expected).enumerate() {
            let Answer { ids, record, .. } = answer(handle);
            assert_eq!(record.status, Status::Finished, "{what}, request {i}: {:?}", record.reason);
            assert_eq!(ids, *expected, "{what}, request {i}");
            preemptions += record.preemptions;
        }
        engine.check_idle().unwrap();
    }
    assert!(preemptions > 10, "{preemptions} preemptions test little");
}

/// A prompt that is in the prefix cache, whole, or but for a token, gives what it gave before.
#[test]
fn cached_prompts_give_the_same_tokens() {
    for topology in ["1M", "1P1D"] {
        let engine = Engine::new(model(), config(topology), built_in("disaggregated").unwrap()).unwrap();
        let ask = |prompt: &[u32]| {
            let request = Submission { sampling: sampled(5), ..submission(prompt.to_vec(), 10) };
            let answer = answer(&engine.submit(request).unwrap());
            assert_eq!(answer.ids, alone(prompt, 10, sampled(5)), "{topology}, {} tokens", prompt.len());
            assert!(answer.record.cached_tokens < answer.record.prompt_tokens);
            answer
        };
        for blocks in [1, 2, 8] {
            let length = (blocks * BLOCK) as usize;
            let prompt = ids(100 + u64::from(blocks), length as u32 + 1);
            assert_eq!(ask(&prompt[..length]).record.cached_tokens, 0);
            assert_eq!(ask(&prompt[..length]).record.cached_tokens, (blocks - 1) * BLOCK);
            assert_eq!(ask(&prompt).record.cached_tokens, blocks * BLOCK);
            assert_eq!(ask(&prompt[..length - 1]).record.cached_tokens, (blocks - 1) * BLOCK);
        }
        // A next turn finds prompt and answer, where they were decoded.
        let mut turn = ids(200, 30);
        let first = ask(&turn);
        turn.extend(first.ids);
        turn.extend(ids(201, 9));
        let cached = ask(&turn).record.cached_tokens;
        assert_eq!(cached, if topology == "1M" { 32 } else { 16 });
        engine.check_idle().unwrap();
    }
}

/// Laws 2 and 3: after bursts in which clients leave anywhere, every block is free or cached and
/// everybody else was served.
#[test]
fn blocks_come_back_whoever_leaves() {
    for (round, (topology, policy, blocks, prefix_caching)) in (0..).zip(settings()) {
        let config = EngineConfig { kv_blocks: Some(blocks), prefix_caching, ..config(topology) };
        let engine = Engine::new(model(), config, policy).unwrap();
        let mut stream = Stream::new(round, Purpose::POLICY, 1);
        for burst in 0..2 {
            let submit = |i: u64| {
                let prompt = ids(burst * 10 + i % 5, 3 + (i as u32 * 17) % 80);
                engine.submit(submission(prompt, 5 + (i as u32 * 11) % 40)).unwrap()
            };
            let handles: Vec<Handle> = (0..24).map(submit).collect();
            let mut stay = Vec::new();
            for handle in handles {
                match stream.below(6) {
                    // At once: queued, or wherever it is by then.
                    0 => drop(handle),
                    1 => handle.cancel(),
                    // After a token or two: about to move, moving, or decoding.
                    2 => {
                        next(&handle);
                        drop(handle);
                    }
                    3 => {
                        next(&handle);
                        next(&handle);
                        handle.cancel();
                        while let Some(output) = next(&handle) {
                            assert!(matches!(output, Output::Token { .. } | Output::Finished { .. }));
                        }
                    }
                    _ => stay.push(handle),
                }
                engine.check_integrity().unwrap();
            }
            for handle in &stay {
                assert_eq!(answer(handle).record.status, Status::Finished, "{topology}, {blocks} blocks");
            }
            engine.check_idle().unwrap();
        }
    }
}
