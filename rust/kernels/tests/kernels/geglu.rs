//! GeGLU: two roundings.

use half::{bf16, f16};
use kvrelay_kernels::launch::Activation;

use crate::device::Device;
use crate::numbers::rounded;
use crate::oracle::geglu::geglu;
use crate::swiglu::gated;

pub(crate) fn check(device: &Device) {
    gated::<bf16>(device, Activation::GeluTanh, |row| geglu(row, rounded::<bf16>));
    gated::<f16>(device, Activation::GeluTanh, |row| geglu(row, rounded::<f16>));
}
