//! What there is to compute on.

use std::num::NonZero;
use std::thread::available_parallelism;

use kvrelay_engine::backend::cpu::vector_instructions;
use kvrelay_kernels::{Device, Driver};
use pyo3::prelude::*;

/// A CUDA device: name, memory in bytes, compute capability, CUDA version of its driver.
type CudaDevice = (String, u64, (u32, u32), (u32, u32));

/// Why devices that the kernels run on are not usable all the same.
const NO_BACKEND: &str = "the engine of this build of kvrelay does not run on CUDA devices";

/// The cores this process may use, and the widest vector instructions that kernels use on them.
#[pyfunction]
pub(crate) fn cpu() -> (usize, Option<&'static str>) {
    (available_parallelism().map_or(1, NonZero::get), vector_instructions())
}

/// The CUDA devices that the driver lists, and why they cannot be used, if so.
#[pyfunction]
pub(crate) fn cuda(py: Python<'_>) -> (Vec<CudaDevice>, Option<String>) {
    let row = |device: &Device| {
        let Device { name, memory_bytes, compute_capability, driver_version } = device;
        let [capability, driver] = [compute_capability, driver_version].map(|v| (v.major, v.minor));
        (name.clone(), *memory_bytes, capability, driver)
    };
    match py.detach(Driver::probe) {
        Ok(devices) => (devices.iter().map(row).collect(), Some(NO_BACKEND.to_owned())),
        Err(reason) => (reason.devices().iter().map(row).collect(), Some(reason.to_string())),
    }
}
