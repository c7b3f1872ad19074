//! cuBLAS, where the system's loader finds one: for matrices of plain numbers in the fast tier.

use std::ffi::{CString, c_void};

use cudarc::cublas::{result, sys};
use cudarc::driver::{CudaView, DevicePtr, DevicePtrMut};
use half::bf16;
use kvrelay_kernels::launch::Output;

use super::memory::DeviceVec;
use super::product::{Own, Product};
use super::weights::Matrix;
use crate::backend::BackendError;

/// Bytes that cuBLAS may use between kernels: what NVIDIA recommends for Hopper. Given by us, so that
/// nothing is allocated in a step, nor while a graph is captured.
pub(super) const WORKSPACE: usize = 32 << 20;

/// The functions that are called here. cudarc panics for one that is missing.
const FUNCTIONS: [&str; 5] =
    ["cublasCreate_v2", "cublasDestroy_v2", "cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasGemmEx"];

/// A handle on one stream. Quantised matrices are left to our own kernels.
#[derive(Debug)]
pub(super) struct CuBlas {
    handle: sys::cublasHandle_t,
    own: Own,
    /// What the handle works in.
    _workspace: DeviceVec<u8>,
}

// SAFETY: a handle may be used from any thread, by one at a time; its owner is the only one.
unsafe impl Send for CuBlas {}

/// Whether a usable cuBLAS is there.
pub(super) fn is_present() -> bool {
    // SAFETY: loading a library runs its constructors; cuBLAS's are made for that.
    if !unsafe { sys::is_culib_present() } {
        return false;
    }
    FUNCTIONS.iter().all(|name| {
        let name = CString::new(*name).unwrap_or_default();
        // SAFETY: the library is present, and the function is looked up, not called.
        unsafe { sys::culib().get::<*const c_void>(name.as_bytes_with_nul()).is_ok() }
    })
}

impl CuBlas {
    /// A handle on the stream of `own`; [`is_present`] has said yes.
    pub(super) fn new(own: Own) -> Result<Self, BackendError> {
        own.device.told("binding its context", own.device.context().bind_to_thread())?;
        let workspace = DeviceVec::new(&own.device, &own.stream, "cuBLAS's workspace", WORKSPACE)?;
        let handle = result::create_handle().map_err(|error| failed(&own, "starting cuBLAS", error))?;
        let this = Self { handle, own, _workspace: workspace };
        // SAFETY: handle, stream and workspace are alive, and stay so as long as the handle.
        let set = unsafe {
            let stream = this.own.stream.cu_stream().cast();
            result::set_stream(handle, stream).and_then(|()| {
                let workspace = this._workspace.pointer() as *mut c_void;
                sys::cublasSetWorkspace_v2(handle, workspace, WORKSPACE).result()
            })
        };
        set.map_err(|error| failed(&this.own, "starting cuBLAS", error))?;
        Ok(this)
    }
}

fn failed(own: &Own, doing: &'static str, error: result::CublasError) -> BackendError {
    let device = format!("cuda:{}", own.device.ordinal());
    BackendError::Device { device, doing, reason: error.to_string() }
}

impl Product for CuBlas {
    fn name(&self) -> &'static str {
        "cuBLAS"
    }

    fn multiply(
        &self,
        y: Output<'_, bf16>,
        x: CudaView<'_, bf16>,
        matrix: &Matrix,
        rows: usize,
    ) -> Result<(), BackendError> {
        let Some(weights) = matrix.plain() else { return self.own.multiply(y, x, matrix, rows) };
        assert_eq!(x.len(), rows * matrix.inputs, "elements of x");
        let stream = &self.own.stream;
        let (mut rounded, mut wide);
        let (y_len, y_pointer, y_type) = match y {
            Output::Rounded(y) => {
                rounded = y;
                (rounded.len(), rounded.device_ptr_mut(stream).0, sys::cudaDataType::CUDA_R_16BF)
            }
            Output::Wide(y) => {
                wide = y;
                (wide.len(), wide.device_ptr_mut(stream).0, sys::cudaDataType::CUDA_R_32F)
            }
        };
        assert_eq!(y_len, rows * matrix.outputs, "elements of y");
        let [m, n, k] = [matrix.outputs, rows, matrix.inputs].map(|number| number as i32);
        let (one, zero) = (1.0_f32, 0.0_f32);
        // Column-major, as BLAS has it, y is [outputs][rows], x [inputs][rows], the weights
        // [inputs][outputs].
        // SAFETY: the handle is alive, and all three have the sizes that were compared.
        let enqueued = unsafe {
            result::gemm_ex(
                self.handle,
                sys::cublasOperation_t::CUBLAS_OP_T,
                sys::cublasOperation_t::CUBLAS_OP_N,
                m,
                n,
                k,
                (&raw const one).cast(),
                weights.pointer() as *const c_void,
                sys::cudaDataType::CUDA_R_16BF,
                k,
                x.device_ptr(stream).0 as *const c_void,
                sys::cudaDataType::CUDA_R_16BF,
                k,
                (&raw const zero).cast(),
                y_pointer as *mut c_void,
                y_type,
                m,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        };
        enqueued.map_err(|error| failed(&self.own, "a product by cuBLAS", error))
    }
}

impl Drop for CuBlas {
    fn drop(&mut self) {
        let _ = self.own.device.context().bind_to_thread();
        // SAFETY: made by `create_handle`, and destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}
