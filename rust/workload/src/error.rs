//! Why a workload cannot be made.

use kvrelay_core::latency::names::UnknownName;

use crate::trace::TraceError;

/// Why a workload cannot be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum WorkloadError {
    /// A parameter out of its range.
    #[error("{parameter} is {value}; it must be {range}")]
    Parameter {
        /// Which one.
        parameter: String,
        /// Its value.
        value: String,
        /// What it must be.
        range: String,
    },
    /// No preset of this name.
    #[error(transparent)]
    Preset(#[from] UnknownName),
    /// The preset's source publishes no arrivals.
    #[error("no arrival rate is published for {preset:?}: give one, in requests per second (rate=)")]
    RateNeeded {
        /// The preset.
        preset: String,
    },
    /// Arrivals over more time than a run can hold.
    #[error("{what} spans {seconds} s; a run holds at most {limit} s ({hint})")]
    TooLong {
        /// What does.
        what: String,
        /// From the start to the last arrival.
        seconds: f64,
        /// The most there may be.
        limit: f64,
        /// What to do.
        hint: &'static str,
    },
    /// A rate was asked of arrivals that have none.
    #[error(
        "{num_requests} arrivals over {seconds} s have no rate to change; at least two instants are needed"
    )]
    NoRate {
        /// How many arrivals there are.
        num_requests: usize,
        /// From first to last.
        seconds: f64,
    },
    /// What only arrivals with times of their own can do was asked of others.
    #[error("{what} is a closed loop ({description}): its arrivals wait for completions, {problem}")]
    ClosedLoop {
        /// Which workload.
        what: String,
        /// What it is.
        description: String,
        /// What cannot be done.
        problem: String,
    },
    /// A trace that cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

impl WorkloadError {
    /// A parameter out of its range.
    pub(crate) fn parameter(
        parameter: impl Into<String>,
        value: impl ToString,
        range: impl Into<String>,
    ) -> WorkloadError {
        WorkloadError::Parameter {
            parameter: parameter.into(),
            value: value.to_string(),
            range: range.into(),
        }
    }
}

/// `value`, if it is above zero and finite.
pub(crate) fn positive(parameter: &str, value: f64) -> Result<f64, WorkloadError> {
    if value > 0.0 && value.is_finite() {
        return Ok(value);
    }
    Err(WorkloadError::parameter(parameter, value, "above 0 and finite"))
}

/// The most tokens a prompt or an output may have: far beyond any model, and small enough that sums
/// of squares over a batch stay in 64 bits.
pub const MAX_TOKENS: u32 = 1 << 24;

/// `value`, if it is a number of tokens.
pub(crate) fn tokens(parameter: impl Into<String>, value: i64) -> Result<u32, WorkloadError> {
    match u32::try_from(value) {
        Ok(tokens) if (1..=MAX_TOKENS).contains(&tokens) => Ok(tokens),
        _ => Err(WorkloadError::parameter(parameter, value, format!("between 1 and {MAX_TOKENS} tokens"))),
    }
}
