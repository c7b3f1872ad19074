//! The kernels in plain code, generic over how a product is added.
//!
//! Each function fixes its order of accumulation: sums run over a fixed number of lanes that are
//! folded by halves, attention goes through the positions in order. The order depends on the
//! length alone. IEEE addition and multiplication are exact in that sense whatever registers the
//! compiler uses, so one function compiled for several instruction sets gives the same bits;
//! only [`Fused`] rounds differently from [`Separate`].

use crate::backend::KvPool;

/// Lanes of a sum over a row of weights.
const ROW_LANES: usize = 32;
/// Lanes of a sum over a head.
const HEAD_LANES: usize = 16;
/// Rows of weights that one call of [`dots`] takes.
pub(super) const DOT_ROWS: usize = 4;

/// How `a * b + c` is rounded.
pub(super) trait Arithmetic {
    /// `a * b + c`
    fn multiply_add(a: f32, b: f32, c: f32) -> f32;
}

/// After the product and after the sum: the same on every machine.
pub(super) struct Separate;

/// Once, where the machine can.
pub(super) struct Fused;

impl Arithmetic for Separate {
    #[inline(always)]
    fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

impl Arithmetic for Fused {
    #[inline(always)]
    fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

/// How two lanes become one.
#[derive(Clone, Copy)]
enum Combine {
    Add,
    Larger,
}

impl Combine {
    #[inline(always)]
    fn of(self, a: f32, b: f32) -> f32 {
        match self {
            Self::Add => a + b,
            Self::Larger if a > b => a,
            Self::Larger => b,
        }
    }
}

/// Folds the upper half of the lanes onto the lower until one is left. Spelled out in whole
/// arrays, without closures, so that the lanes never leave their registers.
#[inline(always)]
fn fold(lanes: [f32; HEAD_LANES], by: Combine) -> f32 {
    let (mut eight, mut four) = ([0.0; 8], [0.0; 4]);
    for i in 0..8 {
        eight[i] = by.of(lanes[i], lanes[i + 8]);
    }
    for i in 0..4 {
        four[i] = by.of(eight[i], eight[i + 4]);
    }
    by.of(by.of(four[0], four[2]), by.of(four[1], four[3]))
}

/// As [`fold`], the sum of the lanes of a row.
#[inline(always)]
fn fold_row(lanes: [f32; ROW_LANES]) -> f32 {
    let mut half = [0.0; HEAD_LANES];
    for i in 0..HEAD_LANES {
        half[i] = lanes[i] + lanes[i + HEAD_LANES];
    }
    fold(half, Combine::Add)
}

#[inline(always)]
fn add_products<A: Arithmetic, const L: usize>(x: &[f32; L], y: &[f32; L], mut lanes: [f32; L]) -> [f32; L] {
    for i in 0..L {
        lanes[i] = A::multiply_add(x[i], y[i], lanes[i]);
    }
    lanes
}

/// A last, short chunk with zeros behind it: lanes indexed by a variable would live in memory.
#[inline(always)]
fn padded<const L: usize>(rest: &[f32]) -> [f32; L] {
    let mut out = [0.0; L];
    out[..rest.len()].copy_from_slice(rest);
    out
}

#[inline(always)]
fn lane_sums<A: Arithmetic, const L: usize>(x: &[f32], y: &[f32]) -> [f32; L] {
    let mut lanes = [0.0; L];
    let (x, x_rest) = x.as_chunks::<L>();
    let (y, y_rest) = y.as_chunks::<L>();
    for (x, y) in x.iter().zip(y) {
        lanes = add_products::<A, L>(x, y, lanes);
    }
    if !x_rest.is_empty() {
        lanes = add_products::<A, L>(&padded(x_rest), &padded(y_rest), lanes);
    }
    lanes
}

/// The products of `x` with [`DOT_ROWS`] rows of weights, each as it would be alone.
#[inline(always)]
pub(super) fn dots<A: Arithmetic>(x: &[f32], weights: &[f32], out: &mut [f32; DOT_ROWS]) {
    let columns = x.len();
    let rows: [&[f32]; DOT_ROWS] = std::array::from_fn(|r| &weights[r * columns..(r + 1) * columns]);
    let (mut a, mut b, mut c, mut d) =
        ([0.0; ROW_LANES], [0.0; ROW_LANES], [0.0; ROW_LANES], [0.0; ROW_LANES]);
    let (chunks, rest) = x.as_chunks::<ROW_LANES>();
    let [rows_a, rows_b, rows_c, rows_d] = rows.map(|row| row.as_chunks::<ROW_LANES>().0);
    for ((((x, row_a), row_b), row_c), row_d) in chunks.iter().zip(rows_a).zip(rows_b).zip(rows_c).zip(rows_d)
    {
        a = add_products::<A, ROW_LANES>(x, row_a, a);
        b = add_products::<A, ROW_LANES>(x, row_b, b);
        c = add_products::<A, ROW_LANES>(x, row_c, c);
        d = add_products::<A, ROW_LANES>(x, row_d, d);
    }
    for ((lanes, row), out) in [a, b, c, d].into_iter().zip(rows).zip(out) {
        let row = &row[columns - rest.len()..];
        let lanes = if rest.is_empty() {
            lanes
        } else {
            add_products::<A, ROW_LANES>(&padded(rest), &padded(row), lanes)
        };
        *out = fold_row(lanes);
    }
}

/// `e^x` for `x` up to 88, within 2 units in the last place; far below it is nearly 0. The
/// reduction and the polynomial are those of Cephes' `expf`.
#[inline(always)]
fn exp<A: Arithmetic>(x: f32) -> f32 {
    /// Adding and taking away 1.5 * 2^23 rounds to a whole number.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // ln 2 in two parts, the first of few bits, so that the difference stays exact.
    let r = A::multiply_add(n, -0.693_359_4, x);
    let r = A::multiply_add(n, 2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5] {
        p = A::multiply_add(p, r, c);
    }
    let y = A::multiply_add(p * r, r, r + 1.0);
    // The low bits of `shifted` are n: no conversion, so that loops over this stay vectors.
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    y * f32::from_bits(exponent << 23)
}

/// Adds `delta` to the residual stream `x`, and writes its RMS norm times `weight` to `out`
/// (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019).
#[inline(always)]
pub(super) fn norm<A: Arithmetic>(
    x: &mut [f32],
    delta: Option<&[f32]>,
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    if let Some(delta) = delta {
        for (x, d) in x.iter_mut().zip(delta) {
            *x += d;
        }
    }
    let mean = fold_row(lane_sums::<A, ROW_LANES>(x, x)) / x.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    for ((out, x), w) in out.iter_mut().zip(x.iter()).zip(weight) {
        *out = x * scale * w;
    }
}

/// `gate = silu(gate) * up` (Shazeer, "GLU Variants Improve Transformer", 2020).
#[inline(always)]
pub(super) fn swiglu<A: Arithmetic>(gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = *g / (1.0 + exp::<A>(-*g)) * u;
    }
}

/// Turns the half-split pairs of a head; `rotation` is its cosines, then its sines.
#[inline(always)]
pub(super) fn rotate<A: Arithmetic>(head: &mut [f32], rotation: &[f32]) {
    let half = head.len() / 2;
    let (low, high) = head.split_at_mut(half);
    let (cos, sin) = rotation.split_at(half);
    for i in 0..half {
        let (a, b) = (low[i], high[i]);
        low[i] = A::multiply_add(a, cos[i], -(b * sin[i]));
        high[i] = A::multiply_add(b, cos[i], a * sin[i]);
    }
}

/// The keys and values of one KV head of one layer, as the block table of a sequence finds them.
#[derive(Clone, Copy)]
pub(super) struct KvHead<'a> {
    pub(super) pool: &'a KvPool,
    pub(super) blocks: &'a [u32],
    /// Elements from the start of a block to this head's keys.
    pub(super) keys: usize,
    /// Elements from the start of a block to this head's values.
    pub(super) values: usize,
    /// Positions to attend to, from 0.
    pub(super) len: usize,
}

impl KvHead<'_> {
    /// The first position of each block, and what the block holds at `offset`.
    ///
    /// # Safety
    /// The first `len` positions must be written, and nothing may write them meanwhile.
    #[inline(always)]
    unsafe fn chunks(&self, offset: usize) -> impl Iterator<Item = (usize, &[f32])> {
        let geometry = self.pool.geometry();
        let (size, dim) = (geometry.block_size, geometry.head_dim);
        self.blocks.iter().enumerate().take(self.len.div_ceil(size)).map(move |(index, &block)| {
            let first = index * size;
            let tokens = size.min(self.len - first);
            // SAFETY: a head's keys or values are `size * dim` elements from `offset` on, inside
            // the block; the caller excludes writers.
            (first, unsafe { std::slice::from_raw_parts(self.pool.block(block).add(offset), tokens * dim) })
        })
    }
}

/// Attention of one query head over `kv` into `out`; `scores` has room for `kv.len` numbers.
///
/// # Safety
/// As for [`KvHead::chunks`].
#[inline(always)]
pub(super) unsafe fn attend<A: Arithmetic>(
    query: &[f32],
    kv: KvHead<'_>,
    scores: &mut [f32],
    out: &mut [f32],
) {
    let dim = query.len();
    let scale = 1.0 / (dim as f32).sqrt();
    let scores = &mut scores[..kv.len];
    // SAFETY: the caller's contract.
    for (first, keys) in unsafe { kv.chunks(kv.keys) } {
        for (score, key) in scores[first..].iter_mut().zip(keys.chunks_exact(dim)) {
            *score = fold(lane_sums::<A, HEAD_LANES>(query, key), Combine::Add) * scale;
        }
    }
    let sum = softmax_numerators::<A>(scores);
    let mut at = 0;
    while at < dim {
        // SAFETY: the caller's contract.
        at += unsafe {
            match dim - at {
                64.. => mix_four::<A>(scores, kv, at, out),
                16.. => mix::<A, 16>(scores, kv, at, out),
                _ => mix::<A, 1>(scores, kv, at, out),
            }
        };
    }
    let inverse = 1.0 / sum;
    for x in out {
        *x *= inverse;
    }
}

/// Replaces scores by `e^(score - max)` and gives their sum.
#[inline(always)]
fn softmax_numerators<A: Arithmetic>(scores: &mut [f32]) -> f32 {
    let mut largest = [f32::NEG_INFINITY; HEAD_LANES];
    let (chunks, rest) = scores.as_chunks::<HEAD_LANES>();
    for chunk in chunks {
        for i in 0..HEAD_LANES {
            largest[i] = Combine::Larger.of(chunk[i], largest[i]);
        }
    }
    for (i, &x) in rest.iter().enumerate() {
        largest[i] = Combine::Larger.of(x, largest[i]);
    }
    let max = fold(largest, Combine::Larger);
    let mut sums = [0.0; HEAD_LANES];
    let (chunks, rest) = scores.as_chunks_mut::<HEAD_LANES>();
    for chunk in chunks {
        for i in 0..HEAD_LANES {
            chunk[i] = exp::<A>(chunk[i] - max);
            sums[i] += chunk[i];
        }
    }
    for (i, x) in rest.iter_mut().enumerate() {
        *x = exp::<A>(*x - max);
        sums[i] += *x;
    }
    fold(sums, Combine::Add)
}

/// `sums + weight * value`
#[inline(always)]
fn add_scaled<A: Arithmetic, const N: usize>(weight: f32, value: &[f32], mut sums: [f32; N]) -> [f32; N] {
    let value = &value[..N];
    for i in 0..N {
        sums[i] = A::multiply_add(weight, value[i], sums[i]);
    }
    sums
}

/// Elements `at..at + N` of the weighted sum of the values, position by position; gives `N`.
///
/// # Safety
/// As for [`KvHead::chunks`].
#[inline(always)]
unsafe fn mix<A: Arithmetic, const N: usize>(
    weights: &[f32],
    kv: KvHead<'_>,
    at: usize,
    out: &mut [f32],
) -> usize {
    let dim = kv.pool.geometry().head_dim;
    let mut sums = [0.0; N];
    // SAFETY: the caller's contract.
    for (first, values) in unsafe { kv.chunks(kv.values) } {
        for (weight, value) in weights[first..].iter().zip(values.chunks_exact(dim)) {
            sums = add_scaled::<A, N>(*weight, &value[at..], sums);
        }
    }
    out[at..at + N].copy_from_slice(&sums);
    N
}

/// As [`mix`] four times 16 elements in one pass; four named sums stay in registers where an
/// array of 64 does not.
///
/// # Safety
/// As for [`KvHead::chunks`].
#[inline(always)]
unsafe fn mix_four<A: Arithmetic>(weights: &[f32], kv: KvHead<'_>, at: usize, out: &mut [f32]) -> usize {
    let dim = kv.pool.geometry().head_dim;
    let (mut a, mut b, mut c, mut d) = ([0.0; 16], [0.0; 16], [0.0; 16], [0.0; 16]);
    // SAFETY: the caller's contract.
    for (first, values) in unsafe { kv.chunks(kv.values) } {
        for (weight, value) in weights[first..].iter().zip(values.chunks_exact(dim)) {
            let value = &value[at..at + 64];
            a = add_scaled::<A, 16>(*weight, value, a);
            b = add_scaled::<A, 16>(*weight, &value[16..], b);
            c = add_scaled::<A, 16>(*weight, &value[32..], c);
            d = add_scaled::<A, 16>(*weight, &value[48..], d);
        }
    }
    for (out, sums) in out[at..at + 64].chunks_exact_mut(16).zip([a, b, c, d]) {
        out.copy_from_slice(&sums);
    }
    64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close() {
        for i in -8000..=800 {
            let x = i as f32 / 100.0;
            let exact = libm::exp(f64::from(x));
            for y in [exp::<Separate>(x), exp::<Fused>(x)] {
                assert!((f64::from(y) / exact - 1.0).abs() < 3e-7, "{x}: {y} {exact}");
            }
        }
        assert!(exp::<Separate>(-1e30) < 1e-37);
        assert_eq!(exp::<Separate>(0.0), 1.0);
    }

    #[test]
    fn four_dots_are_four_single_dots() {
        for columns in [1, 31, 32, 33, 96, 100] {
            let number = |i: usize| ((i * 7919 % 1000) as f32 - 500.0) / 300.0;
            let x: Vec<f32> = (0..columns).map(number).collect();
            let w: Vec<f32> = (0..columns * DOT_ROWS).map(|i| number(i + 3)).collect();
            let mut out = [0.0; DOT_ROWS];
            dots::<Separate>(&x, &w, &mut out);
            for (r, out) in out.iter().enumerate() {
                let row = &w[r * columns..(r + 1) * columns];
                assert_eq!(*out, fold_row(lane_sums::<Separate, ROW_LANES>(&x, row)));
                let exact: f64 = x.iter().zip(row).map(|(a, b)| f64::from(a * b)).sum();
                assert!((f64::from(*out) - exact).abs() < 1e-4);
            }
        }
    }
}
