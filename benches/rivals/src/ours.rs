//! kvrelay's side.

use kvrelay_benches::cluster;
use kvrelay_core::metrics::Distribution;
use kvrelay_core::policy::built_in;
use kvrelay_core::record::{Detail, RequestRecord, Status};
use kvrelay_core::watch::Unwatched;
use kvrelay_sim::{Options, simulate};
use kvrelay_workload::Workload;

use crate::{Case, Outcome, cpu_seconds};

/// CPU seconds of a simulation with its statistics, and what it says.
pub(crate) fn run(case: &Case, workload: &Workload) -> anyhow::Result<(f64, Outcome)> {
    let cluster = cluster(&format!("{}P{}D", case.prefill, case.decode));
    let mut source = workload.source();
    let policy = built_in("disaggregated").ok_or_else(|| anyhow::anyhow!("no built-in `disaggregated`"))?;
    let options = Options { detail: Detail::RequestsOnly, ..Options::default() };
    let started = cpu_seconds();
    let run = simulate(&cluster, &mut *source, policy, &options, &mut Unwatched)?;
    let requests = &run.log.requests;
    let latencies = [
        milliseconds(requests.iter().filter_map(|record| Some(record.ttft()?.as_secs_f64()))),
        milliseconds(requests.iter().filter_map(RequestRecord::tpot)),
    ];
    let finished = requests.iter().filter(|record| record.status == Status::Finished).count();
    Ok((cpu_seconds() - started, Outcome { finished, latencies }))
}

fn milliseconds(seconds: impl Iterator<Item = f64>) -> [f64; 3] {
    let values = Distribution::new(seconds.map(|value| value * 1e3));
    [values.mean(), values.percentile(50.0), values.percentile(90.0)].map(|value| value.unwrap_or(f64::NAN))
}
