//! Made-up numbers, and how near a kernel must come to its oracle.

use std::env;
use std::fmt::Debug;

use kvrelay_kernels::launch::Element;

/// A stream of made-up numbers: the same for the same seed (SplitMix64; Steele et al., 2014).
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// For shapes: other ones in every order of threads, the same when the same test is run again.
    pub(crate) fn of_this_run() -> Self {
        let settings =
            ["KVRELAY_EMU_ORDER", "KVRELAY_EMU_SEED"].map(|name| env::var(name).unwrap_or_default());
        let bytes = settings.iter().flat_map(|value| value.bytes());
        Self(bytes.fold(0, |hash: u64, byte| hash.wrapping_mul(257).wrapping_add(u64::from(byte))))
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    /// Between `least` and `most`, both included.
    pub(crate) fn between(&mut self, least: usize, most: usize) -> usize {
        least + self.below(most - least + 1)
    }

    /// Between `-size` and `size`.
    pub(crate) fn float(&mut self, size: f32) -> f32 {
        ((self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0) * size
    }

    pub(crate) fn floats(&mut self, count: usize, size: f32) -> Vec<f32> {
        (0..count).map(|_| self.float(size)).collect()
    }

    /// Elements between `-size` and `size`.
    pub(crate) fn elements<T: Element>(&mut self, count: usize, size: f32) -> Vec<T> {
        (0..count).map(|_| T::from_f32(self.float(size))).collect()
    }

    /// The numbers below `count` in some order.
    pub(crate) fn shuffled(&mut self, count: usize) -> Vec<i32> {
        let mut all: Vec<i32> = (0..count as i32).collect();
        for i in (1..count).rev() {
            all.swap(i, self.below(i + 1));
        }
        all
    }
}

/// The distance between an element of about 1 and the next: 2^-7 for bf16, which keeps 8 bits of a
/// number, and 2^-10 for f16, which keeps 11. Rounding is off by half of it at most.
pub(crate) fn spacing<T: Element>() -> f64 {
    match T::NAME {
        "bf16" => 2_f64.powi(-7),
        "f16" => 2_f64.powi(-10),
        other => panic!("no spacing is known of {other}"),
    }
}

pub(crate) fn wide<T: Element>(elements: &[T]) -> Vec<f64> {
    elements.iter().map(|x| f64::from(x.to_f32())).collect()
}

/// As a `T` would hold it.
pub(crate) fn rounded<T: Element>(number: f64) -> f64 {
    f64::from(T::from_f32(number as f32).to_f32())
}

/// Every number within `relative` of the expected one, or within `absolute`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Within {
    pub(crate) relative: f64,
    pub(crate) absolute: f64,
}

#[track_caller]
pub(crate) fn compare(what: &str, found: &[f64], expected: &[f64], within: Within) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    for (i, (&f, &e)) in found.iter().zip(expected).enumerate() {
        let allowed = within.absolute + within.relative * e.abs();
        // Not a number is never near.
        let near = (f - e).abs() <= allowed;
        assert!(near, "{what}: number {i} is {f}, expected {e} within {allowed:e}");
    }
}

/// As [`compare`], but what is expected to be infinite, or not a number, must be just that.
#[track_caller]
pub(crate) fn compare_not_finite(what: &str, found: &[f64], expected: &[f64], within: Within) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    for (i, (&f, &e)) in found.iter().zip(expected).enumerate() {
        if e.is_finite() {
            compare(&format!("{what}, number {i}"), &[f], &[e], within);
        } else {
            assert!(f == e || f.is_nan() && e.is_nan(), "{what}: number {i} is {f}, expected {e}");
        }
    }
}

/// That intermediate results are rounded where they should be: a hair in a sum turns few roundings, one
/// rounding more or less turns every fourth number. Of less than a hundred numbers nothing is said.
#[track_caller]
pub(crate) fn mostly_identical(what: &str, found: &[f64], expected: &[f64]) {
    let same = found.iter().zip(expected).filter(|(f, e)| f == e).count();
    assert!(
        found.len() < 100 || same * 100 >= found.len() * 95,
        "{what}: only {same} of {} numbers are the same",
        found.len()
    );
}

/// The same bits.
#[track_caller]
pub(crate) fn identical<T: PartialEq + Debug>(what: &str, found: &[T], expected: &[T]) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    if let Some(i) = (0..found.len()).find(|&i| found[i] != expected[i]) {
        panic!("{what}: number {i} is {:?}, expected {:?}", found[i], expected[i]);
    }
}
