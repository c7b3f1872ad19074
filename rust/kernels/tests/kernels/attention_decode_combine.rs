//! Splits added up: one rounding.

use half::{bf16, f16};
use kvrelay_kernels::launch::{AttentionDecodeCombine, DecodePlan, Element, Split};

use crate::device::Device;
use crate::numbers::{Numbers, Within, compare, spacing, wide};
use crate::oracle::attention_decode::Part;
use crate::oracle::attention_decode_combine::combined;

pub(crate) fn check(device: &Device) {
    for head_dim in [64, 80, 96, 128, 256] {
        one::<bf16>(device, head_dim);
        one::<f16>(device, head_dim);
    }
}

fn one<T: Element>(device: &Device, head_dim: usize) {
    let (q_heads, lengths) = (3, [0, 1, 256, 257, 1100]);
    let plan = DecodePlan::new(Split::Invariant, lengths.len(), 1, q_heads, 1100);
    let mut numbers = Numbers::new(head_dim as u64);
    let [outputs_len, sums_len] = plan.workspace_len(lengths.len(), q_heads, head_dim);
    // As much beyond the row's own splits as it takes to notice that they were read.
    let (mut outputs, mut sums) = (vec![f32::NAN; outputs_len], vec![f32::NAN; sums_len]);
    let mut expected = Vec::new();
    for (row, &length) in lengths.iter().enumerate() {
        for head in 0..q_heads {
            let place = (row * q_heads + head) * plan.max_splits;
            let parts: Vec<Part> = (0..(length as usize).div_ceil(256))
                .map(|s| {
                    // Scores far from 0, as some models have them.
                    let (largest, sum) =
                        (numbers.float(10.0) - 300.0, numbers.float(1.0).abs() * 100.0 + 1.0);
                    let output = numbers.floats(head_dim, sum);
                    outputs[(place + s) * head_dim..][..head_dim].copy_from_slice(&output);
                    sums[(place + s) * 2..][..2].copy_from_slice(&[largest, sum]);
                    let output = output.iter().map(|&x| f64::from(x)).collect();
                    Part { largest: largest.into(), sum: sum.into(), output }
                })
                .collect();
            expected.extend(combined(&parts, head_dim));
        }
    }
    let (outputs, sums, lengths) = (device.upload(&outputs), device.upload(&sums), device.upload(&lengths));
    let mut out = device.upload(&vec![T::from_f32(7.0); expected.len()]);
    let parameters = AttentionDecodeCombine {
        out: out.as_view_mut(),
        outputs: outputs.as_view(),
        sums: sums.as_view(),
        lengths: lengths.as_view(),
        plan,
        q_heads,
        head_dim,
    };
    parameters.launch(&device.kernels, &device.stream).unwrap();
    let what = format!("attention_decode_combine_{} of heads of {head_dim}", T::NAME);
    let within = Within { relative: spacing::<T>() / 2.0, absolute: 1e-5 };
    compare(&what, &wide(&device.download(&out)), &expected, within);
}
