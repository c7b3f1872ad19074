//! Engines of CUDA workers: law 1a for whole requests, on one device and on several; memory refused;
//! where workers sit.

use std::sync::Arc;

use kvrelay_core::policy::{Chunked, Policy, built_in};
use kvrelay_core::record::Status;
use kvrelay_emulator::{Emulated, test_name};
use kvrelay_engine::backend::cpu::{CpuBackend, CpuConfig, CpuWeights, Tier};
use kvrelay_engine::backend::cuda::{CudaBackend, CudaConfig};
use kvrelay_engine::backend::{Backend, Limits};
use kvrelay_engine::{DeviceChoice, Engine, EngineConfig, EngineError, Handle, Numerics, Submission};
use kvrelay_model::{DType, Model, SamplingParams};

use crate::common::{answer, belief, config, ids, submission, tiny, weights};

fn model() -> Arc<Model> {
    Arc::new(tiny(DType::BF16).model())
}

/// Prompts around the borders of blocks, greedy and sampled.
fn requests() -> Vec<Submission> {
    let block = 16;
    let lengths = [1, block - 1, block, block + 1, 2 * block, 2 * block + 1];
    let request = |(i, length): (u64, usize)| Submission {
        sampling: if i.is_multiple_of(2) {
            SamplingParams::default()
        } else {
            SamplingParams { temperature: 1.2, top_k: 50, top_p: 0.95, seed: i }
        },
        ..submission(ids(i / 3, length), 6 + i as u32)
    };
    (0..).zip(lengths).map(request).collect()
}

/// The tokens of all requests, served together, and how often one was preempted.
fn served(
    model: &Arc<Model>,
    config: EngineConfig,
    policy: Box<dyn Policy>,
    requests: &[Submission],
) -> (Vec<Vec<u32>>, u32) {
    let engine = Engine::new(model.clone(), config, policy).unwrap();
    let handles: Vec<Handle> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
    let mut preemptions = 0;
    let tokens = handles.iter().map(|handle| {
        let (tokens, record) = answer(handle);
        assert_eq!(record.status, Status::Finished, "{:?}", record.reason);
        preemptions += record.preemptions;
        tokens
    });
    let tokens = tokens.collect();
    engine.check_idle().unwrap();
    (tokens, preemptions)
}

fn named(name: &str) -> Box<dyn Policy> {
    built_in(name).unwrap()
}

/// With invariant numerics tokens are those of the request alone: batched, chunked, preempted, handed
/// over within a device and between devices.
#[test]
fn tokens_are_those_of_the_request_alone() {
    let test = Emulated::new(test_name!()).set("DEVICES", 2).set("MEMORY_MB", 256).set("JITTER_US", 100);
    test.run(|| {
        let model = model();
        let requests = requests();
        let alone = |request: &Submission| {
            let requests = std::slice::from_ref(request);
            served(&model, config("1M", DeviceChoice::Cuda(0)), named("fcfs"), requests).0.remove(0)
        };
        let expected: Vec<Vec<u32>> = requests.iter().map(alone).collect();
        let chunked = || Box::new(Chunked { token_budget: 7 });
        let settings: Vec<(&str, DeviceChoice, Box<dyn Policy>, u32)> = vec![
            ("1M", DeviceChoice::Cuda(0), named("fcfs"), 64),
            ("1M", DeviceChoice::Cuda(0), chunked(), 64),
            ("1P1D", DeviceChoice::Cuda(1), named("disaggregated"), 64),
            ("1P1D", DeviceChoice::AllCuda, named("disaggregated"), 64),
            ("2P1D", DeviceChoice::AllCuda, named("goodput"), 64),
            ("1P1D", DeviceChoice::AllCuda, chunked(), 64),
            // Room for little more than one request: preemption by need.
            ("1M", DeviceChoice::Cuda(0), named("fcfs"), 4),
        ];
        let mut preemptions = 0;
        for (topology, device, policy, kv_blocks) in settings {
            let what = format!("{topology} on {device}, {}, {kv_blocks} blocks", policy.name());
            let config = EngineConfig { kv_blocks: Some(kv_blocks), ..config(topology, device) };
            let (tokens, preempted) = served(&model, config, policy, &requests);
            assert_eq!(tokens, expected, "{what}");
            preemptions += preempted;
        }
        assert!(preemptions > 0, "nothing was preempted");
    });
}

/// The fast tier's engine runs the same requests, with what policies predict with measured on the
/// device; its first tokens are the invariant tier's wherever the choice is clear.
#[test]
fn a_fast_engine_serves() {
    Emulated::new(test_name!()).set("MEMORY_MB", 256).run(|| {
        let model = model();
        let fast =
            EngineConfig { numerics: Numerics::Fast, belief: None, ..config("1P1D", DeviceChoice::Auto) };
        let requests: Vec<Submission> = (0..4).map(|i| submission(ids(i, 20 + i as usize), 5)).collect();
        let (tokens, _) = served(&model, fast, named("disaggregated"), &requests);
        assert!(tokens.iter().all(|tokens| tokens.len() == 5));
        let invariant = config("1M", DeviceChoice::Cuda(0));
        let (expected, _) = served(&model, invariant, named("fcfs"), &requests);
        let agreeing = tokens.iter().zip(&expected).filter(|(a, b)| a[0] == b[0]).count();
        assert!(agreeing >= 3, "{tokens:?} {expected:?}");
    });
}

#[test]
fn workers_are_dealt_round_and_say_where_they_are() {
    let test = Emulated::new(test_name!()).set("DEVICES", 2).set("MEMORY_MB", 256);
    test.run(|| {
        let engine =
            Engine::new(model(), config("2P1D", DeviceChoice::AllCuda), named("disaggregated")).unwrap();
        let workers = engine.workers();
        let devices: Vec<&str> = workers.iter().map(|worker| worker.device.as_str()).collect();
        let expected = [0, 1, 0].map(|n| format!("cuda:{n} (Emulated device {n}, invariant, own products)"));
        assert_eq!(devices, expected);
        assert!(workers.iter().all(|worker| worker.threads == 0 && worker.kv_blocks == 64));
        let logits = engine.logits(&ids(1, 70)).unwrap();
        assert_eq!((logits.len(), logits[0].len()), (70, 288));
    });
}

#[test]
fn what_does_not_fit_is_refused_before_it_is_taken() {
    let test = Emulated::new(test_name!()).set("DEVICES", 2).set("MEMORY_MB", 24);
    test.run(|| {
        let refused = |config: EngineConfig| {
            Engine::new(model(), config, named("fcfs")).map(drop).unwrap_err().to_string()
        };
        let device = DeviceChoice::AllCuda;
        let error = refused(EngineConfig { kv_blocks: Some(2000), ..config("3M", device) });
        // Two workers are on the first.
        assert!(error.starts_with("cuda:0: the engine needs "), "{error}");
        let kv = 2 * 2000 * 16 * 2 * 2 * 64 * 2_u64;
        assert!(error.contains(&format!("KV {} MiB", kv.div_ceil(1 << 20))), "{error}");
        assert!(error.contains("24 MiB are free; lower the KV memory"), "{error}");
        let error = refused(config("1M", DeviceChoice::Cuda(2)));
        assert!(error.contains("there is no cuda:2; the CUDA driver lists 2, cuda:0 to cuda:1"), "{error}");
        // By itself an engine takes what fits, and leaves a tenth.
        let all = EngineConfig { kv_blocks: None, ..config("3M", device) };
        let engine = Engine::new(model(), all, named("fcfs")).unwrap();
        let blocks: Vec<u32> = engine.workers().iter().map(|worker| worker.kv_blocks).collect();
        assert!(blocks[0] > 100 && blocks.iter().all(|&count| count == blocks[0]), "{blocks:?}");
        let (tokens, _) = answer(&engine.submit(submission(ids(1, 20), 5)).unwrap());
        assert_eq!(tokens.len(), 5);
    });
}

#[test]
fn a_model_that_no_kernel_is_made_for() {
    Emulated::new(test_name!()).run(|| {
        let odd = Arc::new(kvrelay_model::testing::TinyLlama::default().model());
        let made = Engine::new(odd.clone(), config("1M", DeviceChoice::AllCuda), named("fcfs"));
        let error = made.map(drop).unwrap_err().to_string();
        assert!(error.contains("head dimension on CUDA: expected one of [64, 80, 96, 128, 256], found 16"));
        // Left to choose, an engine takes what can run it.
        let engine = Engine::new(odd, config("1M", DeviceChoice::Auto), named("fcfs")).unwrap();
        assert!(engine.workers()[0].device.starts_with("cpu"));
    });
}

/// Workers of unlike KV are refused with both values (law 5).
#[test]
fn peers_of_unlike_dtype() {
    Emulated::new(test_name!()).run(|| {
        let model = model();
        let limits = Limits { max_rows: 8, max_tokens: 72, max_logits: 8, max_positions: 256, max_slots: 8 };
        let cpu = CpuWeights::new(&model, Tier::Scalar);
        let cpu = CpuBackend::new(Arc::new(cpu), &CpuConfig::default(), limits.clone()).unwrap();
        let cuda = CudaBackend::new(weights(&model), &CudaConfig::default(), limits).unwrap();
        let backends: Vec<Box<dyn Backend>> = vec![Box::new(cpu), Box::new(cuda)];
        let config = EngineConfig { belief: Some(belief(2)), ..config("1P1D", DeviceChoice::Cpu) };
        let error = Engine::with_backends(model, config, backends, named("disaggregated")).map(drop);
        let error = error.unwrap_err();
        assert!(matches!(error, EngineError::Backend(_)));
        assert_eq!(error.to_string(), "KV peer: dtype: here F32, there BF16");
    });
}

/// A row that ends by its text while its next step is in the device's queue: that step is dropped, and
/// its companions go on as if nothing had been.
#[test]
fn a_step_ahead_of_an_end_is_dropped() {
    let test = Emulated::new(test_name!()).set("MEMORY_MB", 256);
    test.run(|| {
        let model = model();
        let requests: Vec<Submission> = (0..3).map(|i| submission(ids(60 + i, 15), 30)).collect();
        let whole = served(&model, config("1M", DeviceChoice::Cuda(0)), named("fcfs"), &requests).0;
        // Where a request says something that can be waited for, in the middle of its text.
        let says = |i: usize, at: usize| {
            let text = model.tokenizer().decode(&whole[i][at..=at]);
            (!text.is_empty() && text.is_ascii()).then_some((i, at, text))
        };
        let stops: Vec<(usize, usize, String)> =
            (0..3).flat_map(|i| [4, 9, 13, 17].map(|at| (i, at))).filter_map(|(i, at)| says(i, at)).collect();
        assert!(stops.len() >= 3, "{stops:?}");
        for topology in ["1M", "1P1D"] {
            let engine = config(topology, DeviceChoice::Cuda(0));
            let engine = Engine::new(model.clone(), engine, named("disaggregated")).unwrap();
            for (ends, at, text) in &stops {
                let mut all = requests.clone();
                all[*ends].stop = vec![text.clone()];
                let handles: Vec<Handle> = all.into_iter().map(|one| engine.submit(one).unwrap()).collect();
                for (i, (handle, whole)) in handles.iter().zip(&whole).enumerate() {
                    let tokens = answer(handle).0;
                    if i == *ends {
                        assert!(tokens.len() <= at + 1 && whole.starts_with(&tokens), "{tokens:?}");
                    } else {
                        assert_eq!(tokens, *whole);
                    }
                }
            }
            engine.check_idle().unwrap();
        }
    });
}
