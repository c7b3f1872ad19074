//! Model files, tokenizers, chat templates and sampling for kvrelay.
//!
//! This crate knows nothing of threads, clocks or devices: it turns files into a checked
//! [`Model`] (named tensors, configuration, tokenizer, chat template) that a backend uploads,
//! and logits into tokens. Files are mapped, never trusted: every error names the file, the
//! field, what was expected and what was found, and nothing is half loaded.

pub mod chat;
pub mod config;
pub mod error;
pub mod family;
pub mod gguf;
pub mod hf;
mod model;
pub mod rope;
pub mod safetensors;
pub mod sampling;
pub mod stream;
pub mod tensor;
#[cfg(feature = "testing")]
pub mod testing;
pub mod tokenizer;

pub use chat::{ChatMessage, ChatTemplate};
pub use error::ModelError;
pub use family::llama::{LlamaConfig, LlamaLayer, LlamaWeights};
pub use model::Model;
pub use sampling::{Sampler, SamplingParams};
pub use stream::{Detokenizer, TextStream};
pub use tensor::{DType, Tensor};
pub use tokenizer::Tokenizer;
