//! A policy written in Python behind the core's trait: its methods are bound once, what it raises
//! comes out unchanged.

use std::collections::BTreeMap;

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::policy as core;
use kvrelay_core::policy::{
    Acceptance, Admission, Batch, Decision, Outcome, Placement, PolicyFault, Rebalance,
};
use kvrelay_core::request::RequestId;
use kvrelay_core::time::Time;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyTuple, PyType};

use crate::error;
use crate::view::{Lease, RequestView, WorkerView, role_named};

/// A built-in policy with its parameters; `kvrelay.policies` gives these their names.
#[pyclass(frozen, module = "kvrelay._core")]
#[derive(Clone)]
pub(crate) struct BuiltIn {
    name: String,
    token_budget: Option<u32>,
    chunk_tokens: Option<u32>,
}

#[pymethods]
impl BuiltIn {
    /// The built-in called `name`. `token_budget` is `chunked`'s, `chunk_tokens` `goodput`'s.
    #[new]
    #[pyo3(signature = (name, token_budget=None, chunk_tokens=None))]
    fn new(
        py: Python<'_>,
        name: String,
        token_budget: Option<u32>,
        chunk_tokens: Option<u32>,
    ) -> PyResult<BuiltIn> {
        if !core::BUILT_IN.contains(&name.as_str()) {
            return Err(error::config(
                py,
                format!("policy {name:?}; built in are {}", core::BUILT_IN.join(", ")),
            ));
        }
        Ok(BuiltIn { name, token_budget, chunk_tokens })
    }

    /// Its name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }
}

impl BuiltIn {
    fn build(&self) -> Option<Box<dyn core::Policy>> {
        match (self.name.as_str(), self.token_budget, self.chunk_tokens) {
            ("chunked", Some(token_budget), _) => Some(Box::new(core::Chunked { token_budget })),
            ("goodput", _, Some(chunk_tokens)) => Some(Box::new(core::Goodput::new(chunk_tokens))),
            (name, ..) => core::built_in(name),
        }
    }
}

/// The policy that Python names: a [`BuiltIn`], or an object with any of the methods, or a callable
/// for placement. `kvrelay.policies.resolve` has turned names into [`BuiltIn`]s before.
pub(crate) fn policy_from(value: &Bound<'_, PyAny>) -> PyResult<Box<dyn core::Policy>> {
    if let Ok(built_in) = value.cast::<BuiltIn>() {
        let built = built_in.get().build();
        return built.ok_or_else(|| error::config(value.py(), "no such built-in policy"));
    }
    Ok(Box::new(PyPolicy::bind(value)?))
}

/// A policy object of Python's, its methods bound once.
pub(crate) struct PyPolicy {
    name: String,
    begin: Option<Py<PyAny>>,
    observe: Option<Py<PyAny>>,
    admit: Option<Py<PyAny>>,
    place: Option<Py<PyAny>>,
    accept: Option<Py<PyAny>>,
    batch: Option<Py<PyAny>>,
    rebalance: Option<Py<PyAny>>,
    classes: Answers,
}

/// The classes of `kvrelay.policies` that answers and outcomes are made of.
struct Answers {
    hold: Py<PyAny>,
    demote: Py<PyAny>,
    refuse: Py<PyAny>,
    ran: Py<PyAny>,
    ended: Py<PyAny>,
}

impl PyPolicy {
    fn bind(object: &Bound<'_, PyAny>) -> PyResult<PyPolicy> {
        let py = object.py();
        let method = |name: &str| -> PyResult<Option<Py<PyAny>>> {
            let found = object.getattr_opt(name)?.filter(|found| found.is_callable());
            Ok(found.map(Bound::unbind))
        };
        let mut bound = PyPolicy {
            name: object.get_type().name()?.to_string(),
            begin: method("begin")?,
            observe: method("observe")?,
            admit: method("admit")?,
            place: method("place")?,
            accept: method("accept")?,
            batch: method("batch")?,
            rebalance: method("rebalance")?,
            classes: Answers::import(py)?,
        };
        let decides = [&bound.admit, &bound.place, &bound.accept, &bound.batch, &bound.rebalance];
        if decides.iter().all(|method| method.is_none()) {
            if !object.is_callable() {
                let message = format!(
                    "{} is no policy: it has none of admit, place, accept, batch, rebalance and cannot be called",
                    object.repr()?
                );
                return Err(error::config(py, message));
            }
            bound.place = Some(object.clone().unbind());
            bound.name = object.getattr_opt("__name__")?.map_or(Ok(bound.name), |name| name.extract())?;
        }
        Ok(bound)
    }
}

impl Answers {
    fn import(py: Python<'_>) -> PyResult<Answers> {
        let module = py.import("kvrelay.policies")?;
        let class = |name: &str| module.getattr(name).map(Bound::unbind);
        Ok(Answers {
            hold: class("Hold")?,
            demote: class("Demote")?,
            refuse: class("Refuse")?,
            ran: class("Ran")?,
            ended: class("Ended")?,
        })
    }
}

/// Calls into Python; what is raised there is a fault that carries that very exception.
fn asked<T>(method: &'static str, ask: impl FnOnce(Python<'_>) -> PyResult<T>) -> Decision<T> {
    Python::attach(ask).map_err(|error| PolicyFault::Raised { method, source: Box::new(error) })
}

/// What a method answered, read by `parse`. What is wrong with it names the method and the answer.
fn read<T>(
    method: &str,
    answer: &Bound<'_, PyAny>,
    parse: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>,
) -> PyResult<T> {
    let py = answer.py();
    let parsed = if answer.is_instance_of::<PyType>() {
        Err(unexpected("an object, not its class", answer))
    } else {
        parse(answer)
    };
    parsed.map_err(|problem| {
        // A view that was kept from an earlier call is an error of its own.
        if problem.get_type(py).name().is_ok_and(|name| name == "StaleView") {
            return problem;
        }
        let answer = answer.repr().map_or_else(|_| "?".to_owned(), |repr| repr.to_string());
        let message = format!("policy method `{method}` answered {answer}: {}", problem.value(py));
        let raised = error::raise(py, "PolicyError", message);
        raised.set_cause(py, Some(problem));
        raised
    })
}

/// A field of an answer, of the type that `expected` describes.
fn field<'py, T: FromPyObjectOwned<'py>>(
    answer: &Bound<'py, PyAny>,
    name: &str,
    expected: &str,
) -> PyResult<T> {
    let value = answer.getattr(name)?;
    value.extract().map_err(|_| unexpected(&format!("{expected} as {name}"), &value))
}

fn worker_id(answer: &Bound<'_, PyAny>) -> PyResult<WorkerId> {
    if let Ok(view) = answer.cast::<WorkerView>() {
        return view.get().core_id(answer.py());
    }
    if answer.is_instance_of::<PyBool>() {
        return Err(unexpected("a worker (its view or its index)", answer));
    }
    let index: u32 = answer.extract().map_err(|_| unexpected("a worker (its view or its index)", answer))?;
    Ok(WorkerId(index))
}

fn request_id(answer: &Bound<'_, PyAny>) -> PyResult<RequestId> {
    if let Ok(view) = answer.cast::<RequestView>() {
        return view.get().core_id(answer.py());
    }
    let id: u64 = answer.extract().map_err(|_| unexpected("a request (its view or its id)", answer))?;
    Ok(RequestId(id))
}

fn unexpected(expected: &str, found: &Bound<'_, PyAny>) -> PyErr {
    let found_repr = found.repr().map_or_else(|_| "?".to_owned(), |repr| repr.to_string());
    error::raise(found.py(), "PolicyError", format!("expected {expected}, found {found_repr}"))
}

fn placement_from(answer: &Bound<'_, PyAny>) -> PyResult<Option<Placement>> {
    if answer.is_none() {
        return Ok(None);
    }
    if let Ok(pair) = answer.cast::<PyTuple>() {
        if pair.len() != 2 {
            return Err(unexpected("(prefill, decode)", answer));
        }
        let (prefill, decode) = (worker_id(&pair.get_item(0)?)?, worker_id(&pair.get_item(1)?)?);
        return Ok(Some(Placement { prefill, decode: Some(decode), reserve: false }));
    }
    let Some(prefill) = answer.getattr_opt("prefill")? else {
        return worker_id(answer).map(|worker| Some(worker.into()));
    };
    let decode = answer.getattr("decode")?;
    Ok(Some(Placement {
        prefill: worker_id(&prefill)?,
        decode: if decode.is_none() { None } else { Some(worker_id(&decode)?) },
        reserve: field(answer, "reserve", "True or False")?,
    }))
}

fn acceptance_from(answer: &Bound<'_, PyAny>) -> PyResult<Acceptance> {
    if let Ok(flag) = answer.cast::<PyBool>() {
        return Ok(if flag.is_true() { Acceptance::Now } else { Acceptance::Later });
    }
    if let Ok(word) = answer.extract::<String>() {
        return match word.as_str() {
            "now" => Ok(Acceptance::Now),
            "later" => Ok(Acceptance::Later),
            _ => Err(unexpected("\"now\", \"later\", True, False or a worker", answer)),
        };
    }
    if answer.is_none() {
        return Ok(Acceptance::Now);
    }
    let other =
        worker_id(answer).map_err(|_| unexpected("\"now\", \"later\", True, False or a worker", answer));
    other.map(Acceptance::Other)
}

fn batch_from(answer: &Bound<'_, PyAny>) -> PyResult<Batch> {
    if answer.getattr_opt("prefill")?.is_none() || answer.getattr_opt("preempt")?.is_none() {
        return Err(unexpected("a kvrelay.Batch or None", answer));
    }
    let ids = |field: &str| -> PyResult<Vec<RequestId>> {
        answer.getattr(field)?.try_iter()?.map(|id| request_id(&id?)).collect()
    };
    let mut prefill = Vec::new();
    for entry in answer.getattr("prefill")?.try_iter()? {
        let entry = entry?;
        let (request, tokens): (Bound<'_, PyAny>, i64) =
            entry.extract().map_err(|_| unexpected("(request, tokens)", &entry))?;
        let tokens =
            u32::try_from(tokens).map_err(|_| unexpected("a number of prompt tokens from 1 on", &entry))?;
        prefill.push((request_id(&request)?, tokens));
    }
    let decode = if answer.getattr("decode")?.is_none() { None } else { Some(ids("decode")?) };
    let wake_at: Option<f64> = field(answer, "wake_at", "seconds or None")?;
    Ok(Batch {
        prefill,
        decode,
        repeat: field(answer, "repeat", "a number of steps or None")?,
        preempt: ids("preempt")?,
        drop: ids("drop")?,
        wake_at: wake_at.map(Time::from_secs_f64),
    })
}

fn rebalance_from(answer: &Bound<'_, PyAny>) -> PyResult<Rebalance> {
    if answer.is_none() {
        return Ok(Rebalance::default());
    }
    if answer.getattr_opt("roles")?.is_none() {
        return Err(unexpected("a kvrelay.Rebalance or None", answer));
    }
    let mut roles = Vec::new();
    let given = answer.getattr("roles")?;
    for entry in given.cast::<PyDict>().map_err(|_| unexpected("roles as {worker: role}", &given))?.iter() {
        let role: String = entry.1.extract().map_err(|_| unexpected("a role", &entry.1))?;
        roles.push((worker_id(&entry.0)?, role_named(answer.py(), &role)?));
    }
    let next: Option<f64> = field(answer, "next", "seconds or None")?;
    Ok(Rebalance { roles, next: next.map(Time::from_secs_f64) })
}

impl PyPolicy {
    fn admission_from(&self, answer: &Bound<'_, PyAny>) -> PyResult<Admission> {
        let py = answer.py();
        if answer.is_none() {
            return Ok(Admission::Accept);
        }
        if answer.is_instance(self.classes.hold.bind(py))? {
            let until: f64 = field(answer, "until", "seconds")?;
            return Ok(Admission::Hold(Time::from_secs_f64(until)));
        }
        if answer.is_instance(self.classes.demote.bind(py))? {
            return Ok(Admission::Demote);
        }
        if answer.is_instance(self.classes.refuse.bind(py))? {
            let reason: String = field(answer, "reason", "a string")?;
            let numbers: BTreeMap<String, f64> = field(answer, "numbers", "named numbers")?;
            return Ok(Admission::Refuse { reason, numbers });
        }
        Err(unexpected("None, Hold(until), Demote() or Refuse(reason, **numbers)", answer))
    }

    fn outcome<'py>(&self, py: Python<'py>, outcome: Outcome<'_>) -> PyResult<Bound<'py, PyAny>> {
        let fields = PyDict::new(py);
        match outcome {
            Outcome::Ran { worker, shape, steps, duration } => {
                fields.set_item("worker", worker.0)?;
                fields.set_item("steps", steps)?;
                fields.set_item("duration", duration.as_secs_f64())?;
                fields.set_item("prefill_tokens", shape.prefill_tokens)?;
                fields.set_item("num_prefill", shape.num_prefill)?;
                fields.set_item("num_decode", shape.num_decode)?;
                fields.set_item("decode_context", shape.decode_context)?;
                self.classes.ran.bind(py).call((), Some(&fields))
            }
            Outcome::Ended(record) => {
                fields.set_item("request", record.id.0)?;
                fields.set_item("status", record.status.name())?;
                fields.set_item("slo_class", record.class.0)?;
                fields.set_item("prompt_tokens", record.prompt_tokens)?;
                fields.set_item("output_tokens", record.output_tokens)?;
                fields.set_item("ttft", record.ttft().map(|ttft| ttft.as_secs_f64()))?;
                fields.set_item("tpot", record.tpot())?;
                fields.set_item("good", crate::result::good(record))?;
                self.classes.ended.bind(py).call((), Some(&fields))
            }
        }
    }
}

impl core::Policy for PyPolicy {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn begin(&mut self, cluster: &core::ClusterView<'_>, seed: u64) -> Decision<()> {
        let Some(begin) = &self.begin else { return Ok(()) };
        asked("begin", |py| {
            let lease = Lease::new();
            let rng = py.import("numpy.random")?.call_method1("default_rng", (seed,))?;
            begin.call1(py, (lease.cluster(*cluster), rng)).map(|_| ())
        })
    }

    fn observe(&mut self, outcome: Outcome<'_>) -> Decision<()> {
        let Some(observe) = &self.observe else { return Ok(()) };
        asked("observe", |py| observe.call1(py, (self.outcome(py, outcome)?,)).map(|_| ()))
    }

    fn admit(
        &mut self,
        request: &core::RequestView<'_>,
        cluster: &core::ClusterView<'_>,
    ) -> Decision<Admission> {
        let Some(admit) = &self.admit else { return Ok(Admission::Accept) };
        asked("admit", |py| {
            let lease = Lease::new();
            let answer = admit.call1(py, (lease.request(*request), lease.cluster(*cluster)))?;
            read("admit", answer.bind(py), |answer| self.admission_from(answer))
        })
    }

    fn place(
        &mut self,
        request: &core::RequestView<'_>,
        cluster: &core::ClusterView<'_>,
    ) -> Decision<Option<Placement>> {
        let Some(place) = &self.place else { return Ok(core::default_place(request, cluster)) };
        asked("place", |py| {
            let lease = Lease::new();
            let answer = place.call1(py, (lease.request(*request), lease.cluster(*cluster)))?;
            read("place", answer.bind(py), placement_from)
        })
    }

    fn accept(
        &mut self,
        request: &core::RequestView<'_>,
        worker: &core::WorkerView<'_>,
    ) -> Decision<Acceptance> {
        let Some(accept) = &self.accept else { return Ok(core::default_accept(request, worker)) };
        asked("accept", |py| {
            let lease = Lease::new();
            let answer = accept.call1(py, (lease.request(*request), lease.worker(*worker)))?;
            read("accept", answer.bind(py), acceptance_from)
        })
    }

    fn batch(&mut self, worker: &core::WorkerView<'_>) -> Decision<Batch> {
        let Some(batch) = &self.batch else { return Ok(core::default_batch(worker)) };
        let answer = asked("batch", |py| {
            let lease = Lease::new();
            let answer = batch.call1(py, (lease.worker(*worker),))?;
            let answer = answer.bind(py);
            if answer.is_none() { Ok(None) } else { read("batch", answer, batch_from).map(Some) }
        })?;
        Ok(answer.unwrap_or_else(|| core::default_batch(worker)))
    }

    fn rebalance(&mut self, cluster: &core::ClusterView<'_>) -> Decision<Rebalance> {
        let Some(rebalance) = &self.rebalance else { return Ok(Rebalance::default()) };
        asked("rebalance", |py| {
            let lease = Lease::new();
            let answer = rebalance.call1(py, (lease.cluster(*cluster),))?;
            read("rebalance", answer.bind(py), rebalance_from)
        })
    }
}
