//! The CUDA driver library: is it there, does it start, what does it list.

use std::error::Error;
use std::ffi::{CStr, OsString, c_char, c_int, c_uint};
use std::fmt;
use std::ops::Deref;

use cudarc::driver::DriverError;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use crate::module;

/// The name under which NVIDIA's driver installs its library.
const LIBRARY: &str = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };

/// The variable by which a user hides devices from the driver.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// The oldest driver that runs what the kernels are compiled with, CUDA 13.0.
const OLDEST_DRIVER: Version = Version { major: 13, minor: 0 };

/// The oldest devices that the kernels are compiled for.
pub(crate) const OLDEST_CAPABILITY: Version = Version { major: 8, minor: 0 };

const SUCCESS: c_int = 0;
const NO_DEVICE: c_int = 100;

/// A version of CUDA or a compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Before the point.
    pub major: u32,
    /// After it.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A device, as its driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its name, such as `NVIDIA H200`.
    pub name: String,
    /// Its whole memory, in bytes.
    pub memory_bytes: u64,
    /// Its compute capability.
    pub compute_capability: Version,
    /// The newest CUDA that its driver runs; the same for all devices of a machine.
    pub driver_version: Version,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Device { name, memory_bytes, compute_capability, driver_version } = self;
        let gib = *memory_bytes as f64 / (1u64 << 30) as f64;
        write!(
            f,
            "{name}, {gib:.1} GiB, compute capability {compute_capability}, driver for CUDA {driver_version}"
        )
    }
}

/// The devices of a machine, by ordinal; at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Devices(Vec<Device>);

impl Deref for Devices {
    type Target = [Device];

    fn deref(&self) -> &[Device] {
        &self.0
    }
}

/// An error number of the CUDA driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaError {
    /// The number.
    pub code: i32,
    /// The driver's name and description of it, where it has them: `CUDA_ERROR_NO_DEVICE: no
    /// CUDA-capable device is detected`.
    pub meaning: Option<String>,
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let meaning = self.meaning.as_deref().unwrap_or("a number that this driver has no name for");
        write!(f, "CUDA error {}, {meaning}", self.code)
    }
}

/// Why CUDA is not usable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoCuda {
    /// There is no driver library, so no driver.
    #[error("no {LIBRARY} was found")]
    NoLibrary,
    /// There is one, and the system's loader refuses it.
    #[error("{LIBRARY} could not be loaded ({reason})")]
    BadLibrary {
        /// The loader's own words.
        reason: String,
    },
    /// The library lacks a function that every driver has.
    #[error("the {LIBRARY} that was found has no {function}, so it is not a usable NVIDIA driver")]
    NoFunction {
        /// The function.
        function: &'static str,
    },
    /// A function of the driver failed.
    #[error("the CUDA driver failed: {function} gave {error}")]
    Failed {
        /// The function.
        function: &'static str,
        /// What it returned.
        error: CudaError,
    },
    /// The driver works and sees no device.
    #[error("the CUDA driver found no device{}{}", in_brackets(error), hidden_by(visible))]
    NoDevice {
        /// The driver's error; `None` if it counted, and counted 0.
        error: Option<CudaError>,
        /// The value of `CUDA_VISIBLE_DEVICES`, which hides devices, where it is set.
        visible: Option<OsString>,
    },
    /// There are devices, and nothing in this build to run on them.
    #[error("this build of kvrelay was built without CUDA kernels, so it cannot use {}", list(devices))]
    NoKernels {
        /// What the driver lists.
        devices: Devices,
    },
    /// The driver is older than what the kernels are compiled with.
    #[error(
        "the CUDA driver is too old: it runs CUDA {found}, the kernels need {OLDEST_DRIVER}; it lists {}",
        list(devices)
    )]
    OldDriver {
        /// The newest CUDA that it runs.
        found: Version,
        /// What it lists.
        devices: Devices,
    },
    /// No device is new enough for the kernels.
    #[error(
        "the kernels need compute capability {OLDEST_CAPABILITY} or newer, and there is only {}",
        list(devices)
    )]
    OldDevices {
        /// What the driver lists.
        devices: Devices,
    },
}

fn in_brackets(error: &Option<CudaError>) -> String {
    error.as_ref().map_or_else(String::new, |error| format!(" ({error})"))
}

fn hidden_by(visible: &Option<OsString>) -> String {
    visible.as_ref().map_or_else(String::new, |value| format!("; {VISIBLE} is set to {value:?}"))
}

fn list(devices: &Devices) -> String {
    let each = devices.iter().enumerate().map(|(ordinal, device)| format!("cuda:{ordinal} ({device})"));
    each.collect::<Vec<_>>().join(", ")
}

impl NoCuda {
    /// The devices that the driver lists although they cannot be used.
    pub fn devices(&self) -> &[Device] {
        match self {
            NoCuda::NoKernels { devices }
            | NoCuda::OldDriver { devices, .. }
            | NoCuda::OldDevices { devices } => devices,
            _ => &[],
        }
    }
}

/// The CUDA driver of this machine.
#[derive(Debug)]
pub struct Driver;

impl Driver {
    /// The devices that kvrelay can use, or the first reason why there are none. Never panics.
    ///
    /// Loads and initialises the driver if there is one, which can take seconds on a machine with
    /// many devices, and after which a forked child of the process cannot use CUDA.
    ///
    /// # Errors
    /// [`NoCuda`].
    pub fn probe() -> Result<Devices, NoCuda> {
        usable(listed()?, module::embedded().is_some())
    }
}

/// The devices, if this build has kernels, and they run on some of them.
fn usable(devices: Devices, has_kernels: bool) -> Result<Devices, NoCuda> {
    let found = devices[0].driver_version;
    if !has_kernels {
        Err(NoCuda::NoKernels { devices })
    } else if found < OLDEST_DRIVER {
        Err(NoCuda::OldDriver { found, devices })
    } else if devices.iter().all(|device| device.compute_capability < OLDEST_CAPABILITY) {
        Err(NoCuda::OldDevices { devices })
    } else {
        Ok(devices)
    }
}

/// What the driver lists.
fn listed() -> Result<Devices, NoCuda> {
    // SAFETY: loading a library runs its constructors; a driver's are made for that.
    if !unsafe { sys::is_culib_present() } {
        return Err(why_not_loaded());
    }
    let no_device = |error| NoCuda::NoDevice { error, visible: std::env::var_os(VISIBLE) };
    // SAFETY: the signatures of the functions named, from CUDA's `cuda.h`; every pointer is valid
    // for the call. `cuInit` comes first, and every ordinal is below the count.
    unsafe {
        let init: unsafe extern "C" fn(c_uint) -> c_int = function(c"cuInit")?;
        match init(0) {
            NO_DEVICE => return Err(no_device(Some(error(NO_DEVICE)))),
            code => check("cuInit", code)?,
        }
        let get_count: unsafe extern "C" fn(*mut c_int) -> c_int = function(c"cuDeviceGetCount")?;
        let mut count = 0;
        check("cuDeviceGetCount", get_count(&mut count))?;
        let devices = (0..count).map(|ordinal| describe(ordinal)).collect::<Result<Vec<_>, _>>()?;
        if devices.is_empty() { Err(no_device(None)) } else { Ok(Devices(devices)) }
    }
}

/// The device of an ordinal.
///
/// # Safety
/// The driver is initialised, and counts more devices than `ordinal`.
unsafe fn describe(ordinal: c_int) -> Result<Device, NoCuda> {
    // SAFETY: signatures from `cuda.h`; every pointer is valid for the call, and the device is the
    // one that the driver gave.
    unsafe {
        let get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int = function(c"cuDeviceGet")?;
        let mut device = 0;
        check("cuDeviceGet", get(&mut device, ordinal))?;

        let get_name: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int =
            function(c"cuDeviceGetName")?;
        // One byte more than the driver is told of, so that the name ends whatever it writes.
        let mut name = [0u8; 257];
        check("cuDeviceGetName", get_name(name.as_mut_ptr().cast(), 256, device))?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();

        let total: unsafe extern "C" fn(*mut usize, c_int) -> c_int = function(c"cuDeviceTotalMem_v2")?;
        let mut memory = 0usize;
        check("cuDeviceTotalMem", total(&mut memory, device))?;

        let read: unsafe extern "C" fn(*mut c_int, c_uint, c_int) -> c_int =
            function(c"cuDeviceGetAttribute")?;
        let attribute = |which: Attribute| {
            let mut value = 0;
            check("cuDeviceGetAttribute", read(&mut value, which as c_uint, device)).map(|()| value as u32)
        };
        let compute_capability = Version {
            major: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        };

        let get_version: unsafe extern "C" fn(*mut c_int) -> c_int = function(c"cuDriverGetVersion")?;
        let mut version = 0;
        check("cuDriverGetVersion", get_version(&mut version))?;
        // 1000 · major + 10 · minor.
        let driver_version = Version { major: version as u32 / 1000, minor: version as u32 % 1000 / 10 };

        Ok(Device { name, memory_bytes: memory as u64, compute_capability, driver_version })
    }
}

/// A function of the driver library, which stays loaded for the life of the process.
///
/// cudarc's own wrappers are not used here: they panic for a function that is missing, and return an
/// `enum`, which must not hold the numbers of a newer driver.
///
/// # Safety
/// The library is present, and `F` is the function's type.
unsafe fn function<F: Copy>(name: &'static CStr) -> Result<F, NoCuda> {
    // SAFETY: as the caller promises.
    let found = unsafe { sys::culib().get::<F>(name.to_bytes_with_nul()) };
    let missing = NoCuda::NoFunction { function: name.to_str().unwrap_or_default() };
    found.map(|symbol| *symbol).map_err(|_| missing)
}

fn check(function: &'static str, code: c_int) -> Result<(), NoCuda> {
    if code == SUCCESS { Ok(()) } else { Err(NoCuda::Failed { function, error: error(code) }) }
}

/// An error number with the driver's own words for it. The library must be present.
fn error(code: c_int) -> CudaError {
    type Text = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
    let text = |name| -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: signatures from `cuda.h`; what the driver hands out is a constant of its own.
        unsafe {
            let describe: Text = function(name).ok()?;
            let known = describe(code, &mut text) == SUCCESS && !text.is_null();
            known.then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    let parts = [text(c"cuGetErrorName"), text(c"cuGetErrorString")];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    CudaError { code, meaning: (!parts.is_empty()).then(|| parts.join(": ")) }
}

impl From<DriverError> for CudaError {
    /// An error of a call that was made, so the library is present.
    fn from(DriverError(code): DriverError) -> CudaError {
        error(code as c_int)
    }
}

/// Why the library is not present.
fn why_not_loaded() -> NoCuda {
    // SAFETY: as for `is_culib_present`, which has just tried the same.
    let Err(error) = (unsafe { libloading::Library::new(LIBRARY) }) else { return NoCuda::NoLibrary };
    let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    // glibc's words, and musl's, for a file that is nowhere on the search path.
    let nowhere = [
        format!("{LIBRARY}: cannot open shared object file: No such file or directory"),
        format!("Error loading shared library {LIBRARY}: No such file or directory"),
    ];
    if nowhere.contains(&reason) { NoCuda::NoLibrary } else { NoCuda::BadLibrary { reason } }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(driver: (u32, u32), capabilities: &[(u32, u32)]) -> Devices {
        let version = |(major, minor)| Version { major, minor };
        let device = |&capability| Device {
            name: "Card".to_owned(),
            memory_bytes: 3 << 30,
            compute_capability: version(capability),
            driver_version: version(driver),
        };
        Devices(capabilities.iter().map(device).collect())
    }

    #[test]
    fn kernels_first() {
        let reason = usable(devices((13, 0), &[(9, 0)]), false).unwrap_err();
        let expected = "this build of kvrelay was built without CUDA kernels, so it cannot use cuda:0 (Card, 3.0 GiB, \
                        compute capability 9.0, driver for CUDA 13.0)";
        assert_eq!((reason.to_string().as_str(), reason.devices().len()), (expected, 1));
    }

    #[test]
    fn then_the_driver() {
        assert!(usable(devices((13, 0), &[(9, 0)]), true).is_ok());
        let reason = usable(devices((12, 9), &[(9, 0), (8, 0)]), true).unwrap_err();
        assert!(reason.to_string().contains("it runs CUDA 12.9, the kernels need 13.0"), "{reason}");
        assert_eq!(reason.devices().len(), 2);
    }

    #[test]
    fn then_the_devices() {
        let mixed = devices((13, 1), &[(7, 5), (8, 0)]);
        assert_eq!(usable(mixed.clone(), true), Ok(mixed));
        let reason = usable(devices((13, 1), &[(7, 5)]), true).unwrap_err();
        assert!(reason.to_string().contains("compute capability 8.0 or newer"), "{reason}");
        assert!(reason.to_string().contains("compute capability 7.5"), "{reason}");
    }
}
