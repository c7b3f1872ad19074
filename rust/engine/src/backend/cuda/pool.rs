//! KV blocks in device memory, and copies between devices.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaStream, result};
use half::bf16;

use super::device::CudaDevice;
use super::memory::DeviceVec;
use crate::backend::BackendError;

/// The memory of a pool: one plain allocation, which another process could be given, and the stream
/// that copies out of it.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    device: Arc<CudaDevice>,
    copies: Arc<CudaStream>,
    elements: DeviceVec<bf16>,
}

impl DeviceMemory {
    pub(crate) fn new(device: &Arc<CudaDevice>, len: usize) -> Result<Self, BackendError> {
        let copies = device.stream()?;
        let elements = DeviceVec::new(device, &copies, "KV blocks", len)?;
        Ok(Self { device: device.clone(), copies, elements })
    }

    pub(crate) fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    pub(super) fn elements(&self) -> &DeviceVec<bf16> {
        &self.elements
    }

    /// Copies runs of elements, given by where they begin here and there and by their length, and waits.
    ///
    /// # Safety
    /// The runs lie in both memories. Nothing writes them here, and nothing else touches them there,
    /// until this returns; what was written before is complete or ordered before `self.copies`.
    pub(crate) unsafe fn copy_to(
        &self,
        there: &Self,
        runs: impl Iterator<Item = (usize, usize, usize)>,
    ) -> Result<(), BackendError> {
        self.device.reach(&there.device)?;
        self.device.told("binding its context", self.device.context().bind_to_thread())?;
        let (here_context, there_context) = (self.device.context().cu_ctx(), there.device.context().cu_ctx());
        let stream = self.copies.cu_stream();
        let mut enqueued = Ok(());
        for (from, to, len) in neighbours_merged(runs) {
            let source = self.elements.pointer() + (from * size_of::<bf16>()) as u64;
            let destination = there.elements.pointer() + (to * size_of::<bf16>()) as u64;
            let bytes = len * size_of::<bf16>();
            // SAFETY: the caller's contract; both memories live until the copies are waited for below.
            enqueued = unsafe {
                if self.device.ordinal() == there.device.ordinal() {
                    result::memcpy_dtod_async(destination, source, bytes, stream)
                } else {
                    result::memcpy_peer_async(there_context, destination, here_context, source, bytes, stream)
                }
            };
            if enqueued.is_err() {
                break;
            }
        }
        // Also where one was refused: those before it must have ended when this returns.
        let waited = self.copies.synchronize();
        self.device.told("copying KV", enqueued.and(waited))
    }

    /// Copies elements out, for tests.
    ///
    /// # Safety
    /// The range lies in the memory, and nothing writes it meanwhile.
    pub(crate) unsafe fn read(&self, range: Range<usize>, out: &mut [f32]) -> Result<(), BackendError> {
        let mut elements = vec![bf16::ZERO; range.len()];
        self.device.told("binding its context", self.device.context().bind_to_thread())?;
        let from = self.elements.pointer() + (range.start * size_of::<bf16>()) as u64;
        // SAFETY: the caller's contract; the copy is waited for.
        let copied = unsafe { result::memcpy_dtoh_async(&mut elements, from, self.copies.cu_stream()) };
        self.device.told("copying KV out", copied.and(self.copies.synchronize()))?;
        for (out, element) in out.iter_mut().zip(elements) {
            *out = element.to_f32();
        }
        Ok(())
    }

    /// Copies elements in, rounded, for tests.
    ///
    /// # Safety
    /// `from` fits into the memory from `start` on, and nothing else touches it there meanwhile.
    pub(crate) unsafe fn write(&self, start: usize, from: &[f32]) -> Result<(), BackendError> {
        let elements: Vec<bf16> = from.iter().map(|&number| bf16::from_f32(number)).collect();
        self.device.told("binding its context", self.device.context().bind_to_thread())?;
        let to = self.elements.pointer() + (start * size_of::<bf16>()) as u64;
        // SAFETY: the caller's contract; the copy is waited for.
        let copied = unsafe { result::memcpy_htod_async(to, &elements, self.copies.cu_stream()) };
        self.device.told("copying KV in", copied.and(self.copies.synchronize()))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // On a lost device there is nothing to wait for.
        let _ = self.copies.synchronize();
    }
}

/// Runs that follow each other at both ends become one copy.
fn neighbours_merged(
    runs: impl Iterator<Item = (usize, usize, usize)>,
) -> impl Iterator<Item = (usize, usize, usize)> {
    let mut runs = runs.peekable();
    std::iter::from_fn(move || {
        let (from, to, mut len) = runs.next()?;
        while let Some((_, _, more)) = runs.next_if(|&(f, t, _)| (f, t) == (from + len, to + len)) {
            len += more;
        }
        Some((from, to, len))
    })
}

#[cfg(test)]
mod tests {
    use super::neighbours_merged;

    #[test]
    fn only_true_neighbours_are_one_copy() {
        let runs = [(0, 10, 5), (5, 15, 5), (10, 25, 5), (15, 30, 5), (25, 35, 5)];
        let merged: Vec<_> = neighbours_merged(runs.into_iter()).collect();
        assert_eq!(merged, [(0, 10, 10), (10, 25, 10), (25, 35, 5)]);
    }
}
