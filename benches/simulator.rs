//! Requests simulated per second: the setting in which other simulators were measured (12P6D, 40
//! requests a second, KV blocks and per-request records), on one core.

use std::time::Duration;

use criterion::{BatchSize, Criterion, SamplingMode, Throughput};
use kvrelay_benches::{cluster, workload};
use kvrelay_core::policy::built_in;
use kvrelay_core::request::Source;
use kvrelay_core::watch::Unwatched;
use kvrelay_sim::{Options, simulate};

const NUM_REQUESTS: usize = 10_000;

fn simulator(criterion: &mut Criterion) {
    let workload = workload(NUM_REQUESTS);
    let cluster = cluster("12P6D");
    let mut group = criterion.benchmark_group("12P6D, 40 req/s, 10,000 requests");
    group.throughput(Throughput::Elements(NUM_REQUESTS as u64));
    group.sampling_mode(SamplingMode::Flat).sample_size(20).measurement_time(Duration::from_secs(6));
    for policy in ["disaggregated", "goodput"] {
        group.bench_function(policy, |bencher| {
            let fresh = || (workload.source(), built_in(policy).expect("a built-in policy"));
            let run = |(mut source, policy): (Box<dyn Source + Send>, _)| {
                simulate(&cluster, &mut *source, policy, &Options::default(), &mut Unwatched)
                    .expect("it drains")
            };
            bencher.iter_batched(fresh, run, BatchSize::LargeInput);
        });
    }
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    simulator(&mut criterion);
    criterion.final_summary();
}
