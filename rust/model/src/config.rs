//! Reads the Llama family's configuration from GGUF metadata or a Hugging Face `config.json`.
//!
//! A setting that changes what is computed and that kvrelay does not implement is refused by its
//! name and value, never ignored.

use std::path::Path;

use serde_json::Value;

use crate::ModelError;
use crate::family::llama::LlamaConfig;
use crate::gguf::Gguf;
use crate::rope::{self, RopeScaling};

/// Keys below `llama.` that are read here, or that change nothing that is computed.
const GGUF_KEYS: [&str; 18] = [
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "tensor_data_layout",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
];

/// The configuration in a GGUF file; the vocabulary size is that of the embedding.
pub fn from_gguf(gguf: &Gguf) -> Result<LlamaConfig, ModelError> {
    let path = gguf.path();
    let architecture =
        gguf.string("general.architecture")?.ok_or_else(|| gguf.missing("general.architecture"))?;
    if architecture != "llama" {
        return Err(ModelError::unsupported(&path, "general.architecture", architecture, "llama"));
    }
    for key in gguf.keys() {
        let Some(name) = key.strip_prefix("llama.") else {
            continue;
        };
        let unused_experts =
            matches!(name, "expert_count" | "expert_used_count") && gguf.unsigned(key)? == Some(0);
        if !GGUF_KEYS.contains(&name) && !unused_experts {
            return Err(ModelError::unsupported(&path, key, "a setting", GGUF_KEYS.join(", ")));
        }
    }
    let hidden_size = gguf.require_unsigned("llama.embedding_length")?;
    let num_heads = gguf.require_unsigned("llama.attention.head_count")?;
    let optional = |key: &str| -> Result<Option<usize>, ModelError> {
        gguf.unsigned(key).map(|n| n.map(|n| n as usize))
    };
    let head_dim = match optional("llama.attention.key_length")? {
        Some(dim) => dim,
        None => hidden_size.checked_div(num_heads).unwrap_or(0),
    };
    for key in ["llama.attention.value_length", "llama.rope.dimension_count"] {
        if let Some(found) = optional(key)?.filter(|&n| n != head_dim) {
            return Err(ModelError::unsupported(
                &path,
                key,
                found,
                format!("the head dimension, {head_dim}"),
            ));
        }
    }
    let embedding = gguf.tensors().get("token_embd.weight");
    let embedding = embedding.ok_or_else(|| gguf.missing("tensor token_embd.weight"))?;
    let vocab_size = optional("llama.vocab_size")?.unwrap_or(embedding.rows());
    let rope_theta = gguf.float("llama.rope.freq_base")?.unwrap_or(10_000.0);
    let rope_scaling = gguf_scaling(gguf)?;
    let mut config = LlamaConfig {
        vocab_size,
        hidden_size,
        ffn_size: gguf.require_unsigned("llama.feed_forward_length")?,
        num_layers: gguf.require_unsigned("llama.block_count")?,
        num_heads,
        num_kv_heads: optional("llama.attention.head_count_kv")?.unwrap_or(num_heads),
        head_dim,
        context_length: gguf.require_unsigned("llama.context_length")?,
        rms_eps: gguf
            .float("llama.attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| gguf.missing("llama.attention.layer_norm_rms_epsilon"))? as f32,
        rope_theta,
        rope_scaling,
        rope_frequencies: vec![],
    };
    check(&path, &config)?;
    config.rope_frequencies = rope::frequencies(head_dim, rope_theta, rope_scaling);
    Ok(config)
}

fn gguf_scaling(gguf: &Gguf) -> Result<Option<RopeScaling>, ModelError> {
    const TYPE: &str = "llama.rope.scaling.type";
    let path = gguf.path();
    let legacy = gguf.float("llama.rope.scale_linear")?;
    let factor = gguf.float("llama.rope.scaling.factor")?;
    match gguf.string(TYPE)? {
        Some("none") => Ok(None),
        Some("linear") => {
            let factor = factor.or(legacy).ok_or_else(|| gguf.missing("llama.rope.scaling.factor"))?;
            at_least_one(&path, "llama.rope.scaling.factor", factor)?;
            Ok(Some(RopeScaling::Linear { factor }))
        }
        None => match legacy.or(factor) {
            Some(factor) if factor != 1.0 => {
                at_least_one(&path, "llama.rope.scale_linear", factor)?;
                Ok(Some(RopeScaling::Linear { factor }))
            }
            _ => Ok(None),
        },
        // Llama 3's scaling comes as the tensor `rope_freqs.weight` and has no type here.
        Some(other) => Err(ModelError::unsupported(&path, TYPE, other, "none, linear")),
    }
}

/// Settings of `config.json` that must have one value, if they are there at all.
fn hf_fixed() -> [(&'static str, Value); 10] {
    [
        ("model_type", "llama".into()),
        ("hidden_act", "silu".into()),
        ("attention_bias", false.into()),
        ("mlp_bias", false.into()),
        ("rope_interleaved", false.into()),
        ("partial_rotary_factor", 1.0.into()),
        ("pretraining_tp", 1.into()),
        ("sliding_window", Value::Null),
        ("quantization_config", Value::Null),
        ("is_encoder_decoder", false.into()),
    ]
}

/// The configuration in a Hugging Face `config.json` at `path`.
pub fn from_hf(path: &Path, json: &Value) -> Result<LlamaConfig, ModelError> {
    if json.get("model_type").is_none() {
        return Err(ModelError::field(path, "model_type", "llama", "no entry"));
    }
    for (key, allowed) in hf_fixed() {
        let found = json.get(key).unwrap_or(&allowed);
        let same = found == &allowed || found.as_f64().is_some_and(|x| Some(x) == allowed.as_f64());
        if !same && !found.is_null() {
            return Err(ModelError::unsupported(path, key, found, allowed.to_string()));
        }
    }
    let optional = |key: &str| -> Result<Option<usize>, ModelError> {
        match json.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64() {
                Some(n) => Ok(Some(n as usize)),
                None => Err(ModelError::field(path, key, "a whole number of at least 0", value)),
            },
        }
    };
    let require = |key: &str| optional(key)?.ok_or_else(|| ModelError::field(path, key, "an entry", "none"));
    let hidden_size = require("hidden_size")?;
    let num_heads = require("num_attention_heads")?;
    let head_dim = match optional("head_dim")? {
        Some(dim) => dim,
        None => hidden_size.checked_div(num_heads).unwrap_or(0),
    };
    let (rope_theta, rope_scaling) = hf_rope(path, json)?;
    let mut config = LlamaConfig {
        vocab_size: require("vocab_size")?,
        hidden_size,
        ffn_size: require("intermediate_size")?,
        num_layers: require("num_hidden_layers")?,
        num_heads,
        num_kv_heads: optional("num_key_value_heads")?.unwrap_or(num_heads),
        head_dim,
        context_length: require("max_position_embeddings")?,
        rms_eps: number(path, json, "", "rms_norm_eps")?.unwrap_or(1e-6) as f32,
        rope_theta,
        rope_scaling,
        rope_frequencies: vec![],
    };
    check(path, &config)?;
    config.rope_frequencies = rope::frequencies(head_dim, rope_theta, rope_scaling);
    Ok(config)
}

fn number(path: &Path, json: &Value, within: &str, key: &str) -> Result<Option<f64>, ModelError> {
    match json.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_f64() {
            Some(x) => Ok(Some(x)),
            None => Err(ModelError::field(path, format!("{within}{key}"), "a number", value)),
        },
    }
}

/// Theta and scaling, from `rope_scaling` or (newer files) `rope_parameters`.
fn hf_rope(path: &Path, json: &Value) -> Result<(f64, Option<RopeScaling>), ModelError> {
    let given = |key: &'static str| json.get(key).filter(|v| !v.is_null()).map(|v| (key, v));
    let top = number(path, json, "", "rope_theta")?;
    let Some((name, rope)) = given("rope_scaling").or_else(|| given("rope_parameters")) else {
        return Ok((top.unwrap_or(10_000.0), None));
    };
    let within = format!("{name}.");
    let theta = number(path, rope, &within, "rope_theta")?.or(top).unwrap_or(10_000.0);
    let require = |key: &str| -> Result<f64, ModelError> {
        number(path, rope, &within, key)?
            .ok_or_else(|| ModelError::field(path, format!("{within}{key}"), "a number", "no entry"))
    };
    let kind = rope.get("rope_type").or_else(|| rope.get("type"));
    let kind = kind.and_then(Value::as_str).ok_or_else(|| {
        ModelError::field(path, format!("{within}rope_type"), "default, linear or llama3", rope)
    })?;
    let scaling = match kind {
        "default" => return Ok((theta, None)),
        "linear" => RopeScaling::Linear { factor: require("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: require("factor")?,
            low_freq_factor: require("low_freq_factor")?,
            high_freq_factor: require("high_freq_factor")?,
            original_context: require("original_max_position_embeddings")?,
        },
        other => {
            let supported = "default, linear, llama3";
            return Err(ModelError::unsupported(path, format!("{within}rope_type"), other, supported));
        }
    };
    match scaling {
        RopeScaling::Linear { factor } => at_least_one(path, &format!("{within}factor"), factor)?,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            at_least_one(path, &format!("{within}factor"), factor)?;
            at_least_one(path, &format!("{within}original_max_position_embeddings"), original_context)?;
            if !(low_freq_factor > 0.0 && high_freq_factor > low_freq_factor && high_freq_factor.is_finite())
            {
                let found = format!("{low_freq_factor} and {high_freq_factor}");
                return Err(ModelError::field(
                    path,
                    within + "low_freq_factor",
                    "0 < low < high_freq_factor",
                    found,
                ));
            }
        }
    }
    Ok((theta, Some(scaling)))
}

fn at_least_one(path: &Path, field: &str, value: f64) -> Result<(), ModelError> {
    if value.is_finite() && value >= 1.0 {
        return Ok(());
    }
    Err(ModelError::field(path, field, "a finite number of at least 1", value))
}

/// The relations every Llama keeps, whatever file it came from.
fn check(path: &Path, config: &LlamaConfig) -> Result<(), ModelError> {
    let sizes = [
        ("vocabulary size", config.vocab_size),
        ("hidden size", config.hidden_size),
        ("feed-forward size", config.ffn_size),
        ("number of layers", config.num_layers),
        ("number of attention heads", config.num_heads),
        ("number of KV heads", config.num_kv_heads),
        ("head dimension", config.head_dim),
        ("context length", config.context_length),
    ];
    for (field, size) in sizes {
        if size == 0 || size > i32::MAX as usize {
            return Err(ModelError::field(path, field, "between 1 and 2^31 - 1", size));
        }
    }
    let (heads, kv_heads) = (config.num_heads, config.num_kv_heads);
    if !heads.is_multiple_of(kv_heads) {
        return Err(ModelError::field(path, "number of KV heads", format!("a divisor of {heads}"), kv_heads));
    }
    if !config.head_dim.is_multiple_of(2) {
        return Err(ModelError::field(path, "head dimension", "an even number", config.head_dim));
    }
    if !(config.rms_eps > 0.0 && config.rms_eps < 1.0) {
        return Err(ModelError::field(path, "RMS epsilon", "between 0 and 1", config.rms_eps));
    }
    if !(config.rope_theta.is_finite() && config.rope_theta > 1.0) {
        return Err(ModelError::field(path, "RoPE theta", "a finite number above 1", config.rope_theta));
    }
    Ok(())
}
