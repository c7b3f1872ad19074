//! Numbers to stored blocks, by rounding to the nearest.

use half::{bf16, f16};

use crate::DType;

/// The storage of `numbers` as `dtype`.
///
/// # Panics
/// If they are no whole number of blocks.
pub fn quantise(dtype: DType, numbers: &[f32]) -> Vec<u8> {
    assert!(numbers.len().is_multiple_of(dtype.block_len()), "a whole number of blocks");
    let blocks = numbers.chunks(dtype.block_len());
    blocks.flat_map(|block| quantise_block(dtype, block)).collect()
}

fn quantise_block(dtype: DType, x: &[f32]) -> Vec<u8> {
    let largest = x.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    let (low, high) = x.iter().fold((x[0], x[0]), |(l, h), &v| (l.min(v), h.max(v)));
    let steps = |scale: f32, offset: f32, limit: f32| -> Vec<u8> {
        let quantum = |v: f32| {
            if scale == 0.0 { 0.0 } else { ((v - offset) / scale).round() }
        };
        let q: Vec<u8> = x.iter().map(|&v| quantum(v).clamp(0.0, limit) as u8).collect();
        (0..16).map(|j| q[j] | q[j + 16] << 4).collect()
    };
    match dtype {
        DType::F32 => x[0].to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(x[0]).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(x[0]).to_le_bytes().to_vec(),
        DType::Q8_0 => {
            let d = f16::from_f32(largest / 127.0);
            let quantum = |v: &f32| {
                if d.to_f32() == 0.0 { 0 } else { (v / d.to_f32()).round() as i8 }
            };
            d.to_le_bytes().into_iter().chain(x.iter().map(|v| quantum(v).cast_unsigned())).collect()
        }
        DType::Q4_0 => {
            let d = f16::from_f32(largest / 7.0);
            let q = steps(d.to_f32(), -8.0 * d.to_f32(), 15.0);
            d.to_le_bytes().into_iter().chain(q).collect()
        }
        DType::Q4_1 => {
            let (d, m) = (f16::from_f32((high - low) / 15.0), f16::from_f32(low));
            let q = steps(d.to_f32(), m.to_f32(), 15.0);
            d.to_le_bytes().into_iter().chain(m.to_le_bytes()).chain(q).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_within_half_a_step() {
        let numbers: Vec<f32> = (0..96_u16).map(|i| (f32::from(i) * 0.7).sin() * 2.0).collect();
        for (dtype, bound) in [
            (DType::F32, 0.0),
            (DType::F16, 1e-3),
            (DType::BF16, 8e-3),
            (DType::Q8_0, 9e-3),
            (DType::Q4_0, 0.16),
            (DType::Q4_1, 0.15),
        ] {
            let mut back = vec![0.0; numbers.len()];
            dtype.dequantise(&quantise(dtype, &numbers), &mut back);
            let worst = numbers.iter().zip(&back).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= bound, "{}: {worst}", dtype.name());
        }
    }
}
