//! The side of `aisimulate-core`.

use std::collections::VecDeque;
use std::sync::Arc;

use aisimulate_core::engine::{Backend, EngineConfig, TimingModel};
use aisimulate_core::replay::{
    CURRENT_REPLAY_SPEC_VERSION, DirectRequest, ReplayEngineConfig, ReplayEngineFactory, ReplayRuntimeInput,
    ReplaySpec, ReplayTopology, Replayer, WorkerPoolSpec,
};
use kvrelay_benches::cluster;
use kvrelay_core::latency::LatencyModel;
use kvrelay_core::step::StepShape;
use kvrelay_sim::{Links, SimCluster};
use kvrelay_workload::Record;
use uuid::Uuid;

use crate::{Case, Outcome, cpu_seconds};

/// CPU seconds of a replay with its report, and what it says. Requests are made before the clock starts.
pub(crate) fn run(case: &Case, records: &[Record], prefix_caching: bool) -> anyhow::Result<(f64, Outcome)> {
    let cluster = cluster(&format!("{}P{}D", case.prefill, case.decode));
    let requests: VecDeque<DirectRequest> =
        (0u32..).zip(records).map(|(i, record)| request(i, record)).collect();
    let timing = Arc::new(Roofline(Arc::clone(&cluster.workers[0].latency)));
    let factory = ReplayEngineFactory::with_timing_model(timing);
    let replayer = Replayer::new(spec(case, &cluster, prefix_caching)?, factory)?;
    let started = cpu_seconds();
    let report = replayer.with_runtime_input(ReplayRuntimeInput::Requests(requests)).run()?;
    let seconds = cpu_seconds() - started;
    anyhow::ensure!(
        report.per_request.len() == records.len(),
        "the rival has {} records of {} requests",
        report.per_request.len(),
        records.len()
    );
    let latencies =
        [&report.latency.ttft, &report.latency.tpot].map(|of| [of.mean_ms, of.median_ms, of.p90_ms]);
    Ok((seconds, Outcome { finished: report.request_counts.completed_requests, latencies }))
}

/// The same workers: blocks, limits, bytes and bandwidth of the hand-over.
fn spec(case: &Case, cluster: &SimCluster, prefix_caching: bool) -> anyhow::Result<ReplaySpec> {
    let Links::Apart(link) = cluster.links else { anyhow::bail!("the bench's links are apart") };
    let limits = &cluster.limits;
    let rank = EngineConfig {
        num_gpu_blocks: cluster.workers[0].num_blocks as usize,
        block_size: limits.block_tokens as usize,
        max_num_seqs: limits.max_batch as usize,
        max_num_batched_tokens: limits.max_prefill_tokens as usize,
        enable_prefix_caching: prefix_caching,
        kv_transfer_bytes_per_token: Some(usize::try_from(cluster.kv_bytes_per_token)?),
        kv_transfer_bandwidth: Some(link.bandwidth / 1e9),
        ..EngineConfig::for_backend(Backend::Vllm)
    };
    let pool = |initial_workers| WorkerPoolSpec { initial_workers, ..WorkerPoolSpec::default() };
    Ok(ReplaySpec {
        version: CURRENT_REPLAY_SPEC_VERSION,
        topology: ReplayTopology::Disaggregated {
            prefill: pool(case.prefill),
            decode: pool(case.decode),
            handoff_latency_ms: 0.0,
        },
        engine: serde_json::to_value(ReplayEngineConfig { rank, ..ReplayEngineConfig::default() })?,
        adapters: Default::default(),
        max_sim_time_ms: None,
        max_in_flight: None,
        record_per_request: true,
        sla: Default::default(),
        requests: Vec::new(),
    })
}

/// A request whose tokens nobody else's prompt begins with.
fn request(index: u32, record: &Record) -> DirectRequest {
    let tokens = std::iter::once(index).chain(1..record.prompt_tokens).collect();
    DirectRequest {
        tokens,
        max_output_tokens: record.output_tokens as usize,
        uuid: Some(Uuid::from_u128(u128::from(index) + 1)),
        arrival_timestamp_ms: Some(record.at.0 as f64 / 1e6),
        ..DirectRequest::default()
    }
}

/// kvrelay's step times, asked as the rival asks.
struct Roofline(Arc<dyn LatencyModel>);

impl Roofline {
    fn milliseconds(&self, shape: &StepShape) -> f64 {
        self.0.step(shape).as_secs_f64() * 1e3
    }
}

impl TimingModel for Roofline {
    fn prefill_batch_validation_can_fail(&self) -> bool {
        false
    }

    fn prefill_prediction_can_fail(&self) -> bool {
        false
    }

    fn predict_prefill_ms(
        &self,
        batch: usize,
        mean_length: usize,
        mean_prefix: usize,
    ) -> anyhow::Result<f64> {
        let (length, prefix) = (u32::try_from(mean_length)?, u32::try_from(mean_prefix)?);
        let one = StepShape::prefill(prefix, length - prefix);
        let rows = batch as u64;
        let shape = StepShape {
            num_prefill: u32::try_from(batch)?,
            prefill_tokens: one.prefill_tokens * rows,
            prefill_context: one.prefill_context * rows,
            prefill_square: one.prefill_square * rows,
            ..one
        };
        Ok(self.milliseconds(&shape))
    }

    fn predict_decode_ms(
        &self,
        batch: usize,
        context: usize,
        _mean_context: usize,
        _capacity: usize,
    ) -> anyhow::Result<f64> {
        Ok(self.milliseconds(&StepShape::decode(u32::try_from(batch)?, context as u64)))
    }
}
