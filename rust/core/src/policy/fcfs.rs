//! `fcfs`: first come, first served, prompts before decode.

use super::Policy;

/// Prompts run whole and before decode, in order of arrival, on the least loaded worker: what
/// engines did before chunked prefill. All of it is the default behaviour.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fcfs;

impl Policy for Fcfs {
    fn name(&self) -> String {
        "fcfs".to_owned()
    }
}
