//! What benches share: the workload and cluster that simulators are compared on.

use std::sync::Arc;

use kvrelay_core::cluster::Topology;
use kvrelay_core::latency::hardware::{gpu, kv_capacity_tokens};
use kvrelay_core::latency::models::model;
use kvrelay_core::latency::roofline::{Efficiencies, Roofline};
use kvrelay_core::latency::{LatencyModel, Link};
use kvrelay_core::scheduler::Limits;
use kvrelay_sim::{Delays, Links, SimCluster, SimWorker};
use kvrelay_workload::{Class, Workload};

/// Requests with the lengths of Azure's conversations at 40 a second, gaps as bursty as published.
///
/// # Panics
/// When the preset is gone.
pub fn workload(num_requests: usize) -> Workload {
    workload_at(40.0, num_requests)
}

/// The same at another rate.
///
/// # Panics
/// When the preset is gone.
pub fn workload_at(rate: f64, num_requests: usize) -> Workload {
    Workload::preset("azure-conv-2023", Some(rate), num_requests, Class::default(), 0)
        .expect("a known preset")
}

/// Llama-3.1-8B on H100s at TP 1, KV over NVLink.
///
/// # Panics
/// When `topology` is none.
pub fn cluster(topology: &str) -> SimCluster {
    let (model, gpu) = (model("llama-3.1-8b").expect("a known model"), gpu("h100").expect("a known GPU"));
    let roofline =
        Roofline::new(model.clone(), &gpu, 1, Efficiencies::default()).expect("an 8B model at TP 1");
    let latency: Arc<dyn LatencyModel> = Arc::new(roofline);
    let tokens = kv_capacity_tokens(&model, &gpu, 1, 1).expect("an 8B model fits");
    let num_blocks = (tokens / u64::from(Limits::default().block_tokens)) as u32;
    let worker = |role| SimWorker { role, num_blocks, stages: 1, latency: Arc::clone(&latency) };
    let topology: Topology = topology.parse().expect("a topology");
    SimCluster {
        workers: topology.roles().into_iter().map(worker).collect(),
        limits: Limits::default(),
        prefix_caching: true,
        links: Links::Apart(Link {
            bandwidth: gpu.nvlink_bandwidth.expect("H100s have NVLink"),
            ..Link::INSTANT
        }),
        kv_bytes_per_token: model.kv_bytes_per_token(),
        layer_groups: 1,
        conversion: None,
        delays: Delays::default(),
        neighbours: None,
        belief: None,
    }
}
