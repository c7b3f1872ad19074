//! A request as the core knows it. How long its output will be is not part of that.

use std::sync::Arc;

use crate::slo::Slo;
use crate::time::Time;

/// Names a request. The driver gives ids in increasing order, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Index of an SLO class (chat, code, …) in the workload's list of class names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(pub u16);

/// Identity of one full KV block *and all before it*: equal hashes mean equal prefixes.
///
/// 128 bits, so that a chance collision (which would be a wrong text, not a slow one) is out of
/// the question.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub u128);

/// What arrives at the scheduler.
#[derive(Clone, Debug)]
pub struct Request {
    /// Given by the driver, increasing.
    pub id: RequestId,
    /// The scheduled arrival, before tokenisation.
    pub arrival: Time,
    /// Prompt length in tokens, at least 1.
    pub prompt_tokens: u32,
    /// The most tokens it may produce, at least 1.
    pub max_tokens: u32,
    /// Higher is more important; built-in policies break ties by it.
    pub priority: i32,
    /// Its objectives.
    pub slo: Slo,
    /// Its SLO class.
    pub class: ClassId,
    /// Chained hashes of the prompt's full blocks, in the pool's block size; empty when its
    /// prefix is not to be shared.
    pub prefix: Arc<[BlockHash]>,
}

impl Request {
    /// Prompt and output at their longest, in tokens.
    pub fn longest(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.max_tokens)
    }
}

/// One arrival as a source gives it: the request, and what only the driver may know.
#[derive(Clone, Debug, Default)]
pub struct Arrival {
    /// Scheduled arrival.
    pub at: Time,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// True output length in tokens; seen by drivers, never by the scheduler or a policy.
    pub output_tokens: u32,
    /// The most tokens it may produce: all that scheduler and policies know of its length.
    pub max_tokens: u32,
    /// See [`Request::priority`].
    pub priority: i32,
    /// Its objectives.
    pub slo: Slo,
    /// Its SLO class.
    pub class: ClassId,
    /// Content identity of its prompt.
    pub content: PromptContent,
}

/// What is known of a prompt's content, for prefix sharing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PromptContent {
    /// Unlike every other prompt.
    #[default]
    Unique,
    /// A trace's hash ids, each standing for `tokens_per_id` tokens and all before them.
    HashIds {
        /// One id per block of the trace, the last possibly of a partial block.
        ids: Arc<[u64]>,
        /// Tokens that one id stands for.
        tokens_per_id: u32,
    },
}

impl PromptContent {
    /// Chained hashes of the full blocks of `block_tokens` of a prompt of `prompt_tokens`.
    ///
    /// A trace's ids are already chained (an id names a block and all before it), so block `i`
    /// is named by the id that covers its last token and by its place within it.
    pub fn block_hashes(&self, prompt_tokens: u32, block_tokens: u32) -> Arc<[BlockHash]> {
        let PromptContent::HashIds { ids, tokens_per_id } = self else {
            return Arc::default();
        };
        let full_blocks = u64::from(prompt_tokens / block_tokens);
        (0..full_blocks)
            .map_while(|block| {
                let last_token = (block + 1) * u64::from(block_tokens) - 1;
                let index = last_token / u64::from(*tokens_per_id);
                let offset = last_token % u64::from(*tokens_per_id);
                let id = ids.get(usize::try_from(index).ok()?)?;
                Some(BlockHash(u128::from(*id) << 64 | u128::from(offset) << 32 | u128::from(*tokens_per_id)))
            })
            .collect()
    }
}

/// Where arrivals come from. Told of completions, so that closed loops are sources like any other.
pub trait Source {
    /// When the next arrival is due; `None` when there is none, or none until a completion.
    fn next_at(&mut self) -> Option<Time>;

    /// Takes the next arrival. Arrivals come in time order.
    fn pull(&mut self) -> Option<Arrival>;

    /// Where in its workload's list the `index`-th arrival pulled (from 0) stands.
    fn place(&self, index: u64) -> u64 {
        index
    }

    /// The `index`-th arrival pulled (from 0) is over, at `at`.
    fn completed(&mut self, index: u64, at: Time) {
        let _ = (index, at);
    }
}

/// A source over arrivals that are known beforehand, in time order.
#[derive(Clone, Debug)]
pub struct Scheduled {
    arrivals: std::iter::Peekable<std::vec::IntoIter<Arrival>>,
}

impl Scheduled {
    /// Takes `arrivals`, sorting them stably by time if they are not.
    pub fn new(mut arrivals: Vec<Arrival>) -> Scheduled {
        arrivals.sort_by_key(|arrival| arrival.at);
        Scheduled { arrivals: arrivals.into_iter().peekable() }
    }
}

impl Source for Scheduled {
    fn next_at(&mut self) -> Option<Time> {
        self.arrivals.peek().map(|arrival| arrival.at)
    }

    fn pull(&mut self) -> Option<Arrival> {
        self.arrivals.next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ids: &[u64]) -> PromptContent {
        PromptContent::HashIds { ids: ids.into(), tokens_per_id: 32 }
    }

    #[test]
    fn shared_trace_ids_are_shared_blocks() {
        let a = ids(&[7, 8, 9]).block_hashes(96, 16);
        let b = ids(&[7, 8, 10]).block_hashes(80, 16);
        assert_eq!((a.len(), b.len()), (6, 5));
        assert_eq!(a[..4], b[..4]);
        assert_ne!(a[4], b[4]);
    }

    #[test]
    fn a_partial_block_is_not_shared_and_missing_ids_end_the_chain() {
        assert_eq!(ids(&[1]).block_hashes(31, 16).len(), 1);
        assert_eq!(ids(&[1]).block_hashes(640, 16).len(), 2);
        assert!(PromptContent::Unique.block_hashes(640, 16).is_empty());
    }
}
