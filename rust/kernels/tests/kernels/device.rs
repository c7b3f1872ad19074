//! The device that tests run on.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr, ValidAsZeroBits};
use kvrelay_kernels::Driver;
use kvrelay_kernels::launch::Kernels;

/// The first device, its kernels, and one stream.
pub(crate) struct Device {
    pub(crate) kernels: Kernels,
    pub(crate) stream: Arc<CudaStream>,
}

impl Device {
    pub(crate) fn open() -> Self {
        let devices = Driver::probe().unwrap_or_else(|reason| panic!("{reason}"));
        let module = devices.open(0).unwrap_or_else(|error| panic!("{error}"));
        let stream = module.context().new_stream().unwrap();
        Self { kernels: Kernels::new(module), stream }
    }

    pub(crate) fn upload<T: DeviceRepr>(&self, numbers: &[T]) -> CudaSlice<T> {
        if numbers.is_empty() {
            // CUDA has no empty allocations.
            return self.stream.null().unwrap();
        }
        self.stream.clone_htod(numbers).unwrap()
    }

    /// Memory for `count` numbers, of which a kernel must write what it is asked for: all bits are set.
    pub(crate) fn unwritten<T: DeviceRepr + ValidAsZeroBits + Clone>(&self, count: usize) -> CudaSlice<T> {
        let bytes = count * size_of::<T>();
        if bytes == 0 {
            return self.stream.null().unwrap();
        }
        let mut memory = self.stream.alloc_zeros::<T>(count).unwrap();
        let poison = self.upload(&vec![0xff_u8; bytes]);
        // SAFETY: `bytes` is the length of both, and any bits are a number of the types that kernels use.
        let mut raw = unsafe { memory.transmute_mut::<u8>(bytes) }.unwrap();
        self.stream.memcpy_dtod(&poison, &mut raw).unwrap();
        memory
    }

    /// After all that was enqueued.
    #[track_caller]
    pub(crate) fn download<T: DeviceRepr>(&self, memory: &impl DevicePtr<T>) -> Vec<T> {
        if memory.len() == 0 {
            return Vec::new();
        }
        self.stream.clone_dtoh(memory).unwrap_or_else(|error| panic!("the kernel failed: {error}"))
    }
}
