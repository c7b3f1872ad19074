//! An opened device: its kernels, its context, and how its errors are told.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};
use kvrelay_kernels::launch::{Kernels, LaunchError};
use kvrelay_kernels::{CudaError, Devices};

use crate::backend::BackendError;

/// A device with the kernels loaded; shared by its workers.
#[derive(Debug)]
pub struct CudaDevice {
    ordinal: usize,
    name: String,
    multiprocessors: usize,
    kernels: Kernels,
    /// Devices whose memory this one was allowed to reach.
    reached: Mutex<BTreeSet<usize>>,
}

impl CudaDevice {
    /// Opens a device of those that the probe found.
    ///
    /// # Errors
    /// [`BackendError::Stopped`] with the reason: no such device, one too old, or a driver that refuses.
    pub fn open(devices: &Devices, ordinal: usize) -> Result<Arc<Self>, BackendError> {
        let module = devices.open(ordinal).map_err(|error| BackendError::Stopped(error.to_string()))?;
        let context = module.context().clone();
        // SAFETY: every buffer here outlives the work that uses it (its owner waits for its stream
        // before it is freed), and streams wait for each other by events of their own.
        unsafe { context.disable_event_tracking() };
        let count = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        let count = count.map_err(|error| failed(ordinal, "asking for its multiprocessors", error))?;
        Ok(Arc::new(Self {
            ordinal,
            name: devices[ordinal].name.clone(),
            multiprocessors: count.max(1) as usize,
            kernels: Kernels::new(module),
            reached: Mutex::default(),
        }))
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// What its maker calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its free memory and all of it, in bytes.
    ///
    /// # Errors
    /// [`BackendError::Device`] if the driver refuses.
    pub fn memory(&self) -> Result<(u64, u64), BackendError> {
        let (free, total) = self.told("asking for its free memory", self.context().mem_get_info())?;
        Ok((free as u64, total as u64))
    }

    pub(super) fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    pub(super) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    pub(super) fn context(&self) -> &Arc<CudaContext> {
        self.kernels.module().context()
    }

    pub(super) fn stream(&self) -> Result<Arc<CudaStream>, BackendError> {
        self.told("making a stream", self.context().new_stream())
    }

    /// A stream whose kernels go before those of all streams that are not `urgent`, or behind them.
    pub(super) fn stream_of_priority(&self, urgent: bool) -> Result<Arc<CudaStream>, BackendError> {
        self.told("binding its context", self.context().bind_to_thread())?;
        let range = self.told("asking for its priorities", result::stream::get_priority_range())?;
        let (least, greatest) = range;
        let priority = if urgent { greatest } else { least };
        self.told("making a stream", self.context().new_stream_with_priority(priority))
    }

    /// An event whose time can be read, and that a waiting thread sleeps on.
    pub(super) fn event(&self) -> Result<CudaEvent, BackendError> {
        let flags = Some(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC);
        self.told("making an event", self.context().new_event(flags))
    }

    /// An error of the driver, with the device's name and what was being done.
    pub(super) fn told<T>(
        &self,
        doing: &'static str,
        result: Result<T, DriverError>,
    ) -> Result<T, BackendError> {
        result.map_err(|error| failed(self.ordinal, doing, error))
    }

    /// An error of a launch, with the device's name.
    pub(super) fn launched<T>(&self, result: Result<T, LaunchError>) -> Result<T, BackendError> {
        result.map_err(|error| BackendError::Device {
            device: format!("cuda:{}", self.ordinal),
            doing: "a launch",
            reason: error.to_string(),
        })
    }

    /// Lets copies go straight to another device where the machine can; elsewhere the driver takes them
    /// through the host.
    pub(super) fn reach(&self, other: &Self) -> Result<(), BackendError> {
        let mut reached = self.reached.lock().unwrap_or_else(PoisonError::into_inner);
        if self.ordinal == other.ordinal || reached.contains(&other.ordinal) {
            return Ok(());
        }
        self.told("binding its context", self.context().bind_to_thread())?;
        let mut can = 0;
        // SAFETY: both devices are open, and the number is valid for the call.
        let asked = unsafe {
            sys::cuDeviceCanAccessPeer(&raw mut can, self.context().cu_device(), other.context().cu_device())
        };
        self.told("asking which devices it reaches", asked.result())?;
        if can != 0 {
            // SAFETY: the other's context is alive.
            match unsafe { sys::cuCtxEnablePeerAccess(other.context().cu_ctx(), 0) } {
                CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
                code => self.told("reaching another device", code.result())?,
            }
        }
        reached.insert(other.ordinal);
        Ok(())
    }

    /// Allocates device memory, zeroed when this returns; a lack of it is told with both numbers.
    pub(super) fn allocate(
        &self,
        stream: &CudaStream,
        what: &'static str,
        bytes: usize,
    ) -> Result<sys::CUdeviceptr, BackendError> {
        self.told("binding its context", self.context().bind_to_thread())?;
        // SAFETY: the context is bound; the memory is written right below.
        match unsafe { result::malloc_sync(bytes) } {
            Ok(pointer) => {
                // Streams here wait for no default stream, so the call that has none would not do.
                // SAFETY: the allocation is as long.
                let zeroed = unsafe { result::memset_d8_async(pointer, 0, bytes, stream.cu_stream()) };
                let zeroed = zeroed.and_then(|()| stream.synchronize());
                if let Err(error) = zeroed {
                    // SAFETY: nothing uses the allocation.
                    let _ = unsafe { result::free_sync(pointer) };
                    return self.told("clearing memory", Err(error));
                }
                Ok(pointer)
            }
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Err(BackendError::DeviceMemory {
                device: format!("cuda:{}", self.ordinal),
                what,
                needed: bytes as u64,
                free: self.memory()?.0,
            }),
            Err(error) => self.told("allocating memory", Err(error)),
        }
    }
}

fn failed(ordinal: usize, doing: &'static str, error: DriverError) -> BackendError {
    let reason = CudaError::from(error).to_string();
    BackendError::Device { device: format!("cuda:{ordinal}"), doing, reason }
}
