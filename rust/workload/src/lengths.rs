//! Distributions of prompt and output lengths, alone and in pairs.
//!
//! Every draw is by inversion, from one uniform number a length, so that a pair can keep a rank
//! correlation and a changed distribution keeps everything else of a workload.

use std::fmt;
use std::sync::Arc;

use kvrelay_core::rng::{Purpose, Stream, inverse_normal_cdf, normal_cdf};

use crate::error::{MAX_TOKENS, WorkloadError, positive, tokens};

/// A distribution of lengths in tokens, rounded to whole tokens, between 1 and [`MAX_TOKENS`].
#[derive(Clone, Debug, PartialEq)]
pub struct Lengths(Kind);

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Constant(u32),
    Uniform {
        low: u32,
        high: u32,
    },
    LogNormal {
        mu: f64,
        sigma: f64,
    },
    /// The values, and the power by which the last interval rises.
    Quantiles {
        values: Arc<[f64]>,
        tail: f64,
    },
}

impl Lengths {
    /// Always `length`.
    ///
    /// # Errors
    /// When it is not a number of tokens.
    pub fn constant(length: i64) -> Result<Lengths, WorkloadError> {
        Ok(Lengths(Kind::Constant(tokens("length", length)?)))
    }

    /// Uniform over `low ..= high`.
    ///
    /// # Errors
    /// When they are no numbers of tokens, or the wrong way round.
    pub fn uniform(low: i64, high: i64) -> Result<Lengths, WorkloadError> {
        let (low, high) = (tokens("low", low)?, tokens("high", high)?);
        if low > high {
            return Err(WorkloadError::parameter("low", low, format!("at most high, which is {high}")));
        }
        Ok(Lengths(Kind::Uniform { low, high }))
    }

    /// Log-normal with this mean and standard deviation (of the lengths, not of their logarithms).
    ///
    /// # Errors
    /// When `mean` is not positive or `std` negative.
    pub fn lognormal(mean: f64, std: f64) -> Result<Lengths, WorkloadError> {
        positive("mean", mean)?;
        if !(std >= 0.0 && std.is_finite()) {
            return Err(WorkloadError::parameter("std", std, "at least 0 and finite"));
        }
        let ratio = std / mean;
        let variance = libm::log1p(ratio * ratio);
        Ok(Lengths(Kind::LogNormal { mu: libm::log(mean) - 0.5 * variance, sigma: variance.sqrt() }))
    }

    /// Log-normal with this median and 90th percentile.
    ///
    /// # Errors
    /// When `median` is not positive or `p90` is below it.
    pub fn lognormal_from_percentiles(median: f64, p90: f64) -> Result<Lengths, WorkloadError> {
        positive("median", median)?;
        if !(p90 >= median && p90.is_finite()) {
            return Err(WorkloadError::parameter(
                "p90",
                p90,
                format!("at least the median, which is {median}"),
            ));
        }
        let mu = libm::log(median);
        Ok(Lengths(Kind::LogNormal { mu, sigma: (libm::log(p90) - mu) / inverse_normal_cdf(0.9) }))
    }

    /// Given by its quantiles at evenly spaced probabilities from 0 to 1 (101 of them are the
    /// percentiles), linear in between.
    ///
    /// # Errors
    /// When there are fewer than two, or they are not positive, finite and in order.
    pub fn empirical(quantiles: &[f64]) -> Result<Lengths, WorkloadError> {
        if quantiles.len() < 2 {
            return Err(WorkloadError::parameter("quantiles", quantiles.len(), "at least 2 values"));
        }
        for (i, pair) in quantiles.windows(2).enumerate() {
            positive(&format!("quantiles[{i}]"), pair[0])?;
            positive(&format!("quantiles[{}]", i + 1), pair[1])?;
            if pair[1] < pair[0] {
                let range = format!("at least the one before it, which is {}", pair[0]);
                return Err(WorkloadError::parameter(format!("quantiles[{}]", i + 1), pair[1], range));
            }
        }
        Ok(Lengths(Kind::Quantiles { values: quantiles.into(), tail: 1.0 }))
    }

    /// As [`Lengths::empirical`], with the mean that the lengths had. The straight line to the
    /// largest length overstates a long tail (Azure's code completions by a fifth), so the last
    /// interval rises by that power of its probability which gives the mean, as nearly as it can.
    ///
    /// # Errors
    /// As [`Lengths::empirical`], or when `mean` is not positive and finite.
    pub fn empirical_with_mean(quantiles: &[f64], mean: f64) -> Result<Lengths, WorkloadError> {
        positive("mean", mean)?;
        let linear = Lengths::empirical(quantiles)?;
        let [.., start, end] = quantiles else { return Ok(linear) };
        if start == end {
            return Ok(linear);
        }
        let excess = (linear.mean() - mean) * (quantiles.len() - 1) as f64;
        // The mean of t^k over 0..1 is 1 / (k + 1); the line's is a half.
        let share = (0.5 - excess / (end - start)).clamp(0.02, 0.9);
        Ok(Lengths(Kind::Quantiles { values: quantiles.into(), tail: 1.0 / share - 1.0 }))
    }

    /// The length below which a share `p` (between 0 and 1) of all lengths lies.
    pub fn quantile(&self, p: f64) -> u32 {
        let length = match &self.0 {
            Kind::Constant(length) => return *length,
            Kind::Uniform { low, high } => {
                let count = f64::from(high - low) + 1.0;
                return (low + (p * count) as u32).min(*high);
            }
            Kind::LogNormal { mu, sigma } => libm::exp(mu + sigma * inverse_normal_cdf(p)),
            Kind::Quantiles { values, tail } => {
                let last = values.len() - 2;
                let place = p * (values.len() - 1) as f64;
                let below = (place as usize).min(last);
                let (a, b) = (values[below], values[below + 1]);
                let rest = place - below as f64;
                a + (b - a) * if below == last && *tail != 1.0 { libm::pow(rest, *tail) } else { rest }
            }
        };
        length.round().clamp(1.0, f64::from(MAX_TOKENS)) as u32
    }

    /// The mean, before rounding.
    pub fn mean(&self) -> f64 {
        match &self.0 {
            Kind::Constant(length) => f64::from(*length),
            Kind::Uniform { low, high } => (f64::from(*low) + f64::from(*high)) / 2.0,
            Kind::LogNormal { mu, sigma } => libm::exp(mu + 0.5 * sigma * sigma),
            Kind::Quantiles { values, tail } => {
                let last = values.len() - 2;
                let halves = values[..=last].windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).sum::<f64>();
                let end = values[last] + (values[last + 1] - values[last]) / (tail + 1.0);
                (halves + end) / (last + 1) as f64
            }
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Constant(length) => write!(f, "{length}"),
            Kind::Uniform { low, high } => write!(f, "uniform {low} to {high}"),
            Kind::LogNormal { mu, .. } => {
                write!(f, "lognormal with mean {:.0}, median {:.0}", self.mean(), libm::exp(*mu))
            }
            Kind::Quantiles { .. } => write!(f, "empirical with mean {:.0}", self.mean()),
        }
    }
}

/// Prompt and output lengths together.
#[derive(Clone, Debug, PartialEq)]
pub struct LengthPair {
    prompt: Lengths,
    output: Lengths,
    /// Correlation of the two normal variables behind the pair.
    normal_correlation: f64,
}

impl LengthPair {
    /// Prompts and outputs that know nothing of each other.
    pub fn independent(prompt: Lengths, output: Lengths) -> LengthPair {
        LengthPair { prompt, output, normal_correlation: 0.0 }
    }

    /// Prompts and outputs with this rank correlation (Spearman's), through a Gaussian copula: the
    /// normal variables behind it correlate by 2·sin(π/6 · spearman) (Pearson, 1907). Lengths that
    /// tie, as few distinct ones do, correlate a little less.
    ///
    /// # Errors
    /// When `spearman` is not between −1 and 1.
    pub fn correlated(prompt: Lengths, output: Lengths, spearman: f64) -> Result<LengthPair, WorkloadError> {
        if !(-1.0..=1.0).contains(&spearman) {
            return Err(WorkloadError::parameter("spearman", spearman, "between -1 and 1"));
        }
        let correlation = 2.0 * libm::sin(std::f64::consts::FRAC_PI_6 * spearman);
        Ok(LengthPair { prompt, output, normal_correlation: correlation.clamp(-1.0, 1.0) })
    }

    /// Prompt and output tokens of request `index`.
    pub fn draw(&self, seed: u64, index: u64) -> (u32, u32) {
        let mut stream = Stream::new(seed, Purpose::LENGTHS, index);
        let (first, second) = (stream.uniform(), stream.uniform());
        let rho = self.normal_correlation;
        let output = if rho == 0.0 {
            second
        } else {
            let rest = (1.0 - rho * rho).sqrt();
            let normal = rho * inverse_normal_cdf(first) + rest * inverse_normal_cdf(second);
            // The extremes of a quantile function lie at 0 and 1, where a log-normal has none.
            normal_cdf(normal).clamp(f64::MIN_POSITIVE, 1.0 - f64::EPSILON / 2.0)
        };
        (self.prompt.quantile(first), self.output.quantile(output))
    }

    /// Means of prompts and outputs.
    pub fn means(&self) -> (f64, f64) {
        (self.prompt.mean(), self.output.mean())
    }
}

impl fmt::Display for LengthPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "prompts {}, outputs {}", self.prompt, self.output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn draws(pair: &LengthPair, num: u64) -> (Vec<f64>, Vec<f64>) {
        (0..num).map(|i| pair.draw(5, i)).map(|(p, o)| (f64::from(p), f64::from(o))).unzip()
    }

    fn mean_std(values: &[f64]) -> (f64, f64) {
        let num = values.len() as f64;
        let mean = values.iter().sum::<f64>() / num;
        (mean, (values.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / num).sqrt())
    }

    /// Ranks, ties sharing their mean.
    fn ranks(values: &[f64]) -> Vec<f64> {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
        let mut ranks = vec![0.0; values.len()];
        let mut start = 0;
        while start < order.len() {
            let tied = order[start..].iter().take_while(|i| values[**i] == values[order[start]]).count();
            for place in start..start + tied {
                ranks[order[place]] = start as f64 + (tied as f64 - 1.0) / 2.0;
            }
            start += tied;
        }
        ranks
    }

    fn spearman(a: &[f64], b: &[f64]) -> f64 {
        let (a, b) = (ranks(a), ranks(b));
        let ((mean_a, std_a), (mean_b, std_b)) = (mean_std(&a), mean_std(&b));
        let products = a.iter().zip(&b).map(|(x, y)| (x - mean_a) * (y - mean_b)).sum::<f64>();
        products / a.len() as f64 / (std_a * std_b)
    }

    fn every_kind() -> Vec<Lengths> {
        vec![
            Lengths::constant(512).unwrap(),
            Lengths::uniform(3, 900).unwrap(),
            Lengths::lognormal(700.0, 900.0).unwrap(),
            Lengths::lognormal(300.0, 0.0).unwrap(),
            Lengths::lognormal_from_percentiles(400.0, 2_000.0).unwrap(),
            Lengths::empirical(&[10.0, 20.0, 500.0, 500.0, 4_000.0]).unwrap(),
            Lengths::empirical_with_mean(&[10.0, 20.0, 500.0, 500.0, 4_000.0], 500.0).unwrap(),
        ]
    }

    #[test]
    fn means_are_within_three_standard_errors() {
        let num = 20_000;
        for lengths in every_kind() {
            let pair = LengthPair::independent(lengths.clone(), lengths.clone());
            for values in <[Vec<f64>; 2]>::from(draws(&pair, num)) {
                let (mean, std) = mean_std(&values);
                // Half a token is what rounding may shift a constant by.
                let error = 3.0 * std / (num as f64).sqrt() + 0.01;
                assert!((mean - lengths.mean()).abs() <= error, "{lengths}: {mean} ± {error}");
            }
        }
    }

    #[test]
    fn quantiles_are_the_ones_asked_for() {
        let lengths = Lengths::lognormal_from_percentiles(400.0, 2_000.0).unwrap();
        assert_eq!((lengths.quantile(0.5), lengths.quantile(0.9)), (400, 2_000));
        let lengths = Lengths::empirical(&[10.0, 20.0, 500.0]).unwrap();
        let at = [0.0, 0.25, 0.5, 0.75, 1.0].map(|p| lengths.quantile(p));
        assert_eq!(at, [10, 15, 20, 260, 500]);
        let lengths = Lengths::empirical_with_mean(&[10.0, 20.0, 500.0], 75.0).unwrap();
        assert!((lengths.mean() - 75.0).abs() < 1e-9);
        assert_eq!([0.25, 0.5, 1.0].map(|p| lengths.quantile(p)), [15, 20, 500]);
        let lengths = Lengths::uniform(2, 4).unwrap();
        assert_eq!([0.01, 0.34, 0.67, 1.0].map(|p| lengths.quantile(p)), [2, 3, 4, 4]);
        let lengths = Lengths::lognormal(1e6, 1e9).unwrap();
        assert_eq!((lengths.quantile(1e-300), lengths.quantile(1.0 - 1e-16)), (1, MAX_TOKENS));
    }

    #[test]
    fn impossible_distributions_name_the_parameter_and_the_numbers() {
        for (result, message) in [
            (Lengths::constant(0), "length is 0; it must be between 1 and 16777216 tokens"),
            (Lengths::constant(-5), "length is -5"),
            (Lengths::uniform(5, 3), "low is 5; it must be at most high, which is 3"),
            (Lengths::lognormal(f64::NAN, 1.0), "mean is NaN"),
            (Lengths::lognormal(10.0, -1.0), "std is -1"),
            (Lengths::lognormal(10.0, f64::INFINITY), "std is inf"),
            (Lengths::lognormal_from_percentiles(10.0, 9.0), "p90 is 9; it must be at least the median"),
            (Lengths::empirical(&[1.0]), "quantiles is 1; it must be at least 2 values"),
            (Lengths::empirical(&[1.0, 3.0, 2.0]), "quantiles[2] is 2; it must be at least the one before"),
            (Lengths::empirical(&[0.0, 3.0]), "quantiles[0] is 0"),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
        let one = || Lengths::constant(1).unwrap();
        assert!(
            LengthPair::correlated(one(), one(), 1.1).unwrap_err().to_string().starts_with("spearman is 1.1")
        );
    }

    #[test]
    fn perfect_correlation_is_perfect() {
        let lengths = || Lengths::lognormal(700.0, 900.0).unwrap();
        for spearman_asked in [1.0, -1.0] {
            let (a, b) = draws(&LengthPair::correlated(lengths(), lengths(), spearman_asked).unwrap(), 500);
            assert!((spearman(&a, &b) - spearman_asked).abs() < 1e-3);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn the_rank_correlation_is_kept(asked in -0.95f64..0.95, which in 0usize..2) {
            let other = [Lengths::uniform(1, 5_000), Lengths::lognormal(300.0, 500.0)][which].clone().unwrap();
            let pair = LengthPair::correlated(Lengths::lognormal(700.0, 900.0).unwrap(), other, asked).unwrap();
            let (a, b) = draws(&pair, 6_000);
            // Three standard errors of a rank correlation of 6,000 pairs, and ties.
            prop_assert!((spearman(&a, &b) - asked).abs() < 0.04, "{} for {asked}", spearman(&a, &b));
        }
    }
}
