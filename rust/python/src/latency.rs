//! Latency models that Python gives: tables of measured steps, and callables.

use std::sync::{Arc, Mutex, PoisonError};

use kvrelay_core::latency::LatencyModel;
use kvrelay_core::latency::fitted::Sample;
use kvrelay_core::latency::table::{Table, TableError, TableTerms};
use kvrelay_core::step::{StepShape, Stretch};
use kvrelay_core::time::Picos;
use pyo3::prelude::*;

use crate::error;

/// A step's sums: chunks, prompt tokens, Σ(prefix + chunk), Σ((prefix + chunk)² − prefix²), decode
/// rows, context tokens.
pub(crate) type Sums = (u32, u64, u64, u64, u32, u64);

pub(crate) fn shape(
    (num_prefill, prefill_tokens, prefill_context, prefill_square, num_decode, decode_context): Sums,
) -> StepShape {
    StepShape { num_prefill, prefill_tokens, prefill_context, prefill_square, num_decode, decode_context }
}

fn table_error(py: Python<'_>, error: &TableError) -> PyErr {
    error::config(py, error)
}

/// Step times read off measurements; `kvrelay.LatencyTable` wraps it.
#[pyclass(frozen, module = "kvrelay._core")]
pub(crate) struct LatencyTable(pub(crate) Arc<Table>);

#[pymethods]
impl LatencyTable {
    /// Nodes as (tokens, milliseconds), and milliseconds per row, token² and token of context.
    #[new]
    fn new(
        py: Python<'_>,
        nodes: Vec<(u64, f64)>,
        per_row: f64,
        per_square: f64,
        per_context: f64,
        most_context: u64,
    ) -> PyResult<LatencyTable> {
        let terms = TableTerms { nodes, per_row, per_square, per_context, most_context };
        Table::new(terms).map(|table| LatencyTable(Arc::new(table))).map_err(|error| table_error(py, &error))
    }

    /// Fits a table to steps and their seconds.
    #[staticmethod]
    fn fit(py: Python<'_>, steps: Vec<Sums>, seconds: Vec<f64>) -> PyResult<LatencyTable> {
        let sample = |(step, seconds): (Sums, f64)| Sample {
            shape: shape(step),
            duration: Picos::from_secs_f64(seconds),
        };
        let samples: Vec<_> = steps.into_iter().zip(seconds).map(sample).collect();
        Table::fit(&samples)
            .map(|table| LatencyTable(Arc::new(table)))
            .map_err(|error| table_error(py, &error))
    }

    /// Nodes, and milliseconds per row, token² and token of context, and the most context measured.
    #[getter]
    fn terms(&self) -> (Vec<(u64, f64)>, f64, f64, f64, u64) {
        let terms = self.0.terms();
        (terms.nodes.clone(), terms.per_row, terms.per_square, terms.per_context, terms.most_context)
    }

    /// Seconds that each step takes.
    fn predict(&self, steps: Vec<Sums>) -> Vec<f64> {
        steps.into_iter().map(|step| self.0.step(&shape(step)).as_secs_f64()).collect()
    }
}

/// Asks a Python callable for the seconds of every step. What it raises ends up in `raised`, and
/// the simulation with it.
pub(crate) struct Callable {
    call: Py<PyAny>,
    raised: Raised,
}

/// The first exception of a callable.
pub(crate) type Raised = Arc<Mutex<Option<PyErr>>>;

impl Callable {
    pub(crate) fn new(call: Py<PyAny>, raised: Raised) -> Callable {
        Callable { call, raised }
    }

    fn seconds(&self, step: &StepShape) -> PyResult<f64> {
        Python::attach(|py| {
            let arguments = (
                step.num_prefill,
                step.prefill_tokens,
                step.prefill_context,
                step.prefill_square,
                step.num_decode,
                step.decode_context,
            );
            let answer = self.call.bind(py).call1(arguments)?;
            match answer.extract::<f64>() {
                Ok(seconds) if seconds >= 0.0 && seconds.is_finite() => Ok(seconds),
                _ => {
                    let message =
                        format!("latency{arguments:?} is {}; it must be seconds, at least 0", answer.repr()?);
                    Err(error::config(py, message))
                }
            }
        })
    }
}

impl LatencyModel for Callable {
    fn stretch(&self, shape: &StepShape, _: u32) -> Stretch {
        let mut raised = self.raised.lock().unwrap_or_else(PoisonError::into_inner);
        if raised.is_some() {
            // The run is lost already; let it end soon.
            return Stretch::single(Picos(1_000));
        }
        match self.seconds(shape) {
            Ok(seconds) => Stretch::single(Picos::from_secs_f64(seconds)),
            Err(error) => {
                *raised = Some(error);
                Stretch::single(Picos(1_000))
            }
        }
    }
}
