//! RMSNorm of heads: two roundings; the values stay the same to the bit.

use half::{bf16, f16};
use kvrelay_kernels::launch::{Element, HeadNorm};

use crate::device::Device;
use crate::numbers::{Numbers, Within, compare, identical, mostly_identical, rounded, spacing, wide};
use crate::oracle::head_norm::head_norm;

pub(crate) fn check(device: &Device) {
    for (rows, q_heads, kv_heads, head_dim) in
        [(1, 1, 1, 64), (3, 6, 2, 80), (2, 16, 1, 128), (5, 3, 3, 256), (2, 7, 1, 96)]
    {
        one::<bf16>(device, rows, q_heads, kv_heads, head_dim);
        one::<f16>(device, rows, q_heads, kv_heads, head_dim);
    }
    let mut shapes = Numbers::of_this_run();
    for _ in 0..3 {
        let [rows, q_heads, kv_heads] = [9, 20, 5].map(|most| shapes.between(1, most));
        one::<bf16>(device, rows, q_heads, kv_heads, shapes.between(1, 256));
    }
}

fn one<T: Element>(device: &Device, rows: usize, q_heads: usize, kv_heads: usize, head_dim: usize) {
    let eps = 1e-6_f32;
    let row = (q_heads + 2 * kv_heads) * head_dim;
    let mut numbers = Numbers::new((rows * row) as u64);
    let qkv: Vec<T> = numbers.elements(rows * row, 4.0);
    let [q_weight, k_weight]: [Vec<T>; 2] = [1.0, 3.0].map(|size| numbers.elements(head_dim, size));
    let mut there = device.upload(&qkv);
    let (q_there, k_there) = (device.upload(&q_weight), device.upload(&k_weight));
    let parameters = HeadNorm {
        qkv: there.as_view_mut(),
        q_weight: q_there.as_view(),
        k_weight: k_there.as_view(),
        q_heads,
        kv_heads,
        eps,
    };
    parameters.launch(&device.kernels, &device.stream).unwrap();

    let found = wide(&device.download(&there));
    let (q_weight, k_weight) = (wide(&q_weight), wide(&k_weight));
    let what = format!("head_norm_{} of {q_heads} and {kv_heads} heads of {head_dim}", T::NAME);
    for (found, before) in found.chunks(row).zip(wide(&qkv).chunks(row)) {
        let expected =
            head_norm(before, [&q_weight, &k_weight], q_heads, kv_heads, f64::from(eps), rounded::<T>);
        compare(&what, found, &expected, Within { relative: 2.0 * spacing::<T>(), absolute: 1e-9 });
        mostly_identical(&what, found, &expected);
        let values = (q_heads + kv_heads) * head_dim;
        identical(&what, &found[values..], &before[values..]);
    }
}
