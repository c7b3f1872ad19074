//! Device memory that the driver knows by plain allocations, and pinned memory of the host.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceRepr, result};

use super::device::CudaDevice;
use crate::backend::BackendError;

/// An array in device memory. Its owner sees to it that nothing uses it when it is dropped.
pub(super) struct DeviceVec<T> {
    device: Arc<CudaDevice>,
    pointer: CUdeviceptr,
    len: usize,
    /// What views are made of; never dropped as a slice, which would free it on a stream.
    slice: ManuallyDrop<CudaSlice<T>>,
}

impl<T: DeviceRepr> DeviceVec<T> {
    /// Zeros; `what` it is for is told when there is no room.
    pub(super) fn new(
        device: &Arc<CudaDevice>,
        stream: &Arc<CudaStream>,
        what: &'static str,
        len: usize,
    ) -> Result<Self, BackendError> {
        // CUDA has no empty allocations.
        let bytes = len.max(1).saturating_mul(size_of::<T>());
        let pointer = device.allocate(stream, what, bytes)?;
        // SAFETY: the allocation is as long and zeroed, which every `DeviceRepr` here can be; events
        // are not tracked, so that nothing is made that could fail.
        let slice = unsafe { stream.upgrade_device_ptr(pointer, len) };
        Ok(Self { device: device.clone(), pointer, len, slice: ManuallyDrop::new(slice) })
    }

    pub(super) fn pointer(&self) -> CUdeviceptr {
        self.pointer
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn view(&self) -> CudaView<'_, T> {
        self.slice.as_view()
    }

    /// The first `len` elements.
    pub(super) fn first(&self, len: usize) -> CudaView<'_, T> {
        self.slice.slice(..len)
    }

    /// The first `len` elements, to write.
    pub(super) fn first_mut(&mut self, len: usize) -> CudaViewMut<'_, T> {
        self.slice.slice_mut(..len)
    }

    /// All of it, for somebody who may write it though others hold it too.
    ///
    /// # Safety
    /// The alias is gone before this is dropped, and what is enqueued through it touches nothing that
    /// anybody else uses meanwhile.
    pub(super) unsafe fn alias(&self) -> Alias<T> {
        // SAFETY: as in `new`; an alias never frees what it points at.
        let slice = unsafe { self.slice.stream().upgrade_device_ptr(self.pointer, self.len) };
        Alias(ManuallyDrop::new(slice))
    }
}

/// Another's memory.
#[derive(Debug)]
pub(super) struct Alias<T>(ManuallyDrop<CudaSlice<T>>);

impl<T> Alias<T> {
    pub(super) fn view(&self) -> CudaView<'_, T> {
        self.0.as_view()
    }

    pub(super) fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.0.as_view_mut()
    }
}

impl<T> Drop for Alias<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, here. The memory is its owner's to free.
        let _ = unsafe { ManuallyDrop::take(&mut self.0) }.leak();
    }
}

impl<T> Drop for DeviceVec<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, here.
        let pointer = unsafe { ManuallyDrop::take(&mut self.slice) }.leak();
        let context = self.device.context();
        // On a device that is lost nothing can be freed, and nobody is left to be told.
        if context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `malloc_sync`, and freed once.
            let _ = unsafe { result::free_sync(pointer) };
        }
    }
}

impl<T> fmt::Debug for DeviceVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceVec({} elements on cuda:{})", self.len, self.device.ordinal())
    }
}

/// Bytes of the host that the device copies without the processor; whoever enqueues a copy keeps them
/// as they are until it is over.
#[derive(Debug)]
pub(super) struct Pinned {
    device: Arc<CudaDevice>,
    memory: *mut u8,
    len: usize,
}

// SAFETY: plain memory, reached through `&` and `&mut` of its owner alone.
unsafe impl Send for Pinned {}

impl Pinned {
    pub(super) fn new(device: &Arc<CudaDevice>, len: usize) -> Result<Self, BackendError> {
        device.told("binding its context", device.context().bind_to_thread())?;
        let len = len.max(1);
        // SAFETY: the context is bound; no flags: the host reads what comes back.
        let memory = device.told("pinning host memory", unsafe { result::malloc_host(len, 0) })?.cast::<u8>();
        // SAFETY: the allocation is as long.
        unsafe { memory.write_bytes(0, len) };
        Ok(Self { device: device.clone(), memory, len })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the allocation is as long, and was written.
        unsafe { std::slice::from_raw_parts(self.memory, self.len) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.memory, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.device.context().bind_to_thread();
        // SAFETY: allocated by `malloc_host`, and freed once.
        let _ = unsafe { result::free_host(self.memory.cast()) };
    }
}
