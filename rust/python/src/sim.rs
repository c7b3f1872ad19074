//! Simulations, and the search over them.

use std::sync::PoisonError;

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::time::Time;
use kvrelay_sim::search::{Bisection, Judgement, max_rate_interval};
use kvrelay_sim::{Injection, Options, SimError};
use pyo3::prelude::*;

use crate::cluster::Cluster;
use crate::door::Doorkeeper;
use crate::result::Result;
use crate::workload::Workload;
use crate::{error, policy};

/// Runs a workload through a simulated cluster. The loop stays on the calling thread, without the
/// GIL but for a Python policy's calls; `progress(arrived, over, seconds)` is called now and then.
#[pyfunction]
#[pyo3(signature = (workload, cluster, policy_object, belief, seed, oracle, until, single_steps, faults, progress))]
pub(crate) fn simulate(
    py: Python<'_>,
    workload: &Workload,
    cluster: &Cluster,
    policy_object: &Bound<'_, PyAny>,
    belief: Option<&str>,
    seed: u64,
    oracle: bool,
    until: Option<f64>,
    single_steps: bool,
    faults: Vec<(u32, f64, Option<f64>)>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Result> {
    let policy = policy::policy_from(policy_object)?;
    let mut sim = cluster.sim.clone();
    sim.belief = belief.map(|name| cluster.belief(py, name)).transpose()?;
    if let Some(until) = until.filter(|until| !(*until >= 0.0 && until.is_finite())) {
        return Err(error::config(py, format!("until is {until} s; it must be at least 0 and finite")));
    }
    let mut injections = Vec::new();
    for (worker, at, back) in faults {
        injections.push((Time::from_secs_f64(at), Injection::WorkerDown(WorkerId(worker))));
        injections.extend(back.map(|at| (Time::from_secs_f64(at), Injection::WorkerUp(WorkerId(worker)))));
    }
    let options = Options {
        seed,
        oracle,
        single_steps,
        until: until.map(Time::from_secs_f64),
        injections,
        ..Options::default()
    };
    let mut source = workload.0.source();
    let mut doorkeeper = Doorkeeper::new(progress);
    let ended = py.detach(|| kvrelay_sim::simulate(&sim, &mut *source, policy, &options, &mut doorkeeper));
    if let Some(raised) = cluster.raised.lock().unwrap_or_else(PoisonError::into_inner).take() {
        return Err(raised);
    }
    match (ended, doorkeeper.raised) {
        (Err(SimError::Interrupted), Some(raised)) => Err(raised),
        (Err(error), _) => Err(error::simulation(py, error)),
        (Ok(simulation), _) => {
            let ids = 0..simulation.log.requests.len() as u64;
            let places = ids.map(|id| source.place(id)).collect();
            Ok(Result::new(simulation.log, workload.0.class_names.clone()).placed(places))
        }
    }
}

/// Bisects for the largest rate that attains, and for the ends of its interval. `judge(rate)` says
/// whether it is sustained, attained, possible. Returns the largest tried rate that attains, the
/// smallest that does not, and the lower (looked for if `low`) and the upper end.
#[pyfunction]
pub(crate) fn search_rate(
    judge: &Bound<'_, PyAny>,
    start: f64,
    tolerance: f64,
    ends: f64,
    low: bool,
) -> PyResult<(f64, f64, f64, f64)> {
    let settings = Bisection { start, tolerance, ..Bisection::default() };
    let found = max_rate_interval(settings, ends, low, |rate| {
        let (sustained, attained, possible) = judge.call1((rate,))?.extract()?;
        Ok::<_, PyErr>(Judgement { sustained, attained, possible })
    })?;
    Ok((found.rate.low, found.rate.high, found.low, found.high))
}
