//! A tiny model, small engines, and waits that fail instead of hanging.

use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

use kvrelay_core::policy::{Policy, built_in};
use kvrelay_core::record::{FinishReason, RequestRecord};
use kvrelay_engine::backend::cpu::{CpuBackend, CpuConfig, CpuWeights, Tier};
use kvrelay_engine::backend::{Backend, Input, Limits, Logits, Row};
use kvrelay_engine::{Engine, EngineConfig, Handle, Numerics, Output, Submission};
use kvrelay_model::sampling::uniform;
use kvrelay_model::testing::TinyLlama;
use kvrelay_model::{Model, SamplingParams};

use crate::belief::belief;
use crate::doubles::{Trouble, Troubled};

/// Longer than anything here takes; a wait that reaches it has hung.
pub(crate) const HANG: Duration = Duration::from_secs(60);

/// Tokens in a KV block.
pub(crate) const BLOCK: u32 = 16;

pub(crate) fn model() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| Arc::new(TinyLlama { num_layers: 2, ..TinyLlama::default() }.model())).clone()
}

pub(crate) fn config(topology: &str) -> EngineConfig {
    let config = EngineConfig::new(topology.parse().unwrap());
    let workers = config.topology.num_workers() as usize;
    EngineConfig {
        threads_per_worker: Some(1),
        numerics: Numerics::Invariant,
        kv_blocks: Some(64),
        belief: Some(belief(workers)),
        ..config
    }
}

/// CPU backends as an engine of this description would make them.
pub(crate) fn backends(config: &EngineConfig) -> Vec<Box<dyn Backend>> {
    let weights = Arc::new(CpuWeights::new(&model(), Tier::Scalar));
    let rows = config.limits.max_batch as usize;
    let limits = Limits {
        max_rows: rows,
        max_tokens: config.limits.max_prefill_tokens as usize + rows,
        max_logits: rows,
        max_positions: model().config().context_length,
        max_slots: rows,
    };
    let cpu = CpuConfig { num_blocks: config.kv_blocks.unwrap() as usize, ..CpuConfig::default() };
    let backend =
        |_| -> Box<dyn Backend> { Box::new(CpuBackend::new(weights.clone(), &cpu, limits.clone()).unwrap()) };
    (0..config.topology.num_workers()).map(backend).collect()
}

/// An engine whose worker `index` is in trouble.
pub(crate) fn troubled(config: EngineConfig, index: usize, trouble: Trouble, name: &str) -> Engine {
    let mut backends = backends(&config);
    let inner = backends.remove(index);
    backends.insert(index, Troubled::boxed(inner, trouble));
    Engine::with_backends(model(), config, backends, policy(name)).unwrap()
}

/// The tokens of a request alone, by a backend and nothing else.
pub(crate) fn alone(prompt: &[u32], count: u32, sampling: SamplingParams) -> Vec<u32> {
    let mut backend = backends(&config("1M")).remove(0);
    let blocks: Vec<u32> = (0..64).collect();
    let mut tokens = prompt.to_vec();
    let mut start = 0;
    for _ in 0..count {
        let row = Row {
            slot: 0,
            input: Input::Tokens(&tokens[start..]),
            start: start as u32,
            blocks: &blocks,
            sample: Some(sampling),
            logits: Logits::Nothing,
        };
        start = tokens.len();
        let ticket = backend.enqueue(&[row]).unwrap();
        let token = backend.wait(ticket).unwrap().rows[0].token.unwrap();
        tokens.push(token);
    }
    tokens.split_off(prompt.len())
}

pub(crate) fn policy(name: &str) -> Box<dyn Policy> {
    built_in(name).unwrap()
}

pub(crate) fn engine(topology: &str, name: &str) -> Engine {
    Engine::new(model(), config(topology), policy(name)).unwrap()
}

/// Ordinary ids, others for every seed.
pub(crate) fn ids(seed: u64, count: u32) -> Vec<u32> {
    (0..u64::from(count)).map(|i| 3 + (uniform(seed, i) * 256.0) as u32).collect()
}

pub(crate) fn submission(prompt: Vec<u32>, max_tokens: u32) -> Submission {
    Submission { prompt, max_tokens, ignore_eos: true, ..Submission::default() }
}

/// All that a request gave.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) ids: Vec<u32>,
    pub(crate) text: String,
    pub(crate) record: RequestRecord,
    pub(crate) reason: Option<FinishReason>,
}

pub(crate) fn next(handle: &Handle) -> Option<Output> {
    match handle.recv_timeout(HANG) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("request {} hangs", handle.id().0),
    }
}

/// Waits for the end of a request.
pub(crate) fn answer(handle: &Handle) -> Answer {
    let (mut ids, mut text) = (Vec::new(), String::new());
    while let Some(output) = next(handle) {
        match output {
            Output::Token { ids: new, text: piece } => {
                assert!(!new.is_empty());
                ids.extend(new);
                text.push_str(&piece);
            }
            Output::Finished { record, reason } => {
                assert_eq!(next(handle), None, "nothing comes after the end");
                return Answer { ids, text, record: *record, reason };
            }
        }
    }
    panic!("request {} ended without a last piece", handle.id().0);
}

/// Runs `body` on a thread of its own, and fails if it hangs.
pub(crate) fn guarded<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || done.send(body()));
    match result.recv_timeout(HANG) {
        Ok(value) => value,
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(thread.join().expect_err("it sent nothing"))
        }
    }
}
