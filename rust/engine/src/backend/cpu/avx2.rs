//! The vector tier's kernels for AVX2, FMA and F16C; [`super::panels`] has their plain oracles.

use std::arch::x86_64::*;

use kvrelay_model::DType;

use super::panels::{PANEL, Tile};

/// Rows of a register tile: 6 x 2 sums, 2 vectors of weights and one broadcast of 16 registers.
const TILE_ROWS: usize = 6;
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
            let rows = TILE_ROWS.min(tile.rows - row);
            // SAFETY: the caller's contract for rows `row..row + rows`.
            unsafe {
                let x = tile.x.add(row * tile.x_stride);
                let y = tile.y.add(row * tile.y_stride + c);
                match rows {
                    1 => rows_of::<1>(&weights[c..], x, y, tile),
                    2 => rows_of::<2>(&weights[c..], x, y, tile),
                    3 => rows_of::<3>(&weights[c..], x, y, tile),
                    4 => rows_of::<4>(&weights[c..], x, y, tile),
                    5 => rows_of::<5>(&weights[c..], x, y, tile),
                    _ => rows_of::<TILE_ROWS>(&weights[c..], x, y, tile),
                }
            }
            row += rows;
        }
    }
}

/// `R` rows of [`TILE_COLUMNS`] outputs, whose sums stay in registers; `weights` begins at the
/// first of the outputs.
///
/// # Safety
/// As for [`multiply`].
#[target_feature(enable = "avx2,fma")]
unsafe fn rows_of<const R: usize>(weights: &[f32], x: *const f32, y: *mut f32, tile: &Tile) {
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    // SAFETY: the caller's contract; `weights` holds `PANEL` numbers for each input, less at
    // most the outputs before the tile.
    unsafe {
        if !tile.fresh {
            for (r, sums) in sums.iter_mut().enumerate() {
                let y = y.add(r * tile.y_stride);
                *sums = [_mm256_loadu_ps(y), _mm256_loadu_ps(y.add(8))];
            }
        }
        let w = weights.as_ptr();
        for k in 0..weights.len().div_ceil(PANEL) {
            let w = w.add(k * PANEL);
            let (low, high) = (_mm256_loadu_ps(w), _mm256_loadu_ps(w.add(8)));
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = _mm256_set1_ps(*x.add(r * tile.x_stride + k));
                sums[0] = _mm256_fmadd_ps(x, low, sums[0]);
                sums[1] = _mm256_fmadd_ps(x, high, sums[1]);
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            let y = y.add(r * tile.y_stride);
            _mm256_storeu_ps(y, sums[0]);
            _mm256_storeu_ps(y.add(8), sums[1]);
        }
    }
}
