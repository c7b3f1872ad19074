//! RMSNorm of rows.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, PushKernelArg};

use super::check::{Check, elements};
use super::{Element, Geometry, Kernels, LaunchError, enqueue};

/// `h = x + residual`, written back into `residual` where there is one; `out = h / rms(h) * weight`, the
/// normalised value rounded before the weight, as Llama does.
#[derive(Debug)]
pub struct RmsNorm<'a, T> {
    /// `[rows][dim]`
    pub out: CudaViewMut<'a, T>,
    /// `[rows][dim]`
    pub x: CudaView<'a, T>,
    /// `[rows][dim]`
    pub residual: Option<CudaViewMut<'a, T>>,
    /// `[dim]`
    pub weight: CudaView<'a, T>,
    /// Added to the mean square.
    pub eps: f32,
}

impl<T: Element> RmsNorm<'_, T> {
    /// Enqueues `rms_norm_{T}`; nothing for no rows. A row's sum depends on `dim` alone.
    pub fn launch(mut self, kernels: &Kernels, stream: &CudaStream) -> Result<(), LaunchError> {
        let name = format!("rms_norm_{}", T::NAME);
        let check = Check { kernel: &name };
        let dim = self.weight.len();
        check.at_least("elements of weight", 1, dim)?;
        let rows = self.out.len() / dim;
        check.multiple("elements of out", dim, self.out.len().max(dim))?;
        check.equal("elements of x", self.out.len(), self.x.len())?;
        if let Some(residual) = &self.residual {
            check.equal("elements of residual", elements([rows, dim]), residual.len())?;
        }
        let dim_int = check.int("dim", dim)?;
        if rows == 0 {
            return check.equal("elements of out", 0, self.out.len());
        }
        let function = kernels.function(&name, 0)?;
        let mut arguments = stream.launch_builder(&function);
        arguments.arg(&mut self.out).arg(&self.x);
        match &mut self.residual {
            Some(residual) => arguments.arg(residual),
            None => arguments.arg(&0_u64),
        };
        arguments.arg(&self.weight).arg(&dim_int).arg(&self.eps);
        let threads = dim.div_ceil(4).next_multiple_of(32).min(512);
        // SAFETY: the views have the shapes that were checked; a null residual is what the kernel expects.
        unsafe { enqueue(&name, &mut arguments, &Geometry::new([rows, 1, 1], threads)) }
    }
}
