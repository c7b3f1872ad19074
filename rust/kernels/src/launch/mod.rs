//! Typed launchers: one struct of named parameters a kernel, named as the kernel. `launch` compares
//! every shape with every other before anything is enqueued, and says which differs and by what.
//!
//! What the host cannot see is the caller's to keep, and is said where it matters: that ids, block
//! numbers and lengths in device memory lie in their ranges. What kernels read or write 16 bytes at a
//! time must begin at a 16-byte border, as allocations and whole rows do; a view that does not is
//! refused. Launches return before the kernel has run.

mod attention_decode;
mod attention_prefill;
mod check;
mod embedding;
mod gated;
mod gemm;
mod head_norm;
mod kv_groups;
mod paged;
mod rms_norm;
mod rope_append;
mod sample;
mod tokens;
mod weights;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::CUfunction_attribute;
use cudarc::driver::{CudaFunction, DeviceRepr, LaunchArgs, LaunchConfig};

use crate::driver::CudaError;
use crate::module::{Module, ModuleError};

pub use attention_decode::{
    AttentionDecode, AttentionDecodeCombine, DecodePlan, DecodeRows, INVARIANT_SPLIT_TOKENS, Split,
};
pub use attention_prefill::AttentionPrefill;
pub use embedding::Embedding;
pub use gated::{Activation, Gated};
pub use gemm::{Gemm, Output};
pub use head_norm::HeadNorm;
pub use kv_groups::{GatherKvGroups, ScatterKvGroups};
pub use paged::{KvLayout, Layer, LayerMut};
pub use rms_norm::RmsNorm;
pub use rope_append::{RopeAppend, RopePairs};
pub use sample::{MAX_VOCAB, Sample};
pub use tokens::{FeedTokens, KeepTokens};
pub use weights::Weights;

/// The head sizes that attention is compiled for.
pub const HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];

/// Dynamic shared memory that a kernel may use without being asked.
const DYNAMIC_WITHOUT_OPT_IN: usize = 48 * 1024;

/// The largest grid in `y` and `z`; in `x` it is `i32::MAX`.
const MAX_GRID: usize = 65_535;

/// A type of activations: 16 bits, computed with in `f32`.
pub trait Element: DeviceRepr + Copy + fmt::Debug + Send + Sync + 'static {
    /// As kernels' names have it.
    const NAME: &'static str;

    /// The number that is stored.
    fn to_f32(self) -> f32;

    /// The nearest element, ties to even.
    fn from_f32(number: f32) -> Self;
}

impl Element for half::bf16 {
    const NAME: &'static str = "bf16";

    fn to_f32(self) -> f32 {
        half::bf16::to_f32(self)
    }

    fn from_f32(number: f32) -> Self {
        half::bf16::from_f32(number)
    }
}

impl Element for half::f16 {
    const NAME: &'static str = "f16";

    fn to_f32(self) -> f32 {
        half::f16::to_f32(self)
    }

    fn from_f32(number: f32) -> Self {
        half::f16::from_f32(number)
    }
}

/// Why a kernel was not launched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// A shape that does not fit the others, or the kernel.
    #[error("{kernel}: {what}: expected {expected}, found {found}")]
    Shape {
        /// The kernel.
        kernel: String,
        /// The parameter and what of it.
        what: &'static str,
        /// What it should be.
        expected: String,
        /// What it is.
        found: usize,
    },
    /// The kernel is not there.
    #[error(transparent)]
    Module(#[from] ModuleError),
    /// The driver refuses.
    #[error("{kernel}: {doing} failed: {error}")]
    Driver {
        /// The kernel.
        kernel: String,
        /// What was being done.
        doing: &'static str,
        /// What the driver said.
        error: CudaError,
    },
}

/// The kernels of a device, each looked up once.
#[derive(Debug)]
pub struct Kernels {
    module: Module,
    functions: Mutex<BTreeMap<String, CudaFunction>>,
}

impl Kernels {
    /// Those of a loaded module.
    pub fn new(module: Module) -> Self {
        Self { module, functions: Mutex::default() }
    }

    /// The module.
    pub fn module(&self) -> &Module {
        &self.module
    }

    /// The names of the kernels that have been launched, in order.
    pub fn launched(&self) -> Vec<String> {
        self.functions.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    /// A kernel, allowed the dynamic shared memory that it will be launched with, in bytes; always
    /// the same for a kernel.
    fn function(&self, name: &str, dynamic_shared: usize) -> Result<CudaFunction, LaunchError> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return Ok(function.clone());
        }
        let function = self.module.function(name)?;
        if dynamic_shared > DYNAMIC_WITHOUT_OPT_IN {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, dynamic_shared as i32).map_err(|error| {
                LaunchError::Driver {
                    kernel: name.to_owned(),
                    doing: "asking for shared memory",
                    error: error.into(),
                }
            })?;
        }
        functions.insert(name.to_owned(), function.clone());
        Ok(function)
    }
}

/// Blocks of a launch, threads of a block, and its dynamic shared memory in bytes.
struct Geometry {
    grid: [usize; 3],
    threads: usize,
    shared: usize,
}

impl Geometry {
    fn new(grid: [usize; 3], threads: usize) -> Self {
        Self { grid, threads, shared: 0 }
    }
}

/// Enqueues a kernel; a grid too large for any device is an error.
///
/// # Safety
/// The arguments are the kernel's parameters, in number, order and type, and what it reads and
/// writes through them lies in the views that they were made from.
unsafe fn enqueue(
    kernel: &str,
    arguments: &mut LaunchArgs<'_>,
    geometry: &Geometry,
) -> Result<(), LaunchError> {
    let [x, y, z] = geometry.grid;
    let limits =
        [("blocks in x", x, i32::MAX as usize), ("blocks in y", y, MAX_GRID), ("blocks in z", z, MAX_GRID)];
    for (what, found, limit) in limits {
        if !(1..=limit).contains(&found) {
            let (kernel, expected) = (kernel.to_owned(), format!("between 1 and {limit}"));
            return Err(LaunchError::Shape { kernel, what, expected, found });
        }
    }
    let config = LaunchConfig {
        grid_dim: (x as u32, y as u32, z as u32),
        block_dim: (geometry.threads as u32, 1, 1),
        shared_mem_bytes: geometry.shared as u32,
    };
    // SAFETY: the caller's contract.
    let launched = unsafe { arguments.launch(config) };
    launched.map(|_| ()).map_err(|error| LaunchError::Driver {
        kernel: kernel.to_owned(),
        doing: "the launch",
        error: error.into(),
    })
}
