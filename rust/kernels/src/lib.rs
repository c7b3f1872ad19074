//! Whether CUDA is usable on this machine, and why not.
//!
//! cudarc binds the driver library at run time and *panics* where it, or a function of it, is
//! missing. So [`Driver::probe`] is the one door: nothing else may touch CUDA before it has said
//! yes. There are no kernels in this crate yet, so it never does: with a driver and devices it says
//! [`NoCuda::NoKernels`], and lists them.

mod driver;

pub use driver::{CudaError, Device, Devices, Driver, NoCuda, Version};
