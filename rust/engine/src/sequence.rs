//! A request's tokens while it lives: what a worker reads its inputs from and adds its outputs to.
//!
//! A sequence is shared by the loop and the worker that runs it; two runs of one request never
//! overlap, so its lock is never waited for. It moves with the KV: whoever runs the request next
//! finds all its tokens here, also those that must be computed again.

use std::sync::Arc;

use kvrelay_core::record::FinishReason;
use kvrelay_core::request::BlockHash;
use kvrelay_model::{SamplingParams, TextStream};

use crate::digest::BlockHasher;
use crate::handle::Stream;

/// Where a request's tokens go.
pub(crate) struct Reader {
    pub(crate) text: TextStream,
    pub(crate) stream: Arc<Stream>,
}

/// See the module's documentation.
pub(crate) struct Sequence {
    /// Prompt and output.
    tokens: Vec<u32>,
    prompt_tokens: usize,
    /// Tokens to produce at most, at least 1.
    limit: usize,
    sampling: SamplingParams,
    /// Ids that end it, sorted; empty when it is to go on to its limit.
    ends: Arc<[u32]>,
    /// `None` when nobody reads the output.
    reader: Option<Reader>,
    /// `None` when its content is not to be shared.
    hasher: Option<BlockHasher>,
}

impl Sequence {
    /// A request that has produced nothing; `hasher` has seen its prompt.
    pub(crate) fn new(
        prompt: Vec<u32>,
        limit: u32,
        sampling: SamplingParams,
        ends: Arc<[u32]>,
        reader: Option<Reader>,
        hasher: Option<BlockHasher>,
    ) -> Sequence {
        let prompt_tokens = prompt.len();
        let limit = limit.max(1) as usize;
        Sequence { tokens: prompt, prompt_tokens, limit, sampling, ends, reader, hasher }
    }

    /// The ids at positions `start..start + len`.
    ///
    /// # Panics
    /// When they are not all there: a bug of scheduler or driver.
    pub(crate) fn input(&self, start: u32, len: u32) -> &[u32] {
        &self.tokens[start as usize..start as usize + len as usize]
    }

    pub(crate) fn sampling(&self) -> SamplingParams {
        self.sampling
    }

    /// Tokens produced.
    pub(crate) fn produced(&self) -> usize {
        self.tokens.len() - self.prompt_tokens
    }

    /// Whether its next token is the last one, whatever it is.
    pub(crate) fn ends_with_next(&self) -> bool {
        self.produced() + 1 >= self.limit
    }

    /// Takes the token of the next position and hands it to the reader; why it is the last, if so.
    pub(crate) fn push(&mut self, token: u32) -> Option<FinishReason> {
        self.tokens.push(token);
        let mut stopped = self.ends.binary_search(&token).is_ok();
        let full = self.produced() >= self.limit;
        if let Some(reader) = &mut self.reader {
            let mut piece = reader.text.push(token);
            stopped |= piece.stopped;
            if stopped || full {
                piece.text.push_str(&reader.text.finish().text);
            }
            reader.stream.token(token, &piece.text);
        }
        match (stopped, full) {
            (true, _) => Some(FinishReason::Stop),
            (false, true) => Some(FinishReason::Length),
            (false, false) => None,
        }
    }

    /// Names of its full blocks, for the prefix index; none when they are not to be shared.
    pub(crate) fn content(&mut self) -> Arc<[BlockHash]> {
        match &mut self.hasher {
            Some(hasher) => hasher.extend(&self.tokens).into(),
            None => Arc::default(),
        }
    }
}
