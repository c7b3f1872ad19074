//! Made-up prompts for workloads that say only how long a prompt is, and what it shares.

use std::ops::Range;

use kvrelay_core::request::{Arrival, PromptContent};
use kvrelay_core::rng::{Purpose, Stream};
use kvrelay_model::Model;

/// Makes prompts of ordinary tokens: none that is special, and none that ends a sequence.
pub(crate) struct PromptMaker {
    ordinary: Vec<u32>,
}

impl PromptMaker {
    pub(crate) fn new(model: &Model) -> PromptMaker {
        let tokenizer = model.tokenizer();
        let is_ordinary = |id: &u32| {
            !tokenizer.is_special(*id)
                && !tokenizer.token_bytes(*id).is_empty()
                && model.end_ids().binary_search(id).is_err()
        };
        let mut ordinary: Vec<u32> = (0..tokenizer.vocab_size() as u32).filter(is_ordinary).collect();
        if ordinary.is_empty() {
            // A vocabulary of nothing but special tokens still has ids to compute with.
            ordinary = (0..model.config().vocab_size as u32).collect();
        }
        PromptMaker { ordinary }
    }

    /// The prompt of the `index`-th arrival: the same for the same seed. Where a trace names the
    /// prompt's blocks, a name stands for the same tokens in every prompt.
    pub(crate) fn make(&self, seed: u64, index: u64, arrival: &Arrival) -> Vec<u32> {
        let length = arrival.prompt_tokens as usize;
        let mut tokens = Vec::with_capacity(length);
        if let PromptContent::HashIds { ids, tokens_per_id } = &arrival.content {
            for id in ids.iter() {
                let count = (*tokens_per_id as usize).min(length - tokens.len());
                self.draw(&mut Stream::new(seed, Purpose::BLOCK_TOKEN_IDS, *id), 0..count, &mut tokens);
            }
        }
        let rest = tokens.len()..length;
        self.draw(&mut Stream::new(seed, Purpose::TOKEN_IDS, index), rest, &mut tokens);
        tokens
    }

    fn draw(&self, stream: &mut Stream, count: Range<usize>, into: &mut Vec<u32>) {
        let token = |_| self.ordinary[stream.below(self.ordinary.len() as u64) as usize];
        into.extend(count.map(token));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvrelay_model::testing::TinyLlama;

    #[test]
    fn prompts_share_what_their_trace_shares_and_nothing_else() {
        let model = TinyLlama { num_layers: 1, ..TinyLlama::default() }.model();
        let maker = PromptMaker::new(&model);
        let arrival = |ids: &[u64], prompt_tokens| Arrival {
            prompt_tokens,
            content: PromptContent::HashIds { ids: ids.into(), tokens_per_id: 32 },
            ..Arrival::default()
        };
        let a = maker.make(7, 0, &arrival(&[5, 6, 7], 90));
        let b = maker.make(7, 1, &arrival(&[5, 6, 8], 96));
        assert_eq!((a.len(), b.len()), (90, 96));
        assert_eq!(a[..64], b[..64]);
        assert_ne!(a[64..90], b[64..90]);
        assert_eq!(a, maker.make(7, 3, &arrival(&[5, 6, 7], 90)));
        assert_ne!(a, maker.make(8, 0, &arrival(&[5, 6, 7], 90)));
        let short_of_ids = maker.make(7, 0, &arrival(&[5], 50));
        assert_eq!((short_of_ids.len(), &short_of_ids[..32]), (50, &a[..32]));
        let unique = |index| maker.make(7, index, &Arrival { prompt_tokens: 40, ..Arrival::default() });
        assert_ne!(unique(0), unique(1));
        let tokenizer = model.tokenizer();
        assert!(a.iter().chain(&unique(0)).all(|id| !tokenizer.is_special(*id)));
    }
}
