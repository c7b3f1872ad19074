//! A step's kernels, in order, on the compute stream.
//!
//! The residual stream, and all between kernels, is bf16; logits are f32. In the fast tier prompts go
//! through the prefill kernel. In the invariant tier every token goes through the decode kernel, whose
//! splits depend on a row's own length alone, so that chunks and recomputed tokens give the same bits.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, CudaView, DeviceRepr};
use half::bf16;
use kvrelay_kernels::launch::{
    Activation, AttentionDecode, AttentionDecodeCombine, AttentionPrefill, DecodePlan, DecodeRows, Embedding,
    FeedTokens, Gated, KeepTokens, KvLayout, LaunchError, Layer as KvLayer, LayerMut as KvLayerMut, Output,
    RmsNorm, RopeAppend, RopePairs, Sample, Weights,
};

use super::buffers::{Buffers, Sizes};
use super::device::CudaDevice;
use super::inputs::{Offsets, Part, Shape};
use super::memory::{Alias, DeviceVec};
use super::product::Product;
use super::weights::{CudaWeights, Layer};
use crate::backend::{BackendError, KvPool};

/// All that launches a step needs.
#[derive(Debug)]
pub(super) struct Forward {
    pub(super) weights: Arc<CudaWeights>,
    pub(super) stream: Arc<CudaStream>,
    pub(super) buffers: Buffers,
    pub(super) sizes: Sizes,
    pool: Arc<KvPool>,
    /// The pool's memory as the kernels see it.
    kv: Alias<bf16>,
    layout: KvLayout,
    product: Box<dyn Product>,
}

/// The inputs of a step in device memory.
#[derive(Clone, Copy)]
struct There<'a> {
    shape: &'a Shape,
    offsets: &'a Offsets,
}

impl There<'_> {
    fn view<'b, T: DeviceRepr>(&self, input: &CudaView<'b, u8>, part: Part, count: usize) -> CudaView<'b, T> {
        let bytes = input.slice(self.offsets.range::<T>(part, count));
        // SAFETY: the part was packed as numbers of this type, and begins at a border of 16 bytes.
        let numbers = unsafe { bytes.transmute(count) };
        numbers.expect("a part is whole numbers")
    }
}

impl Forward {
    pub(super) fn new(
        weights: Arc<CudaWeights>,
        stream: Arc<CudaStream>,
        buffers: Buffers,
        sizes: Sizes,
        pool: Arc<KvPool>,
        product: Box<dyn Product>,
    ) -> Option<Self> {
        let geometry = pool.geometry();
        let layout = KvLayout {
            block_size: geometry.block_size,
            num_layers: geometry.num_layers,
            kv_heads: geometry.num_kv_heads,
            head_dim: geometry.head_dim,
        };
        // SAFETY: steps write the blocks of their rows alone, which the scheduler keeps from everybody
        // else meanwhile, see `KvPool`; the pool lives as long as this.
        let kv = unsafe { pool.device()?.elements().alias() };
        Some(Self { weights, stream, buffers, sizes, pool, kv, layout, product })
    }

    pub(super) fn device(&self) -> &Arc<CudaDevice> {
        &self.weights.device
    }

    /// Enqueues a step whose inputs are packed in device memory. With `marks`, one event a layer
    /// group is recorded behind the kernel that writes its KV.
    pub(super) fn enqueue(
        &mut self,
        shape: &Shape,
        offsets: &Offsets,
        marks: Option<&[CudaEvent]>,
    ) -> Result<(), BackendError> {
        let there = There { shape, offsets };
        let device = self.device().clone();
        device.launched(self.embed(there))?;
        let weights = self.weights.clone();
        let mut group = 0;
        for (index, layer) in weights.layers.iter().enumerate() {
            self.project(layer, index > 0, shape.tokens)?;
            device.launched(self.place(index, there))?;
            if self.pool.geometry().layers_of(group).end == index + 1 {
                if let Some(marks) = marks {
                    device.told("recording an event", marks[group].record(&self.stream))?;
                }
                group += 1;
            }
            device.launched(self.attend_prompts(index, there))?;
            device.launched(self.attend_singles(index, there))?;
            self.feed_forward(layer, shape.tokens)?;
        }
        if shape.wanted > 0 {
            self.logits(there)?;
            device.launched(self.sample(there))?;
        }
        Ok(())
    }

    /// The ids, and their rows of the embedding.
    fn embed(&mut self, there: There<'_>) -> Result<(), LaunchError> {
        let Self { weights, stream, buffers, .. } = self;
        let kernels = weights.device.kernels();
        let tokens = there.shape.tokens;
        let input = buffers.input.view();
        FeedTokens {
            ids: buffers.ids.first_mut(tokens),
            sources: there.view(&input, Part::Sources, tokens),
            last: buffers.last.view(),
        }
        .launch(kernels, stream)?;
        let hidden = weights.config.hidden_size;
        Embedding {
            out: buffers.residual.first_mut(tokens * hidden),
            table: weights.embedding.weights(),
            ids: buffers.ids.first(tokens),
            vocab: weights.config.vocab_size,
            dim: hidden,
        }
        .launch(kernels, stream)
    }

    /// The attention's norm, and queries, keys and values. `add`: what the layer before has left in
    /// `delta` belongs to the residual stream first.
    fn project(&mut self, layer: &Layer, add: bool, tokens: usize) -> Result<(), BackendError> {
        let hidden = self.weights.config.hidden_size;
        let norm = if add {
            self.add_and_norm(&layer.attention_norm, tokens)
        } else {
            RmsNorm {
                out: self.buffers.normed.first_mut(tokens * hidden),
                x: self.buffers.residual.first(tokens * hidden),
                residual: None,
                weight: layer.attention_norm.view(),
                eps: self.weights.config.rms_eps,
            }
            .launch(self.weights.device.kernels(), &self.stream)
        };
        self.device().launched(norm)?;
        let buffers = &mut self.buffers;
        self.product.multiply(
            Output::Rounded(buffers.qkv.first_mut(tokens * layer.qkv.outputs)),
            buffers.normed.first(tokens * hidden),
            &layer.qkv,
            tokens,
        )
    }

    /// `residual += delta`, and its norm into `normed`.
    fn add_and_norm(&mut self, weight: &DeviceVec<bf16>, tokens: usize) -> Result<(), LaunchError> {
        let Self { weights, stream, buffers, .. } = self;
        let len = tokens * weights.config.hidden_size;
        RmsNorm {
            out: buffers.normed.first_mut(len),
            x: buffers.delta.first(len),
            residual: Some(buffers.residual.first_mut(len)),
            weight: weight.view(),
            eps: weights.config.rms_eps,
        }
        .launch(weights.device.kernels(), stream)
    }

    /// Queries turned, keys turned and with their values into the KV.
    fn place(&mut self, layer: usize, there: There<'_>) -> Result<(), LaunchError> {
        let Self { weights, stream, buffers, kv, layout, .. } = self;
        let tokens = there.shape.tokens;
        let width = (weights.config.num_heads + 2 * weights.config.num_kv_heads) * weights.config.head_dim;
        let input = buffers.input.view();
        RopeAppend {
            qkv: buffers.qkv.first_mut(tokens * width),
            kv: KvLayerMut { pool: kv.view_mut(), layout: *layout, layer },
            rotations: buffers.rotations.view(),
            positions: there.view(&input, Part::Positions, tokens),
            slots: there.view(&input, Part::Slots, tokens),
            q_heads: weights.config.num_heads,
            pairs: RopePairs::Halves,
        }
        .launch(weights.device.kernels(), stream)
    }

    /// Rows of several tokens, by the prefill kernel.
    fn attend_prompts(&mut self, layer: usize, there: There<'_>) -> Result<(), LaunchError> {
        let Shape { prefill_tokens: tokens, prefill_rows: rows, .. } = *there.shape;
        if rows == 0 {
            return Ok(());
        }
        let Self { weights, stream, buffers, kv, layout, .. } = self;
        let config = &weights.config;
        let (heads, stride) = strides(config);
        let input = buffers.input.view();
        AttentionPrefill {
            out: buffers.mixed.first_mut(tokens * heads),
            q: buffers.qkv.first(tokens * stride),
            kv: KvLayer { pool: kv.view(), layout: *layout, layer },
            first_rows: there.view(&input, Part::FirstRows, rows + 1),
            contexts: there.view(&input, Part::Contexts, rows),
            tables: there.view(&input, Part::Tables, rows * there.shape.max_blocks),
            rows: tokens,
            max_rows: there.shape.longest_prefill,
            q_heads: config.num_heads,
            q_stride: stride,
            scale: scale(config.head_dim),
        }
        .launch(weights.device.kernels(), stream)
    }

    /// All other tokens, by the decode kernel: as many at a time as the workspace holds.
    fn attend_singles(&mut self, layer: usize, there: There<'_>) -> Result<(), LaunchError> {
        let shape = there.shape;
        let count = shape.tokens - shape.prefill_tokens;
        let plan = self.sizes.plan(count, shape.max_length);
        let at_once = self.sizes.rows_at_once(&plan);
        let mut first = shape.prefill_tokens;
        while first < shape.tokens {
            let end = shape.tokens.min(first + at_once);
            self.attend(layer, there, plan, first, end - first)?;
            first = end;
        }
        Ok(())
    }

    fn attend(
        &mut self,
        layer: usize,
        there: There<'_>,
        plan: DecodePlan,
        first: usize,
        count: usize,
    ) -> Result<(), LaunchError> {
        let Self { weights, stream, buffers, kv, layout, .. } = self;
        let kernels = weights.device.kernels();
        let config = &weights.config;
        let (heads, stride) = strides(config);
        let [outputs, sums] = plan.workspace_len(count, config.num_heads, config.head_dim);
        let (tokens, shape) = (first + count, there.shape);
        let input = buffers.input.view();
        let lengths: CudaView<'_, i32> = there.view(&input, Part::Lengths, tokens);
        let sequences: CudaView<'_, i32> = there.view(&input, Part::Sequences, tokens);
        AttentionDecode {
            outputs: buffers.outputs.first_mut(outputs),
            sums: buffers.sums.first_mut(sums),
            q: buffers.qkv.first(tokens * stride).slice(first * stride..),
            kv: KvLayer { pool: kv.view(), layout: *layout, layer },
            rows: DecodeRows {
                lengths: lengths.slice(first..),
                sequences: Some(sequences.slice(first..)),
                tables: there.view(&input, Part::Tables, shape.tables * shape.max_blocks),
                max_blocks: shape.max_blocks,
            },
            plan,
            q_heads: config.num_heads,
            q_stride: stride,
            scale: scale(config.head_dim),
        }
        .launch(kernels, stream)?;
        let mut mixed = buffers.mixed.first_mut(tokens * heads);
        AttentionDecodeCombine {
            out: mixed.slice_mut(first * heads..),
            outputs: buffers.outputs.first(outputs),
            sums: buffers.sums.first(sums),
            lengths: lengths.slice(first..),
            plan,
            q_heads: config.num_heads,
            head_dim: config.head_dim,
        }
        .launch(kernels, stream)
    }

    /// The attention's output and the gated layer, whose output stays in `delta`.
    fn feed_forward(&mut self, layer: &Layer, tokens: usize) -> Result<(), BackendError> {
        let (hidden, ffn) = (self.weights.config.hidden_size, self.weights.config.ffn_size);
        let heads = layer.attention_output.inputs;
        let buffers = &mut self.buffers;
        self.product.multiply(
            Output::Rounded(buffers.delta.first_mut(tokens * hidden)),
            buffers.mixed.first(tokens * heads),
            &layer.attention_output,
            tokens,
        )?;
        let norm = self.add_and_norm(&layer.ffn_norm, tokens);
        self.device().launched(norm)?;
        let buffers = &mut self.buffers;
        self.product.multiply(
            Output::Rounded(buffers.gate_up.first_mut(tokens * 2 * ffn)),
            buffers.normed.first(tokens * hidden),
            &layer.gate_up,
            tokens,
        )?;
        let gated = Gated {
            out: buffers.gated.first_mut(tokens * ffn),
            gate_up: buffers.gate_up.first(tokens * 2 * ffn),
            width: ffn,
            activation: Activation::Silu,
        }
        .launch(self.weights.device.kernels(), &self.stream);
        self.weights.device.launched(gated)?;
        self.product.multiply(
            Output::Rounded(buffers.delta.first_mut(tokens * hidden)),
            buffers.gated.first(tokens * ffn),
            &layer.down,
            tokens,
        )
    }

    /// The final norm, and the logits of the wanted positions.
    fn logits(&mut self, there: There<'_>) -> Result<(), BackendError> {
        let weights = self.weights.clone();
        let Shape { tokens, wanted, .. } = *there.shape;
        let (hidden, vocab) = (weights.config.hidden_size, weights.config.vocab_size);
        let norm = self.add_and_norm(&weights.final_norm, tokens);
        weights.device.launched(norm)?;
        let buffers = &mut self.buffers;
        let input = buffers.input.view();
        // Rows chosen by number are what an embedding is.
        let chosen = Embedding {
            out: buffers.selected.first_mut(wanted * hidden),
            table: Weights::Plain(buffers.normed.first(tokens * hidden)),
            ids: there.view(&input, Part::Wanted, wanted),
            vocab: tokens,
            dim: hidden,
        }
        .launch(weights.device.kernels(), &self.stream);
        weights.device.launched(chosen)?;
        self.product.multiply(
            Output::Wide(buffers.logits.first_mut(wanted * vocab)),
            buffers.selected.first(wanted * hidden),
            weights.output(),
            wanted,
        )
    }

    fn sample(&mut self, there: There<'_>) -> Result<(), LaunchError> {
        let Self { weights, stream, buffers, .. } = self;
        let kernels = weights.device.kernels();
        let (wanted, vocab) = (there.shape.wanted, weights.config.vocab_size);
        let input = buffers.input.view();
        Sample {
            tokens: buffers.tokens.first_mut(wanted),
            logits: buffers.logits.first(wanted * vocab),
            temperatures: there.view(&input, Part::Temperatures, wanted),
            top_ks: there.view(&input, Part::TopKs, wanted),
            top_ps: there.view(&input, Part::TopPs, wanted),
            seeds: there.view(&input, Part::Seeds, wanted),
            positions: there.view(&input, Part::Counters, wanted),
            vocab,
        }
        .launch(kernels, stream)?;
        let slots = buffers.last.len();
        KeepTokens {
            last: buffers.last.first_mut(slots),
            tokens: buffers.tokens.first(wanted),
            slots: there.view(&input, Part::Keep, wanted),
        }
        .launch(kernels, stream)
    }
}

/// Elements of a token's query heads, and of its queries, keys and values.
fn strides(config: &kvrelay_model::LlamaConfig) -> (usize, usize) {
    let heads = config.num_heads * config.head_dim;
    (heads, heads + 2 * config.num_kv_heads * config.head_dim)
}

fn scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}
