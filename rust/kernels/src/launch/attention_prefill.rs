//! Causal attention of new tokens over the paged KV.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, PushKernelArg};

use super::check::{Check, elements};
use super::paged::Layer;
use super::{Element, Geometry, HEAD_DIMS, Kernels, LaunchError, enqueue};

/// Causal attention of the new tokens of several sequences over the KV, which holds what came before
/// them and the new tokens' own (FlashAttention-2; Dao, 2023). A row's result depends on its own
/// query and position alone, bit for bit: not on how its prompt was cut into chunks.
#[derive(Debug)]
pub struct AttentionPrefill<'a, T> {
    /// `[rows][q_heads][head_dim]`
    pub out: CudaViewMut<'a, T>,
    /// `[rows][q_heads][head_dim]`, in rows `q_stride` apart.
    pub q: CudaView<'a, T>,
    /// Keys and values.
    pub kv: Layer<'a, T>,
    /// `[sequences + 1]`: where each sequence's rows begin, and where the last one's end: never
    /// decreasing, from 0 to `rows`.
    pub first_rows: CudaView<'a, i32>,
    /// `[sequences]`: tokens of each, its new rows included.
    pub contexts: CudaView<'a, i32>,
    /// `[sequences][blocks]`: the blocks of each in order of position, enough for its context.
    pub tables: CudaView<'a, i32>,
    /// All rows.
    pub rows: usize,
    /// The most rows that a sequence has.
    pub max_rows: usize,
    /// Query heads: a multiple of the KV heads.
    pub q_heads: usize,
    /// Elements from a row of q to the next: a multiple of 8.
    pub q_stride: usize,
    /// Scores are multiplied by it; mostly `1 / sqrt(head_dim)`.
    pub scale: f32,
}

/// As `attention_prefill.cu` has them.
const THREADS: usize = 128;
const QUERIES: usize = 64;

/// Keys and values of a tile, twice, in rows eight elements longer than a head; the queries too where
/// heads are wide.
fn shared_bytes(head_dim: usize) -> usize {
    let (keys, queries) = if head_dim > 128 { (32, QUERIES) } else { (64, 0) };
    (4 * keys + queries) * (head_dim + 8) * 2
}

impl<T: Element> AttentionPrefill<'_, T> {
    /// Enqueues `attention_prefill_{T}_hd{head_dim}`; nothing for no rows.
    pub fn launch(mut self, kernels: &Kernels, stream: &CudaStream) -> Result<(), LaunchError> {
        let head_dim = self.kv.layout.head_dim;
        let name = format!("attention_prefill_{}_hd{head_dim}", T::NAME);
        let check = Check { kernel: &name };
        let max_blocks = self.check(&check)?;
        if self.rows == 0 {
            return Ok(());
        }
        let (layout, sequences) = (self.kv.layout, self.contexts.len());
        check.begins_at("bytes of out beyond a 16-byte border", 16, &self.out, stream)?;
        check.begins_at("bytes of q beyond a 16-byte border", 16, &self.q, stream)?;
        let layer = self.kv.keys(&check, stream)?;
        let [block_stride, q_stride] = [layout.block_len() as i64, self.q_stride as i64];
        let block_size = check.int("block_size", layout.block_size)?;
        let max_blocks = check.int("blocks of a sequence", max_blocks)?;
        let q_heads = check.int("q_heads", self.q_heads)?;
        let kv_heads = check.int("kv_heads", layout.kv_heads)?;
        // The kernel's exponentials are powers of two.
        let scale = self.scale * std::f32::consts::LOG2_E;
        let shared = shared_bytes(head_dim);
        let function = kernels.function(&name, shared)?;
        let mut arguments = stream.launch_builder(&function);
        arguments.arg(&mut self.out).arg(&self.q).arg(&layer).arg(&self.first_rows).arg(&self.contexts);
        arguments.arg(&self.tables).arg(&block_stride).arg(&q_stride).arg(&block_size).arg(&max_blocks);
        arguments.arg(&q_heads).arg(&kv_heads).arg(&scale);
        let grid = [self.max_rows.div_ceil(QUERIES), self.q_heads, sequences];
        // SAFETY: the views have the shapes that were checked; what lies in the index arrays is the caller's promise.
        unsafe { enqueue(&name, &mut arguments, &Geometry { grid, threads: THREADS, shared }) }
    }

    /// The blocks of a table's row.
    fn check(&self, check: &Check<'_>) -> Result<usize, LaunchError> {
        let (layout, sequences) = (self.kv.layout, self.contexts.len());
        check.one_of("head_dim", &HEAD_DIMS, layout.head_dim)?;
        check.at_least("kv_heads", 1, layout.kv_heads)?;
        check.multiple("q_heads", layout.kv_heads, self.q_heads)?;
        check.at_least("sequences", usize::from(self.rows > 0), sequences)?;
        check.equal("first_rows", sequences + 1, self.first_rows.len())?;
        // Without rows there need be no table.
        if self.rows > 0 {
            check.multiple("block numbers of tables", sequences, self.tables.len())?;
        }
        check.at_most("max_rows", self.rows, self.max_rows)?;
        check.at_least("sequences times max_rows", self.rows, elements([sequences, self.max_rows]))?;
        let row = elements([self.q_heads, layout.head_dim]);
        check.int("elements of a row of q", row)?;
        check.equal("elements of out", elements([self.rows, row]), self.out.len())?;
        check.multiple("q_stride", 8, self.q_stride)?;
        check.at_least("q_stride", row, self.q_stride)?;
        let reached = elements([self.rows.saturating_sub(1), self.q_stride]).saturating_add(row);
        check.at_least("elements of q", if self.rows == 0 { 0 } else { reached }, self.q.len())?;
        Ok(self.tables.len() / sequences.max(1))
    }
}
