//! Rows of the embedding table.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, PushKernelArg};

use super::check::{Check, elements};
use super::weights::{Weights, weights_argument};
use super::{Element, Geometry, Kernels, LaunchError, enqueue};

/// `out[t] = table[ids[t]]`, rounded to `T` where the table is quantised. Ids outside the table, such
/// as -1 for a padded row, give zeros.
#[derive(Debug)]
pub struct Embedding<'a, T> {
    /// `[rows][dim]`
    pub out: CudaViewMut<'a, T>,
    /// `[vocab][dim]`
    pub table: Weights<'a, T>,
    /// `[rows]`
    pub ids: CudaView<'a, i32>,
    /// Rows of the table.
    pub vocab: usize,
    /// Elements of a row: a multiple of 8, of 32 if the table is quantised.
    pub dim: usize,
}

impl<T: Element> Embedding<'_, T> {
    /// Enqueues `embedding_{T}` or `embedding_{T}_{format}`; nothing for no rows.
    pub fn launch(mut self, kernels: &Kernels, stream: &CudaStream) -> Result<(), LaunchError> {
        let name = format!("embedding_{}{}", T::NAME, self.table.suffix());
        let check = Check { kernel: &name };
        let rows = self.ids.len();
        self.table.check(&check, self.vocab, self.dim)?;
        check.equal("elements of out", elements([rows, self.dim]), self.out.len())?;
        let (vocab, dim) = (check.int("vocab", self.vocab)?, check.int("dim", self.dim)?);
        if rows == 0 {
            return Ok(());
        }
        check.begins_at("bytes of out beyond a 16-byte border", 16, &self.out, stream)?;
        self.table.check_begin(&check, stream)?;
        let function = kernels.function(&name, 0)?;
        let mut arguments = stream.launch_builder(&function);
        arguments.arg(&mut self.out);
        weights_argument!(arguments, &self.table);
        arguments.arg(&self.ids).arg(&vocab).arg(&dim);
        let threads = (self.dim / 8).next_multiple_of(32).min(256);
        // SAFETY: the views have the shapes that were checked, and the kernel looks up no id beyond `vocab`.
        unsafe { enqueue(&name, &mut arguments, &Geometry::new([rows, 1, 1], threads)) }
    }
}
