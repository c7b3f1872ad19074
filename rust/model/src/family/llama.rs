//! The Llama family: RMS norm, grouped-query attention with rotary positions, SwiGLU.
//!
//! Every tensor of the plan is looked up by name and its shape compared; a tensor of the file
//! that is in no plan (a bias, an expert) would change what is computed, and is refused.

use std::collections::BTreeMap;
use std::path::Path;

use crate::rope::RopeScaling;
use crate::{ModelError, Tensor};

/// Sizes and constants of a Llama.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// Rows of the embedding; logits are this long.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub ffn_size: usize,
    /// Transformer layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; a divisor of `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Positions the model was made for.
    pub context_length: usize,
    /// Added to the mean square before its root.
    pub rms_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// How they are stretched, where the configuration says so.
    pub rope_scaling: Option<RopeScaling>,
    /// Radians per position of each rotary pair, `[head_dim / 2]`, after every scaling.
    pub rope_frequencies: Vec<f64>,
}

/// The weights of one layer. Shapes are `[outputs, inputs]`; query and key rows count in
/// half-split order whatever the file's order is.
#[derive(Debug, Clone)]
pub struct LlamaLayer {
    /// `[hidden]`
    pub attention_norm: Tensor,
    /// `[heads * head_dim, hidden]`
    pub query: Tensor,
    /// `[kv_heads * head_dim, hidden]`
    pub key: Tensor,
    /// `[kv_heads * head_dim, hidden]`
    pub value: Tensor,
    /// `[hidden, heads * head_dim]`
    pub attention_output: Tensor,
    /// `[hidden]`
    pub ffn_norm: Tensor,
    /// `[ffn, hidden]`
    pub gate: Tensor,
    /// `[ffn, hidden]`
    pub up: Tensor,
    /// `[hidden, ffn]`
    pub down: Tensor,
}

/// All weights, by their place.
#[derive(Debug, Clone)]
pub struct LlamaWeights {
    /// `[vocab, hidden]`
    pub embedding: Tensor,
    /// In order.
    pub layers: Vec<LlamaLayer>,
    /// `[hidden]`
    pub final_norm: Tensor,
    /// `[vocab, hidden]`; `None` when the embedding serves for it.
    output: Option<Tensor>,
}

impl LlamaLayer {
    fn tensors(&self) -> [&Tensor; 9] {
        [
            &self.attention_norm,
            &self.query,
            &self.key,
            &self.value,
            &self.attention_output,
            &self.ffn_norm,
            &self.gate,
            &self.up,
            &self.down,
        ]
    }
}

impl LlamaWeights {
    /// The matrix that makes logits, `[vocab, hidden]`: the embedding itself when they are tied.
    pub fn output(&self) -> &Tensor {
        self.output.as_ref().unwrap_or(&self.embedding)
    }

    /// Whether the embedding is also the output matrix.
    pub fn is_tied(&self) -> bool {
        self.output.is_none()
    }

    /// Every tensor once, in a fixed order.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let ends = [&self.embedding, &self.final_norm].into_iter().chain(self.output.as_ref());
        ends.chain(self.layers.iter().flat_map(LlamaLayer::tensors))
    }

    /// Bytes of all weights as stored; a tied embedding counts once.
    pub fn num_bytes(&self) -> usize {
        self.tensors().map(Tensor::num_bytes).sum()
    }

    /// Looks up the plan's tensors among those of a GGUF file, and applies `rope_freqs.weight`
    /// to `config` when the file has it.
    pub fn from_gguf(
        path: &Path,
        tensors: &BTreeMap<String, Tensor>,
        config: &mut LlamaConfig,
    ) -> Result<Self, ModelError> {
        let mut source = Source::new(path, tensors.clone());
        if source.left.contains_key("rope_freqs.weight") {
            let divisors = source.take("rope_freqs.weight", &[config.head_dim / 2])?.to_f32();
            for (frequency, &divisor) in config.rope_frequencies.iter_mut().zip(&divisors) {
                if !(divisor.is_finite() && divisor > 0.0) {
                    return Err(ModelError::field(
                        path,
                        "tensor rope_freqs.weight",
                        "positive divisors",
                        divisor,
                    ));
                }
                *frequency /= f64::from(divisor);
            }
        }
        let names =
            Names { embedding: "token_embd.weight", final_norm: "output_norm.weight", layer: gguf_name };
        let tied = !source.left.contains_key("output.weight");
        let mut weights = source.weights(config, &names, (!tied).then_some("output.weight"))?;
        for layer in &mut weights.layers {
            // llama.cpp's converter stores the two halves of a head interleaved.
            layer.query = layer.query.clone().with_paired_rows(config.head_dim);
            layer.key = layer.key.clone().with_paired_rows(config.head_dim);
        }
        source.refuse_rest(|_| false)?;
        Ok(weights)
    }

    /// Looks up the plan's tensors among those of a Hugging Face folder.
    pub fn from_hf(
        path: &Path,
        tensors: BTreeMap<String, Tensor>,
        config: &LlamaConfig,
        tied: bool,
    ) -> Result<Self, ModelError> {
        let mut source = Source::new(path, tensors);
        let names =
            Names { embedding: "model.embed_tokens.weight", final_norm: "model.norm.weight", layer: hf_name };
        let weights = source.weights(config, &names, (!tied).then_some("lm_head.weight"))?;
        // Some exporters also write the rotary buffer, which follows from the configuration, and
        // a copy of the tied embedding.
        source.refuse_rest(|name| {
            name.ends_with("rotary_emb.inv_freq") || (tied && name == "lm_head.weight")
        })?;
        Ok(weights)
    }
}

struct Names {
    embedding: &'static str,
    final_norm: &'static str,
    layer: fn(usize, Part) -> String,
}

#[derive(Clone, Copy)]
enum Part {
    AttentionNorm,
    Query,
    Key,
    Value,
    AttentionOutput,
    FfnNorm,
    Gate,
    Up,
    Down,
}

fn gguf_name(layer: usize, part: Part) -> String {
    let name = match part {
        Part::AttentionNorm => "attn_norm",
        Part::Query => "attn_q",
        Part::Key => "attn_k",
        Part::Value => "attn_v",
        Part::AttentionOutput => "attn_output",
        Part::FfnNorm => "ffn_norm",
        Part::Gate => "ffn_gate",
        Part::Up => "ffn_up",
        Part::Down => "ffn_down",
    };
    format!("blk.{layer}.{name}.weight")
}

fn hf_name(layer: usize, part: Part) -> String {
    let name = match part {
        Part::AttentionNorm => "input_layernorm",
        Part::Query => "self_attn.q_proj",
        Part::Key => "self_attn.k_proj",
        Part::Value => "self_attn.v_proj",
        Part::AttentionOutput => "self_attn.o_proj",
        Part::FfnNorm => "post_attention_layernorm",
        Part::Gate => "mlp.gate_proj",
        Part::Up => "mlp.up_proj",
        Part::Down => "mlp.down_proj",
    };
    format!("model.layers.{layer}.{name}.weight")
}

/// The tensors of a file that no plan has taken yet.
struct Source<'a> {
    path: &'a Path,
    left: BTreeMap<String, Tensor>,
}

impl<'a> Source<'a> {
    fn new(path: &'a Path, left: BTreeMap<String, Tensor>) -> Self {
        Self { path, left }
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        let field = || format!("tensor {name}");
        let tensor = self.left.remove(name).ok_or_else(|| {
            ModelError::field(self.path, field(), format!("shape {shape:?}"), "no such tensor")
        })?;
        if tensor.shape() != shape {
            let found = format!("shape {:?}", tensor.shape());
            return Err(ModelError::field(tensor.path(), field(), format!("shape {shape:?}"), found));
        }
        Ok(tensor)
    }

    fn weights(
        &mut self,
        config: &LlamaConfig,
        names: &Names,
        output: Option<&str>,
    ) -> Result<LlamaWeights, ModelError> {
        let (vocab, hidden, ffn) = (config.vocab_size, config.hidden_size, config.ffn_size);
        let (heads, kv) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
        let embedding = self.take(names.embedding, &[vocab, hidden])?;
        let mut layers = vec![];
        for index in 0..config.num_layers {
            let mut part = |part, shape: &[usize]| self.take(&(names.layer)(index, part), shape);
            layers.push(LlamaLayer {
                attention_norm: part(Part::AttentionNorm, &[hidden])?,
                query: part(Part::Query, &[heads, hidden])?,
                key: part(Part::Key, &[kv, hidden])?,
                value: part(Part::Value, &[kv, hidden])?,
                attention_output: part(Part::AttentionOutput, &[hidden, heads])?,
                ffn_norm: part(Part::FfnNorm, &[hidden])?,
                gate: part(Part::Gate, &[ffn, hidden])?,
                up: part(Part::Up, &[ffn, hidden])?,
                down: part(Part::Down, &[hidden, ffn])?,
            });
        }
        let final_norm = self.take(names.final_norm, &[hidden])?;
        let output = output.map(|name| self.take(name, &[vocab, hidden])).transpose()?;
        Ok(LlamaWeights { embedding, layers, final_norm, output })
    }

    fn refuse_rest(&self, harmless: impl Fn(&str) -> bool) -> Result<(), ModelError> {
        match self.left.keys().find(|name| !harmless(name)) {
            None => Ok(()),
            Some(name) => Err(ModelError::unsupported(
                self.path,
                format!("tensor {name}"),
                "a tensor outside the plan",
                "the tensors of a Llama without biases or experts",
            )),
        }
    }
}
