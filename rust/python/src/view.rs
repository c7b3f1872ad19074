//! Views for policies written in Python. They borrow the scheduler's state for the length of one
//! call; one that is kept past it raises `StaleView`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvrelay_core::cluster::{Role, WorkerId};
use kvrelay_core::policy as core;
use kvrelay_core::request::RequestId;
use kvrelay_core::step::StepShape;
use numpy::PyArray1;
use pyo3::prelude::*;

use crate::{error, objectives};

/// A borrow whose end is a flag instead of a lifetime.
struct Borrowed<T> {
    view: T,
    alive: Arc<AtomicBool>,
}

// SAFETY: `view` is only looked at by `get`, which holds the interpreter's lock; while the flag is
// up, the policy call that lent it is in progress, and the state it borrows is not changed.
unsafe impl<T> Send for Borrowed<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Borrowed<T> {}

impl<T: Copy> Borrowed<T> {
    fn get(&self, py: Python<'_>) -> PyResult<T> {
        if self.alive.load(Ordering::Acquire) {
            return Ok(self.view);
        }
        Err(error::raise(
            py,
            "StaleView",
            "this view belongs to a policy call that is over: copy what you want to keep",
        ))
    }

    fn lend<U>(&self, view: U) -> Borrowed<U> {
        Borrowed { view, alive: Arc::clone(&self.alive) }
    }
}

/// Lends views for the length of one policy call.
pub(crate) struct Lease {
    alive: Arc<AtomicBool>,
}

impl Lease {
    pub(crate) fn new() -> Lease {
        Lease { alive: Arc::new(AtomicBool::new(true)) }
    }

    pub(crate) fn cluster(&self, view: core::ClusterView<'_>) -> ClusterView {
        // SAFETY: the lifetime is replaced by the flag, which falls before the borrow ends: this
        // lease is dropped within the policy method that was given the view.
        let view = unsafe { std::mem::transmute::<core::ClusterView<'_>, core::ClusterView<'static>>(view) };
        ClusterView(Borrowed { view, alive: Arc::clone(&self.alive) })
    }

    pub(crate) fn worker(&self, view: core::WorkerView<'_>) -> WorkerView {
        // SAFETY: as in `cluster`.
        let view = unsafe { std::mem::transmute::<core::WorkerView<'_>, core::WorkerView<'static>>(view) };
        WorkerView(Borrowed { view, alive: Arc::clone(&self.alive) })
    }

    pub(crate) fn request(&self, view: core::RequestView<'_>) -> RequestView {
        // SAFETY: as in `cluster`.
        let view = unsafe { std::mem::transmute::<core::RequestView<'_>, core::RequestView<'static>>(view) };
        RequestView(Borrowed { view, alive: Arc::clone(&self.alive) })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.alive.store(false, Ordering::Release);
    }
}

/// The whole cluster, as a policy sees it. Times are seconds since the run began.
#[pyclass(frozen, module = "kvrelay._core")]
pub(crate) struct ClusterView(Borrowed<core::ClusterView<'static>>);

/// One worker, as a policy sees it.
#[pyclass(frozen, module = "kvrelay._core")]
pub(crate) struct WorkerView(Borrowed<core::WorkerView<'static>>);

/// One request, as a policy sees it: what it has produced is known, what it will produce is not.
#[pyclass(frozen, module = "kvrelay._core")]
pub(crate) struct RequestView(Borrowed<core::RequestView<'static>>);

pub(crate) fn role_named(py: Python<'_>, name: &str) -> PyResult<Role> {
    [Role::Prefill, Role::Decode, Role::Mixed]
        .into_iter()
        .find(|role| role.name() == name)
        .ok_or_else(|| error::config(py, format!("role {name:?}; known: prefill, decode, mixed")))
}

fn metric_named(py: Python<'_>, name: &str) -> PyResult<core::LoadMetric> {
    core::LoadMetric::named(name).ok_or_else(|| {
        let known: Vec<_> = core::LoadMetric::ALL.iter().map(|(name, _)| *name).collect();
        error::config(py, format!("metric {name:?}; known: {}", known.join(", ")))
    })
}

#[pymethods]
impl ClusterView {
    /// The instant of the decision.
    #[getter]
    fn now(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.0.get(py)?.now().as_secs_f64())
    }

    /// All workers, in order.
    #[getter]
    fn workers(&self, py: Python<'_>) -> PyResult<Vec<WorkerView>> {
        Ok(self.0.get(py)?.workers().map(|worker| WorkerView(self.0.lend(worker))).collect())
    }

    /// How many workers there are.
    #[getter]
    fn num_workers(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.0.get(py)?.num_workers())
    }

    /// Worker number `index`.
    fn worker(&self, py: Python<'_>, index: u32) -> PyResult<WorkerView> {
        let view = self.0.get(py)?;
        let found = view.worker(WorkerId(index));
        let found = found
            .ok_or_else(|| error::config(py, format!("worker {index} of {} workers", view.num_workers())))?;
        Ok(WorkerView(self.0.lend(found)))
    }

    /// The worker with the least of `metric` among those that are up and have one of `roles`
    /// (default: those that take prompts); `None` if there is none. Ties go to the first.
    #[pyo3(signature = (metric="queued_tokens", roles=None))]
    fn least_loaded(
        &self,
        py: Python<'_>,
        metric: &str,
        roles: Option<Vec<String>>,
    ) -> PyResult<Option<WorkerView>> {
        let view = self.0.get(py)?;
        let metric = metric_named(py, metric)?;
        let roles =
            roles.map(|roles| roles.iter().map(|role| role_named(py, role)).collect::<PyResult<Vec<_>>>());
        let roles = roles.transpose()?.unwrap_or_else(|| vec![Role::Prefill, Role::Mixed]);
        let found = view.least_loaded(metric, |worker| worker.is_up() && roles.contains(&worker.role()));
        Ok(found.map(|worker| WorkerView(self.0.lend(worker))))
    }

    /// One of the load metrics for every worker, in order: an array of int64 `[num_workers]`.
    fn column<'py>(&self, py: Python<'py>, metric: &str) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let view = self.0.get(py)?;
        let metric = metric_named(py, metric)?;
        Ok(PyArray1::from_iter(py, view.workers().map(|worker| worker.load(metric) as i64)))
    }

    /// Per worker, in order: prompt tokens of the request that its prefix cache holds.
    fn prefix_hits(&self, py: Python<'_>, request: &RequestView) -> PyResult<Vec<u32>> {
        Ok(self.0.get(py)?.prefix_hits(&request.0.get(py)?))
    }

    /// Seconds that moving the KV of `tokens` tokens is believed to take.
    fn predict_transfer(&self, py: Python<'_>, tokens: u64) -> PyResult<f64> {
        Ok(self.0.get(py)?.predict_transfer(tokens).as_secs_f64())
    }

    /// Admitted requests without a worker.
    #[getter]
    fn num_unplaced(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.0.get(py)?.num_unplaced())
    }

    /// Requests whose KV waits for room at a decode worker.
    #[getter]
    fn num_awaiting_room(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.0.get(py)?.num_awaiting_room())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match self.0.get(py) {
            Ok(view) => {
                format!("ClusterView({} workers at {:.3} s)", view.num_workers(), view.now().as_secs_f64())
            }
            Err(_) => "ClusterView(stale)".to_owned(),
        }
    }
}

impl WorkerView {
    pub(crate) fn core_id(&self, py: Python<'_>) -> PyResult<WorkerId> {
        Ok(self.0.get(py)?.id())
    }
}

#[pymethods]
impl WorkerView {
    /// The instant of the decision.
    #[getter]
    fn now(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.0.get(py)?.now().as_secs_f64())
    }

    /// Its index in the cluster.
    #[getter]
    fn id(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.0.get(py)?.id().0)
    }

    /// `"prefill"`, `"decode"` or `"mixed"`.
    #[getter]
    fn role(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(self.0.get(py)?.role().name())
    }

    /// Whether it is there.
    #[getter]
    fn is_up(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.0.get(py)?.is_up())
    }

    /// Whether a run of it is in progress.
    #[getter]
    fn is_busy(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.0.get(py)?.is_busy())
    }

    /// Prompt tokens still to compute.
    #[getter]
    fn queued_tokens(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.0.get(py)?.queued_tokens())
    }

    /// Requests with prompt tokens to compute.
    #[getter]
    fn num_waiting(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.0.get(py)?.num_waiting())
    }

    /// Requests that decode.
    #[getter]
    fn num_running(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.0.get(py)?.num_running())
    }

    /// Requests whose KV is on its way here.
    #[getter]
    fn num_incoming(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.0.get(py)?.num_incoming())
    }

    /// KV tokens of decoding requests and of those on their way.
    #[getter]
    fn context_tokens(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.0.get(py)?.context_tokens())
    }

    /// KV blocks in all.
    #[getter]
    fn num_blocks(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.0.get(py)?.num_blocks())
    }

    /// KV blocks that can be allocated.
    #[getter]
    fn available_blocks(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.0.get(py)?.available_blocks())
    }

    /// KV blocks that somebody holds.
    #[getter]
    fn held_blocks(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.0.get(py)?.held_blocks())
    }

    /// Tokens a KV block holds.
    #[getter]
    fn block_tokens(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.0.get(py)?.limits().block_tokens)
    }

    /// Requests that a step may hold.
    #[getter]
    fn max_batch(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.0.get(py)?.limits().max_batch)
    }

    /// Prompt tokens that a step may hold; one longer prompt may go alone.
    #[getter]
    fn max_prefill_tokens(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.0.get(py)?.limits().max_prefill_tokens)
    }

    /// Requests with prompt tokens to compute, in queue order.
    #[getter]
    fn waiting(&self, py: Python<'_>) -> PyResult<Vec<RequestView>> {
        Ok(self.0.get(py)?.waiting().map(|request| RequestView(self.0.lend(request))).collect())
    }

    /// Requests that decode, in the order in which they joined.
    #[getter]
    fn running(&self, py: Python<'_>) -> PyResult<Vec<RequestView>> {
        Ok(self.0.get(py)?.running().map(|request| RequestView(self.0.lend(request))).collect())
    }

    /// The whole cluster.
    #[getter]
    fn cluster(&self, py: Python<'_>) -> PyResult<ClusterView> {
        Ok(ClusterView(self.0.lend(self.0.get(py)?.cluster())))
    }

    /// Prompt tokens of the request that its prefix cache holds; at most all but one.
    fn prefix_hit(&self, py: Python<'_>, request: &RequestView) -> PyResult<u32> {
        Ok(self.0.get(py)?.prefix_hit(&request.0.get(py)?))
    }

    /// Whether there is room now to start the prompt of a waiting request.
    fn can_start(&self, py: Python<'_>, request: &RequestView) -> PyResult<bool> {
        Ok(self.0.get(py)?.can_start(&request.0.get(py)?))
    }

    /// Whether there is room now for the KV of a request that comes to decode here.
    fn can_accept(&self, py: Python<'_>, request: &RequestView) -> PyResult<bool> {
        Ok(self.0.get(py)?.can_accept(&request.0.get(py)?))
    }

    /// Whether its pool could hold `tokens` tokens, were they alone.
    fn can_ever_hold(&self, py: Python<'_>, tokens: u64) -> PyResult<bool> {
        Ok(self.0.get(py)?.can_ever_hold(tokens))
    }

    /// Seconds that `tokens` prompt tokens behind `prefix` cached ones are believed to take here,
    /// alone and in one step.
    #[pyo3(signature = (tokens, prefix=0))]
    fn predict_prefill(&self, py: Python<'_>, tokens: u32, prefix: u32) -> PyResult<f64> {
        Ok(self.0.get(py)?.predict_prefill(tokens, prefix).as_secs_f64())
    }

    /// Seconds that a step of `num_decode` decode rows with `context_tokens` of context together
    /// is believed to take here; by default the step of all that decode here now.
    #[pyo3(signature = (num_decode=None, context_tokens=None))]
    fn predict_decode(
        &self,
        py: Python<'_>,
        num_decode: Option<u32>,
        context_tokens: Option<u64>,
    ) -> PyResult<f64> {
        let view = self.0.get(py)?;
        let now = view.decode_shape();
        let shape = StepShape::decode(
            num_decode.unwrap_or(now.num_decode),
            context_tokens.unwrap_or(now.decode_context),
        );
        Ok(view.predict_step(&shape).as_secs_f64())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match self.0.get(py) {
            Ok(view) => format!(
                "WorkerView({}, {}, {} waiting, {} running)",
                view.id().0,
                view.role().name(),
                view.num_waiting(),
                view.num_running()
            ),
            Err(_) => "WorkerView(stale)".to_owned(),
        }
    }
}

impl RequestView {
    pub(crate) fn core_id(&self, py: Python<'_>) -> PyResult<RequestId> {
        Ok(self.0.get(py)?.id())
    }
}

#[pymethods]
impl RequestView {
    /// Its number in the run.
    #[getter]
    fn id(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.0.get(py)?.id().0)
    }

    /// Scheduled arrival.
    #[getter]
    fn arrival(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.0.get(py)?.arrival().as_secs_f64())
    }

    /// Prompt length.
    #[getter]
    fn prompt_tokens(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.0.get(py)?.prompt_tokens())
    }

    /// The most it may produce.
    #[getter]
    fn max_tokens(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.0.get(py)?.max_tokens())
    }

    /// Tokens emitted so far.
    #[getter]
    fn generated(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.0.get(py)?.generated())
    }

    /// Tokens whose KV exists.
    #[getter]
    fn computed(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.0.get(py)?.computed())
    }

    /// Tokens to compute before the next one is emitted.
    #[getter]
    fn pending(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.0.get(py)?.pending())
    }

    /// Its objectives: a `kvrelay.SLO`.
    #[getter]
    fn slo(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        objectives::slo_to(py, self.0.get(py)?.slo())
    }

    /// The number of its SLO class, in the workload's order.
    #[getter]
    fn slo_class(&self, py: Python<'_>) -> PyResult<u16> {
        Ok(self.0.get(py)?.class())
    }

    /// Higher is more important.
    #[getter]
    fn priority(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.0.get(py)?.priority())
    }

    /// When its first token is due; `None` without a TTFT objective.
    #[getter]
    fn deadline(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        Ok(self.0.get(py)?.deadline().map(|deadline| deadline.as_secs_f64()))
    }

    /// When its first token was emitted.
    #[getter]
    fn first_token(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        Ok(self.0.get(py)?.first_token().map(|at| at.as_secs_f64()))
    }

    /// Whether its KV blocks are allocated.
    #[getter]
    fn is_started(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.0.get(py)?.is_started())
    }

    /// Whether admission put it behind the others.
    #[getter]
    fn is_demoted(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.0.get(py)?.is_demoted())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match self.0.get(py) {
            Ok(view) => format!(
                "RequestView({}, {} prompt tokens, {} of at most {} generated)",
                view.id().0,
                view.prompt_tokens(),
                view.generated(),
                view.max_tokens()
            ),
            Err(_) => "RequestView(stale)".to_owned(),
        }
    }
}
