//! Rotary positions, and keys and values into the paged KV.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, PushKernelArg};

use super::check::{Check, elements};
use super::paged::LayerMut;
use super::{Element, Geometry, Kernels, LaunchError, enqueue};

/// Which two elements of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// `i` and `i + head_dim / 2`.
    Halves,
    /// `2i` and `2i + 1`.
    Interleaved,
}

/// Turns the queries in place and the keys on their way into the KV, where the values follow them
/// (Su et al., "RoFormer", 2021).
#[derive(Debug)]
pub struct RopeAppend<'a, T> {
    /// `[rows][q_heads + 2 * kv_heads][head_dim]`
    pub qkv: CudaViewMut<'a, T>,
    /// Where keys and values go.
    pub kv: LayerMut<'a, T>,
    /// `[max_positions][2][head_dim / 2]`: the cosines of a position, then its sines. The host makes
    /// them, so that every scaling kind is covered.
    pub rotations: CudaView<'a, f32>,
    /// `[rows]`, each below `max_positions`.
    pub positions: CudaView<'a, i32>,
    /// `[rows]`: block times block size plus offset in the block; -1 is a padded row, which writes
    /// nothing to the KV.
    pub slots: CudaView<'a, i64>,
    /// Query heads.
    pub q_heads: usize,
    /// How heads are paired.
    pub pairs: RopePairs,
}

impl<T: Element> RopeAppend<'_, T> {
    /// Enqueues `rope_append_{T}`; nothing for no rows.
    pub fn launch(mut self, kernels: &Kernels, stream: &CudaStream) -> Result<(), LaunchError> {
        let name = format!("rope_append_{}", T::NAME);
        let check = Check { kernel: &name };
        let (rows, layout) = (self.positions.len(), self.kv.layout);
        let mut layer = self.kv.keys(&check)?;
        let heads = self.q_heads.saturating_add(layout.kv_heads.saturating_mul(2));
        check.equal("elements of qkv", elements([rows, heads, layout.head_dim]), self.qkv.len())?;
        check.equal("slots", rows, self.slots.len())?;
        check.multiple("elements of rotations", layout.head_dim, self.rotations.len())?;
        check.int("elements of a row of qkv", elements([heads, layout.head_dim]))?;
        let block_stride = layout.block_len() as i64;
        let block_size = check.int("block_size", layout.block_size)?;
        let q_heads = check.int("q_heads", self.q_heads)?;
        let kv_heads = check.int("kv_heads", layout.kv_heads)?;
        let head_dim = check.int("head_dim", layout.head_dim)?;
        let interleaved = i32::from(self.pairs == RopePairs::Interleaved);
        if rows == 0 {
            return Ok(());
        }
        let function = kernels.function(&name, 0)?;
        let mut arguments = stream.launch_builder(&function);
        arguments.arg(&mut self.qkv).arg(&mut layer).arg(&self.rotations).arg(&self.positions);
        arguments.arg(&self.slots).arg(&block_stride).arg(&block_size).arg(&q_heads);
        arguments.arg(&kv_heads).arg(&head_dim).arg(&interleaved);
        // SAFETY: the views have the shapes that were checked; positions and slots are the caller's promise.
        unsafe { enqueue(&name, &mut arguments, &Geometry::new([rows, 1, 1], 128)) }
    }
}
