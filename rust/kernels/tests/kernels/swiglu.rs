//! SwiGLU: two roundings.

use half::{bf16, f16};
use kvrelay_kernels::launch::{Activation, Element, Gated};

use crate::device::Device;
use crate::numbers::{Numbers, Within, compare, mostly_identical, rounded, spacing, wide};
use crate::oracle::swiglu::swiglu;

pub(crate) fn check(device: &Device) {
    gated::<bf16>(device, Activation::Silu, |row| swiglu(row, rounded::<bf16>));
    gated::<f16>(device, Activation::Silu, |row| swiglu(row, rounded::<f16>));
    many_rows(device);
}

/// More rows than a grid has blocks in y.
fn many_rows(device: &Device) {
    const ROWS: usize = 65_540;
    let gate_up: Vec<bf16> = (0..2 * ROWS).map(|i| bf16::from_f32((i % 11) as f32 - 5.0)).collect();
    let there = device.upload(&gate_up);
    let mut out = device.unwritten::<bf16>(ROWS);
    let parameters =
        Gated { out: out.as_view_mut(), gate_up: there.as_view(), width: 1, activation: Activation::Silu };
    parameters.launch(&device.kernels, &device.stream).unwrap();
    let expected: Vec<f64> = wide(&gate_up).chunks(2).flat_map(|row| swiglu(row, rounded::<bf16>)).collect();
    let within = Within { relative: 2.0 * spacing::<bf16>(), absolute: 1e-6 };
    compare("many rows", &wide(&device.download(&out)), &expected, within);
}

/// Any gated activation against its oracle of a row.
pub(crate) fn gated<T: Element>(
    device: &Device,
    activation: Activation,
    oracle: impl Fn(&[f64]) -> Vec<f64>,
) {
    let mut shapes = Numbers::of_this_run();
    let random = [(); 3].map(|()| (shapes.between(1, 20), shapes.between(1, 700)));
    for (rows, width) in [(1, 1), (1, 7), (3, 256), (2, 20_001), (33, 100)].into_iter().chain(random) {
        let mut numbers = Numbers::new((rows * width) as u64);
        let mut gate_up: Vec<T> = numbers.elements(rows * 2 * width, 6.0);
        // Where the exponential overflows, or the activation is all but nothing.
        gate_up[0] = T::from_f32(-100.0);
        gate_up[width / 2] = T::from_f32(90.0);
        let there = device.upload(&gate_up);
        let mut out = device.upload(&vec![T::from_f32(7.0); rows * width]);
        let parameters = Gated { out: out.as_view_mut(), gate_up: there.as_view(), width, activation };
        parameters.launch(&device.kernels, &device.stream).unwrap();
        let expected: Vec<f64> = wide(&gate_up).chunks(2 * width).flat_map(&oracle).collect();
        // What vanishes in an f16 is a denormal there.
        let within = Within { relative: 2.0 * spacing::<T>(), absolute: 1e-6 };
        let what = format!("{activation:?} of {} in {rows} x {width}", T::NAME);
        let found = wide(&device.download(&out));
        compare(&what, &found, &expected, within);
        mostly_identical(&what, &found, &expected);
    }
}
