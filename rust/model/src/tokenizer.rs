//! Text to token ids and back, from `tokenizer.json` or from GGUF metadata.
//!
//! Encoding is the `tokenizers` crate's. Decoding is done here from the bytes of each token, so
//! that streaming and one-shot decoding are the same function (see [`crate::stream`]): the text
//! of a sequence is the lossy UTF-8 reading of its tokens' bytes, one after the other.

use std::path::Path;

use serde_json::Value;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior};

use crate::ModelError;
use crate::gguf::Gguf;
use crate::stream::Detokenizer;

/// GGUF's number for tokens that stand for no text.
const TYPE_CONTROL: i64 = 3;
/// GGUF's number for tokens that are matched in the text before anything else.
const TYPE_USER_DEFINED: i64 = 4;

/// The pattern of Llama 3's published `tokenizer.json`.
const LLAMA3_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A tokenizer and the bytes of each of its tokens.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    bytes: Vec<u8>,
    /// Token `i` is `bytes[ends[i - 1]..ends[i]]`.
    ends: Vec<u32>,
    special: Vec<bool>,
    strip_leading_spaces: usize,
    bos: Option<u32>,
    /// Whether `encode` itself puts the BOS first; `tokenizer.json` has a post-processor for it.
    prepend_bos: bool,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    pub fn from_file(path: &Path) -> Result<Self, ModelError> {
        let json = std::fs::read(path).map_err(|e| ModelError::io(path, e))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(&json)
            .map_err(|e| ModelError::field(path, "tokenizer", "a tokenizer.json", e))?;
        // A prompt is neither cut nor filled up behind its user's back.
        let no_truncation = inner.with_truncation(None).map(|_| ());
        no_truncation.map_err(|e| ModelError::field(path, "truncation", "none", e))?;
        inner.with_padding(None);
        let decoder = serde_json::to_value(inner.get_decoder()).unwrap_or(Value::Null);
        let decoder = Decoder::from_json(path, &decoder)?;
        Self::new(inner, decoder, None, false)
    }

    /// Builds a byte-level BPE from a GGUF file's vocabulary and merges.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        let path = gguf.path();
        let required = |key: &str| gguf.string(key)?.ok_or_else(|| gguf.missing(key));
        let model = required("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(ModelError::unsupported(
                &path,
                "tokenizer.ggml.model",
                model,
                "gpt2 (byte-level BPE)",
            ));
        }
        if gguf.boolean("tokenizer.ggml.add_eos_token")? == Some(true) {
            return Err(ModelError::unsupported(&path, "tokenizer.ggml.add_eos_token", true, "false"));
        }
        let pre = required("tokenizer.ggml.pre")?;
        let (pre_tokenizer, ignore_merges) = pre_tokenizer(&path, pre)?;
        let (tokens, types) = gguf_vocabulary(gguf)?;
        let merges = gguf_merges(gguf)?;
        let vocab: Vocab = tokens.iter().zip(0..).map(|(&token, id)| (token.to_owned(), id)).collect();
        if vocab.len() != tokens.len() {
            let found = format!("{} distinct of {}", vocab.len(), tokens.len());
            return Err(ModelError::field(&path, "tokenizer.ggml.tokens", "each token once", found));
        }
        let bpe = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(ignore_merges).build();
        let bpe = bpe.map_err(|e| ModelError::field(&path, "tokenizer.ggml.merges", "pairs of tokens", e))?;
        let mut inner = tokenizers::Tokenizer::new(bpe);
        inner.with_pre_tokenizer(Some(pre_tokenizer)).with_decoder(Some(ByteLevel::new(false, true, true)));
        let of_type = |wanted: i64| tokens.iter().zip(&types).filter(move |(_, t)| **t == wanted);
        let added = |(token, _): (&&str, &i64), special| AddedToken::from(*token, special).normalized(false);
        inner
            .add_special_tokens(of_type(TYPE_CONTROL).map(|t| added(t, true)))
            .and_then(|_| inner.add_tokens(of_type(TYPE_USER_DEFINED).map(|t| added(t, false))))
            .map_err(|e| ModelError::field(&path, "tokenizer.ggml.token_type", "added tokens", e))?;
        let prepend_bos = gguf.boolean("tokenizer.ggml.add_bos_token")?.unwrap_or(pre == "llama-bpe");
        let bos = gguf_token(gguf, "tokenizer.ggml.bos_token_id", tokens.len())?;
        if prepend_bos && bos.is_none() {
            return Err(gguf.missing("tokenizer.ggml.bos_token_id"));
        }
        Self::new(inner, Decoder { byte_level: true, ..Decoder::default() }, bos, prepend_bos)
    }

    fn new(
        inner: tokenizers::Tokenizer,
        decoder: Decoder,
        bos: Option<u32>,
        prepend_bos: bool,
    ) -> Result<Self, ModelError> {
        let size = inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        let added = inner.get_added_tokens_decoder();
        let (mut bytes, mut ends, mut special) = (vec![], vec![], vec![]);
        for id in 0..size as u32 {
            let token = inner.id_to_token(id).unwrap_or_default();
            special.push(added.get(&id).is_some_and(|t| t.special));
            decoder.append_bytes(&token, &mut bytes);
            let end = u32::try_from(bytes.len());
            ends.push(end.map_err(|_| ModelError::Tokenizer("the vocabulary is larger than 4 GB".into()))?);
        }
        Ok(Self { inner, bytes, ends, special, strip_leading_spaces: decoder.strip, bos, prepend_bos })
    }

    /// The ids of `text`; special tokens written in it are recognised. With `add_special`, what
    /// the model expects around a plain prompt (its BOS, if it has one) is added.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, ModelError> {
        let encoding =
            self.inner.encode_fast(text, add_special).map_err(|e| ModelError::Tokenizer(e.to_string()))?;
        let mut ids = encoding.get_ids().to_vec();
        if let Some(bos) = self.bos.filter(|_| add_special && self.prepend_bos) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The text of `ids`, without special tokens; bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut text = String::new();
        let mut detokenizer = Detokenizer::new(self);
        for &id in ids {
            detokenizer.push(self, id, &mut text);
        }
        detokenizer.finish(&mut text);
        text
    }

    /// The bytes a token stands for; none for an id the vocabulary does not have.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let Some(&end) = self.ends.get(id as usize) else {
            return &[];
        };
        let start = (id as usize).checked_sub(1).map_or(0, |previous| self.ends[previous]);
        &self.bytes[start as usize..end as usize]
    }

    /// Whether the token stands for no text of its own.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// One more than the largest id; a model's embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.ends.len()
    }

    /// The id of exactly this token.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token as the vocabulary writes it.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The BOS that the metadata names, added or not.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    pub(crate) fn strip_leading_spaces(&self) -> usize {
        self.strip_leading_spaces
    }
}

/// How the vocabulary writes bytes.
#[derive(Debug, Default)]
struct Decoder {
    /// GPT-2's alphabet of 256 printable characters.
    byte_level: bool,
    /// `<0x0A>` is the byte 10.
    byte_fallback: bool,
    /// U+2581 is a space.
    spaces: bool,
    /// Spaces removed from the start of a text.
    strip: usize,
}

impl Decoder {
    /// Understands the decoders of byte-level BPE and of SentencePiece conversions.
    fn from_json(path: &Path, json: &Value) -> Result<Self, ModelError> {
        let mut decoder = Self::default();
        decoder.add(path, json)?;
        Ok(decoder)
    }

    fn add(&mut self, path: &Path, json: &Value) -> Result<(), ModelError> {
        let refuse = || {
            let supported =
                "ByteLevel, Metaspace, or a Sequence of Replace (U+2581), ByteFallback, Fuse and Strip";
            Err(ModelError::unsupported(path, "decoder", json, supported))
        };
        match json["type"].as_str() {
            Some("ByteLevel") => self.byte_level = true,
            Some("ByteFallback") => self.byte_fallback = true,
            Some("Fuse") => {}
            Some("Replace") if json["pattern"]["String"] == "\u{2581}" && json["content"] == " " => {
                self.spaces = true
            }
            Some("Strip") if json["content"] == " " && json["stop"] == 0 => {
                self.strip = json["start"].as_u64().unwrap_or(0) as usize;
            }
            Some("Metaspace") if json["replacement"] == "\u{2581}" => {
                self.spaces = true;
                self.strip = usize::from(json["prepend_scheme"] != "never");
            }
            Some("Sequence") => {
                for part in json["decoders"].as_array().map_or(&[][..], Vec::as_slice) {
                    self.add(path, part)?;
                }
            }
            _ => return refuse(),
        }
        Ok(())
    }

    fn append_bytes(&self, token: &str, out: &mut Vec<u8>) {
        if self.byte_level {
            let start = out.len();
            for c in token.chars() {
                match byte_of(c) {
                    Some(byte) => out.push(byte),
                    None => {
                        // A character outside the alphabet: the token is written as itself.
                        out.truncate(start);
                        out.extend(token.as_bytes());
                        return;
                    }
                }
            }
            return;
        }
        let byte = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')).filter(|t| t.len() == 2);
        match byte.and_then(|t| u8::from_str_radix(t, 16).ok()).filter(|_| self.byte_fallback) {
            Some(byte) => out.push(byte),
            None if self.spaces => out.extend(token.replace('\u{2581}', " ").as_bytes()),
            None => out.extend(token.as_bytes()),
        }
    }
}

/// The byte that GPT-2's alphabet writes as `c`: printable Latin-1 stands for itself, the other
/// 68 bytes follow from U+0100 in order.
fn byte_of(c: char) -> Option<u8> {
    let itself = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(c) {
        code @ 0..=0xff => Some(code as u8).filter(|&b| itself(b)),
        code => (0..=255_u8).filter(|&b| !itself(b)).nth(code as usize - 0x100),
    }
}

/// The character that GPT-2's alphabet writes for a byte.
#[cfg(feature = "testing")]
pub(crate) fn char_of(byte: u8) -> char {
    (0..0x180).filter_map(char::from_u32).find(|&c| byte_of(c) == Some(byte)).unwrap_or('\0')
}

/// The pre-tokenizer a GGUF file names, and whether whole words go before merges.
fn pre_tokenizer(path: &Path, name: &str) -> Result<(PreTokenizerWrapper, bool), ModelError> {
    let words = ByteLevel::new(false, true, true);
    match name {
        "gpt-2" => Ok((words.into(), false)),
        "smollm" => Ok((Sequence::new(vec![Digits::new(true).into(), words.into()]).into(), false)),
        "llama-bpe" => {
            let pattern = SplitPattern::Regex(LLAMA3_PATTERN.into());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                .map_err(|e| ModelError::Tokenizer(e.to_string()))?;
            let bytes = ByteLevel::new(false, true, false);
            Ok((Sequence::new(vec![split.into(), bytes.into()]).into(), true))
        }
        other => Err(ModelError::unsupported(path, "tokenizer.ggml.pre", other, "gpt-2, smollm, llama-bpe")),
    }
}

fn gguf_vocabulary(gguf: &Gguf) -> Result<(Vec<&str>, Vec<i64>), ModelError> {
    const TOKENS: &str = "tokenizer.ggml.tokens";
    const TYPES: &str = "tokenizer.ggml.token_type";
    let tokens = gguf.strings(TOKENS)?.ok_or_else(|| gguf.missing(TOKENS))?;
    let types = gguf.integers(TYPES)?.unwrap_or_else(|| vec![1; tokens.len()]);
    if types.len() != tokens.len() {
        return Err(ModelError::field(&gguf.path(), TYPES, format!("{} entries", tokens.len()), types.len()));
    }
    Ok((tokens, types))
}

fn gguf_merges(gguf: &Gguf) -> Result<Vec<(String, String)>, ModelError> {
    const MERGES: &str = "tokenizer.ggml.merges";
    let merges = gguf.strings(MERGES)?.ok_or_else(|| gguf.missing(MERGES))?;
    let split = |merge: &str| match merge.split_once(' ') {
        Some((left, right)) => Ok((left.to_owned(), right.to_owned())),
        None => Err(ModelError::field(&gguf.path(), MERGES, "two tokens and a space", merge)),
    };
    merges.into_iter().map(split).collect()
}

/// A token id in the metadata, checked against the vocabulary.
pub(crate) fn gguf_token(gguf: &Gguf, key: &str, vocab_size: usize) -> Result<Option<u32>, ModelError> {
    match gguf.unsigned(key)? {
        Some(id) if id >= vocab_size as u64 => {
            Err(ModelError::field(&gguf.path(), key, format!("below {vocab_size}"), id))
        }
        other => Ok(other.map(|id| id as u32)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_a_bijection() {
        let chars: Vec<char> = (0..=255).map(char_of).collect();
        for (byte, &c) in chars.iter().enumerate() {
            assert_eq!(byte_of(c), Some(byte as u8));
        }
        assert_eq!((chars[usize::from(b' ')], chars[usize::from(b'\n')], chars[0xad]), ('Ġ', 'Ċ', 'Ń'));
        let alphabet = ByteLevel::alphabet();
        assert!(chars.iter().all(|c| alphabet.contains(c)) && alphabet.len() == 256);
    }

    #[test]
    fn unknown_decoders_are_refused_by_name() {
        let json = serde_json::json!({"type": "Sequence", "decoders": [{"type": "WordPiece"}]});
        let error = Decoder::from_json(Path::new("tokenizer.json"), &json).unwrap_err().to_string();
        assert!(error.contains("WordPiece"), "{error}");
    }
}
