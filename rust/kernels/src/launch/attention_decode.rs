//! Attention of single queries over the paged KV, split over the keys, and the sum of the splits.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, PushKernelArg};

use super::check::{Check, elements};
use super::paged::Layer;
use super::{Element, Geometry, HEAD_DIMS, Kernels, LaunchError, enqueue};

/// Tokens of a split in the invariant form.
pub const INVARIANT_SPLIT_TOKENS: usize = 256;

/// The shortest split of the fast form: below it, adding the splits up costs more than they save.
const LEAST_SPLIT_TOKENS: usize = 64;

/// Query heads of a group that one block takes, at most.
const GROUP: usize = 8;

/// Threads of a block, as `attention_decode.cu` has them.
const THREADS: usize = 128;

/// How keys are split between blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Every [`INVARIANT_SPLIT_TOKENS`] tokens: a row's result depends on its own query, keys and
    /// length alone, bit for bit.
    Invariant,
    /// As many splits as give each of the device's multiprocessors a few blocks.
    Fast {
        /// Multiprocessors of the device.
        multiprocessors: usize,
    },
}

/// How a batch is split; what its workspace must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodePlan {
    /// Tokens of a split.
    pub split_tokens: usize,
    /// Splits of the longest row.
    pub max_splits: usize,
    /// The longest row, in tokens.
    pub max_length: usize,
}

impl DecodePlan {
    /// For `rows` rows of `kv_heads` groups of `group` query heads and at most `max_length` tokens.
    pub fn new(split: Split, rows: usize, kv_heads: usize, group: usize, max_length: usize) -> Self {
        let split_tokens = match split {
            Split::Invariant => INVARIANT_SPLIT_TOKENS,
            Split::Fast { multiprocessors } => {
                let blocks = elements([rows, kv_heads, group.div_ceil(GROUP)]).max(1);
                let splits = multiprocessors.saturating_mul(4).div_ceil(blocks).max(1);
                let tokens = max_length.div_ceil(splits).max(1);
                // Beyond what kernels count in, so a launch refuses it.
                tokens.checked_next_multiple_of(LEAST_SPLIT_TOKENS).unwrap_or(usize::MAX)
            }
        };
        Self { split_tokens, max_splits: max_length.div_ceil(split_tokens).max(1), max_length }
    }

    /// Elements of the workspace's outputs and of its sums.
    pub fn workspace_len(&self, rows: usize, q_heads: usize, head_dim: usize) -> [usize; 2] {
        [head_dim, 2].map(|last| elements([rows, q_heads, self.max_splits, last]))
    }
}

/// The rows of a decode batch and the blocks that they see.
#[derive(Debug)]
pub struct DecodeRows<'a> {
    /// `[rows]`: how many tokens each row sees, at most the plan's `max_length`; 0 for a padded row.
    pub lengths: CudaView<'a, i32>,
    /// `[rows]`: the block table of each; `None` where row r has table r. Rows of one sequence share one.
    pub sequences: Option<CudaView<'a, i32>>,
    /// `[tables][max_blocks]`: blocks in order of position, enough for the rows' lengths.
    pub tables: CudaView<'a, i32>,
    /// Blocks of a table.
    pub max_blocks: usize,
}

/// The splits of each row: what [`AttentionDecodeCombine`] adds up (Flash-Decoding; Dao et al., 2023).
///
/// Who needs a token's numbers to be the same whether it was decoded or recomputed as part of a prompt
/// runs prompts through this too, a row a token, with [`Split::Invariant`]:
/// [`AttentionPrefill`](super::AttentionPrefill) adds in another order.
#[derive(Debug)]
pub struct AttentionDecode<'a, T> {
    /// `[rows][q_heads][max_splits][head_dim]`, or more.
    pub outputs: CudaViewMut<'a, f32>,
    /// `[rows][q_heads][max_splits][2]`, or more.
    pub sums: CudaViewMut<'a, f32>,
    /// `[rows][q_heads][head_dim]`, in rows `q_stride` apart.
    pub q: CudaView<'a, T>,
    /// Keys and values.
    pub kv: Layer<'a, T>,
    /// The rows.
    pub rows: DecodeRows<'a>,
    /// How they are split.
    pub plan: DecodePlan,
    /// Query heads: a multiple of the KV heads, by any factor.
    pub q_heads: usize,
    /// Elements from a row of q to the next: a multiple of 8.
    pub q_stride: usize,
    /// Scores are multiplied by it; mostly `1 / sqrt(head_dim)`.
    pub scale: f32,
}

impl<T: Element> AttentionDecode<'_, T> {
    /// Enqueues `attention_decode_{T}_hd{head_dim}_g{1|2|4|8}`; nothing for no rows.
    pub fn launch(mut self, kernels: &Kernels, stream: &CudaStream) -> Result<(), LaunchError> {
        let layout = self.kv.layout;
        let group = self.q_heads.checked_div(layout.kv_heads).unwrap_or(0);
        let in_block = group.clamp(1, GROUP).next_power_of_two();
        let name = format!("attention_decode_{}_hd{}_g{in_block}", T::NAME, layout.head_dim);
        let check = Check { kernel: &name };
        self.check(&check)?;
        let rows = self.rows.lengths.len();
        if rows == 0 {
            return Ok(());
        }
        check.begins_at("bytes of q beyond a 16-byte border", 16, &self.q, stream)?;
        let layer = self.kv.keys(&check, stream)?;
        let [block_stride, q_stride] = [layout.block_len() as i64, self.q_stride as i64];
        let block_size = check.int("block_size", layout.block_size)?;
        let max_blocks = check.int("max_blocks", self.rows.max_blocks)?;
        let q_heads = check.int("q_heads", self.q_heads)?;
        let kv_heads = check.int("kv_heads", layout.kv_heads)?;
        let split_tokens = check.int("split_tokens", self.plan.split_tokens)?;
        let max_splits = check.int("max_splits", self.plan.max_splits)?;
        // The kernel's exponentials are powers of two.
        let scale = self.scale * std::f32::consts::LOG2_E;
        let function = kernels.function(&name, 0)?;
        let mut arguments = stream.launch_builder(&function);
        arguments.arg(&mut self.outputs).arg(&mut self.sums).arg(&self.q).arg(&layer);
        arguments.arg(&self.rows.lengths);
        match &self.rows.sequences {
            Some(sequences) => arguments.arg(sequences),
            None => arguments.arg(&0_u64),
        };
        arguments.arg(&self.rows.tables).arg(&block_stride).arg(&q_stride).arg(&block_size).arg(&max_blocks);
        arguments.arg(&q_heads).arg(&kv_heads).arg(&split_tokens).arg(&max_splits).arg(&scale);
        let grid = [rows, layout.kv_heads * group.div_ceil(in_block), self.plan.max_splits];
        // SAFETY: the views have the shapes that were checked; what lies in the index arrays is the caller's promise.
        unsafe { enqueue(&name, &mut arguments, &Geometry::new(grid, THREADS)) }
    }

    fn check(&self, check: &Check<'_>) -> Result<(), LaunchError> {
        let (layout, plan, rows) = (self.kv.layout, self.plan, self.rows.lengths.len());
        check.one_of("head_dim", &HEAD_DIMS, layout.head_dim)?;
        check.at_least("kv_heads", 1, layout.kv_heads)?;
        check.multiple("q_heads", layout.kv_heads, self.q_heads)?;
        check_plan(check, plan)?;
        let tables = match &self.rows.sequences {
            Some(sequences) => {
                check.equal("sequences", rows, sequences.len())?;
                // Without rows there need be no table.
                if rows > 0 {
                    check.multiple(
                        "block numbers of tables",
                        self.rows.max_blocks.max(1),
                        self.rows.tables.len(),
                    )?;
                }
                self.rows.tables.len() / self.rows.max_blocks.max(1)
            }
            None => rows,
        };
        check.equal(
            "block numbers of tables",
            elements([tables, self.rows.max_blocks]),
            self.rows.tables.len(),
        )?;
        check.at_most("max_length", elements([self.rows.max_blocks, layout.block_size]), plan.max_length)?;
        let [outputs, sums] = plan.workspace_len(rows, self.q_heads, layout.head_dim);
        check.at_least("elements of outputs", outputs, self.outputs.len())?;
        check.at_least("elements of sums", sums, self.sums.len())?;
        let row = elements([self.q_heads, layout.head_dim]);
        check.int("elements of a row of q", row)?;
        check.multiple("q_stride", 8, self.q_stride)?;
        check.at_least("q_stride", row, self.q_stride)?;
        let reached = elements([rows.saturating_sub(1), self.q_stride]).saturating_add(row);
        check.at_least("elements of q", if rows == 0 { 0 } else { reached }, self.q.len())
    }
}

fn check_plan(check: &Check<'_>, plan: DecodePlan) -> Result<(), LaunchError> {
    check.at_least("split_tokens", 1, plan.split_tokens)?;
    check.equal("max_splits", plan.max_length.div_ceil(plan.split_tokens).max(1), plan.max_splits)?;
    // The kernel's split ends are 32-bit numbers.
    check.int("max_length and a split", plan.max_length.saturating_add(plan.split_tokens)).map(|_| ())
}

/// Adds the splits of each row, in order. Padded rows give zeros.
#[derive(Debug)]
pub struct AttentionDecodeCombine<'a, T> {
    /// `[rows][q_heads][head_dim]`
    pub out: CudaViewMut<'a, T>,
    /// As [`AttentionDecode`] left it.
    pub outputs: CudaView<'a, f32>,
    /// As [`AttentionDecode`] left it.
    pub sums: CudaView<'a, f32>,
    /// `[rows]`, the same lengths.
    pub lengths: CudaView<'a, i32>,
    /// The same plan.
    pub plan: DecodePlan,
    /// Query heads.
    pub q_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl<T: Element> AttentionDecodeCombine<'_, T> {
    /// Enqueues `attention_decode_combine_{T}`; nothing for no rows.
    pub fn launch(mut self, kernels: &Kernels, stream: &CudaStream) -> Result<(), LaunchError> {
        let name = format!("attention_decode_combine_{}", T::NAME);
        let check = Check { kernel: &name };
        let rows = self.lengths.len();
        check.one_of("head_dim", &HEAD_DIMS, self.head_dim)?;
        check.at_least("q_heads", 1, self.q_heads)?;
        check_plan(&check, self.plan)?;
        check.equal("elements of out", elements([rows, self.q_heads, self.head_dim]), self.out.len())?;
        let [outputs, sums] = self.plan.workspace_len(rows, self.q_heads, self.head_dim);
        check.at_least("elements of outputs", outputs, self.outputs.len())?;
        check.at_least("elements of sums", sums, self.sums.len())?;
        let split_tokens = check.int("split_tokens", self.plan.split_tokens)?;
        let max_splits = check.int("max_splits", self.plan.max_splits)?;
        let head_dim = check.int("head_dim", self.head_dim)?;
        if rows == 0 {
            return Ok(());
        }
        let function = kernels.function(&name, 0)?;
        let mut arguments = stream.launch_builder(&function);
        arguments.arg(&mut self.out).arg(&self.outputs).arg(&self.sums).arg(&self.lengths);
        arguments.arg(&split_tokens).arg(&max_splits).arg(&head_dim);
        let geometry = Geometry::new([rows, self.q_heads, 1], self.head_dim.next_multiple_of(32));
        // SAFETY: the views have the shapes that were checked; lengths are the caller's promise.
        unsafe { enqueue(&name, &mut arguments, &geometry) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_invariant_split_knows_nothing_of_the_batch() {
        for (rows, kv_heads, group, length) in
            [(1, 1, 1, 1), (256, 8, 4, 100_000), (3, 2, 16, 256), (3, 2, 16, 257)]
        {
            let plan = DecodePlan::new(Split::Invariant, rows, kv_heads, group, length);
            assert_eq!(plan.split_tokens, INVARIANT_SPLIT_TOKENS);
            assert_eq!(plan.max_splits, length.div_ceil(INVARIANT_SPLIT_TOKENS));
        }
    }

    #[test]
    fn the_fast_split_fills_the_device_and_no_more() {
        let fast = |rows, length| {
            let plan = DecodePlan::new(Split::Fast { multiprocessors: 100 }, rows, 8, 4, length);
            assert!(
                plan.max_splits * plan.split_tokens >= length
                    && plan.split_tokens.is_multiple_of(LEAST_SPLIT_TOKENS)
            );
            assert!((plan.max_splits - 1) * plan.split_tokens < length.max(1), "{plan:?} has an empty split");
            plan
        };
        // 400 blocks are wanted: 8 a row and split.
        assert_eq!(fast(1, 64_000).max_splits, 50);
        assert_eq!(fast(50, 64_000).max_splits, 1);
        assert_eq!(fast(1, 100).max_splits, 2);
        assert_eq!(fast(0, 0).max_splits, 1);
    }

    #[test]
    fn no_length_is_too_long_to_plan() {
        for length in [usize::MAX, usize::MAX - 62, usize::MAX - 63] {
            for multiprocessors in [0, 1, usize::MAX] {
                let plan = DecodePlan::new(Split::Fast { multiprocessors }, 1, 8, 4, length);
                assert!(plan.max_splits.saturating_mul(plan.split_tokens) >= length, "{plan:?}");
            }
        }
        let plan = DecodePlan::new(Split::Invariant, usize::MAX, usize::MAX, usize::MAX, usize::MAX);
        assert_eq!(plan.max_splits, usize::MAX.div_ceil(INVARIANT_SPLIT_TOKENS));
    }

    #[test]
    fn a_padded_batch_has_one_split() {
        let plan = DecodePlan::new(Split::Invariant, 4, 2, 2, 0);
        assert_eq!((plan.max_splits, plan.workspace_len(4, 4, 64)), (1, [1024, 32]));
    }
}
