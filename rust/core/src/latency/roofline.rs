//! The *roofline* model: step times from the tables of GPUs and models.
//!
//! A step lasts a constant, plus, for each of its parts, the longer of operations / attainable peak
//! and bytes / attainable bandwidth, per GPU of the group:
//!
//! * the linear layers, over all tokens of the step at once: 2 operations a parameter and token;
//!   all weights are read, of routed experts those that the step's tokens are expected to visit;
//! * the output head, for every row;
//! * attention of the chunks: (d_k + d_v)·heads·Σ((prefix + chunk)² − prefix²) operations a layer
//!   (causal: half of all pairs), and the KV of prefix and chunk read once;
//! * attention of the decodes: 2·(d_k + d_v)·heads operations a layer and token of context, and
//!   the KV of the whole context;
//! * two all-reduces a layer for `tp` above 1: rings that move 2·(tp − 1)/tp of the residual stream.
//!
//! These are the formulas of AIConfigurator's speed-of-light model (`fpm_sol.rs`), with measured
//! efficiencies in the place of its peaks. It ignores wave quantisation: between 64 and 256 tokens
//! a step it is up to a quarter too fast.

use super::LatencyModel;
use super::hardware::GpuSpec;
use super::models::{Attention, ModelSpec, Precision};
use crate::step::{StepShape, Stretch};
use crate::time::Picos;

/// The attainable shares of peak, and the constants. `benches/roofline_fit.py` fits the shares on
/// published measurements, and says why those of attention are not the fitted ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Efficiencies {
    /// Of peak operations, by the linear layers. Fitted on Vidur's kernels on one GPU: 0.70.
    pub linear_flops: f64,
    /// Of memory bandwidth, while weights are read. Fitted on Vidur's kernels on one GPU: 0.76; the
    /// small kernels of a small model over eight GPUs reach half of that.
    pub weight_bandwidth: f64,
    /// Of peak bf16 operations, by attention. FlashAttention-2 reports 0.5 to 0.73 on A100.
    /// DistServe's coefficients imply 0.1 to 0.6 and Sarathi's prompts 0.2 for the kernels of their
    /// time; on steps of an H200 those are worse.
    pub attention_flops: f64,
    /// Of memory bandwidth, while KV is read. DistServe's coefficients imply 0.53 to 0.66,
    /// AIConfigurator assumes 0.8.
    pub kv_bandwidth: f64,
    /// Of a link's bandwidth, by large all-reduces. Vidur's of 4 MiB and more reach 0.38 to 0.44 on
    /// A100, 0.58 to 0.68 on H100 (medians).
    pub link_bandwidth: f64,
    /// Seconds an all-reduce takes beyond its bytes. Vidur's smallest take 7 and 10 µs between two
    /// GPUs (NCCL takes up to 60 between more, which custom kernels avoid).
    pub all_reduce_latency: f64,
    /// Seconds from one pipeline stage to the next beyond the bytes. Vidur's smallest sends take 17 µs
    /// (H100) and 24 µs (A100) at the median.
    pub stage_latency: f64,
    /// Seconds a step takes beyond all that: launches, sampling, the engine's loop. A choice.
    pub step_constant: f64,
}

impl Default for Efficiencies {
    fn default() -> Efficiencies {
        Efficiencies {
            linear_flops: 0.7,
            weight_bandwidth: 0.78,
            attention_flops: 0.5,
            kv_bandwidth: 0.7,
            link_bandwidth: 0.6,
            all_reduce_latency: 10e-6,
            stage_latency: 20e-6,
            step_constant: 0.5e-3,
        }
    }
}

impl Efficiencies {
    /// Peaks reached and nothing else: no step is faster.
    pub const SPEED_OF_LIGHT: Efficiencies = Efficiencies {
        linear_flops: 1.0,
        weight_bandwidth: 1.0,
        attention_flops: 1.0,
        kv_bandwidth: 1.0,
        link_bandwidth: 1.0,
        all_reduce_latency: 0.0,
        stage_latency: 0.0,
        step_constant: 0.0,
    };
}

/// Why there is no roofline for a model on a GPU.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RooflineError {
    /// Heads do not divide over the ranks.
    #[error("{model} has {heads} attention heads, which tp = {tp} does not divide")]
    Heads {
        /// The model.
        model: String,
        /// Its query heads.
        heads: u32,
        /// GPUs in the group.
        tp: u32,
    },
    /// The GPU cannot compute in the precision of the weights.
    #[error("{model} has {precision:?} weights, and {gpu} has no units for them; use bf16 weights")]
    Precision {
        /// The model.
        model: String,
        /// Its weights.
        precision: Precision,
        /// The GPU.
        gpu: String,
    },
    /// An efficiency or a figure of the GPU that is not usable.
    #[error("{what} is {value}; it must be {range}")]
    Value {
        /// Which one.
        what: &'static str,
        /// Its value.
        value: f64,
        /// What it must be.
        range: &'static str,
    },
}

/// Seconds per unit of work.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Rates {
    /// Per operation in linear layers.
    linear: f64,
    /// Per operation in attention.
    attention: f64,
    /// Per byte of weights.
    weights: f64,
    /// Per byte of KV or activations.
    kv: f64,
    /// Per byte of a rank's part of an all-reduce.
    link: f64,
}

/// The roofline model of one worker: a model on a group of GPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct Roofline {
    model: ModelSpec,
    tp: u32,
    rates: Rates,
    /// Seconds of a step beyond its parts, all-reduce latencies included.
    constant: f64,
    /// Picoseconds of operations per token of decode context. Whole, as are those of bytes, so
    /// that a run of decode steps is an exact progression; off by half a picosecond at most.
    decode_flops_picos: u64,
    /// Picoseconds of KV reads per token of decode context.
    decode_bytes_picos: u64,
    /// Picoseconds of query and output traffic per decode row.
    decode_row_picos: u64,
}

fn checked(what: &'static str, value: f64, most: f64) -> Result<f64, RooflineError> {
    if value > 0.0 && value <= most {
        return Ok(value);
    }
    let range = if most == 1.0 { "above 0 and at most 1" } else { "above 0 and finite" };
    Err(RooflineError::Value { what, value, range })
}

fn checked_seconds(what: &'static str, value: f64) -> Result<f64, RooflineError> {
    let range = "between 0 and 3600 s";
    (0.0..=3600.0).contains(&value).then_some(value).ok_or(RooflineError::Value { what, value, range })
}

impl Roofline {
    /// The model of a worker of `tp` GPUs.
    ///
    /// # Errors
    /// [`RooflineError`], when the heads do not divide over the ranks, the GPU lacks units for the
    /// weights' precision, or a figure is out of its range.
    pub fn new(
        model: ModelSpec,
        gpu: &GpuSpec,
        tp: u32,
        efficiencies: Efficiencies,
    ) -> Result<Roofline, RooflineError> {
        let heads = model.heads();
        if tp == 0 || heads == 0 || !heads.is_multiple_of(tp) {
            return Err(RooflineError::Heads { model: model.name.to_string(), heads, tp });
        }
        let peak = gpu.flops(model.weights).ok_or_else(|| RooflineError::Precision {
            model: model.name.to_string(),
            precision: model.weights,
            gpu: gpu.name.to_string(),
        })?;
        let rates = Rates::new(gpu, peak, tp, &efficiencies)?;
        let latency = checked_seconds("all_reduce_latency", efficiencies.all_reduce_latency)?;
        let all_reduces = if tp > 1 { 2 * model.num_layers } else { 0 };
        let constant = checked_seconds("step_constant", efficiencies.step_constant)?;
        let mut roofline = Roofline {
            model,
            tp,
            rates,
            constant: constant + f64::from(all_reduces) * latency,
            decode_flops_picos: 0,
            decode_bytes_picos: 0,
            decode_row_picos: 0,
        };
        let context_flops = roofline.decode_flops_per_context() / f64::from(tp);
        let context_bytes = roofline.model.kv_bytes_per_rank(tp);
        roofline.decode_flops_picos = Picos::from_secs_f64(context_flops * rates.attention).0;
        roofline.decode_bytes_picos = Picos::from_secs_f64(context_bytes * rates.kv).0;
        let row_bytes = roofline.attention_activation_bytes() / f64::from(tp);
        roofline.decode_row_picos = Picos::from_secs_f64(row_bytes * rates.kv).0;
        Ok(roofline)
    }

    /// The model it describes.
    pub fn model(&self) -> &ModelSpec {
        &self.model
    }

    /// Operations of decode attention per token of context. MLA attends to latents: its up-projections
    /// are folded into queries and outputs.
    fn decode_flops_per_context(&self) -> f64 {
        let (heads, sizes) = match self.model.attention {
            Attention::Grouped { heads, head_dim, .. } => (heads, 2 * head_dim),
            Attention::Latent { heads, kv_rank, rope_dim, .. } => (heads, 2 * kv_rank + rope_dim),
        };
        2.0 * f64::from(self.model.num_layers) * f64::from(heads) * f64::from(sizes)
    }

    /// Operations of causal prefill attention per unit of (prefix + chunk)² − prefix².
    fn prefill_flops_per_square(&self) -> f64 {
        let (heads, sizes) = match self.model.attention {
            Attention::Grouped { heads, head_dim, .. } => (heads, 2 * head_dim),
            Attention::Latent { heads, rope_dim, nope_dim, value_dim, .. } => {
                (heads, rope_dim + nope_dim + value_dim)
            }
        };
        f64::from(self.model.num_layers) * f64::from(heads) * f64::from(sizes)
    }

    /// Bytes of queries read and outputs written per token of a step, in bf16.
    fn attention_activation_bytes(&self) -> f64 {
        let sizes = match self.model.attention {
            Attention::Grouped { heads, head_dim, .. } => heads * 2 * head_dim,
            Attention::Latent { heads, kv_rank, rope_dim, .. } => heads * (2 * kv_rank + rope_dim),
        };
        Precision::Bf16.bytes() * f64::from(self.model.num_layers) * f64::from(sizes)
    }

    /// Seconds of the linear layers and the output head, over `tokens` tokens and `rows` rows.
    fn linear(&self, tokens: f64, rows: f64) -> f64 {
        let model = &self.model;
        let tp = f64::from(self.tp);
        let part = |params_computed: f64, params_read: f64| {
            let flops = 2.0 * params_computed / tp * self.rates.linear;
            let bytes = model.weights.bytes() * params_read / tp * self.rates.weights;
            flops.max(bytes)
        };
        let common = model.common_params() as f64;
        let (mut computed, mut read) = (tokens * common, common);
        if let Some(experts) = model.experts {
            let layers_expert = f64::from(model.num_expert_layers()) * model.expert_params() as f64;
            computed += tokens * f64::from(experts.active) * layers_expert;
            read += expected_experts(experts.count, experts.active, tokens) * layers_expert;
        }
        let head = model.head_params() as f64;
        part(computed, read) + part(rows * head, head)
    }

    /// Seconds of attention over the chunks of `shape`.
    fn prefill_attention(&self, shape: &StepShape) -> f64 {
        let tp = f64::from(self.tp);
        let flops = self.prefill_flops_per_square() / tp * shape.prefill_square as f64;
        let kv = self.model.kv_bytes_per_rank(self.tp) * shape.prefill_context as f64;
        let activations = self.attention_activation_bytes() / tp * shape.prefill_tokens as f64;
        (flops * self.rates.attention).max((kv + activations) * self.rates.kv)
    }

    /// Seconds of the bytes of all all-reduces; their latencies are in the constant.
    fn all_reduce(&self, tokens: f64) -> f64 {
        let tp = f64::from(self.tp);
        let stream = Precision::Bf16.bytes() * f64::from(self.model.hidden) * tokens;
        let rings = 2.0 * f64::from(self.model.num_layers);
        rings * 2.0 * (tp - 1.0) / tp * stream * self.rates.link
    }

    /// What does not depend on the decode context.
    fn fixed(&self, shape: &StepShape) -> Picos {
        let tokens = shape.num_tokens() as f64;
        let mut seconds = self.constant + self.linear(tokens, f64::from(shape.num_rows()));
        seconds += self.all_reduce(tokens);
        if shape.num_prefill > 0 {
            seconds += self.prefill_attention(shape);
        }
        Picos::from_secs_f64(seconds)
    }

    /// Attention of `rows` decode rows over `context` tokens: its first step, the difference from
    /// step to step, and for how many steps operations (or bytes) stay what it waits for.
    fn decode_attention(&self, rows: u32, context: u64) -> (Picos, u64, u64) {
        let rows = u64::from(rows);
        let flops = self.decode_flops_picos.saturating_mul(context);
        let row_bytes = self.decode_row_picos.saturating_mul(rows);
        let bytes = self.decode_bytes_picos.saturating_mul(context).saturating_add(row_bytes);
        if flops > bytes {
            // The gap widens with the context, or closes never: bytes grow faster only if they
            // already were the larger part.
            return (Picos(flops), self.decode_flops_picos.saturating_mul(rows), u64::MAX);
        }
        let gap_closes = self.decode_flops_picos.saturating_sub(self.decode_bytes_picos) * rows;
        // Steps 0 .. n with flops + i·f <= bytes + i·b, that is i <= (bytes − flops) / (f − b).
        let steps = (bytes - flops).checked_div(gap_closes).map_or(u64::MAX, |last| last.saturating_add(1));
        (Picos(bytes), self.decode_bytes_picos.saturating_mul(rows), steps)
    }
}

impl Rates {
    fn new(gpu: &GpuSpec, peak: f64, tp: u32, share: &Efficiencies) -> Result<Rates, RooflineError> {
        let rate = |(what, most): (&'static str, f64), share: (&'static str, f64)| {
            Ok(1.0 / (checked(what, most, f64::MAX)? * checked(share.0, share.1, 1.0)?))
        };
        let memory = ("hbm_bandwidth", gpu.hbm_bandwidth);
        Ok(Rates {
            linear: rate(("peak operations", peak), ("linear_flops", share.linear_flops))?,
            attention: rate(("bf16_flops", gpu.bf16_flops), ("attention_flops", share.attention_flops))?,
            weights: rate(memory, ("weight_bandwidth", share.weight_bandwidth))?,
            kv: rate(memory, ("kv_bandwidth", share.kv_bandwidth))?,
            link: rate(
                ("link bandwidth", gpu.group_bandwidth(tp)),
                ("link_bandwidth", share.link_bandwidth),
            )?,
        })
    }
}

/// Experts of `count` that at least one of `tokens` visits, when each visits `active` at random.
fn expected_experts(count: u32, active: u32, tokens: f64) -> f64 {
    let missed = 1.0 - f64::from(active.min(count)) / f64::from(count.max(1));
    f64::from(count) * (1.0 - libm::pow(missed, tokens))
}

impl LatencyModel for Roofline {
    fn stretch(&self, shape: &StepShape, max_steps: u32) -> Stretch {
        let fixed = self.fixed(shape);
        if shape.num_decode == 0 {
            return Stretch::single(fixed);
        }
        let (attention, delta, steps) = self.decode_attention(shape.num_decode, shape.decode_context);
        let first = fixed + attention;
        if shape.num_prefill > 0 {
            return Stretch::single(first);
        }
        let steps = steps.min(u64::from(max_steps)).max(1);
        Stretch { first, delta: i64::try_from(delta).unwrap_or(i64::MAX), steps: steps as u32 }
    }
}

#[cfg(test)]
mod tests;
