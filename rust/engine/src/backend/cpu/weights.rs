//! A model's weights as the CPU multiplies by them; shared by all workers of a process.

use std::ops::Range;

use kvrelay_model::{LlamaConfig, Model, Tensor};

use super::kernels::{Isa, Kernels, Tier};
use super::panels::{CHUNK, PANEL, Panels};
use super::plain::DOT_ROWS;
use super::rows::Rows;
use super::team::Scratch;

/// A model's weights, ready for one tier. The scalar tier reads the mapped file as it is; the
/// vector tier holds a repacked copy of the same size.
pub struct CpuWeights {
    pub(super) config: LlamaConfig,
    pub(super) tier: Tier,
    pub(super) isa: Isa,
    pub(super) kernels: Kernels,
    pub(super) digest: u64,
    pub(super) embedding: Tensor,
    pub(super) layers: Vec<Layer>,
    pub(super) final_norm: Vec<f32>,
    pub(super) output: Matrix,
}

/// One layer; shapes as in [`kvrelay_model::LlamaLayer`].
pub(super) struct Layer {
    pub(super) attention_norm: Vec<f32>,
    pub(super) query: Matrix,
    pub(super) key: Matrix,
    pub(super) value: Matrix,
    pub(super) attention_output: Matrix,
    pub(super) ffn_norm: Vec<f32>,
    pub(super) gate: Matrix,
    pub(super) up: Matrix,
    pub(super) down: Matrix,
}

/// `[outputs, inputs]`, in the form its tier multiplies by.
pub(super) enum Matrix {
    /// Rows of the file, unpacked as they are used.
    Rows(Tensor),
    /// Repacked.
    Panels(Panels),
}

impl CpuWeights {
    /// Prepares a model for `tier` on this machine.
    pub fn new(model: &Model, tier: Tier) -> Self {
        Self::for_isa(model, tier, Isa::detect())
    }

    fn for_isa(model: &Model, tier: Tier, isa: Isa) -> Self {
        let weights = model.weights();
        // Without vector instructions a fused product would be a call for every element.
        let tier = if isa == Isa::Baseline { Tier::Scalar } else { tier };
        let matrix = |tensor: &Tensor| match tier {
            Tier::Scalar => Matrix::Rows(tensor.clone()),
            Tier::Vector => Matrix::Panels(Panels::pack(tensor)),
        };
        let layers = weights.layers.iter().map(|layer| Layer {
            attention_norm: layer.attention_norm.to_f32(),
            query: matrix(&layer.query),
            key: matrix(&layer.key),
            value: matrix(&layer.value),
            attention_output: matrix(&layer.attention_output),
            ffn_norm: layer.ffn_norm.to_f32(),
            gate: matrix(&layer.gate),
            up: matrix(&layer.up),
            down: matrix(&layer.down),
        });
        Self {
            config: model.config().clone(),
            tier,
            isa,
            kernels: Kernels::new(tier, isa),
            digest: model.digest(),
            embedding: weights.embedding.clone(),
            layers: layers.collect(),
            final_norm: weights.final_norm.to_f32(),
            output: matrix(weights.output()),
        }
    }

    /// The model's sizes.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Identity of the weights, see [`Model::digest`].
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// The tier in force: [`Tier::Scalar`] on machines without vector instructions.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Numbers that unpacking needs in each thread.
    pub(super) fn scratch_len(&self) -> usize {
        let config = &self.config;
        let widest = config.ffn_size.max(config.hidden_size).max(config.num_heads * config.head_dim);
        (CHUNK * PANEL).max(DOT_ROWS * widest)
    }
}

impl std::fmt::Debug for CpuWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuWeights").field("tier", &self.tier).field("isa", &self.isa).finish_non_exhaustive()
    }
}

impl Matrix {
    fn outputs(&self) -> usize {
        match self {
            Self::Rows(tensor) => tensor.rows(),
            Self::Panels(panels) => panels.outputs(),
        }
    }

    /// Units in which threads share the outputs: [`PANEL`] of them, less in the last.
    pub(super) fn units(&self) -> usize {
        self.outputs().div_ceil(PANEL)
    }

    /// The outputs of `units`.
    pub(super) fn outputs_of(&self, units: &Range<usize>) -> Range<usize> {
        units.start * PANEL..(units.end * PANEL).min(self.outputs())
    }

    /// Row by row, the products of `x` with the outputs of `units`, into those columns of `y`.
    ///
    /// # Safety
    /// Nothing writes `x`, and nothing else touches these columns of `y`, meanwhile; `y` has
    /// room for whole units.
    pub(super) unsafe fn multiply(
        &self,
        weights: &CpuWeights,
        units: Range<usize>,
        x: Rows,
        y: Rows,
        rows: usize,
        scratch: &mut Scratch,
    ) {
        match self {
            Self::Panels(panels) => {
                debug_assert!(panels.inputs() <= x.stride());
                // SAFETY: the caller's contract; `isa` was detected.
                unsafe {
                    let (from, to) = ((x.as_ptr(), x.stride()), (y.as_mut_ptr(), y.stride()));
                    panels.multiply(weights.isa, units, rows, from, to, &mut scratch.weights);
                }
            }
            Self::Rows(tensor) => {
                let outputs = self.outputs_of(&units);
                // SAFETY: the caller's contract.
                unsafe { multiply_rows(tensor, weights.kernels, outputs, x, y, rows, &mut scratch.weights) }
            }
        }
    }
}

/// # Safety
/// As for [`Matrix::multiply`].
unsafe fn multiply_rows(
    tensor: &Tensor,
    kernels: Kernels,
    outputs: Range<usize>,
    x: Rows,
    y: Rows,
    rows: usize,
    unpacked: &mut [f32],
) {
    let columns = tensor.columns();
    let unpacked = &mut unpacked[..DOT_ROWS * columns];
    for first in outputs.clone().step_by(DOT_ROWS) {
        let count = DOT_ROWS.min(outputs.end - first);
        for (i, row) in unpacked.chunks_exact_mut(columns).take(count).enumerate() {
            tensor.dequantise_row(first + i, row);
        }
        let mut products = [0.0; DOT_ROWS];
        for row in 0..rows {
            // SAFETY: the caller's contract, and the kernels were chosen for this machine.
            unsafe {
                (kernels.dots)(&x.row(row)[..columns], unpacked, &mut products);
                y.columns_mut(row, first..first + count).copy_from_slice(&products[..count]);
            }
        }
    }
}
