//! Products of activations with weights: by our own kernels, or by cuBLAS where it is found.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView};
use half::bf16;
use kvrelay_kernels::launch::{Gemm, Output};

use super::device::CudaDevice;
use super::weights::Matrix;
use crate::backend::BackendError;

/// What multiplies.
pub(super) trait Product: Send + fmt::Debug {
    /// Its name, for people.
    fn name(&self) -> &'static str;

    /// Enqueues `y = x * matrix^T`: x is `[rows][inputs]` and y `[rows][outputs]`, both contiguous.
    fn multiply(
        &self,
        y: Output<'_, bf16>,
        x: CudaView<'_, bf16>,
        matrix: &Matrix,
        rows: usize,
    ) -> Result<(), BackendError>;
}

/// Our own kernels: a row's outputs do not depend, to the bit, on how many rows there are.
#[derive(Debug)]
pub(super) struct Own {
    pub(super) device: Arc<CudaDevice>,
    pub(super) stream: Arc<CudaStream>,
}

impl Product for Own {
    fn name(&self) -> &'static str {
        "own products"
    }

    fn multiply(
        &self,
        y: Output<'_, bf16>,
        x: CudaView<'_, bf16>,
        matrix: &Matrix,
        rows: usize,
    ) -> Result<(), BackendError> {
        let Matrix { outputs, inputs, .. } = *matrix;
        let product = Gemm { y, x, weights: matrix.weights(), rows, outputs, inputs, x_stride: inputs };
        self.device.launched(product.launch(self.device.kernels(), &self.stream))
    }
}
