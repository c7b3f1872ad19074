//! SwiGLU and GeGLU.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, PushKernelArg};

use super::check::{Check, elements};
use super::{Element, Geometry, Kernels, LaunchError, enqueue};

/// What a gate goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`: SwiGLU.
    Silu,
    /// The approximation by tanh: GeGLU.
    GeluTanh,
}

/// `out = activation(gate) * up`, the activation rounded before the product (Shazeer, "GLU Variants
/// Improve Transformer", 2020).
#[derive(Debug)]
pub struct Gated<'a, T> {
    /// `[rows][width]`
    pub out: CudaViewMut<'a, T>,
    /// `[rows][2][width]`: of each row the gate, then the up projection.
    pub gate_up: CudaView<'a, T>,
    /// Elements of a row.
    pub width: usize,
    /// Which one.
    pub activation: Activation,
}

/// Threads of a block, at most.
const THREADS: usize = 256;

impl<T: Element> Gated<'_, T> {
    /// Enqueues `swiglu_{T}` or `geglu_{T}`; nothing for no rows.
    pub fn launch(mut self, kernels: &Kernels, stream: &CudaStream) -> Result<(), LaunchError> {
        let family = match self.activation {
            Activation::Silu => "swiglu",
            Activation::GeluTanh => "geglu",
        };
        let name = format!("{family}_{}", T::NAME);
        let check = Check { kernel: &name };
        check.at_least("width", 1, self.width)?;
        let rows = self.out.len() / self.width;
        check.equal("elements of out", elements([rows, self.width]), self.out.len())?;
        check.equal("elements of gate_up", elements([rows, 2, self.width]), self.gate_up.len())?;
        let width = check.int("width", self.width)?;
        if rows == 0 {
            return Ok(());
        }
        let function = kernels.function(&name, 0)?;
        let mut arguments = stream.launch_builder(&function);
        arguments.arg(&mut self.out).arg(&self.gate_up).arg(&width);
        let threads = self.width.next_multiple_of(32).min(THREADS);
        let shares = self.width.div_ceil(threads).min(64);
        // SAFETY: the views have the shapes that were checked.
        unsafe { enqueue(&name, &mut arguments, &Geometry::new([rows, shares, 1], threads)) }
    }
}
