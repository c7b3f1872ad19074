//! What callers describe: an engine, a request, a measured run.

use kvrelay_core::cluster::Topology;
use kvrelay_core::request::ClassId;
use kvrelay_core::scheduler::{Belief, Limits};
use kvrelay_core::slo::Slo;
use kvrelay_core::time::Time;
use kvrelay_model::SamplingParams;

use crate::device::DeviceChoice;
use crate::transfer::MakeTransport;

/// Which kernels compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numerics {
    /// The fastest of this machine.
    #[default]
    Fast,
    /// Every token is, bit for bit, that of its request alone, whatever else runs.
    Invariant,
}

/// Wraps the body of the loop's thread; it must call what it is given, once.
pub type AroundLoop = Box<dyn FnOnce(Box<dyn FnOnce() + Send>) + Send>;

/// How to make an engine.
pub struct EngineConfig {
    /// Workers and their first roles.
    pub topology: Topology,
    /// Where they compute.
    pub device: DeviceChoice,
    /// Threads of each worker on the CPU; the machine's cores, shared evenly, when `None`.
    pub threads_per_worker: Option<usize>,
    /// Keep each worker's threads on cores of its own, where there are enough.
    pub pin: bool,
    /// Which kernels compute.
    pub numerics: Numerics,
    /// Limits on batches. `max_model_len` is the model's context when `None`; prompts are always
    /// chunked to `max_chunk_tokens`, which is `max_prefill_tokens` when `None`.
    pub limits: Limits,
    /// KV blocks of each worker; as many as `kv_memory` holds when `None`.
    pub kv_blocks: Option<u32>,
    /// Bytes of KV of each worker. When `None`: on the CPU 512 MiB, on CUDA devices nine tenths of
    /// what is free there, less weights and buffers, shared evenly.
    pub kv_memory: Option<u64>,
    /// Whether prompts share the KV of equal prefixes.
    pub prefix_caching: bool,
    /// What policies predict with; measured at the start when `None`.
    pub belief: Option<Belief>,
    /// Seed of the serving policy's random numbers.
    pub seed: u64,
    /// Keep every event and action, for [`replay`](crate::replay); grows as long as it runs.
    pub record: bool,
    /// What KV is transferred over; copies inside the process when `None`.
    pub transport: Option<MakeTransport>,
    /// Wraps the loop's thread, for those who keep state in it.
    pub around_loop: Option<AroundLoop>,
}

impl EngineConfig {
    /// The defaults for `topology`: on the CPU, at most 64 requests and 2,048 prompt tokens a step,
    /// prefixes shared.
    pub fn new(topology: Topology) -> EngineConfig {
        let limits = Limits { max_batch: 64, max_prefill_tokens: 2048, ..Limits::default() };
        EngineConfig {
            topology,
            device: DeviceChoice::Cpu,
            threads_per_worker: None,
            pin: false,
            numerics: Numerics::Fast,
            limits,
            kv_blocks: None,
            kv_memory: None,
            prefix_caching: true,
            belief: None,
            seed: 0,
            record: false,
            transport: None,
            around_loop: None,
        }
    }
}

/// A request, as its caller describes it.
#[derive(Clone, Debug, Default)]
pub struct Submission {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// The most tokens to produce, at least 1.
    pub max_tokens: u32,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// The text ends before the first of these to be completed; empty ones are none.
    pub stop: Vec<String>,
    /// Go on after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Objectives.
    pub slo: Slo,
    /// SLO class.
    pub class: ClassId,
    /// Higher is more important.
    pub priority: i32,
}

/// How to run a workload.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Seed of the policy's random numbers and of made-up token ids.
    pub seed: u64,
    /// End there and cut off what is live; drain when `None`. Counted from the run's start.
    pub until: Option<Time>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
}
