//! Errors on their way to Python: classes of `kvrelay.errors`, with their numbers as attributes.

use kvrelay_core::policy::PolicyFault;
use kvrelay_sim::SimError;
use kvrelay_workload::WorkloadError;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// An exception of the class `name` of `kvrelay.errors`.
pub(crate) fn raise(py: Python<'_>, name: &str, message: impl ToString) -> PyErr {
    raise_with(py, name, message, &PyDict::new(py))
}

/// The same, with attributes.
pub(crate) fn raise_with(
    py: Python<'_>,
    name: &str,
    message: impl ToString,
    numbers: &Bound<'_, PyDict>,
) -> PyErr {
    let made = py
        .import("kvrelay.errors")
        .and_then(|module| module.getattr(name))
        .and_then(|class| class.call((message.to_string(),), Some(numbers)));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// A bad argument: `ConfigError`.
pub(crate) fn config(py: Python<'_>, message: impl ToString) -> PyErr {
    raise(py, "ConfigError", message)
}

pub(crate) fn workload(py: Python<'_>, error: &WorkloadError) -> PyErr {
    raise(py, "WorkloadError", error)
}

/// A policy's own exception comes out as that very exception.
pub(crate) fn policy(py: Python<'_>, fault: PolicyFault) -> PyErr {
    match fault {
        PolicyFault::Raised { method, source } => match source.downcast::<PyErr>() {
            Ok(error) => *error,
            Err(source) => raise(py, "PolicyError", format!("policy method `{method}` failed: {source}")),
        },
        PolicyFault::Invalid { method, .. } => {
            let numbers = PyDict::new(py);
            match numbers.set_item("method", method) {
                Ok(()) => raise_with(py, "PolicyError", fault, &numbers),
                Err(error) => error,
            }
        }
    }
}

pub(crate) fn simulation(py: Python<'_>, error: SimError) -> PyErr {
    match error {
        SimError::Policy(fault) => policy(py, fault),
        SimError::Interrupted => PyKeyboardInterrupt::new_err(()),
        SimError::Stalled { num_live, first, at } => {
            let numbers = PyDict::new(py);
            let filled = numbers
                .set_item("num_live", num_live)
                .and_then(|()| numbers.set_item("first_request", first))
                .and_then(|()| numbers.set_item("at", at.as_secs_f64()));
            match filled {
                Ok(()) => raise_with(py, "StalledError", error, &numbers),
                Err(error) => error,
            }
        }
        SimError::TooLong { .. } => raise(py, "StalledError", error),
        SimError::Integrity(_) => raise(py, "IntegrityError", error),
    }
}
