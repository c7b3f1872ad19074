//! `chunked`: a token budget per step, as Sarathi-Serve (OSDI'24) introduced it.

use super::defaults::PrefillRoom;
use super::{Batch, Decision, Policy, WorkerView};

/// Every step decodes all running requests and fills the rest of its token budget with chunks of
/// the waiting prompts, first come, first served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunked {
    /// Tokens per step, decode rows and chunks together; at least 1.
    pub token_budget: u32,
}

impl Default for Chunked {
    /// 512 tokens, Sarathi-Serve's choice for tight objectives.
    fn default() -> Chunked {
        Chunked { token_budget: 512 }
    }
}

impl Policy for Chunked {
    fn name(&self) -> String {
        "chunked".to_owned()
    }

    fn batch(&mut self, worker: &WorkerView<'_>) -> Decision<Batch> {
        let budget = self.token_budget.min(worker.limits().max_prefill_tokens);
        let rows = worker.num_running() as u32;
        let budget = budget.saturating_sub(rows).max(u32::from(rows == 0));
        let slots = (worker.limits().max_batch as usize).saturating_sub(worker.num_running());
        Ok(Batch { prefill: fill(worker, worker.waiting(), budget, budget, slots), ..Batch::default() })
    }
}

/// Chunks of the prompts in the given order: `alone` tokens of the first one at most, `together` of
/// several, and no more than `slots` prompts.
pub(super) fn fill<'a>(
    worker: &WorkerView<'a>,
    order: impl Iterator<Item = super::RequestView<'a>>,
    alone: u32,
    together: u32,
    slots: usize,
) -> Vec<(crate::request::RequestId, u32)> {
    let mut room = PrefillRoom::new(worker);
    let mut chunks = Vec::new();
    let mut left = alone;
    for request in order {
        if left == 0 || chunks.len() == slots {
            break;
        }
        if !room.take(&request) {
            continue;
        }
        let chunk = request.pending().min(left);
        left = if chunks.is_empty() { together.saturating_sub(chunk) } else { left - chunk };
        chunks.push((request.id(), chunk));
    }
    chunks
}
