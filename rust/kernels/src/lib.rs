//! CUDA: whether it is usable on this machine and why not, the compiled kernels, and who launches them.
//!
//! cudarc binds the driver library at run time and *panics* where it, or a function of it, is
//! missing. So [`Driver::probe`] is the one door: it gives the [`Devices`], and they alone give a
//! [`Module`], the kernels of `cuda/` loaded into a device. A build without kernels says
//! [`NoCuda::NoKernels`], and lists the devices. [`launch`] is who launches the kernels.

mod driver;
pub mod launch;
mod module;

pub use driver::{CudaError, Device, Devices, Driver, NoCuda, Version};
pub use module::{Module, ModuleError, embedded};
