//! RMSNorm with and without a residual: two roundings. The residual's sum is rounded once from exact
//! numbers, so it is the same to the bit.

use half::{bf16, f16};
use kvrelay_kernels::launch::{Element, RmsNorm};

use crate::device::Device;
use crate::numbers::{Numbers, Within, compare, identical, mostly_identical, rounded, spacing, wide};
use crate::oracle::rms_norm::rms_norm;

pub(crate) fn check(device: &Device) {
    for (rows, dim) in [(1, 1), (1, 31), (3, 64), (17, 576), (2, 4096), (5, 2050)] {
        for with_residual in [false, true] {
            one::<bf16>(device, rows, dim, with_residual);
            one::<f16>(device, rows, dim, with_residual);
        }
    }
    let mut shapes = Numbers::of_this_run();
    for _ in 0..4 {
        let (rows, dim) = (shapes.between(1, 20), shapes.between(1, 900));
        one::<bf16>(device, rows, dim, shapes.below(2) == 0);
        one::<f16>(device, rows, dim, shapes.below(2) == 0);
    }
    small_numbers::<bf16>(device);
    small_numbers::<f16>(device);
}

fn one<T: Element>(device: &Device, rows: usize, dim: usize, with_residual: bool) {
    let mut numbers = Numbers::new((rows * dim) as u64);
    let x: Vec<T> = numbers.elements(rows * dim, 2.0);
    let residual: Vec<T> = numbers.elements(rows * dim, 9.0);
    let weight: Vec<T> = numbers.elements(dim, 1.5);
    compare_with_oracle(device, &x, with_residual.then_some(&residual), &weight);
}

/// Where eps decides.
fn small_numbers<T: Element>(device: &Device) {
    let x = [0.0, 1e-3, -2e-3, 3e-3, 0.0, 0.0, 0.0, 0.0].map(T::from_f32);
    compare_with_oracle(device, &x, None, &x.map(|_| T::from_f32(1.0)));
}

fn compare_with_oracle<T: Element>(device: &Device, x: &[T], residual: Option<&Vec<T>>, weight: &[T]) {
    let eps = 1e-5_f32;
    let dim = weight.len();
    let (x_there, weight_there) = (device.upload(x), device.upload(weight));
    let mut residual_there = residual.map(|residual| device.upload(residual));
    let mut out = device.upload(&vec![T::from_f32(7.0); x.len()]);
    let parameters = RmsNorm {
        out: out.as_view_mut(),
        x: x_there.as_view(),
        residual: residual_there.as_mut().map(|residual| residual.as_view_mut()),
        weight: weight_there.as_view(),
        eps,
    };
    parameters.launch(&device.kernels, &device.stream).unwrap();

    let mut h = wide(x);
    if let (Some(residual), Some(there)) = (residual, residual_there) {
        h = h.iter().zip(wide(residual)).map(|(x, r)| rounded::<T>(x + r)).collect();
        identical("residual", &wide(&device.download(&there)), &h);
    }
    let weight = wide(weight);
    let rows = h.chunks(dim).flat_map(|h| rms_norm(h, &weight, f64::from(eps), rounded::<T>));
    let within = Within { relative: 2.0 * spacing::<T>(), absolute: 1e-9 };
    let what = format!("rms_norm_{} of rows of {dim}", T::NAME);
    let (found, expected) = (wide(&device.download(&out)), rows.collect::<Vec<_>>());
    compare(&what, &found, &expected, within);
    mostly_identical(&what, &found, &expected);
}
