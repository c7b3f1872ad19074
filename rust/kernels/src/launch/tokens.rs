//! Tokens kept on the device from step to step.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, PushKernelArg};

use super::check::Check;
use super::{Geometry, Kernels, LaunchError, enqueue};

const THREADS: usize = 256;

/// What a step runs: ids that the host gives, and tokens that earlier steps sampled.
#[derive(Debug)]
pub struct FeedTokens<'a> {
    /// `[tokens]`
    pub ids: CudaViewMut<'a, i32>,
    /// `[tokens]`: an id; -1 for a padded row, which stays; or `-2 - slot` for that slot's last token.
    pub sources: CudaView<'a, i32>,
    /// `[slots]`: the last token of each.
    pub last: CudaView<'a, i32>,
}

/// Keeps what a step sampled, by slot.
#[derive(Debug)]
pub struct KeepTokens<'a> {
    /// `[slots]`: the last token of each.
    pub last: CudaViewMut<'a, i32>,
    /// `[rows]`; what is below 0 is no token and is not kept.
    pub tokens: CudaView<'a, i32>,
    /// `[rows]`: where to, each its own; -1 for a row that is not kept.
    pub slots: CudaView<'a, i32>,
}

impl FeedTokens<'_> {
    /// Enqueues `feed_tokens`; nothing for no tokens. Slots are the caller's promise.
    pub fn launch(mut self, kernels: &Kernels, stream: &CudaStream) -> Result<(), LaunchError> {
        let name = "feed_tokens";
        let check = Check { kernel: name };
        check.equal("elements of ids", self.sources.len(), self.ids.len())?;
        let count = check.int("sources", self.sources.len())?;
        if count == 0 {
            return Ok(());
        }
        let function = kernels.function(name, 0)?;
        let mut arguments = stream.launch_builder(&function);
        arguments.arg(&mut self.ids).arg(&self.sources).arg(&self.last).arg(&count);
        let blocks = self.sources.len().div_ceil(THREADS);
        // SAFETY: the views have the shapes that were checked; slots are the caller's promise.
        unsafe { enqueue(name, &mut arguments, &Geometry::new([blocks, 1, 1], THREADS)) }
    }
}

impl KeepTokens<'_> {
    /// Enqueues `keep_tokens`; nothing for no rows. Slots are the caller's promise.
    pub fn launch(mut self, kernels: &Kernels, stream: &CudaStream) -> Result<(), LaunchError> {
        let name = "keep_tokens";
        let check = Check { kernel: name };
        check.equal("slots", self.tokens.len(), self.slots.len())?;
        let count = check.int("tokens", self.tokens.len())?;
        if count == 0 {
            return Ok(());
        }
        let function = kernels.function(name, 0)?;
        let mut arguments = stream.launch_builder(&function);
        arguments.arg(&mut self.last).arg(&self.tokens).arg(&self.slots).arg(&count);
        let blocks = self.tokens.len().div_ceil(THREADS);
        // SAFETY: the views have the shapes that were checked; slots are the caller's promise.
        unsafe { enqueue(name, &mut arguments, &Geometry::new([blocks, 1, 1], THREADS)) }
    }
}
