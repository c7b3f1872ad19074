//! Tokens to text as they come: characters are never cut, and stop strings may span tokens.

use std::sync::Arc;

use crate::Tokenizer;

/// Turns tokens into text one by one. The pieces, concatenated, are the lossy UTF-8 reading of
/// all the tokens' bytes; a character whose bytes are not all there yet waits for them.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    pending: Vec<u8>,
    strip: usize,
}

impl Detokenizer {
    /// At the start of a text.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self { pending: vec![], strip: tokenizer.strip_leading_spaces() }
    }

    /// Appends what token `id` completes to `text`. Special tokens have no text.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, text: &mut String) {
        if tokenizer.is_special(id) {
            return;
        }
        for &byte in tokenizer.token_bytes(id) {
            if self.strip > 0 {
                self.strip = if byte == b' ' { self.strip - 1 } else { 0 };
                if byte == b' ' {
                    continue;
                }
            }
            self.pending.push(byte);
        }
        self.flush(text);
    }

    /// Appends the replacement for an incomplete last character, if there is one.
    pub fn finish(&mut self, text: &mut String) {
        if !self.pending.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
    }

    /// Moves all that can be read to `text`; at most an incomplete character stays.
    fn flush(&mut self, text: &mut String) {
        let mut rest = &self.pending[..];
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, invalid) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = invalid;
                    let Some(bad) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[bad..];
                }
            }
        }
        let read = self.pending.len() - rest.len();
        self.pending.drain(..read);
    }
}

/// A piece of a stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Piece {
    /// Text that is certain: no stop string can still begin in it.
    pub text: String,
    /// Whether a stop string has been completed; the stream has ended before it.
    pub stopped: bool,
}

/// A [`Detokenizer`] that ends at the first stop string to be completed.
///
/// The text ends before that stop string (before the longest, where two are completed by the
/// same character). It does not depend on how the text is divided into tokens, so a stream and a
/// one-shot answer agree. Only a true prefix of a stop string is ever held back.
#[derive(Debug, Clone)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

impl TextStream {
    /// A stream that ends before any of `stops`; empty ones are no stops.
    pub fn new(tokenizer: Arc<Tokenizer>, stops: &[String]) -> Self {
        let detokenizer = Detokenizer::new(&tokenizer);
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        Self { tokenizer, detokenizer, stops, held: String::new(), stopped: false }
    }

    /// What token `id` adds. After the end nothing is added.
    pub fn push(&mut self, id: u32) -> Piece {
        let mut new = String::new();
        if !self.stopped {
            self.detokenizer.push(&self.tokenizer, id, &mut new);
        }
        self.scan(&new)
    }

    /// Ends the text: flushes an incomplete character and what was held back.
    pub fn finish(&mut self) -> Piece {
        let mut new = String::new();
        if !self.stopped {
            self.detokenizer.finish(&mut new);
        }
        let mut piece = self.scan(&new);
        piece.text.push_str(&std::mem::take(&mut self.held));
        piece
    }

    fn scan(&mut self, new: &str) -> Piece {
        let mut text = String::new();
        for c in new.chars() {
            self.held.push(c);
            let completed = self.stops.iter().filter(|stop| self.held.ends_with(stop.as_str()));
            if let Some(longest) = completed.map(String::len).max() {
                self.held.truncate(self.held.len() - longest);
                text.push_str(&std::mem::take(&mut self.held));
                self.stopped = true;
                break;
            }
            let certain = self.held.len() - self.longest_open_prefix();
            text.extend(self.held.drain(..certain));
        }
        Piece { text, stopped: self.stopped }
    }

    /// Bytes at the end of the held text that may be the beginning of a stop string.
    fn longest_open_prefix(&self) -> usize {
        let open = |from: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*from..]));
        let from = self.held.char_indices().map(|(at, _)| at).find(open);
        from.map_or(0, |at| self.held.len() - at)
    }
}
