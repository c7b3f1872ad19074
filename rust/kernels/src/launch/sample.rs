//! From logits to tokens.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, PushKernelArg};

use super::check::{Check, elements};
use super::{Geometry, Kernels, LaunchError, enqueue};

/// The largest vocabulary that the kernel adds up without overflow.
pub const MAX_VOCAB: usize = 1 << 19;

/// One token a row, by the rules and the random stream of the CPU's sampler
/// (`kvrelay_model::sampling`): the same token, unless a draw comes within some 1e-11 of the border
/// between two.
#[derive(Debug)]
pub struct Sample<'a> {
    /// `[rows]`: the token, or `-1 - id` where logit `id` is the first that is not finite.
    pub tokens: CudaViewMut<'a, i32>,
    /// `[rows][vocab]`
    pub logits: CudaView<'a, f32>,
    /// `[rows]`, finite and not negative; 0 is greedy, and so is what is not above it.
    pub temperatures: CudaView<'a, f32>,
    /// `[rows]`; what is not between 1 and the vocabulary size means all.
    pub top_ks: CudaView<'a, i32>,
    /// `[rows]`, above 0 and at most 1; 1 means all, and so does what is not below it. What is not above
    /// 0 keeps the largest alone.
    pub top_ps: CudaView<'a, f32>,
    /// `[rows]`: the key of each request's random stream.
    pub seeds: CudaView<'a, u64>,
    /// `[rows]`: tokens before the one to be sampled, the stream's counter.
    pub positions: CudaView<'a, u64>,
    /// Logits of a row.
    pub vocab: usize,
}

impl Sample<'_> {
    /// Enqueues `sample`; nothing for no rows.
    pub fn launch(mut self, kernels: &Kernels, stream: &CudaStream) -> Result<(), LaunchError> {
        let name = "sample";
        let check = Check { kernel: name };
        let rows = self.tokens.len();
        check.at_least("vocab", 1, self.vocab)?;
        check.at_most("vocab", MAX_VOCAB, self.vocab)?;
        check.equal("logits", elements([rows, self.vocab]), self.logits.len())?;
        check.equal("temperatures", rows, self.temperatures.len())?;
        check.equal("top_ks", rows, self.top_ks.len())?;
        check.equal("top_ps", rows, self.top_ps.len())?;
        check.equal("seeds", rows, self.seeds.len())?;
        check.equal("positions", rows, self.positions.len())?;
        if rows == 0 {
            return Ok(());
        }
        let (stride, vocab) = (self.vocab as i64, self.vocab as i32);
        let function = kernels.function(name, 0)?;
        let mut arguments = stream.launch_builder(&function);
        arguments.arg(&mut self.tokens).arg(&self.logits).arg(&self.temperatures).arg(&self.top_ks);
        arguments.arg(&self.top_ps).arg(&self.seeds).arg(&self.positions).arg(&stride).arg(&vocab);
        // SAFETY: the views have the shapes that were checked.
        unsafe { enqueue(name, &mut arguments, &Geometry::new([rows, 1, 1], 256)) }
    }
}
