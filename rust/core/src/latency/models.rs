//! The model table: shapes, and the counts that follow from them.
//!
//! Shapes of Llama 3.1, Qwen3, Mixtral and DeepSeek-V3 are those of AIConfigurator's
//! `model_configs/*.json`, of OPT and Llama-2-70B those of llm-analysis (both Apache-2.0), of
//! Llama-2-7B that of Vidur (MIT; llm-analysis has its inner size wrong). Biases, norms and learned
//! positions are left out of the counts: they are under 0.1 % of any of these models.

use std::borrow::Cow;

use super::names::{UnknownName, canonical};

/// How a number is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// 16 bits (fp16 counts the same).
    Bf16,
    /// 8 bits.
    Fp8,
    /// 4 bits and a scale of 8 bits for every 16 numbers (NVFP4).
    Fp4,
}

impl Precision {
    /// Bytes a number takes.
    pub fn bytes(self) -> f64 {
        match self {
            Precision::Bf16 => 2.0,
            Precision::Fp8 => 1.0,
            Precision::Fp4 => 9.0 / 16.0,
        }
    }
}

/// How queries, keys and values are made and kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// Multi-head, grouped or multi-query attention: each KV head serves a group of query heads.
    Grouped {
        /// Query heads.
        heads: u32,
        /// Key-value heads.
        kv_heads: u32,
        /// Size of a head.
        head_dim: u32,
    },
    /// Multi-head latent attention: one compressed vector a token stands for all heads.
    Latent {
        /// Query heads.
        heads: u32,
        /// Rank of the queries' compression.
        query_rank: u32,
        /// Rank of the latent that is kept.
        kv_rank: u32,
        /// Size of the rotary part of a key, which all heads share.
        rope_dim: u32,
        /// Size of the rest of a key.
        nope_dim: u32,
        /// Size of a value.
        value_dim: u32,
    },
}

/// Experts in place of one feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Layers at the start that have no experts.
    pub dense_layers: u32,
    /// Routed experts in a layer.
    pub count: u32,
    /// Routed experts that a token visits.
    pub active: u32,
    /// Experts that every token visits.
    pub shared: u32,
    /// Inner size of one expert.
    pub inner: u32,
}

/// The shape of a model. All fields are public: give your own where the table has none.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// Lower case, with dashes.
    pub name: Cow<'static, str>,
    /// Layers.
    pub num_layers: u32,
    /// Size of the residual stream.
    pub hidden: u32,
    /// Tokens in the vocabulary.
    pub vocab: u32,
    /// Whether the output head is the embedding table.
    pub tied_embeddings: bool,
    /// Its attention.
    pub attention: Attention,
    /// Inner size of the feed-forward block in layers without experts.
    pub inner: u32,
    /// Whether feed-forward blocks are gated: three matrices rather than two.
    pub gated: bool,
    /// Its experts, if it has any.
    pub experts: Option<Experts>,
    /// Precision of the weights, and so of the linear layers' arithmetic.
    pub weights: Precision,
    /// Precision of the KV cache.
    pub kv: Precision,
}

impl ModelSpec {
    /// The same model with weights of another precision.
    pub fn with_weights(self, weights: Precision) -> ModelSpec {
        ModelSpec { weights, ..self }
    }

    /// The same model with a KV cache of another precision.
    pub fn with_kv(self, kv: Precision) -> ModelSpec {
        ModelSpec { kv, ..self }
    }

    /// Query heads.
    pub fn heads(&self) -> u32 {
        match self.attention {
            Attention::Grouped { heads, .. } | Attention::Latent { heads, .. } => heads,
        }
    }

    /// Parameters of the attention projections of one layer.
    pub fn attention_params_per_layer(&self) -> u64 {
        let hidden = u64::from(self.hidden);
        match self.attention {
            Attention::Grouped { heads, kv_heads, head_dim } => {
                2 * hidden * u64::from(head_dim) * (u64::from(heads) + u64::from(kv_heads))
            }
            Attention::Latent { heads, query_rank, kv_rank, rope_dim, nope_dim, value_dim } => {
                let [heads, query_rank, kv_rank] = [heads, query_rank, kv_rank].map(u64::from);
                let [rope, nope, value] = [rope_dim, nope_dim, value_dim].map(u64::from);
                let queries = hidden * query_rank + query_rank * heads * (nope + rope);
                let keys_values = hidden * (kv_rank + rope) + kv_rank * heads * (nope + value);
                queries + keys_values + heads * value * hidden
            }
        }
    }

    /// Layers without experts.
    pub fn num_dense_layers(&self) -> u32 {
        self.experts.map_or(self.num_layers, |experts| experts.dense_layers.min(self.num_layers))
    }

    /// Layers with experts.
    pub fn num_expert_layers(&self) -> u32 {
        self.num_layers - self.num_dense_layers()
    }

    /// Parameters of a feed-forward block of inner size `inner`.
    fn block_params(&self, inner: u32) -> u64 {
        u64::from(self.hidden) * u64::from(inner) * if self.gated { 3 } else { 2 }
    }

    /// Parameters of one routed expert, if there are any.
    pub fn expert_params(&self) -> u64 {
        self.experts.map_or(0, |experts| self.block_params(experts.inner))
    }

    /// Parameters that every token multiplies with, the output head left out: attention, dense
    /// blocks, routers and shared experts.
    pub fn common_params(&self) -> u64 {
        let attention = u64::from(self.num_layers) * self.attention_params_per_layer();
        let dense = u64::from(self.num_dense_layers()) * self.block_params(self.inner);
        let shared = self.experts.map_or(0, |experts| {
            let router = u64::from(self.hidden) * u64::from(experts.count);
            router + u64::from(experts.shared) * self.block_params(experts.inner)
        });
        attention + dense + u64::from(self.num_expert_layers()) * shared
    }

    /// Parameters of the output head (or of the embedding table, which is as large).
    pub fn head_params(&self) -> u64 {
        u64::from(self.vocab) * u64::from(self.hidden)
    }

    /// All parameters.
    pub fn num_params(&self) -> u64 {
        let routed = self.experts.map_or(0, |experts| u64::from(experts.count) * self.expert_params());
        let embeddings = self.head_params() * if self.tied_embeddings { 1 } else { 2 };
        self.common_params() + u64::from(self.num_expert_layers()) * routed + embeddings
    }

    /// Parameters that one token multiplies with, the output head included: twice as many
    /// operations a token.
    pub fn active_params(&self) -> u64 {
        let routed = self.experts.map_or(0, |experts| u64::from(experts.active) * self.expert_params());
        self.common_params() + u64::from(self.num_expert_layers()) * routed + self.head_params()
    }

    /// Bytes of all weights.
    pub fn weight_bytes(&self) -> u64 {
        (self.num_params() as f64 * self.weights.bytes()) as u64
    }

    /// Numbers that a token leaves in the KV cache of one layer, over all ranks without copies.
    fn kv_numbers_per_layer(&self) -> u64 {
        match self.attention {
            Attention::Grouped { kv_heads, head_dim, .. } => 2 * u64::from(kv_heads) * u64::from(head_dim),
            Attention::Latent { kv_rank, rope_dim, .. } => u64::from(kv_rank) + u64::from(rope_dim),
        }
    }

    /// Bytes that a token leaves in the KV cache: what a transfer moves.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (u64::from(self.num_layers) as f64 * self.kv_numbers_per_layer() as f64 * self.kv.bytes()) as u64
    }

    /// Bytes that a token leaves in the KV cache of each of `tp` ranks; ranks beyond the number of
    /// KV heads hold copies.
    pub fn kv_bytes_per_rank(&self, tp: u32) -> f64 {
        let parts = match self.attention {
            Attention::Grouped { kv_heads, .. } => tp.min(kv_heads).max(1),
            Attention::Latent { .. } => 1,
        };
        self.kv_bytes_per_token() as f64 / f64::from(parts)
    }
}

const fn grouped(heads: u32, kv_heads: u32) -> Attention {
    Attention::Grouped { heads, kv_heads, head_dim: 128 }
}

/// A model of bf16 weights and KV.
const fn dense(
    name: &'static str,
    num_layers: u32,
    hidden: u32,
    vocab: u32,
    attention: Attention,
    inner: u32,
) -> ModelSpec {
    ModelSpec {
        name: Cow::Borrowed(name),
        num_layers,
        hidden,
        vocab,
        tied_embeddings: false,
        attention,
        inner,
        gated: true,
        experts: None,
        weights: Precision::Bf16,
        kv: Precision::Bf16,
    }
}

const fn opt(name: &'static str, num_layers: u32, hidden: u32) -> ModelSpec {
    let heads = hidden / 128;
    let mut model = dense(name, num_layers, hidden, 50_272, grouped(heads, heads), 4 * hidden);
    model.tied_embeddings = true;
    model.gated = false;
    model
}

const fn with_experts(mut model: ModelSpec, experts: Experts) -> ModelSpec {
    model.experts = Some(experts);
    model
}

const DEEPSEEK_V3_ATTENTION: Attention = Attention::Latent {
    heads: 128,
    query_rank: 1_536,
    kv_rank: 512,
    rope_dim: 64,
    nope_dim: 128,
    value_dim: 128,
};

const TABLE: &[ModelSpec] = &[
    opt("opt-13b", 40, 5_120),
    opt("opt-66b", 64, 9_216),
    opt("opt-175b", 96, 12_288),
    dense("llama-2-7b", 32, 4_096, 32_000, grouped(32, 32), 11_008),
    dense("llama-2-13b", 40, 5_120, 32_000, grouped(40, 40), 13_824),
    dense("llama-2-70b", 80, 8_192, 32_000, grouped(64, 8), 28_672),
    dense("llama-3.1-8b", 32, 4_096, 128_256, grouped(32, 8), 14_336),
    dense("llama-3.1-70b", 80, 8_192, 128_256, grouped(64, 8), 28_672),
    dense("llama-3.1-405b", 126, 16_384, 128_256, grouped(128, 8), 53_248),
    dense("qwen3-8b", 36, 4_096, 151_936, grouped(32, 8), 12_288),
    dense("qwen3-32b", 64, 5_120, 151_936, grouped(64, 8), 25_600),
    with_experts(
        dense("qwen3-235b-a22b", 94, 4_096, 151_936, grouped(64, 4), 0),
        Experts { dense_layers: 0, count: 128, active: 8, shared: 0, inner: 1_536 },
    ),
    with_experts(
        dense("mixtral-8x7b", 32, 4_096, 32_000, grouped(32, 8), 0),
        Experts { dense_layers: 0, count: 8, active: 2, shared: 0, inner: 14_336 },
    ),
    // Published in fp8: `with_weights(Precision::Fp8)` where the GPU has such units.
    with_experts(
        dense("deepseek-v3", 61, 7_168, 129_280, DEEPSEEK_V3_ATTENTION, 18_432),
        Experts { dense_layers: 3, count: 256, active: 8, shared: 1, inner: 2_048 },
    ),
];

/// The models known by name.
pub fn model_names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|model| match &model.name {
        Cow::Borrowed(name) => *name,
        Cow::Owned(_) => unreachable!("the table's names are static"),
    })
}

/// The model called `name` (case, blanks and underscores do not matter), in bf16.
///
/// # Errors
/// [`UnknownName`], with the names there are.
pub fn model(name: &str) -> Result<ModelSpec, UnknownName> {
    let wanted = canonical(name);
    let found = TABLE.iter().find(|model| model.name == wanted);
    found.cloned().ok_or_else(|| UnknownName::new("model", name, model_names()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters and active parameters in billions, GiB of bf16, KV bytes per token.
    const PUBLISHED: &[(&str, f64, f64, f64, u64)] = &[
        ("opt-13b", 12.84, 12.84, 23.9, 819_200),
        ("opt-66b", 65.7, 65.7, 122.4, 2_359_296),
        ("opt-175b", 174.6, 174.6, 325.0, 4_718_592),
        ("llama-2-7b", 6.74, 6.61, 12.6, 524_288),
        ("llama-2-13b", 13.02, 12.85, 24.2, 819_200),
        ("llama-2-70b", 68.98, 68.7, 128.5, 327_680),
        ("llama-3.1-8b", 8.03, 7.50, 15.0, 131_072),
        ("llama-3.1-70b", 70.55, 69.5, 131.4, 327_680),
        ("llama-3.1-405b", 405.85, 403.8, 756.0, 516_096),
        ("qwen3-8b", 8.19, 7.57, 15.3, 147_456),
        ("qwen3-32b", 32.76, 31.98, 61.0, 262_144),
        ("qwen3-235b-a22b", 235.09, 21.6, 437.9, 192_512),
        ("mixtral-8x7b", 46.70, 12.75, 87.0, 131_072),
        ("deepseek-v3", 671.03, 36.6, 1250.0, 70_272),
    ];

    #[test]
    fn counts_from_shapes_are_the_published_ones() {
        assert!(model_names().eq(PUBLISHED.iter().map(|row| row.0)));
        for (name, params, active, gib, kv_bytes) in PUBLISHED {
            let model = model(name).unwrap();
            let near = |value: f64, published: f64, what: &str| {
                assert!((value / published - 1.0).abs() < 5e-3, "{name}: {what} {value}, not {published}");
            };
            near(model.num_params() as f64 / 1e9, *params, "parameters");
            near(model.active_params() as f64 / 1e9, *active, "active parameters");
            near(model.weight_bytes() as f64 / f64::from(1 << 30), *gib, "GiB");
            assert_eq!(model.kv_bytes_per_token(), *kv_bytes, "{name}");
        }
    }

    #[test]
    fn precision_scales_bytes() {
        let deepseek = model("DeepSeek V3").unwrap().with_weights(Precision::Fp8);
        assert!((deepseek.weight_bytes() as f64 / f64::from(1 << 30) / 625.0 - 1.0).abs() < 3e-3);
        assert_eq!(deepseek.kv_bytes_per_rank(8), 70_272.0);
        let llama = model("llama-3.1-8b").unwrap().with_kv(Precision::Fp8);
        assert_eq!((llama.kv_bytes_per_rank(4), llama.kv_bytes_per_rank(16)), (16_384.0, 8_192.0));
    }

    #[test]
    fn an_unknown_model_lists_the_known_ones() {
        let message = model("llama-3-8b").unwrap_err().to_string();
        assert!(
            message.contains("nearest first: llama-2-7b, ")
                || message.contains("nearest first: llama-3.1-8b, ")
        );
        assert!(model_names().all(|name| message.contains(name)));
    }
}
