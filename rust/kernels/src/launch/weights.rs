//! Weight matrices in device memory, as model files store them.

use cudarc::driver::{CudaStream, CudaView};

use super::check::{Check, elements};
use super::{Element, LaunchError};

/// A matrix of weights: `[rows][columns]`, rows contiguous.
#[derive(Debug)]
pub enum Weights<'a, T> {
    /// In the activations' type.
    Plain(CudaView<'a, T>),
    /// GGUF blocks of 32 nibbles around 8 and a scale, 18 bytes each.
    Q4_0(CudaView<'a, u8>),
    /// GGUF blocks of 32 nibbles, a scale and a minimum, 20 bytes each.
    Q4_1(CudaView<'a, u8>),
    /// GGUF blocks of 32 signed bytes and a scale, 34 bytes each.
    Q8_0(CudaView<'a, u8>),
}

/// Weights of a quantised block.
const BLOCK: usize = 32;

impl<T: Element> Weights<'_, T> {
    /// What a kernel's name has for the format, behind the activations' type.
    pub(super) fn suffix(&self) -> &'static str {
        match self {
            Self::Plain(_) => "",
            Self::Q4_0(_) => "_q4_0",
            Self::Q4_1(_) => "_q4_1",
            Self::Q8_0(_) => "_q8_0",
        }
    }

    /// Refuses a view of another size than `rows` rows of `columns`, and rows that are not whole blocks
    /// (of a plain matrix: whole 16-byte words).
    pub(super) fn check(&self, check: &Check<'_>, rows: usize, columns: usize) -> Result<(), LaunchError> {
        match self {
            Self::Plain(view) => {
                check.multiple("columns of the weights", 8, columns)?;
                check.equal("elements of the weights", elements([rows, columns]), view.len())
            }
            Self::Q4_0(view) => quantised(check, rows, columns, 18, view.len()),
            Self::Q4_1(view) => quantised(check, rows, columns, 20, view.len()),
            Self::Q8_0(view) => quantised(check, rows, columns, 34, view.len()),
        }
    }

    /// Refuses a view that does not begin at a border of what kernels read at a time: 16 bytes, and of
    /// quantised blocks, which follow each other closely, 2.
    pub(super) fn check_begin(&self, check: &Check<'_>, stream: &CudaStream) -> Result<(), LaunchError> {
        match self {
            Self::Plain(view) => {
                check.begins_at("bytes of the weights beyond a 16-byte border", 16, view, stream)
            }
            Self::Q4_0(view) | Self::Q4_1(view) | Self::Q8_0(view) => {
                check.begins_at("bytes of the weights beyond a 2-byte border", 2, view, stream)
            }
        }
    }
}

fn quantised(
    check: &Check<'_>,
    rows: usize,
    columns: usize,
    block_bytes: usize,
    found: usize,
) -> Result<(), LaunchError> {
    check.multiple("columns of the weights", BLOCK, columns)?;
    check.equal("bytes of the weights", elements([rows, columns / BLOCK, block_bytes]), found)
}

/// Adds the weights to a launch's arguments, whatever they are.
macro_rules! weights_argument {
    ($arguments:expr, $weights:expr) => {
        match $weights {
            Weights::Plain(view) => $arguments.arg(view),
            Weights::Q4_0(view) | Weights::Q4_1(view) | Weights::Q8_0(view) => $arguments.arg(view),
        }
    };
}
pub(super) use weights_argument;
