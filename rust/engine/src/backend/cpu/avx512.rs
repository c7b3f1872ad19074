//! The vector tier's kernels for AVX-512; [`super::panels`] has their plain oracles.

use std::arch::x86_64::*;

use kvrelay_model::DType;

use super::panels::{PANEL, Tile};

/// Rows of a register tile: 12 x 2 sums, 2 vectors of weights, and broadcasts from memory.
const TILE_ROWS: usize = 12;

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
        let rows = TILE_ROWS.min(tile.rows - row);
        // SAFETY: the caller's contract for rows `row..row + rows`.
        unsafe {
            let x = tile.x.add(row * tile.x_stride);
            let y = tile.y.add(row * tile.y_stride);
            match rows {
                1 => rows_of::<1>(weights, x, y, tile),
                2 => rows_of::<2>(weights, x, y, tile),
                3 => rows_of::<3>(weights, x, y, tile),
                4 => rows_of::<4>(weights, x, y, tile),
                5 => rows_of::<5>(weights, x, y, tile),
                6 => rows_of::<6>(weights, x, y, tile),
                7 => rows_of::<7>(weights, x, y, tile),
                8 => rows_of::<8>(weights, x, y, tile),
                9 => rows_of::<9>(weights, x, y, tile),
                10 => rows_of::<10>(weights, x, y, tile),
                11 => rows_of::<11>(weights, x, y, tile),
                _ => rows_of::<TILE_ROWS>(weights, x, y, tile),
            }
        }
        row += rows;
    }
}

/// `R` rows, whose sums stay in registers.
///
/// # Safety
/// As for [`multiply`].
#[target_feature(enable = "avx512f")]
unsafe fn rows_of<const R: usize>(weights: &[f32], x: *const f32, y: *mut f32, tile: &Tile) {
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    // SAFETY: the caller's contract; `weights` holds `PANEL` numbers for each input.
    unsafe {
        if !tile.fresh {
            for (r, sums) in sums.iter_mut().enumerate() {
                let y = y.add(r * tile.y_stride);
                *sums = [_mm512_loadu_ps(y), _mm512_loadu_ps(y.add(16))];
            }
        }
        let mut w = weights.as_ptr();
        for k in 0..weights.len() / PANEL {
            let (low, high) = (_mm512_loadu_ps(w), _mm512_loadu_ps(w.add(16)));
            w = w.add(PANEL);
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = _mm512_set1_ps(*x.add(r * tile.x_stride + k));
                sums[0] = _mm512_fmadd_ps(x, low, sums[0]);
                sums[1] = _mm512_fmadd_ps(x, high, sums[1]);
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            let y = y.add(r * tile.y_stride);
            _mm512_storeu_ps(y, sums[0]);
            _mm512_storeu_ps(y.add(16), sums[1]);
        }
    }
}
