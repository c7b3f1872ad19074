//! The compiled kernels of this build, loaded into a device.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaModule, DriverError};
use cudarc::nvrtc::Ptx;

use crate::driver::{CudaError, Devices, OLDEST_CAPABILITY, Version};

static IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));

/// The compressed fatbin with all kernels; `None` if this build has none.
pub fn embedded() -> Option<&'static [u8]> {
    (!IMAGE.is_empty()).then_some(IMAGE)
}

/// Why a device's kernels cannot be used although the probe said yes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModuleError {
    /// There is no such device.
    #[error("there is no cuda:{ordinal}; the CUDA driver lists {count}, cuda:0 to cuda:{}", count - 1)]
    NoSuchDevice {
        /// What was asked for.
        ordinal: usize,
        /// How many there are; at least one.
        count: usize,
    },
    /// The device is older than all that kernels are compiled for.
    #[error(
        "cuda:{ordinal} ({name}) has compute capability {found}; the kernels need {OLDEST_CAPABILITY} or newer"
    )]
    OldDevice {
        /// The device.
        ordinal: usize,
        /// Its name.
        name: String,
        /// Its compute capability.
        found: Version,
    },
    /// The driver refuses.
    #[error("cuda:{ordinal}: {doing} failed: {error}")]
    Failed {
        /// The device.
        ordinal: usize,
        /// What was being done, such as `loading the kernels`.
        doing: String,
        /// What the driver said.
        error: CudaError,
    },
}

/// The kernels, loaded into a device.
#[derive(Clone, Debug)]
pub struct Module {
    ordinal: usize,
    context: Arc<CudaContext>,
    module: Arc<CudaModule>,
}

impl Devices {
    /// Opens a device and loads the kernels into it. [`Devices`] come from the probe alone, so that
    /// nothing touches CUDA where it would panic.
    ///
    /// # Errors
    /// [`ModuleError`]: no such device, one too old, or a driver that refuses.
    pub fn open(&self, ordinal: usize) -> Result<Module, ModuleError> {
        let device = self.get(ordinal).ok_or(ModuleError::NoSuchDevice { ordinal, count: self.len() })?;
        if device.compute_capability < OLDEST_CAPABILITY {
            let (name, found) = (device.name.clone(), device.compute_capability);
            return Err(ModuleError::OldDevice { ordinal, name, found });
        }
        let failed = |doing: &str| {
            let doing = doing.to_owned();
            move |error: DriverError| ModuleError::Failed { ordinal, doing, error: CudaError::from(error) }
        };
        let context = CudaContext::new(ordinal).map_err(failed("opening the device"))?;
        let image = Ptx::from_binary(IMAGE.to_vec());
        let module = context.load_module(image).map_err(failed("loading the kernels"))?;
        Ok(Module { ordinal, context, module })
    }
}

impl Module {
    /// The device's ordinal.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The device's primary context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// A kernel by its name.
    ///
    /// # Errors
    /// [`ModuleError::Failed`] if there is none of that name.
    pub fn function(&self, name: &str) -> Result<CudaFunction, ModuleError> {
        self.module.load_function(name).map_err(|error| ModuleError::Failed {
            ordinal: self.ordinal,
            doing: format!("looking up the kernel {name}"),
            error: CudaError::from(error),
        })
    }
}
