//! Products with weight matrices, for few rows and for many.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, PushKernelArg};

use super::check::{Check, elements};
use super::weights::{Weights, weights_argument};
use super::{Element, Geometry, Kernels, LaunchError, enqueue};

/// Where the outputs go: rounded, or as they were summed (logits).
#[derive(Debug)]
pub enum Output<'a, T> {
    /// `[rows][outputs]`
    Rounded(CudaViewMut<'a, T>),
    /// `[rows][outputs]`
    Wide(CudaViewMut<'a, f32>),
}

/// `y = x * weights^T`, summed in `f32` on tensor cores. A row's outputs depend on its inputs and
/// their number alone, bit for bit: not on the other rows, nor on how many there are.
#[derive(Debug)]
pub struct Gemm<'a, T> {
    /// `[rows][outputs]`
    pub y: Output<'a, T>,
    /// `[rows][inputs]`, in rows `x_stride` apart.
    pub x: CudaView<'a, T>,
    /// `[outputs][inputs]`
    pub weights: Weights<'a, T>,
    /// Rows of x and y.
    pub rows: usize,
    /// Rows of the weights.
    pub outputs: usize,
    /// A multiple of 8, of 32 if the weights are quantised.
    pub inputs: usize,
    /// Elements from a row of x to the next: a multiple of 8, at least `inputs`.
    pub x_stride: usize,
}

/// The block of a shape, as `gemm.cuh` has it.
struct Shape {
    suffix: &'static str,
    rows: usize,
    columns: usize,
    threads: usize,
    shared: usize,
}

/// Elements of a padded tile row, of all stages, in bytes.
const fn shared_bytes(rows: usize, columns: usize, depth: usize, stages: usize) -> usize {
    (rows + columns) * (depth + 8) * stages * 2
}

const FEW: Shape =
    Shape { suffix: "few", rows: 16, columns: 64, threads: 128, shared: shared_bytes(16, 64, 64, 4) };
const MANY: Shape =
    Shape { suffix: "many", rows: 128, columns: 128, threads: 256, shared: shared_bytes(128, 128, 32, 4) };

/// Up to this many rows, more small blocks are better than few large ones.
const FEW_ROWS: usize = 64;

impl<T: Element> Gemm<'_, T> {
    /// Enqueues `gemm_{T}_{few|many}` or `gemm_{T}_{format}_{few|many}`; nothing for no rows.
    pub fn launch(self, kernels: &Kernels, stream: &CudaStream) -> Result<(), LaunchError> {
        let shape = if self.rows <= FEW_ROWS { &FEW } else { &MANY };
        self.launch_shape(shape, kernels, stream)
    }

    /// As [`Gemm::launch`], with the block for many rows, however few there are.
    pub fn launch_many(self, kernels: &Kernels, stream: &CudaStream) -> Result<(), LaunchError> {
        self.launch_shape(&MANY, kernels, stream)
    }

    fn launch_shape(
        mut self,
        shape: &Shape,
        kernels: &Kernels,
        stream: &CudaStream,
    ) -> Result<(), LaunchError> {
        let name = format!("gemm_{}{}_{}", T::NAME, self.weights.suffix(), shape.suffix);
        let check = Check { kernel: &name };
        self.check(&check)?;
        if self.rows == 0 {
            return Ok(());
        }
        check.begins_at("bytes of x beyond a 16-byte border", 16, &self.x, stream)?;
        self.weights.check_begin(&check, stream)?;
        let [m, n, k] = [self.rows, self.outputs, self.inputs].map(|number| number as i32);
        let stride = self.x_stride as i64;
        let wide = i32::from(matches!(self.y, Output::Wide(_)));
        let function = kernels.function(&name, shape.shared)?;
        let mut arguments = stream.launch_builder(&function);
        match &mut self.y {
            Output::Rounded(y) => arguments.arg(y),
            Output::Wide(y) => arguments.arg(y),
        };
        arguments.arg(&self.x);
        weights_argument!(arguments, &self.weights);
        arguments.arg(&m).arg(&n).arg(&k).arg(&stride).arg(&wide);
        let grid = [self.outputs.div_ceil(shape.columns), self.rows.div_ceil(shape.rows), 1];
        // SAFETY: the views have the shapes that were checked.
        unsafe {
            enqueue(&name, &mut arguments, &Geometry { grid, threads: shape.threads, shared: shape.shared })
        }
    }

    fn check(&self, check: &Check<'_>) -> Result<(), LaunchError> {
        check.at_least("outputs", 1, self.outputs)?;
        self.weights.check(check, self.outputs, self.inputs)?;
        check.multiple("x_stride", 8, self.x_stride)?;
        check.at_least("x_stride", self.inputs, self.x_stride)?;
        let reached = elements([self.rows.saturating_sub(1), self.x_stride]).saturating_add(self.inputs);
        check.at_least("elements of x", if self.rows == 0 { 0 } else { reached }, self.x.len())?;
        let y = match &self.y {
            Output::Rounded(y) => y.len(),
            Output::Wide(y) => y.len(),
        };
        check.equal("elements of y", elements([self.rows, self.outputs]), y)?;
        for (what, number) in [("rows", self.rows), ("outputs", self.outputs), ("inputs", self.inputs)] {
            // With room for a tile beyond the end.
            check.int(what, number.saturating_add(256))?;
        }
        Ok(())
    }
}
