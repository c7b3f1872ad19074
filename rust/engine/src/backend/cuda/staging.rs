//! From pageable memory, such as a mapped file, to a device: through two pinned buffers, one filled
//! while the other is copied.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, DeviceRepr, result};

use super::device::CudaDevice;
use super::memory::{DeviceVec, Pinned};
use crate::backend::BackendError;

/// Bytes of a buffer: enough that a copy runs at the bus's speed.
const BUFFER: usize = 8 << 20;

pub(super) struct Staging {
    device: Arc<CudaDevice>,
    stream: Arc<CudaStream>,
    /// With the event behind the copy out of each.
    buffers: [(Pinned, CudaEvent); 2],
    next: usize,
}

impl Staging {
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<Self, BackendError> {
        let buffer = || Ok((Pinned::new(device, BUFFER)?, device.event()?));
        let buffers = [buffer()?, buffer()?];
        Ok(Self { device: device.clone(), stream: device.stream()?, buffers, next: 0 })
    }

    pub(super) fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Fills `to` with the pieces, one behind the other.
    ///
    /// # Panics
    /// If they are together not as long as `to`.
    pub(super) fn upload<T: DeviceRepr>(
        &mut self,
        to: &DeviceVec<T>,
        pieces: impl Iterator<Item = Vec<u8>>,
    ) -> Result<(), BackendError> {
        let (mut at, mut filled) = (0, 0);
        for piece in pieces {
            let mut rest = &piece[..];
            while !rest.is_empty() {
                if filled == 0 {
                    self.device.told("waiting for a copy", self.buffers[self.next].1.synchronize())?;
                }
                let count = rest.len().min(BUFFER - filled);
                let (now, later) = rest.split_at(count);
                self.buffers[self.next].0.bytes_mut()[filled..filled + count].copy_from_slice(now);
                (rest, filled) = (later, filled + count);
                if filled == BUFFER {
                    self.send(to, at, filled)?;
                    (at, filled) = (at + filled, 0);
                }
            }
        }
        if filled > 0 {
            self.send(to, at, filled)?;
        }
        assert_eq!(at + filled, to.len() * size_of::<T>(), "bytes of an upload");
        Ok(())
    }

    fn send<T: DeviceRepr>(
        &mut self,
        to: &DeviceVec<T>,
        at: usize,
        count: usize,
    ) -> Result<(), BackendError> {
        assert!(at + count <= to.len() * size_of::<T>(), "an upload beyond its end");
        let (buffer, done) = &self.buffers[self.next];
        let pointer = to.pointer() + at as u64;
        // SAFETY: the range lies in `to`, and the buffer is left alone until its event has come.
        let sent =
            unsafe { result::memcpy_htod_async(pointer, &buffer.bytes()[..count], self.stream.cu_stream()) };
        self.device.told("copying to the device", sent)?;
        self.device.told("recording an event", done.record(&self.stream))?;
        self.next = 1 - self.next;
        Ok(())
    }

    /// Waits until all is there.
    pub(super) fn finish(self) -> Result<(), BackendError> {
        self.device.told("copying to the device", self.stream.synchronize())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // An upload that failed must not read buffers that are freed.
        let _ = self.stream.synchronize();
    }
}
