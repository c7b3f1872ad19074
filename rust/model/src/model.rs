//! A model as loaded: configuration, weights, tokenizer, chat template.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use crate::family::llama::{LlamaConfig, LlamaWeights};
use crate::gguf::Gguf;
use crate::tokenizer::gguf_token;
use crate::{ChatTemplate, ModelError, Tokenizer, config, hf, safetensors};

/// A checked model; its weights are views of mapped files, nothing is copied.
#[derive(Debug)]
pub struct Model {
    path: PathBuf,
    name: String,
    config: LlamaConfig,
    weights: LlamaWeights,
    tokenizer: Arc<Tokenizer>,
    chat_template: Option<ChatTemplate>,
    end_ids: Vec<u32>,
    digest: u64,
}

impl Model {
    /// Loads a GGUF file, or a Hugging Face folder (`config.json`, safetensors, `tokenizer.json`).
    pub fn load(path: impl AsRef<Path>) -> Result<Self, ModelError> {
        let path = path.as_ref();
        let kind = std::fs::metadata(path).map_err(|e| ModelError::io(path, e))?;
        if kind.is_dir() {
            return Self::load_folder(path);
        }
        if Gguf::is_gguf(path) {
            return Self::load_gguf(path);
        }
        Err(ModelError::field(path, "file type", "a GGUF file or a Hugging Face folder", "neither"))
    }

    fn load_gguf(path: &Path) -> Result<Self, ModelError> {
        let gguf = Gguf::open(path)?;
        let mut config = config::from_gguf(&gguf)?;
        let weights = LlamaWeights::from_gguf(path, gguf.tensors(), &mut config)?;
        let tokenizer = Tokenizer::from_gguf(&gguf)?;
        let token = |key: &str| gguf_token(&gguf, key, config.vocab_size);
        let mut end_ids = vec![];
        for key in ["eos", "eot", "eom"] {
            end_ids.extend(token(&format!("tokenizer.ggml.{key}_token_id"))?);
        }
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.id_to_token(id)).unwrap_or_default();
        let (bos, eos) = (text(tokenizer.bos()), text(end_ids.first().copied()));
        end_ids.sort_unstable();
        end_ids.dedup();
        let chat_template = match gguf.string("tokenizer.chat_template")? {
            Some(source) => Some(ChatTemplate::new(source, &bos, &eos)?),
            None => None,
        };
        let name = gguf.string("general.name")?.map_or_else(|| stem(path), str::to_owned);
        Self {
            path: path.to_owned(),
            name,
            config,
            weights,
            tokenizer: Arc::new(tokenizer),
            chat_template,
            end_ids,
            digest: 0,
        }
        .checked()
    }

    fn load_folder(path: &Path) -> Result<Self, ModelError> {
        let json = hf::read_json(path, "config.json")?;
        let file = path.join("config.json");
        let json = json.ok_or_else(|| ModelError::field(path, "config.json", "a file", "none"))?;
        let config = config::from_hf(&file, &json)?;
        let tied = json["tie_word_embeddings"].as_bool().unwrap_or(false);
        let weights = LlamaWeights::from_hf(path, safetensors::open_folder(path)?, &config, tied)?;
        let tokenizer = Tokenizer::from_file(&path.join("tokenizer.json"))?;
        let end_ids = hf::end_ids(path, &json, &tokenizer, config.vocab_size)?;
        let chat_template = hf::chat_template(path)?;
        Self {
            path: path.to_owned(),
            name: stem(path),
            config,
            weights,
            tokenizer: Arc::new(tokenizer),
            chat_template,
            end_ids,
            digest: 0,
        }
        .checked()
    }

    /// What neither the weights nor the tokenizer can check alone.
    fn checked(mut self) -> Result<Self, ModelError> {
        let (ids, rows) = (self.tokenizer.vocab_size(), self.config.vocab_size);
        if ids > rows {
            let expected = format!("at most {rows} tokens (rows of the embedding)");
            return Err(ModelError::field(&self.path, "tokenizer", expected, ids));
        }
        self.digest = digest(&self.config, &self.weights);
        Ok(self)
    }

    /// The file or folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the file calls itself.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sizes and constants.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// The weights.
    pub fn weights(&self) -> &LlamaWeights {
        &self.weights
    }

    /// The tokenizer, shared with text streams.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The chat template, where the model has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }

    /// The ids of a conversation, up to where the assistant speaks.
    pub fn chat_ids<M: Serialize>(&self, messages: &[M]) -> Result<Vec<u32>, ModelError> {
        let missing = || ModelError::field(&self.path, "chat template", "a template", "none");
        let text = self.chat_template.as_ref().ok_or_else(missing)?.render(messages, true)?;
        // The template writes every special token itself.
        self.tokenizer.encode(&text, false)
    }

    /// Ids that end a sequence, sorted.
    pub fn end_ids(&self) -> &[u32] {
        &self.end_ids
    }

    /// Identity of the weights as stored: equal for equal files, different for another model,
    /// dtype or conversion of it.
    pub fn digest(&self) -> u64 {
        self.digest
    }
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// FNV-1a over the configuration and, of each tensor, its name, type, shape, and first and last
/// bytes: reading all of a large model would cost more than it tells.
fn digest(config: &LlamaConfig, weights: &LlamaWeights) -> u64 {
    const ENDS: usize = 4096;
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut feed = |bytes: &[u8]| {
        for &byte in bytes {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    feed(format!("{config:?}").as_bytes());
    for tensor in weights.tensors() {
        feed(format!("{} {:?} {:?}", tensor.name(), tensor.dtype(), tensor.shape()).as_bytes());
        let bytes = tensor.stored_bytes();
        feed(&bytes[..bytes.len().min(ENDS)]);
        feed(&bytes[bytes.len().saturating_sub(ENDS)..]);
    }
    hash
}
