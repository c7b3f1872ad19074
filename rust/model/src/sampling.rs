//! From logits to a token.
//!
//! Everything that depends on order is fixed, so that a token is a function of its logits, the
//! parameters and the position alone:
//! 1. temperature 0 is greedy: the largest logit, ties to the lowest id;
//! 2. otherwise weights are `exp((logit - max) / temperature)`, in `f64`;
//! 3. `top_k` keeps the `k` largest logits (ties to the lowest id);
//! 4. `top_p` keeps the shortest run of those, largest first, whose weights reach `top_p` of
//!    what step 3 left;
//! 5. one Philox draw (key = seed, counter = position of the token to be sampled) walks the
//!    remaining candidates: largest first when step 3 or 4 applied, by id otherwise.

use std::cmp::Ordering;

use kvrelay_core::rng::philox4x32;

use crate::ModelError;

/// How one request chooses its tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParams {
    /// Finite and not negative; 0 is greedy.
    pub temperature: f32,
    /// Candidates kept; -1, 0, and anything from the vocabulary size on, mean all.
    pub top_k: i64,
    /// Probability mass kept, above 0 and at most 1; 1 means all.
    pub top_p: f32,
    /// Key of the request's random stream.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

impl SamplingParams {
    /// Refuses values that would poison the sampler, naming the field and its range.
    pub fn validate(&self) -> Result<(), ModelError> {
        let refuse = |field, expected, found: String| Err(ModelError::Parameter { field, expected, found });
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return refuse("temperature", "a finite number of at least 0", self.temperature.to_string());
        }
        if self.top_k < -1 {
            return refuse("top_k", "-1 or 0 (off), or a positive number", self.top_k.to_string());
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refuse("top_p", "a number above 0 and at most 1", self.top_p.to_string());
        }
        Ok(())
    }
}

/// Chooses tokens; holds the scratch memory, so that a step allocates nothing.
#[derive(Debug)]
pub struct Sampler {
    weights: Vec<f64>,
    candidates: Vec<u32>,
}

impl Sampler {
    /// A sampler for `vocab_size` logits.
    pub fn new(vocab_size: usize) -> Self {
        Self { weights: vec![0.0; vocab_size], candidates: Vec::with_capacity(vocab_size) }
    }

    /// The token at `position` (counted from the start of its sequence, so the length of what
    /// precedes it) under `params`. A NaN or infinite logit is an error.
    ///
    /// [`SamplingParams::validate`] refuses other values; here they mean what is nearest, as in the
    /// kernel: a temperature that is not above 0 is 0, an infinite one the largest that is finite; a
    /// `top_p` that is not below 1 is 1, one that is not above 0 keeps the largest logit alone.
    ///
    /// # Panics
    /// If `logits` is not as long as the vocabulary.
    pub fn sample(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        position: u64,
    ) -> Result<u32, ModelError> {
        assert_eq!(logits.len(), self.weights.len(), "logits against the vocabulary");
        let best = argmax(logits)?;
        if params.temperature.is_nan() || params.temperature <= 0.0 {
            return Ok(best);
        }
        let top_p = if params.top_p < 1.0 { params.top_p.max(0.0) } else { 1.0 };
        let max = f64::from(logits[best as usize]);
        let temperature = f64::from(params.temperature.min(f32::MAX));
        for (weight, &logit) in self.weights.iter_mut().zip(logits) {
            *weight = libm::exp((f64::from(logit) - max) / temperature);
        }
        let draw = uniform(params.seed, position);
        let vocab = logits.len();
        let k = usize::try_from(params.top_k).ok().filter(|&k| k > 0 && k < vocab).unwrap_or(vocab);
        if k == vocab && top_p == 1.0 {
            return Ok(walk(&self.weights, 0..vocab as u32, draw).unwrap_or(best));
        }
        self.rank(logits, k, f64::from(top_p));
        Ok(walk(&self.weights, self.candidates.iter().copied(), draw).unwrap_or(best))
    }

    /// Leaves the kept candidates in `self.candidates`, largest first.
    fn rank(&mut self, logits: &[f32], k: usize, top_p: f64) {
        let order = |a: &u32, b: &u32| -> Ordering {
            logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b))
        };
        self.candidates.clear();
        if k < logits.len() {
            self.candidates.extend(0..logits.len() as u32);
            self.candidates.select_nth_unstable_by(k - 1, order);
            self.candidates.truncate(k);
        } else {
            // Tokens lighter than (1 - top_p) / vocabulary weigh less than 1 - top_p together,
            // so the nucleus lies among the others and only those need sorting.
            let total: f64 = self.weights.iter().sum();
            let floor = total * (1.0 - top_p) / logits.len() as f64;
            let heavy = (0..logits.len() as u32).filter(|&id| self.weights[id as usize] >= floor);
            self.candidates.extend(heavy);
        }
        self.candidates.sort_unstable_by(order);
        if top_p < 1.0 {
            let mass = |ids: &[u32]| ids.iter().map(|&id| self.weights[id as usize]).sum::<f64>();
            let total = if k < logits.len() { mass(&self.candidates) } else { self.weights.iter().sum() };
            let mut reached = 0.0;
            let kept = self.candidates.iter().position(|&id| {
                reached += self.weights[id as usize];
                reached >= top_p * total
            });
            self.candidates.truncate(kept.map_or(self.candidates.len(), |last| last + 1));
        }
    }
}

/// The largest logit's id, ties to the lowest; an infinite or undefined logit is an error.
pub fn argmax(logits: &[f32]) -> Result<u32, ModelError> {
    let mut best = 0;
    for (id, &logit) in logits.iter().enumerate() {
        if !logit.is_finite() {
            return Err(ModelError::Logits { token: id, found: logit });
        }
        if logit > logits[best] {
            best = id;
        }
    }
    Ok(best as u32)
}

/// The draw of request `seed` for the token at `position`, in `[0, 1)` with 53 bits: Philox4x32-10
/// with key = seed (low word first), counter = position (low word first, upper two words zero). So
/// any draw can be computed alone, on every device.
pub fn uniform(seed: u64, position: u64) -> f64 {
    let key = [seed as u32, (seed >> 32) as u32];
    let [low, high, ..] = philox4x32(key, [position as u32, (position >> 32) as u32, 0, 0]);
    let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
    bits as f64 * (1.0 / (1_u64 << 53) as f64)
}

/// The first id at which the running weight exceeds `draw` of the total.
fn walk(weights: &[f64], ids: impl Iterator<Item = u32> + Clone, draw: f64) -> Option<u32> {
    let total: f64 = ids.clone().map(|id| weights[id as usize]).sum();
    let mut reached = 0.0;
    let mut last = None;
    for id in ids {
        let weight = weights[id as usize];
        reached += weight;
        if weight > 0.0 {
            last = Some(id);
        }
        if reached > draw * total {
            return Some(id);
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn params(temperature: f32, top_k: i64, top_p: f32, seed: u64) -> SamplingParams {
        SamplingParams { temperature, top_k, top_p, seed }
    }

    #[test]
    fn ranges_are_checked_by_name() {
        let bad = [
            ("temperature", params(f32::NAN, 0, 1.0, 0)),
            ("temperature", params(f32::INFINITY, 0, 1.0, 0)),
            ("temperature", params(-1.0, 0, 1.0, 0)),
            ("top_k", params(1.0, -2, 1.0, 0)),
            ("top_k", params(1.0, i64::MIN, 1.0, 0)),
            ("top_p", params(1.0, 0, 0.0, 0)),
            ("top_p", params(1.0, 0, 1.5, 0)),
            ("top_p", params(1.0, 0, f32::NAN, 0)),
        ];
        for (name, params) in bad {
            assert!(params.validate().unwrap_err().to_string().starts_with(name));
        }
        for top_k in [-1, 0, 1, 4, 5, 1_000_000_000, i64::MAX] {
            params(0.7, top_k, 0.9, 0).validate().unwrap();
        }
    }

    /// Published texts are reproduced from their seeds: the stream may never change.
    #[test]
    fn the_stream_is_pinned() {
        for (seed, position, bits) in [
            (0, 0, 0x3fec_2d38_b1ac_c4fd),
            (7, 0, 0x3fe8_013f_3b9e_8c0f),
            (7, 1, 0x3fe9_72f7_826d_05d1),
            (7 | 1 << 40, 5, 0x3fcb_e7e0_a6b6_a798),
            (u64::MAX, 1 << 33, 0x3fd9_4cad_81d8_985c),
        ] {
            assert_eq!(uniform(seed, position).to_bits(), bits, "seed {seed}, position {position}");
        }
    }

    #[test]
    fn draws_are_uniform() {
        let draws: Vec<f64> = (0..10_000).map(|position| uniform(7, position)).collect();
        assert!(draws.iter().all(|u| (0.0..1.0).contains(u)));
        let mean = draws.iter().sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
    }

    #[test]
    fn greedy_breaks_ties_by_id() {
        let mut sampler = Sampler::new(4);
        assert_eq!(sampler.sample(&[1.0, 3.0, 3.0, 2.0], &params(0.0, 0, 1.0, 0), 5).unwrap(), 1);
        assert_eq!(sampler.sample(&[0.0; 4], &params(0.0, 0, 1.0, 0), 5).unwrap(), 0);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(sampler.sample(&[0.0, bad, 0.0, 0.0], &params(0.0, 0, 1.0, 0), 5).is_err());
        }
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0_f32, 1.0, 2.0, -1.0];
        let mut sampler = Sampler::new(4);
        let mut counts = [0.0; 4];
        let n = 20_000;
        for position in 0..n {
            counts[sampler.sample(&logits, &params(0.8, 0, 1.0, 3), position).unwrap() as usize] += 1.0;
        }
        let weights = logits.map(|l| libm::exp(f64::from(l) / f64::from(0.8_f32)));
        let total: f64 = weights.iter().sum();
        for (count, weight) in counts.iter().zip(weights) {
            assert!((count / n as f64 - weight / total).abs() < 0.015);
        }
    }

    #[test]
    fn what_is_out_of_range_means_what_is_nearest() {
        let mut sampler = Sampler::new(4);
        let mut same = |found, nearest| {
            for position in 0..200 {
                let [found, nearest] =
                    [found, nearest].map(|p| sampler.sample(&[0.3, 1.0, 0.9, -1.0], &p, position).unwrap());
                assert_eq!(found, nearest, "position {position}");
            }
        };
        for top_k in [0, 3] {
            for top_p in [0.0, -0.0, -1.0, f32::NEG_INFINITY] {
                same(params(1.0, top_k, top_p, 5), params(0.0, 0, 1.0, 5));
            }
            for top_p in [1.5, f32::INFINITY, f32::NAN] {
                same(params(1.0, top_k, top_p, 5), params(1.0, top_k, 1.0, 5));
            }
            for temperature in [-1.0, -0.0, f32::NEG_INFINITY, f32::NAN] {
                same(params(temperature, top_k, 0.9, 5), params(0.0, 0, 1.0, 5));
            }
            same(params(f32::INFINITY, top_k, 0.9, 5), params(f32::MAX, top_k, 0.9, 5));
        }
    }

    #[test]
    fn extreme_temperatures_stay_finite() {
        let mut sampler = Sampler::new(3);
        for temperature in [f32::MIN_POSITIVE, 1e-30, 1e30, f32::MAX] {
            let p = params(temperature, 0, 0.9, 1);
            assert!(sampler.sample(&[1e30, -1e30, 0.0], &p, 0).unwrap() < 3);
        }
    }

    proptest! {
        /// What may be drawn is what a plain sort-and-sum says, and "off" values change nothing.
        #[test]
        fn kept_set_matches_the_plain_definition(
            logits in prop::collection::vec(-4.0_f32..4.0, 2..40),
            k in -1_i64..50, top_p in 0.05_f32..=1.0, seed: u64, position in 0_u64..1000,
        ) {
            let n = logits.len();
            let mut order: Vec<usize> = (0..n).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
            if k > 0 { order.truncate(k as usize); }
            let max = logits[order[0]];
            let w = |i: usize| libm::exp(f64::from(logits[i]) - f64::from(max));
            let total: f64 = order.iter().map(|&i| w(i)).sum();
            let mut reached = 0.0;
            let mut allowed = vec![];
            for &i in &order {
                allowed.push(i as u32);
                reached += w(i);
                if reached >= f64::from(top_p) * total * (1.0 + 1e-9) { break; }
            }
            let mut sampler = Sampler::new(n);
            let token = sampler.sample(&logits, &params(1.0, k, top_p, seed), position).unwrap();
            prop_assert!(allowed.contains(&token), "{token} not in {allowed:?}");
            let off: Vec<u32> = [-1, 0, n as i64, n as i64 + 1, i64::MAX].iter()
                .map(|&k| sampler.sample(&logits, &params(1.0, k, top_p, seed), position).unwrap())
                .collect();
            prop_assert!(off.windows(2).all(|pair| pair[0] == pair[1]));
            prop_assert_eq!(
                sampler.sample(&logits, &params(1.0, 1, top_p, seed), position).unwrap(),
                argmax(&logits).unwrap()
            );
        }
    }
}
