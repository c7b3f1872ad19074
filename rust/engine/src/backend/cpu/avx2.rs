//! The vector tier's kernels for AVX2, FMA and F16C; [`super::panels`] has their plain oracles.

use std::arch::x86_64::*;

use kvrelay_model::DType;

use super::panels::{PANEL, Tile};
use super::tile::register_tile;

/// Outputs of a register tile.
const TILE_COLUMNS: usize = 16;

/// See [`super::panels::unpack`].
///
/// # Safety
/// The machine has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn unpack(dtype: DType, packed: &[u8], out: &mut [f32]) {
    assert_eq!(packed.len() / dtype.block_bytes() * dtype.block_len(), out.len());
    let groups = packed.len() / (PANEL * dtype.block_bytes());
    // SAFETY: every group is `PANEL` blocks of the type, and makes as many rows of `out`.
    unsafe {
        let (mut from, mut to) = (packed.as_ptr(), out.as_mut_ptr());
        for _ in 0..groups {
            for c in (0..PANEL).step_by(8) {
                match dtype {
                    DType::F32 => _mm256_storeu_ps(to.add(c), _mm256_loadu_ps(from.cast::<f32>().add(c))),
                    DType::F16 => _mm256_storeu_ps(to.add(c), halves(from.add(2 * c))),
                    DType::BF16 => {
                        let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(2 * c).cast()));
                        _mm256_storeu_ps(to.add(c), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)));
                    }
                    DType::Q8_0 => bytes(from, c, to),
                    DType::Q4_0 => nibbles(from, c, false, to),
                    DType::Q4_1 => nibbles(from, c, true, to),
                }
            }
            from = from.add(PANEL * dtype.block_bytes());
            to = to.add(PANEL * dtype.block_len());
        }
    }
}

/// 8 half-precision numbers.
///
/// # Safety
/// 16 bytes can be read.
#[target_feature(enable = "avx2,f16c")]
unsafe fn halves(from: *const u8) -> __m256 {
    // SAFETY: the caller's contract.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(from.cast()) })
}

/// Outputs `c..c + 8` of a group of `Q8_0`.
///
/// # Safety
/// `from` is a group, `to` has room for it.
#[target_feature(enable = "avx2,f16c")]
unsafe fn bytes(from: *const u8, c: usize, to: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe {
        let scale = halves(from.add(2 * c));
        for k in 0..32 {
            let q = _mm_loadl_epi64(from.add(64 + 32 * k + c).cast());
            let q = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q));
            _mm256_storeu_ps(to.add(PANEL * k + c), _mm256_mul_ps(scale, q));
        }
    }
}

/// Outputs `c..c + 8` of a group of `Q4_1`, or of `Q4_0`, whose minimum is -8 scales.
///
/// # Safety
/// `from` is a group, `to` has room for it.
#[target_feature(enable = "avx2,f16c")]
unsafe fn nibbles(from: *const u8, c: usize, has_minimum: bool, to: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe {
        let values = from.add(if has_minimum { 128 } else { 64 });
        let scale = halves(from.add(2 * c));
        let minimum = match has_minimum {
            true => halves(from.add(64 + 2 * c)),
            false => _mm256_mul_ps(scale, _mm256_set1_ps(-8.0)),
        };
        for j in 0..16 {
            let q = _mm256_cvtepu8_epi32(_mm_loadl_epi64(values.add(32 * j + c).cast()));
            let low = _mm256_cvtepi32_ps(_mm256_and_si256(q, _mm256_set1_epi32(15)));
            let high = _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(q));
            // Rounded twice, like the plain unpacking.
            let low = _mm256_add_ps(_mm256_mul_ps(scale, low), minimum);
            let high = _mm256_add_ps(_mm256_mul_ps(scale, high), minimum);
            _mm256_storeu_ps(to.add(PANEL * j + c), low);
            _mm256_storeu_ps(to.add(PANEL * (j + 16) + c), high);
        }
    }
}

/// See [`super::panels::multiply`].
///
/// # Safety
/// The machine has AVX2 and FMA; otherwise as for [`super::panels::multiply`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn multiply(weights: &[f32], tile: &Tile) {
    for c in (0..PANEL).step_by(TILE_COLUMNS) {
        let mut row = 0;
        while row < tile.rows {
            let (rows, run): (usize, RegisterTile) = match tile.rows - row {
                6.. => (6, rows_6),
                4.. => (4, rows_4),
                2.. => (2, rows_2),
                _ => (1, rows_1),
            };
            // SAFETY: the caller's contract for these rows.
            unsafe {
                let (x, y) = (tile.x.add(row * tile.x_stride), tile.y.add(row * tile.y_stride + c));
                run(&weights[c..], x, y, tile);
            }
            row += rows;
        }
    }
}

type RegisterTile = unsafe fn(&[f32], *const f32, *mut f32, &Tile);

// At most 6 rows: 12 sums, 2 vectors of weights and a broadcast, of 16 registers.
register_tile!(
    rows_6, "avx2,fma", 8,
    (_mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_fmadd_ps),
    bases: (b0 0) (b1 3),
    rows: (l0 h0 0 = b0 0) (l1 h1 1 = b0 1) (l2 h2 2 = b0 2)
    (l3 h3 3 = b1 0) (l4 h4 4 = b1 1) (l5 h5 5 = b1 2)
);
register_tile!(
    rows_4, "avx2,fma", 8,
    (_mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_fmadd_ps),
    bases: (b0 0) (b1 3),
    rows: (l0 h0 0 = b0 0) (l1 h1 1 = b0 1) (l2 h2 2 = b0 2)
    (l3 h3 3 = b1 0)
);
register_tile!(
    rows_2, "avx2,fma", 8,
    (_mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_fmadd_ps),
    bases: (b0 0),
    rows: (l0 h0 0 = b0 0) (l1 h1 1 = b0 1)
);
register_tile!(
    rows_1, "avx2,fma", 8,
    (_mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_fmadd_ps),
    bases: (b0 0),
    rows: (l0 h0 0 = b0 0)
);
