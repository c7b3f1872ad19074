//! RMSNorm of query and key heads.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, PushKernelArg};

use super::check::{Check, elements};
use super::{Element, Geometry, Kernels, LaunchError, enqueue};

/// RMSNorm of every query and key head by itself, in place, as Qwen3 does before it rotates them.
#[derive(Debug)]
pub struct HeadNorm<'a, T> {
    /// `[rows][q_heads + 2 * kv_heads][head_dim]`; the values, at the end of a row, are left alone.
    pub qkv: CudaViewMut<'a, T>,
    /// `[head_dim]`
    pub q_weight: CudaView<'a, T>,
    /// `[head_dim]`
    pub k_weight: CudaView<'a, T>,
    /// Query heads.
    pub q_heads: usize,
    /// Key heads, and as many of values.
    pub kv_heads: usize,
    /// Added to the mean square.
    pub eps: f32,
}

impl<T: Element> HeadNorm<'_, T> {
    /// Enqueues `head_norm_{T}`; nothing for no rows.
    pub fn launch(mut self, kernels: &Kernels, stream: &CudaStream) -> Result<(), LaunchError> {
        let name = format!("head_norm_{}", T::NAME);
        let check = Check { kernel: &name };
        let head_dim = self.q_weight.len();
        check.at_least("elements of q_weight", 1, head_dim)?;
        check.equal("elements of k_weight", head_dim, self.k_weight.len())?;
        let normed = self.q_heads.saturating_add(self.kv_heads);
        check.at_least("heads", 1, normed)?;
        let row = elements([normed.saturating_add(self.kv_heads), head_dim]);
        check.int("elements of a row of qkv", row)?;
        let rows = self.qkv.len() / row;
        check.equal("elements of qkv", elements([rows, row]), self.qkv.len())?;
        let q_heads = check.int("q_heads", self.q_heads)?;
        let kv_heads = check.int("kv_heads", self.kv_heads)?;
        let dim = check.int("head_dim", head_dim)?;
        if rows == 0 {
            return Ok(());
        }
        let function = kernels.function(&name, 0)?;
        let mut arguments = stream.launch_builder(&function);
        arguments.arg(&mut self.qkv).arg(&self.q_weight).arg(&self.k_weight);
        arguments.arg(&q_heads).arg(&kv_heads).arg(&dim).arg(&self.eps);
        let warps = normed.min(8);
        // SAFETY: the views have the shapes that were checked.
        unsafe { enqueue(&name, &mut arguments, &Geometry::new([rows, 1, 1], 32 * warps)) }
    }
}
