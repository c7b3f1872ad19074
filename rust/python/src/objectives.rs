//! Objectives as Python gives and gets them: `kvrelay.SLO`, in seconds.

use kvrelay_core::slo::Slo;
use kvrelay_core::time::Nanos;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error;

/// Reads a `kvrelay.SLO` (or anything with its attributes); `None` is no objective.
pub(crate) fn slo_from(value: Option<&Bound<'_, PyAny>>) -> PyResult<Slo> {
    let Some(value) = value.filter(|value| !value.is_none()) else { return Ok(Slo::default()) };
    let seconds = |name: &str| -> PyResult<Option<Nanos>> {
        let given: Option<f64> = value.getattr(name)?.extract()?;
        match given {
            Some(seconds) if !(seconds > 0.0 && seconds.is_finite()) => {
                let message = format!("SLO {name} is {seconds} s; it must be above 0 and finite, or None");
                Err(error::config(value.py(), message))
            }
            given => Ok(given.map(Nanos::from_secs_f64)),
        }
    };
    Ok(Slo {
        ttft: seconds("ttft")?,
        tpot: seconds("tpot")?,
        e2e: seconds("e2e")?,
        max_gap: seconds("max_gap")?,
        token_deadlines: value.getattr("token_deadlines")?.extract()?,
    })
}

/// Makes a `kvrelay.SLO`.
pub(crate) fn slo_to(py: Python<'_>, slo: &Slo) -> PyResult<Py<PyAny>> {
    let fields = PyDict::new(py);
    let seconds = |limit: Option<Nanos>| limit.map(Nanos::as_secs_f64);
    fields.set_item("ttft", seconds(slo.ttft))?;
    fields.set_item("tpot", seconds(slo.tpot))?;
    fields.set_item("e2e", seconds(slo.e2e))?;
    fields.set_item("max_gap", seconds(slo.max_gap))?;
    fields.set_item("token_deadlines", slo.token_deadlines)?;
    Ok(py.import("kvrelay.describe")?.getattr("SLO")?.call_method1("_of", (fields,))?.unbind())
}
