//! Seeded randomness: one pinned stream per (seed, purpose, index).
//!
//! The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
//! SC'11), which is counter-based: a stream is a key and a place to count from, so that request
//! 1,000's numbers do not depend on how many the requests before it drew. The seed is the key; the
//! 128-bit counter holds, from its highest word down, the index (64 bits), the purpose and the
//! block. A stream has 2³⁴ words.
//!
//! All transcendental functions are `libm`'s: the same seed gives the same bits on every platform.

/// What a stream is for. Streams of different purposes share no numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Purpose(pub u32);

impl Purpose {
    /// Gaps between arrivals; indexed by arrival.
    pub const ARRIVALS: Purpose = Purpose(1);
    /// Prompt and output lengths; indexed by arrival.
    pub const LENGTHS: Purpose = Purpose(2);
    /// Token ids of made-up prompts; indexed by request.
    pub const TOKEN_IDS: Purpose = Purpose(3);
    /// Token ids of prompt blocks that a trace names; indexed by the trace's id.
    pub const BLOCK_TOKEN_IDS: Purpose = Purpose(5);
    /// A policy's own draws.
    pub const POLICY: Purpose = Purpose(4);
    /// How long an arrival process stays at one of its rates; indexed by phase.
    pub const PHASES: Purpose = Purpose(6);
    /// Pauses between an answer and the next request; indexed by the one that was answered.
    pub const THINK_TIMES: Purpose = Purpose(7);
    /// How many turns a session has; indexed by session.
    pub const TURNS: Purpose = Purpose(8);
}

/// Rounds of Philox, and the constants of its 4x32 variant.
const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// The Philox4x32-10 bijection of `counter` under `key`, lowest word first.
pub fn philox4x32(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let mut key = key;
    let mut x = counter;
    for _ in 0..ROUNDS {
        let product = |i: usize, word: u32| {
            let wide = u64::from(MULTIPLIERS[i]) * u64::from(word);
            ((wide >> 32) as u32, wide as u32)
        };
        let (high0, low0) = product(0, x[0]);
        let (high1, low1) = product(1, x[2]);
        x = [high1 ^ x[1] ^ key[0], low1, high0 ^ x[3] ^ key[1], low0];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    x
}

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Stream {
    key: [u32; 2],
    /// Words 1 to 3 of the counter; word 0 counts blocks.
    place: [u32; 3],
    next_block: u32,
    block: [u32; 4],
    used: usize,
}

impl Stream {
    /// The stream of `seed`, `purpose` and `index`.
    pub fn new(seed: u64, purpose: Purpose, index: u64) -> Stream {
        let words = |x: u64| [x as u32, (x >> 32) as u32];
        let [low, high] = words(index);
        Stream { key: words(seed), place: [purpose.0, low, high], next_block: 0, block: [0; 4], used: 4 }
    }

    /// 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.used == 4 {
            let [purpose, low, high] = self.place;
            self.block = philox4x32(self.key, [self.next_block, purpose, low, high]);
            self.next_block = self.next_block.wrapping_add(1);
            self.used = 0;
        }
        self.used += 1;
        self.block[self.used - 1]
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        u64::from(self.next_u32()) | u64::from(self.next_u32()) << 32
    }

    /// Uniform in the open interval (0, 1): a multiple of 2⁻⁵² plus 2⁻⁵³, so neither end occurs.
    pub fn uniform(&mut self) -> f64 {
        const STEP: f64 = 1.0 / (1u64 << 52) as f64;
        ((self.next_u64() >> 12) as f64 + 0.5) * STEP
    }

    /// Uniform over `0 .. bound`, without bias (Lemire, "Fast random integer generation in an
    /// interval", 2019).
    ///
    /// # Panics
    /// When `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "nothing lies below 0");
        loop {
            let wide = u128::from(self.next_u64()) * u128::from(bound);
            // Low halves under 2⁶⁴ mod bound belong to values that would come once too often.
            if wide as u64 >= bound.wrapping_neg() % bound {
                return (wide >> 64) as u64;
            }
        }
    }

    /// Exponential with mean 1.
    pub fn exponential(&mut self) -> f64 {
        -libm::log(self.uniform())
    }

    /// Standard normal, by inversion: one uniform a number.
    pub fn normal(&mut self) -> f64 {
        inverse_normal_cdf(self.uniform())
    }

    /// Gamma with the given shape and scale 1, so with mean and variance `shape`.
    ///
    /// Exact, by rejection (Marsaglia and Tsang, "A simple method for generating gamma variables",
    /// 2000); a shape below 1 is that of `shape + 1`, times a uniform to the power of 1 / shape.
    ///
    /// # Panics
    /// When `shape` is not positive and finite.
    pub fn gamma(&mut self, shape: f64) -> f64 {
        assert!(shape > 0.0 && shape.is_finite(), "a gamma variable of shape {shape}");
        if shape < 1.0 {
            let boost = libm::pow(self.uniform(), 1.0 / shape);
            return self.gamma(shape + 1.0) * boost;
        }
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let root = 1.0 + c * x;
            if root <= 0.0 {
                continue;
            }
            let v = root * root * root;
            if libm::log(self.uniform()) < 0.5 * x * x + d - d * v + d * libm::log(v) {
                return d * v;
            }
        }
    }
}

/// The standard normal distribution function.
pub fn normal_cdf(x: f64) -> f64 {
    0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}

/// The inverse of [`normal_cdf`] for `0 < p < 1`, to about 16 digits.
///
/// Wichura's algorithm AS 241 (PPND16), Applied Statistics 37 (1988): rational functions of
/// degree 7 for the centre and the two stretches of the tails.
pub fn inverse_normal_cdf(p: f64) -> f64 {
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        return q * ratio(&CENTRE, 0.180_625 - q * q);
    }
    let tail = if q < 0.0 { p } else { 1.0 - p };
    let r = (-libm::log(tail)).sqrt();
    let x = if r <= 5.0 { ratio(&NEAR_TAIL, r - 1.6) } else { ratio(&FAR_TAIL, r - 5.0) };
    if q < 0.0 { -x } else { x }
}

/// Numerator and denominator, lowest power first.
type Ratio = [[f64; 8]; 2];

fn ratio(terms: &Ratio, x: f64) -> f64 {
    let horner = |terms: &[f64; 8]| terms.iter().rev().fold(0.0, |sum, term| sum * x + term);
    horner(&terms[0]) / horner(&terms[1])
}

const CENTRE: Ratio = [
    [
        3.387_132_872_796_366_5,
        133.141_667_891_784_38,
        1_971.590_950_306_551_3,
        13_731.693_765_509_46,
        45_921.953_931_549_87,
        67_265.770_927_008_7,
        33_430.575_583_588_13,
        2_509.080_928_730_122_7,
    ],
    [
        1.0,
        42.313_330_701_600_91,
        687.187_007_492_057_9,
        5_394.196_021_424_751,
        21_213.794_301_586_597,
        39_307.895_800_092_71,
        28_729.085_735_721_943,
        5_226.495_278_852_854,
    ],
];

const NEAR_TAIL: Ratio = [
    [
        1.423_437_110_749_683_5,
        4.630_337_846_156_546,
        5.769_497_221_460_691,
        3.647_848_324_763_204_5,
        1.270_458_252_452_368_4,
        0.241_780_725_177_450_6,
        0.022_723_844_989_269_184,
        7.745_450_142_783_414e-4,
    ],
    [
        1.0,
        2.053_191_626_637_759,
        1.676_384_830_183_803_8,
        0.689_767_334_985_1,
        0.148_103_976_427_480_08,
        0.015_198_666_563_616_457,
        5.475_938_084_995_345e-4,
        1.050_750_071_644_416_9e-9,
    ],
];

const FAR_TAIL: Ratio = [
    [
        6.657_904_643_501_103,
        5.463_784_911_164_114,
        1.784_826_539_917_291_3,
        0.296_560_571_828_504_87,
        0.026_532_189_526_576_124,
        0.001_242_660_947_388_078_4,
        2.711_555_568_743_487_6e-5,
        2.010_334_399_292_288_1e-7,
    ],
    [
        1.0,
        0.599_832_206_555_888,
        0.136_929_880_922_735_8,
        0.014_875_361_290_850_615,
        7.868_691_311_456_133e-4,
        1.846_318_317_510_054_7e-5,
        1.421_511_758_316_446e-7,
        2.044_263_103_389_939_8e-15,
    ],
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that come with Random123 (kat_vectors, philox4x32 10).
    #[test]
    fn philox_gives_its_known_answers() {
        let ones = u32::MAX;
        for (key, counter, answer) in [
            ([0; 2], [0; 4], [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]),
            ([ones; 2], [ones; 4], [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]),
            (
                [0xA409_3822, 0x299F_31D0],
                [0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344],
                [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1],
            ),
        ] {
            assert_eq!(philox4x32(key, counter), answer);
        }
    }

    #[test]
    fn streams_are_their_place_and_nothing_else() {
        let draw = |seed, purpose, index| Stream::new(seed, purpose, index).next_u64();
        let base = draw(7, Purpose::ARRIVALS, 3);
        assert_eq!(base, draw(7, Purpose::ARRIVALS, 3));
        assert_ne!(base, draw(8, Purpose::ARRIVALS, 3));
        assert_ne!(base, draw(7, Purpose::LENGTHS, 3));
        assert_ne!(base, draw(7, Purpose::ARRIVALS, 4));
        let mut stream = Stream::new(7, Purpose(2), 5 << 32 | 6);
        let block = philox4x32([7, 0], [1, 2, 6, 5]);
        assert_eq!(stream.nth_u32(4), block[0]);
    }

    impl Stream {
        fn nth_u32(&mut self, n: usize) -> u32 {
            (0..=n).map(|_| self.next_u32()).last().unwrap()
        }
    }

    /// Values of CPython 3.11's statistics.NormalDist, itself checked against R.
    #[test]
    fn the_normal_quantiles_are_right() {
        for (p, x) in [
            (0.5, 0.0),
            (0.975, 1.959_963_984_540_054),
            (0.9, 1.281_551_565_544_600_4),
            (0.025, -1.959_963_984_540_054),
            (1e-6, -4.753_424_308_822_899),
            (1e-20, -9.262_340_089_798_409),
        ] {
            assert!((inverse_normal_cdf(p) - x).abs() <= 4e-15 * x.abs(), "{p}: {}", inverse_normal_cdf(p));
        }
        for i in 1..2_000 {
            let p = f64::from(i) / 2_000.0;
            assert!((normal_cdf(inverse_normal_cdf(p)) - p).abs() < 1e-14, "{p}");
        }
    }

    /// Mean and variance of `num` draws, as distances from the truth in standard errors of the mean.
    fn mean_and_variance(num: u32, draw: impl Fn(&mut Stream) -> f64) -> (f64, f64) {
        let draws: Vec<f64> =
            (0..num).map(|i| draw(&mut Stream::new(1, Purpose::LENGTHS, u64::from(i)))).collect();
        let mean = draws.iter().sum::<f64>() / f64::from(num);
        let variance = draws.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / f64::from(num - 1);
        (mean, variance)
    }

    #[test]
    fn moments_are_within_three_standard_errors() {
        let num = 40_000;
        let check = |what: &str, (mean, variance): (f64, f64), truth: (f64, f64)| {
            let error = (truth.1 / f64::from(num)).sqrt();
            assert!((mean - truth.0).abs() < 3.0 * error, "{what}: mean {mean}");
            assert!((variance / truth.1 - 1.0).abs() < 0.06, "{what}: variance {variance}");
        };
        check("uniform", mean_and_variance(num, Stream::uniform), (0.5, 1.0 / 12.0));
        check("normal", mean_and_variance(num, Stream::normal), (0.0, 1.0));
        check("exponential", mean_and_variance(num, Stream::exponential), (1.0, 1.0));
        for shape in [0.3, 1.0, 4.5, 60.0] {
            check("gamma", mean_and_variance(num, |stream| stream.gamma(shape)), (shape, shape));
        }
        check("below", mean_and_variance(num, |stream| stream.below(6) as f64), (2.5, 35.0 / 12.0));
    }

    #[test]
    fn bounds_hold_at_the_edges() {
        let mut stream = Stream::new(0, Purpose::POLICY, 0);
        for bound in [1, 2, 3, (1 << 63) + 1, u64::MAX] {
            assert!((0..100).all(|_| stream.below(bound) < bound));
        }
        assert!((0..10_000).map(|_| stream.uniform()).all(|x| x > 0.0 && x < 1.0));
    }
}
