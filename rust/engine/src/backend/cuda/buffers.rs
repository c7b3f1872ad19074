//! The buffers of a backend, reckoned once: what is planned is what is allocated.

use std::mem::size_of;
use std::sync::Arc;

use cudarc::driver::{CudaStream, result};
use half::bf16;
use kvrelay_kernels::launch::{DecodePlan, Split};
use kvrelay_model::{LlamaConfig, rope};

use super::cublas;
use super::device::CudaDevice;
use super::inputs::{Buckets, Inputs};
use super::memory::DeviceVec;
use crate::backend::{BackendError, Limits};

/// Bytes that the invariant tier's attention may work in, where one row needs no more.
const WORKSPACE: usize = 64 << 20;

/// Elements of every buffer.
#[derive(Debug, Clone)]
pub(super) struct Sizes {
    tokens: usize,
    wanted: usize,
    hidden: usize,
    ffn: usize,
    heads: usize,
    qkv: usize,
    vocab: usize,
    slots: usize,
    rotations: usize,
    outputs: usize,
    sums: usize,
    pub(super) input: usize,
    cublas: bool,
    split: Split,
    buckets: Buckets,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

impl Sizes {
    pub(super) fn new(
        config: &LlamaConfig,
        limits: &Limits,
        buckets: Buckets,
        split: Split,
        cublas: bool,
    ) -> Self {
        let heads = config.num_heads * config.head_dim;
        let mut sizes = Self {
            tokens: limits.max_tokens.max(limits.max_rows),
            wanted: limits.max_logits.max(limits.max_rows),
            hidden: config.hidden_size,
            ffn: config.ffn_size,
            heads,
            qkv: heads + 2 * config.num_kv_heads * config.head_dim,
            vocab: config.vocab_size,
            slots: limits.max_slots,
            rotations: limits.max_positions * config.head_dim,
            outputs: 0,
            sums: 0,
            input: Inputs::max_bytes(limits, &buckets),
            cublas,
            split,
            buckets,
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
        };
        [sizes.outputs, sizes.sums] = sizes.workspace();
        sizes
    }

    /// The largest workspace of any batch, or for the invariant tier one that some rows fit in.
    fn workspace(&self) -> [usize; 2] {
        let of = |plan: &DecodePlan, rows| plan.workspace_len(rows, self.num_heads, self.head_dim);
        match self.split {
            Split::Invariant => {
                let plan = self.plan(1, self.buckets.max_positions);
                let row = of(&plan, 1).into_iter().sum::<usize>() * size_of::<f32>();
                of(&plan, (WORKSPACE / row).clamp(1, self.tokens))
            }
            Split::Fast { .. } => {
                let all = self.buckets.all().map(|(rows, length)| of(&self.plan(rows, length), rows));
                all.fold([0, 0], |[a, b], [c, d]| [a.max(c), b.max(d)])
            }
        }
    }

    /// How a batch of single tokens is split; the same for all of a bucket.
    pub(super) fn plan(&self, rows: usize, max_length: usize) -> DecodePlan {
        let group = self.num_heads / self.num_kv_heads;
        DecodePlan::new(self.split, self.buckets.rows(rows.max(1)), self.num_kv_heads, group, max_length)
    }

    /// Rows whose splits the workspace holds at a time.
    pub(super) fn rows_at_once(&self, plan: &DecodePlan) -> usize {
        let [outputs, sums] = plan.workspace_len(1, self.num_heads, self.head_dim);
        (self.outputs / outputs).min(self.sums / sums).max(1)
    }

    /// Positions whose logits a step can have.
    pub(super) fn wanted(&self) -> usize {
        self.wanted
    }

    /// Logits of a position.
    pub(super) fn vocab(&self) -> usize {
        self.vocab
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> u64 {
        let elements = self.tokens * (3 * self.hidden + 3 * self.ffn + self.heads + self.qkv)
            + self.wanted * self.hidden;
        let floats = self.wanted * self.vocab + self.rotations + self.outputs + self.sums;
        let numbers = self.tokens + self.wanted + self.slots;
        let workspace = if self.cublas { cublas::WORKSPACE } else { 0 };
        let bytes =
            size_of::<bf16>() * elements + size_of::<f32>() * (floats + numbers) + self.input + workspace;
        bytes as u64
    }
}

/// The buffers; shapes in elements of a token, a wanted position, a slot.
#[derive(Debug)]
pub(super) struct Buffers {
    /// What [`Inputs`] packs.
    pub(super) input: DeviceVec<u8>,
    /// `[tokens]`
    pub(super) ids: DeviceVec<i32>,
    /// `[tokens][hidden]`
    pub(super) residual: DeviceVec<bf16>,
    /// `[tokens][hidden]`
    pub(super) normed: DeviceVec<bf16>,
    /// `[tokens][hidden]`: what is added to the residual next.
    pub(super) delta: DeviceVec<bf16>,
    /// `[tokens][heads + 2 * kv_heads][head_dim]`
    pub(super) qkv: DeviceVec<bf16>,
    /// `[tokens][heads][head_dim]`
    pub(super) mixed: DeviceVec<bf16>,
    /// `[tokens][2][ffn]`
    pub(super) gate_up: DeviceVec<bf16>,
    /// `[tokens][ffn]`
    pub(super) gated: DeviceVec<bf16>,
    /// `[wanted][hidden]`
    pub(super) selected: DeviceVec<bf16>,
    /// `[wanted][vocab]`
    pub(super) logits: DeviceVec<f32>,
    /// `[wanted]`
    pub(super) tokens: DeviceVec<i32>,
    /// `[slots]`: the last token of each.
    pub(super) last: DeviceVec<i32>,
    /// `[positions][2][head_dim / 2]`: cosines, then sines.
    pub(super) rotations: DeviceVec<f32>,
    /// The splits of attention.
    pub(super) outputs: DeviceVec<f32>,
    pub(super) sums: DeviceVec<f32>,
}

impl Buffers {
    pub(super) fn new(
        device: &Arc<CudaDevice>,
        stream: &Arc<CudaStream>,
        sizes: &Sizes,
        config: &LlamaConfig,
    ) -> Result<Self, BackendError> {
        fn make<T: cudarc::driver::DeviceRepr>(
            device: &Arc<CudaDevice>,
            stream: &Arc<CudaStream>,
            len: usize,
        ) -> Result<DeviceVec<T>, BackendError> {
            DeviceVec::new(device, stream, "buffers of steps", len)
        }
        let Sizes { tokens, wanted, hidden, ffn, .. } = *sizes;
        let rotations = make(device, stream, sizes.rotations)?;
        write_rotations(device, stream, &rotations, config)?;
        Ok(Self {
            input: make(device, stream, sizes.input)?,
            ids: make(device, stream, tokens)?,
            residual: make(device, stream, tokens * hidden)?,
            normed: make(device, stream, tokens * hidden)?,
            delta: make(device, stream, tokens * hidden)?,
            qkv: make(device, stream, tokens * sizes.qkv)?,
            mixed: make(device, stream, tokens * sizes.heads)?,
            gate_up: make(device, stream, tokens * 2 * ffn)?,
            gated: make(device, stream, tokens * ffn)?,
            selected: make(device, stream, wanted * hidden)?,
            logits: make(device, stream, wanted * sizes.vocab)?,
            tokens: make(device, stream, wanted)?,
            last: make(device, stream, sizes.slots)?,
            rotations,
            outputs: make(device, stream, sizes.outputs)?,
            sums: make(device, stream, sizes.sums)?,
        })
    }
}

/// The table of cosines and sines, as the host reckons it for every scaling.
fn write_rotations(
    device: &Arc<CudaDevice>,
    stream: &CudaStream,
    table: &DeviceVec<f32>,
    config: &LlamaConfig,
) -> Result<(), BackendError> {
    let mut numbers = vec![0.0; table.len()];
    for (position, out) in numbers.chunks_exact_mut(config.head_dim).enumerate() {
        rope::rotation(&config.rope_frequencies, position, out);
    }
    // SAFETY: the table is as long, and the numbers stay until the copy is over.
    let copied = unsafe { result::memcpy_htod_async(table.pointer(), &numbers, stream.cu_stream()) };
    device.told("copying the rotary table", copied.and(stream.synchronize()))
}
