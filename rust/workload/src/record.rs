//! Requests as a user or a trace lists them, and the classes they belong to.

use kvrelay_core::request::{ClassId, PromptContent};
use kvrelay_core::slo::Slo;
use kvrelay_core::time::Time;

use crate::arrivals::checked_time;
use crate::error::{WorkloadError, tokens};

/// What the requests of one class share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Class {
    /// Its name, as results show it.
    pub name: String,
    /// Objectives.
    pub slo: Slo,
    /// Higher is more important.
    pub priority: i32,
    /// The most tokens its requests may produce, which cuts longer outputs; `None` is its largest
    /// output.
    pub max_tokens: Option<u32>,
}

impl Default for Class {
    fn default() -> Class {
        Class { name: "default".to_owned(), slo: Slo::default(), priority: 0, max_tokens: None }
    }
}

/// One request of a list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// When it arrives.
    pub at: Time,
    /// Prompt length in tokens, at least 1.
    pub prompt_tokens: u32,
    /// Output length in tokens, at least 1.
    pub output_tokens: u32,
    /// Its own limit on output tokens, in place of its class's.
    pub max_tokens: Option<u32>,
    /// Its own priority, in place of its class's.
    pub priority: Option<i32>,
    /// Its class: an index into the list of classes that comes with it.
    pub class: ClassId,
    /// What is known of its prompt.
    pub content: PromptContent,
}

impl Record {
    /// Record number `index` of a list, checked.
    ///
    /// # Errors
    /// When the arrival is negative, not a number, or later than a run can hold, or a length is not
    /// a number of tokens; the message names the record and field.
    pub fn checked(
        index: usize,
        arrival_seconds: f64,
        prompt_tokens: i64,
        output_tokens: i64,
    ) -> Result<Record, WorkloadError> {
        if !(arrival_seconds >= 0.0 && arrival_seconds.is_finite()) {
            let parameter = format!("records[{index}].arrival");
            return Err(WorkloadError::parameter(parameter, arrival_seconds, "at least 0 s and finite"));
        }
        let what = format!("records[{index}].arrival");
        Ok(Record {
            at: checked_time(&what, arrival_seconds, "subtract the first arrival, and give seconds")?,
            prompt_tokens: tokens(format!("records[{index}].prompt_tokens"), prompt_tokens)?,
            output_tokens: tokens(format!("records[{index}].output_tokens"), output_tokens)?,
            ..Record::default()
        })
    }
}
