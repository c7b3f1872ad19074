//! Workloads, as `kvrelay.Workload` wraps them.

use std::path::PathBuf;
use std::sync::Arc;

use kvrelay_core::request::{ClassId, PromptContent};
use kvrelay_core::time::Nanos;
use kvrelay_workload::arrivals::Process;
use kvrelay_workload::closed::{Sessions, ThinkTime, Turn};
use kvrelay_workload::intensity::{Extent, Intensity};
use kvrelay_workload::preset::Preset;
use kvrelay_workload::trace::{Format, TimeUnit, TraceOptions};
use kvrelay_workload::workload::Synthetic;
use kvrelay_workload::{Class, LengthPair, Lengths, Record};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::error;
use crate::objectives::{slo_from, slo_to};

/// Arrivals, with their SLO classes.
#[pyclass(frozen, module = "kvrelay._core")]
pub(crate) struct Workload(pub(crate) Arc<kvrelay_workload::Workload>);

/// What a class of requests shares, as Python gives it: name, SLO, priority, max_tokens.
#[derive(FromPyObject)]
struct ClassSpec<'py>(String, Option<Bound<'py, PyAny>>, i32, Option<u32>);

impl ClassSpec<'_> {
    fn build(self) -> PyResult<Class> {
        Ok(Class { name: self.0, slo: slo_from(self.1.as_ref())?, priority: self.2, max_tokens: self.3 })
    }
}

/// A column of whole numbers.
type Numbers<'py> = Bound<'py, PyArray1<i64>>;

/// Lengths, as Python gives them: a number, or the name of a law and its parameters.
#[derive(FromPyObject)]
enum LengthSpec {
    Constant(i64),
    Law(String, Vec<f64>),
}

impl LengthSpec {
    fn build(&self, py: Python<'_>) -> PyResult<Lengths> {
        let built = match self {
            LengthSpec::Constant(length) => Lengths::constant(*length),
            LengthSpec::Law(law, parameters) => match (law.as_str(), parameters.as_slice()) {
                ("lognormal", [mean, std]) => Lengths::lognormal(*mean, *std),
                ("lognormal_percentiles", [median, p90]) => {
                    Lengths::lognormal_from_percentiles(*median, *p90)
                }
                ("uniform", [low, high]) => Lengths::uniform(*low as i64, *high as i64),
                ("empirical", quantiles) => Lengths::empirical(quantiles),
                _ => {
                    return Err(error::config(
                        py,
                        format!("lengths {law:?} with {} parameters", parameters.len()),
                    ));
                }
            },
        };
        built.map_err(|error| error::workload(py, &error))
    }
}

/// Prompt and output lengths, and the rank correlation between them.
#[derive(FromPyObject)]
struct PairSpec(LengthSpec, LengthSpec, Option<f64>);

impl PairSpec {
    fn build(self, py: Python<'_>) -> PyResult<LengthPair> {
        let (prompt, output) = (self.0.build(py)?, self.1.build(py)?);
        match self.2 {
            None => Ok(LengthPair::independent(prompt, output)),
            Some(spearman) => {
                LengthPair::correlated(prompt, output, spearman).map_err(|error| error::workload(py, &error))
            }
        }
    }
}

/// One request of a list: arrival in seconds, prompt and output tokens, class index, and where they
/// are its own: max_tokens, priority, hash ids with the tokens each stands for.
#[derive(FromPyObject)]
struct RecordSpec(f64, i64, i64, u16, Option<u32>, Option<i32>, Option<(Vec<u64>, u32)>);

impl RecordSpec {
    fn build(self, py: Python<'_>, index: usize) -> PyResult<Record> {
        let record =
            Record::checked(index, self.0, self.1, self.2).map_err(|error| error::workload(py, &error))?;
        let content = self.6.map_or(PromptContent::Unique, |(ids, tokens_per_id)| PromptContent::HashIds {
            ids: ids.into(),
            tokens_per_id: tokens_per_id.max(1),
        });
        Ok(Record { class: ClassId(self.3), max_tokens: self.4, priority: self.5, content, ..record })
    }
}

fn wrap(
    py: Python<'_>,
    made: Result<kvrelay_workload::Workload, kvrelay_workload::WorkloadError>,
) -> PyResult<Workload> {
    made.map(|workload| Workload(Arc::new(workload))).map_err(|error| error::workload(py, &error))
}

#[pymethods]
impl Workload {
    /// Requests that arrive by a process: `"poisson"`, `"gamma"` (with `cv`) or `"fixed"`.
    #[staticmethod]
    #[pyo3(signature = (process, rate, cv, num_requests, lengths, class_spec, seed))]
    fn synthetic(
        py: Python<'_>,
        process: &str,
        rate: f64,
        cv: Option<f64>,
        num_requests: usize,
        lengths: PairSpec,
        class_spec: ClassSpec<'_>,
        seed: u64,
    ) -> PyResult<Workload> {
        let process = match (process, cv) {
            ("poisson", None) => Process::Poisson,
            ("gamma", Some(cv)) => Process::Gamma { cv },
            ("fixed", None) => Process::Fixed,
            _ => return Err(error::config(py, format!("process {process:?} with cv {cv:?}"))),
        };
        let what = Synthetic { num_requests, lengths: lengths.build(py)?, class: class_spec.build()?, seed };
        wrap(py, kvrelay_workload::Workload::synthetic(process, rate, &what))
    }

    /// Requests at a rate that changes: `"ramp"` (from, to), `"sinusoid"` (rate, amplitude, period) or
    /// `"on_off"` (rates, then mean times), until so many requests or so many seconds.
    #[staticmethod]
    #[pyo3(signature = (law, parameters, num_requests, duration, lengths, class_spec, seed))]
    fn varying(
        py: Python<'_>,
        law: &str,
        parameters: Vec<f64>,
        num_requests: Option<usize>,
        duration: Option<f64>,
        lengths: PairSpec,
        class_spec: ClassSpec<'_>,
        seed: u64,
    ) -> PyResult<Workload> {
        let intensity = match (law, parameters.as_slice()) {
            ("ramp", &[from, to]) => Intensity::Ramp { from, to },
            ("sinusoid", &[rate, amplitude, period]) => Intensity::Sinusoid { rate, amplitude, period },
            ("on_off", &[rate_on, rate_off, mean_on, mean_off]) => {
                Intensity::OnOff { rate_on, rate_off, mean_on, mean_off }
            }
            _ => {
                return Err(error::config(py, format!("rates {law:?} with {} parameters", parameters.len())));
            }
        };
        let extent = match (num_requests, duration) {
            (Some(count), None) => Extent::Requests(count),
            (None, Some(seconds)) => Extent::Seconds(seconds),
            _ => return Err(error::config(py, "give num_requests or duration, one of the two")),
        };
        let (lengths, class) = (lengths.build(py)?, class_spec.build()?);
        let made =
            py.detach(|| kvrelay_workload::Workload::varying(intensity, extent, &lengths, class, seed));
        wrap(py, made)
    }

    /// Requests of so many clients, each with one at a time; `think` is (mean seconds, cv).
    #[staticmethod]
    #[pyo3(signature = (concurrency, num_requests, think, lengths, class_spec, seed))]
    fn closed_loop(
        py: Python<'_>,
        concurrency: usize,
        num_requests: usize,
        think: (f64, f64),
        lengths: PairSpec,
        class_spec: ClassSpec<'_>,
        seed: u64,
    ) -> PyResult<Workload> {
        let think = ThinkTime { mean: think.0, cv: think.1 };
        let what = Synthetic { num_requests, lengths: lengths.build(py)?, class: class_spec.build()?, seed };
        wrap(py, kvrelay_workload::Workload::closed_loop(concurrency, think, &what))
    }

    /// Conversations of several turns; `lengths` is what a turn adds.
    #[staticmethod]
    #[pyo3(signature = (num_sessions, rate, turns, think, lengths, class_spec, seed))]
    fn sessions(
        py: Python<'_>,
        num_sessions: usize,
        rate: f64,
        turns: LengthSpec,
        think: (f64, f64),
        lengths: PairSpec,
        class_spec: ClassSpec<'_>,
        seed: u64,
    ) -> PyResult<Workload> {
        let what = Sessions {
            num_sessions,
            rate,
            turns: turns.build(py)?,
            lengths: lengths.build(py)?,
            think: ThinkTime { mean: think.0, cv: think.1 },
            class: class_spec.build()?,
            seed,
        };
        wrap(py, py.detach(|| kvrelay_workload::Workload::sessions(&what)))
    }

    /// Requests like those of a published workload.
    #[staticmethod]
    #[pyo3(signature = (name, rate, num_requests, class_spec, seed))]
    fn preset(
        py: Python<'_>,
        name: &str,
        rate: Option<f64>,
        num_requests: usize,
        class_spec: ClassSpec<'_>,
        seed: u64,
    ) -> PyResult<Workload> {
        let class = class_spec.build()?;
        wrap(py, kvrelay_workload::Workload::preset(name, rate, num_requests, class, seed))
    }

    /// The requests of a trace file.
    #[staticmethod]
    #[pyo3(signature = (path, format, unit, limit, slot, rate, class_spec, seed))]
    fn from_trace(
        py: Python<'_>,
        path: PathBuf,
        format: Option<&str>,
        unit: Option<&str>,
        limit: Option<usize>,
        slot: Option<f64>,
        rate: Option<f64>,
        class_spec: ClassSpec<'_>,
        seed: u64,
    ) -> PyResult<Workload> {
        let unknown = |error: kvrelay_core::latency::names::UnknownName| error::config(py, error);
        let options = TraceOptions {
            format: format.map(Format::named).transpose().map_err(unknown)?,
            unit: unit.map(TimeUnit::named).transpose().map_err(unknown)?,
            limit,
            slot: slot.map(Nanos::from_secs_f64),
        };
        let class = class_spec.build()?;
        let made = py.detach(|| kvrelay_workload::Workload::from_trace(&path, &options, rate, class, seed));
        wrap(py, made)
    }

    /// The requests of a list, with the classes they name by index.
    #[staticmethod]
    fn from_records(
        py: Python<'_>,
        records: Vec<RecordSpec>,
        classes: Vec<ClassSpec<'_>>,
        seed: u64,
    ) -> PyResult<Workload> {
        let built = records.into_iter().enumerate().map(|(index, record)| record.build(py, index));
        let records = built.collect::<PyResult<Vec<_>>>()?;
        let classes = classes.into_iter().map(ClassSpec::build).collect::<PyResult<Vec<_>>>()?;
        wrap(py, kvrelay_workload::Workload::from_records(records, classes, seed))
    }

    /// All of them at once.
    #[staticmethod]
    fn merge(py: Python<'_>, workloads: Vec<PyRef<'_, Workload>>) -> PyResult<Workload> {
        let parts: Vec<_> = workloads.iter().map(|workload| (*workload.0).clone()).collect();
        wrap(py, kvrelay_workload::Workload::merge(&parts))
    }

    /// The same arrivals at another rate.
    fn at_rate(&self, py: Python<'_>, rate: f64) -> PyResult<Workload> {
        wrap(py, self.0.at_rate(rate))
    }

    /// The same arrivals with lengths divided.
    fn scaled_lengths(&self, py: Python<'_>, divide: u32) -> PyResult<Workload> {
        wrap(py, self.0.scaled_lengths(divide))
    }

    /// Whether arrivals wait for completions.
    #[getter]
    fn is_closed_loop(&self) -> bool {
        self.0.is_closed_loop()
    }

    /// Arrivals per second; `None` when all arrive at once, and for a closed loop.
    #[getter]
    fn rate(&self) -> Option<f64> {
        self.0.rate()
    }

    /// From first to last arrival, in seconds.
    #[getter]
    fn span(&self) -> f64 {
        self.0.span().as_secs_f64()
    }

    /// What it is, in a line.
    #[getter]
    fn description(&self) -> &str {
        &self.0.description
    }

    /// The seed of everything made up in it.
    #[getter]
    fn seed(&self) -> u64 {
        self.0.seed
    }

    /// What was noticed and put right, or may surprise.
    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.0.warnings.clone()
    }

    /// Per class: name, SLO, priority.
    #[getter]
    fn classes(&self, py: Python<'_>) -> PyResult<Vec<(String, Py<PyAny>, i32)>> {
        let class = |class: &Class| Ok((class.name.clone(), slo_to(py, &class.slo)?, class.priority));
        self.0.classes().iter().map(class).collect()
    }

    fn __len__(&self) -> usize {
        self.0.arrivals.len()
    }

    /// Of sessions: which session each request belongs to, and which of its turns it is, from 0.
    fn turns<'py>(&self, py: Python<'py>) -> Option<(Numbers<'py>, Numbers<'py>)> {
        let turns = self.0.turns()?;
        let column =
            |of: fn(&Turn) -> u32| PyArray1::from_iter(py, turns.iter().map(|turn| i64::from(of(turn))));
        Some((column(|turn| turn.session), column(|turn| turn.number)))
    }

    /// Columns of equal length: arrival (s; NaN where it waits for a completion), prompt_tokens,
    /// output_tokens, max_tokens, slo_class (an index), priority; of sessions also session and turn; where
    /// prompts share prefixes hash_ids (arrays, or `None`) and tokens_per_id (0 where there are none).
    fn columns<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let columns = PyDict::new(py);
        let arrivals = &self.0.arrivals;
        let at = |index: usize| if self.0.waits(index) { f64::NAN } else { arrivals[index].at.as_secs_f64() };
        columns.set_item("arrival", PyArray1::from_iter(py, (0..arrivals.len()).map(at)))?;
        columns.set_item(
            "prompt_tokens",
            PyArray1::from_iter(py, arrivals.iter().map(|a| i64::from(a.prompt_tokens))),
        )?;
        columns.set_item(
            "output_tokens",
            PyArray1::from_iter(py, arrivals.iter().map(|a| i64::from(a.output_tokens))),
        )?;
        columns.set_item(
            "max_tokens",
            PyArray1::from_iter(py, arrivals.iter().map(|a| i64::from(a.max_tokens))),
        )?;
        columns
            .set_item("slo_class", PyArray1::from_iter(py, arrivals.iter().map(|a| i64::from(a.class.0))))?;
        columns
            .set_item("priority", PyArray1::from_iter(py, arrivals.iter().map(|a| i64::from(a.priority))))?;
        if let Some((sessions, numbers)) = self.turns(py) {
            columns.set_item("session", sessions)?;
            columns.set_item("turn", numbers)?;
        }
        if arrivals.iter().any(|arrival| ids_of(&arrival.content).is_some()) {
            let ids =
                arrivals.iter().map(|a| ids_of(&a.content).map(|(ids, _)| PyArray1::from_slice(py, ids)));
            columns.set_item("hash_ids", PyList::new(py, ids.collect::<Vec<_>>())?)?;
            let tokens =
                arrivals.iter().map(|a| ids_of(&a.content).map_or(0, |(_, tokens)| i64::from(tokens)));
            columns.set_item("tokens_per_id", PyArray1::from_iter(py, tokens))?;
        }
        Ok(columns)
    }
}

/// What names a prompt's content, and the tokens that each id stands for; `None` where it is like no other.
fn ids_of(content: &PromptContent) -> Option<(&[u64], u32)> {
    match content {
        PromptContent::Unique => None,
        PromptContent::HashIds { ids, tokens_per_id } => Some((ids, *tokens_per_id)),
    }
}

/// Names of the published workloads.
#[pyfunction]
pub(crate) fn preset_names() -> Vec<&'static str> {
    Preset::names().collect()
}
