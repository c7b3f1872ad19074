//! A tiny random Llama, written as a GGUF file and as a Hugging Face folder: the mock model of
//! every test. Both hold the same numbers, so what is computed from them must agree.

mod gguf_writer;
mod quantise;
mod tiny_tokenizer;

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

pub use gguf_writer::GgufWriter;
pub use quantise::quantise;

use crate::rope::{self, RopeScaling};
use crate::sampling::uniform;
use crate::{DType, Model};

/// What the tiny Llama looks like; the default has every feature that a layout can get wrong:
/// grouped queries, more layers than one layer group, sizes that are no powers of two.
#[derive(Debug, Clone, PartialEq)]
pub struct TinyLlama {
    /// Of the weights.
    pub seed: u64,
    /// Transformer layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub ffn_size: usize,
    /// Positions.
    pub context_length: usize,
    /// Storage of the matrices; norms are `F32`. A Hugging Face folder takes float types only.
    pub dtype: DType,
    /// Whether the embedding is also the output.
    pub tied: bool,
    /// Rotary scaling.
    pub rope_scaling: Option<RopeScaling>,
    /// Weight files of a Hugging Face folder; more than 1 come with an index.
    pub shards: usize,
}

impl Default for TinyLlama {
    fn default() -> Self {
        Self {
            seed: 0,
            num_layers: 3,
            num_heads: 6,
            num_kv_heads: 2,
            head_dim: 16,
            ffn_size: 160,
            context_length: 256,
            dtype: DType::F32,
            tied: false,
            rope_scaling: None,
            shards: 1,
        }
    }
}

/// One tensor to be written: rows in logical order.
struct Weight {
    gguf: String,
    hf: String,
    shape: Vec<usize>,
    numbers: Vec<f32>,
    paired: bool,
}

const THETA: f64 = 10_000.0;
const EPS: f64 = 1e-5;

/// A ChatML template with a default system prompt, like the demo model's.
pub const CHAT_TEMPLATE: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are tiny<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

impl TinyLlama {
    /// Width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Rows of the embedding.
    pub fn vocab_size(&self) -> usize {
        tiny_tokenizer::tokens().len().next_multiple_of(32)
    }

    /// Loads it from a GGUF file that is gone when this returns.
    ///
    /// # Panics
    /// If the file cannot be written or loaded.
    pub fn model(&self) -> Model {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Model::load(self.write_gguf(folder.path()).expect("a written file")).expect("a valid model")
    }

    /// Writes `tiny.gguf` to `folder`.
    pub fn write_gguf(&self, folder: &Path) -> io::Result<PathBuf> {
        let path = folder.join("tiny.gguf");
        std::fs::write(&path, self.gguf().finish())?;
        Ok(path)
    }

    /// Writes the files of a Hugging Face repository to `folder`.
    ///
    /// # Panics
    /// If `dtype` is a quantised one.
    pub fn write_hf(&self, folder: &Path) -> io::Result<PathBuf> {
        let write_json = |name: &str, value: &Value| std::fs::write(folder.join(name), value.to_string());
        write_json("config.json", &self.hf_config())?;
        write_json("tokenizer.json", &tiny_tokenizer::tokenizer_json())?;
        let special = json!({"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHAT_TEMPLATE});
        write_json("tokenizer_config.json", &special)?;
        let weights = self.weights();
        if self.shards == 1 {
            std::fs::write(folder.join("model.safetensors"), safetensors(&weights, self.dtype))?;
            return Ok(folder.to_owned());
        }
        let mut map = serde_json::Map::new();
        for (index, part) in weights.chunks(weights.len().div_ceil(self.shards)).enumerate() {
            let name = format!("model-{:05}-of-{:05}.safetensors", index + 1, self.shards);
            std::fs::write(folder.join(&name), safetensors(part, self.dtype))?;
            map.extend(part.iter().map(|w| (w.hf.clone(), name.clone().into())));
        }
        write_json("model.safetensors.index.json", &json!({"metadata": {}, "weight_map": map}))?;
        Ok(folder.to_owned())
    }

    /// The contents of its GGUF file, still open for changes.
    pub fn gguf(&self) -> GgufWriter {
        let mut file = GgufWriter::new();
        file.string("general.architecture", "llama");
        let sizes = [
            ("block_count", self.num_layers),
            ("context_length", self.context_length),
            ("embedding_length", self.hidden_size()),
            ("feed_forward_length", self.ffn_size),
            ("attention.head_count", self.num_heads),
            ("attention.head_count_kv", self.num_kv_heads),
            ("vocab_size", self.vocab_size()),
            ("rope.dimension_count", self.head_dim),
        ];
        for (key, size) in sizes {
            file.u32(&format!("llama.{key}"), size as u32);
        }
        file.f32("llama.rope.freq_base", THETA as f32);
        file.f32("llama.attention.layer_norm_rms_epsilon", EPS as f32);
        if let Some(RopeScaling::Linear { factor }) = self.rope_scaling {
            file.string("llama.rope.scaling.type", "linear");
            file.f32("llama.rope.scaling.factor", factor as f32);
        }
        tiny_tokenizer::write_metadata(&mut file);
        file.string("tokenizer.chat_template", CHAT_TEMPLATE);
        for mut weight in self.weights() {
            let columns = *weight.shape.last().unwrap_or(&1);
            if weight.paired {
                weight.numbers = pair_rows(&weight.numbers, columns, self.head_dim);
            }
            let dtype = if weight.shape.len() == 1 { DType::F32 } else { self.dtype };
            let bytes = quantise(dtype, &weight.numbers);
            file.tensor(&weight.gguf, &weight.shape, dtype, bytes);
        }
        if let Some(scaling @ RopeScaling::Llama3 { .. }) = self.rope_scaling {
            let plain = rope::frequencies(self.head_dim, THETA, None);
            let scaled = rope::frequencies(self.head_dim, THETA, Some(scaling));
            let divisors: Vec<f32> = plain.iter().zip(scaled).map(|(p, s)| (p / s) as f32).collect();
            file.tensor("rope_freqs.weight", &[divisors.len()], DType::F32, quantise(DType::F32, &divisors));
        }
        file
    }

    fn hf_config(&self) -> Value {
        let scaling = match self.rope_scaling {
            None => Value::Null,
            Some(RopeScaling::Linear { factor }) => {
                json!({"rope_type": "linear", "factor": factor})
            }
            Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }) => {
                json!({
                    "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor, "original_max_position_embeddings": original_context,
                })
            }
        };
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "hidden_size": self.hidden_size(), "intermediate_size": self.ffn_size,
            "num_hidden_layers": self.num_layers, "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads, "head_dim": self.head_dim,
            "max_position_embeddings": self.context_length, "vocab_size": self.vocab_size(),
            "rms_norm_eps": EPS, "rope_theta": THETA, "rope_scaling": scaling,
            "tie_word_embeddings": self.tied, "attention_bias": false,
            "eos_token_id": tiny_tokenizer::END,
        })
    }

    fn weights(&self) -> Vec<Weight> {
        let (hidden, ffn, vocab) = (self.hidden_size(), self.ffn_size, self.vocab_size());
        let kv = self.num_kv_heads * self.head_dim;
        let mut list = vec![];
        let mut add = |gguf: String, hf: String, shape: &[usize], paired: bool| {
            let numbers = random(self.seed, list.len() as u64, shape);
            list.push(Weight { gguf, hf, shape: shape.to_vec(), numbers, paired });
        };
        add("token_embd.weight".into(), "model.embed_tokens.weight".into(), &[vocab, hidden], false);
        for layer in 0..self.num_layers {
            let parts: [(&str, &str, &[usize], bool); 9] = [
                ("attn_norm", "input_layernorm", &[hidden], false),
                ("attn_q", "self_attn.q_proj", &[hidden, hidden], true),
                ("attn_k", "self_attn.k_proj", &[kv, hidden], true),
                ("attn_v", "self_attn.v_proj", &[kv, hidden], false),
                ("attn_output", "self_attn.o_proj", &[hidden, hidden], false),
                ("ffn_norm", "post_attention_layernorm", &[hidden], false),
                ("ffn_gate", "mlp.gate_proj", &[ffn, hidden], false),
                ("ffn_up", "mlp.up_proj", &[ffn, hidden], false),
                ("ffn_down", "mlp.down_proj", &[hidden, ffn], false),
            ];
            for (gguf, hf, shape, paired) in parts {
                add(
                    format!("blk.{layer}.{gguf}.weight"),
                    format!("model.layers.{layer}.{hf}.weight"),
                    shape,
                    paired,
                );
            }
        }
        add("output_norm.weight".into(), "model.norm.weight".into(), &[hidden], false);
        if !self.tied {
            add("output.weight".into(), "lm_head.weight".into(), &[vocab, hidden], false);
        }
        list
    }
}

/// Uniform numbers: matrices of unit gain, vectors (norms) around 1.
fn random(seed: u64, stream: u64, shape: &[usize]) -> Vec<f32> {
    let count: usize = shape.iter().product();
    let (centre, width) = match shape {
        [_] => (1.0, 0.2),
        _ => (0.0, (3.0 / shape[1] as f64).sqrt()),
    };
    let number = |i| centre + width * (2.0 * uniform(seed, stream << 32 | i) - 1.0);
    (0..count as u64).map(|i| number(i) as f32).collect()
}

/// Puts the two halves of each head side by side, as llama.cpp's converter does.
fn pair_rows(numbers: &[f32], columns: usize, head_dim: usize) -> Vec<f32> {
    let row = |i: usize| &numbers[i * columns..(i + 1) * columns];
    let stored = 0..numbers.len() / columns;
    stored
        .flat_map(|s| {
            let (head, i) = (s / head_dim, s % head_dim);
            row(head * head_dim + i / 2 + (i % 2) * head_dim / 2).to_vec()
        })
        .collect()
}

fn safetensors(weights: &[Weight], dtype: DType) -> Vec<u8> {
    assert_eq!(dtype.block_len(), 1, "safetensors holds float types");
    let (mut header, mut data) = (serde_json::Map::new(), vec![]);
    for weight in weights {
        let start = data.len();
        let kind = if weight.shape.len() == 1 { DType::F32 } else { dtype };
        data.extend(quantise(kind, &weight.numbers));
        let entry = json!({"dtype": kind.name(), "shape": weight.shape, "data_offsets": [start, data.len()]});
        header.insert(weight.hf.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}
