//! The vector tier's kernels for AVX-512; [`super::panels`] has their plain oracles.

use std::arch::x86_64::*;

use kvrelay_model::DType;

use super::panels::{PANEL, Tile};
use super::tile::register_tile;

/// See [`super::panels::unpack`].
///
/// # Safety
/// The machine has AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn unpack(dtype: DType, packed: &[u8], out: &mut [f32]) {
    assert_eq!(packed.len() / dtype.block_bytes() * dtype.block_len(), out.len());
    let groups = packed.len() / (PANEL * dtype.block_bytes());
    // SAFETY: every group is `PANEL` blocks of the type, and makes as many rows of `out`.
    unsafe {
        let (mut from, mut to) = (packed.as_ptr(), out.as_mut_ptr());
        for _ in 0..groups {
            match dtype {
                DType::F32 => {
                    for half in 0..2 {
                        _mm512_storeu_ps(
                            to.add(16 * half),
                            _mm512_loadu_ps(from.cast::<f32>().add(16 * half)),
                        );
                    }
                }
                DType::F16 => {
                    for half in 0..2 {
                        _mm512_storeu_ps(to.add(16 * half), halves(from.add(32 * half)));
                    }
                }
                DType::BF16 => {
                    for half in 0..2 {
                        let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.add(32 * half).cast()));
                        _mm512_storeu_ps(
                            to.add(16 * half),
                            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)),
                        );
                    }
                }
                DType::Q8_0 => bytes(from, to),
                DType::Q4_0 => nibbles(from, false, to),
                DType::Q4_1 => nibbles(from, true, to),
            }
            from = from.add(PANEL * dtype.block_bytes());
            to = to.add(PANEL * dtype.block_len());
        }
    }
}

/// 16 half-precision numbers.
///
/// # Safety
/// 32 bytes can be read.
#[target_feature(enable = "avx512f")]
unsafe fn halves(from: *const u8) -> __m512 {
    // SAFETY: the caller's contract.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(from.cast()) })
}

/// A group of `Q8_0`.
///
/// # Safety
/// `from` is a group, `to` has room for it.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn bytes(from: *const u8, to: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe {
        for half in 0..2 {
            let scale = halves(from.add(32 * half));
            for k in 0..32 {
                let q = _mm_loadu_si128(from.add(64 + 32 * k + 16 * half).cast());
                let q = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q));
                _mm512_storeu_ps(to.add(PANEL * k + 16 * half), _mm512_mul_ps(scale, q));
            }
        }
    }
}

/// A group of `Q4_1`, or of `Q4_0`, whose minimum is -8 scales.
///
/// # Safety
/// `from` is a group, `to` has room for it.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn nibbles(from: *const u8, has_minimum: bool, to: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe {
        let values = from.add(if has_minimum { 128 } else { 64 });
        for half in 0..2 {
            let scale = halves(from.add(32 * half));
            let minimum = match has_minimum {
                true => halves(from.add(64 + 32 * half)),
                false => _mm512_mul_ps(scale, _mm512_set1_ps(-8.0)),
            };
            for j in 0..16 {
                let q = _mm512_cvtepu8_epi32(_mm_loadu_si128(values.add(32 * j + 16 * half).cast()));
                let low = _mm512_cvtepi32_ps(_mm512_and_si512(q, _mm512_set1_epi32(15)));
                let high = _mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(q));
                // Rounded twice, like the plain unpacking.
                let low = _mm512_add_ps(_mm512_mul_ps(scale, low), minimum);
                let high = _mm512_add_ps(_mm512_mul_ps(scale, high), minimum);
                _mm512_storeu_ps(to.add(PANEL * j + 16 * half), low);
                _mm512_storeu_ps(to.add(PANEL * (j + 16) + 16 * half), high);
            }
        }
    }
}

/// See [`super::panels::multiply`].
///
/// # Safety
/// The machine has AVX-512 F; otherwise as for [`super::panels::multiply`].
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn multiply(weights: &[f32], tile: &Tile) {
    let mut row = 0;
    while row < tile.rows {
        let (rows, run): (usize, RegisterTile) = match tile.rows - row {
            12.. => (12, rows_12),
            8.. => (8, rows_8),
            4.. => (4, rows_4),
            2.. => (2, rows_2),
            _ => (1, rows_1),
        };
        // SAFETY: the caller's contract for these rows.
        unsafe { run(weights, tile.x.add(row * tile.x_stride), tile.y.add(row * tile.y_stride), tile) };
        row += rows;
    }
}

type RegisterTile = unsafe fn(&[f32], *const f32, *mut f32, &Tile);

// At most 12 rows: 24 sums, 2 vectors of weights and a broadcast, of 32 registers.
register_tile!(
    rows_12, "avx512f", 16,
    (_mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_fmadd_ps),
    bases: (b0 0) (b1 3) (b2 6) (b3 9),
    rows: (l0 h0 0 = b0 0) (l1 h1 1 = b0 1) (l2 h2 2 = b0 2)
    (l3 h3 3 = b1 0) (l4 h4 4 = b1 1) (l5 h5 5 = b1 2)
    (l6 h6 6 = b2 0) (l7 h7 7 = b2 1) (l8 h8 8 = b2 2)
    (l9 h9 9 = b3 0) (l10 h10 10 = b3 1) (l11 h11 11 = b3 2)
);
register_tile!(
    rows_8, "avx512f", 16,
    (_mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_fmadd_ps),
    bases: (b0 0) (b1 3) (b2 6),
    rows: (l0 h0 0 = b0 0) (l1 h1 1 = b0 1) (l2 h2 2 = b0 2)
    (l3 h3 3 = b1 0) (l4 h4 4 = b1 1) (l5 h5 5 = b1 2)
    (l6 h6 6 = b2 0) (l7 h7 7 = b2 1)
);
register_tile!(
    rows_4, "avx512f", 16,
    (_mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_fmadd_ps),
    bases: (b0 0) (b1 3),
    rows: (l0 h0 0 = b0 0) (l1 h1 1 = b0 1) (l2 h2 2 = b0 2)
    (l3 h3 3 = b1 0)
);
register_tile!(
    rows_2, "avx512f", 16,
    (_mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_fmadd_ps),
    bases: (b0 0),
    rows: (l0 h0 0 = b0 0) (l1 h1 1 = b0 1)
);
register_tile!(
    rows_1, "avx512f", 16,
    (_mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_fmadd_ps),
    bases: (b0 0),
    rows: (l0 h0 0 = b0 0)
);
