//! Confidence intervals of one run, by batch means over arrival order, and over replications. The
//! standard error s is [`Batches::adjusted_error`] throughout: batches of a short run still correlate.

use super::batches::Batches;
use super::student::student_quantile;
use crate::metrics::Distribution;
use crate::rng::inverse_normal_cdf;

/// A confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The estimate.
    pub value: f64,
    /// Lower limit.
    pub low: f64,
    /// Upper limit.
    pub high: f64,
    /// Batches or replications behind it.
    pub num_batches: usize,
    /// Observations behind it.
    pub count: usize,
    /// Correlation of neighbouring batch means. The interval is widened for it, but far above zero the
    /// batches are too short.
    pub correlation: f64,
}

/// Why there is no interval.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum NoInterval {
    /// Not enough observations for batches.
    #[error("{count} of them are too few: batch means need at least {needed}")]
    TooFew {
        /// How many there are.
        count: usize,
        /// How many are needed.
        needed: usize,
    },
    /// The percentile lies too close to an end of the distribution.
    #[error("{count} of them do not enclose the {percent}th percentile on both sides: that takes more")]
    Extreme {
        /// How many there are.
        count: usize,
        /// Which percentile.
        percent: f64,
    },
}

/// The t quantile of a two-sided interval.
fn two_sided(confidence: f64, degrees: usize) -> f64 {
    student_quantile(0.5 * (1.0 + confidence), degrees as f64)
}

/// value ± scale · t · error.
fn about(value: f64, count: usize, batches: &Batches, error: f64, scale: f64, confidence: f64) -> Interval {
    let half = scale * two_sided(confidence, batches.count() - 1) * error;
    Interval {
        value,
        low: value - half,
        high: value + half,
        num_batches: batches.count(),
        count,
        correlation: batches.correlation(),
    }
}

/// Of the mean of `values`, in the order of arrival: x̄ ± t · s over batch means.
///
/// # Errors
/// [`NoInterval::TooFew`].
pub fn mean(values: &[f64], confidence: f64) -> Result<Interval, NoInterval> {
    let number = Batches::number(values.len())?;
    let value = values.iter().sum::<f64>() / values.len() as f64;
    let batches = Batches::split(values, number);
    Ok(about(value, values.len(), &batches, batches.adjusted_error(), 1.0, confidence))
}

/// Of a percentile of `values`, in the order of arrival: the percentiles at p ± t · s, where s is the
/// standard error, by batch means, of the share of values at or below the estimate (Woodruff 1952,
/// "Confidence intervals for medians and other position measures"), and at least that of independent
/// values, √(p(1 − p)/n). Percentiles of batches would be biased: a batch is short.
///
/// # Errors
/// [`NoInterval`], when there are too few.
pub fn percentile(values: &[f64], percent: f64, confidence: f64) -> Result<Interval, NoInterval> {
    let count = values.len();
    let number = Batches::number(count)?;
    let sorted = Distribution::new(values.iter().copied());
    let too_few = NoInterval::TooFew { count, needed: 1 };
    let value = sorted.percentile(percent).ok_or(too_few)?;
    let below: Vec<f64> = values.iter().map(|one| f64::from(u8::from(*one <= value))).collect();
    let batches = Batches::split(&below, number);
    let p = percent / 100.0;
    let error = batches.adjusted_error().max((p * (1.0 - p) / count as f64).sqrt());
    let half = two_sided(confidence, number - 1) * error;
    // One observation must lie beyond either limit.
    let margin = 1.0 / count as f64;
    if p - half < margin || p + half > 1.0 - margin {
        return Err(NoInterval::Extreme { count, percent });
    }
    let at = |share: f64| sorted.percentile(100.0 * share).ok_or(too_few);
    Ok(Interval {
        value,
        low: at(p - half)?,
        high: at(p + half)?,
        num_batches: number,
        count,
        correlation: batches.correlation(),
    })
}

/// Wilson's score interval (1927) of a share among `effective` independent trials.
fn wilson(share: f64, effective: f64, z: f64) -> (f64, f64) {
    let spread = z * z / effective;
    let centre = (share + 0.5 * spread) / (1.0 + spread);
    let half = z * (share * (1.0 - share) / effective + 0.25 * spread / effective).sqrt() / (1.0 + spread);
    (centre - half, centre + half)
}

/// Of the share of true ones in the order of arrival: Wilson's interval with the effective number of
/// requests n* = p(1 − p)/s² · (z/t)², s by batch means, at most n (Korn and Graubard 1998,
/// "Confidence intervals for proportions with small expected number of positive counts estimated from
/// survey data"). It stays within 0 and 1, and a run without a miss has no interval of length zero.
///
/// # Errors
/// [`NoInterval::TooFew`].
pub fn share(met: &[bool], confidence: f64) -> Result<Interval, NoInterval> {
    let count = met.len();
    let number = Batches::number(count)?;
    let values: Vec<f64> = met.iter().map(|met| f64::from(u8::from(*met))).collect();
    let batches = Batches::split(&values, number);
    let value = values.iter().sum::<f64>() / count as f64;
    let (z, t) = (inverse_normal_cdf(0.5 * (1.0 + confidence)), two_sided(confidence, number - 1));
    let error = batches.adjusted_error();
    let effective = if error > 0.0 {
        let design = value * (1.0 - value) / (error * error);
        (design * (z / t) * (z / t)).clamp(1.0, count as f64)
    } else {
        count as f64
    };
    let (low, high) = wilson(value, effective, z);
    Ok(Interval {
        value,
        low: low.clamp(0.0, value),
        high: high.clamp(value, 1.0),
        num_batches: number,
        count,
        correlation: batches.correlation(),
    })
}

/// How many requests it takes, all of them good, for the lower limit of [`share`] to reach `target`:
/// n/(n + z²) ≥ target. `None` when no number is enough.
pub fn smallest_for_share(target: f64, confidence: f64) -> Option<u64> {
    let z = inverse_normal_cdf(0.5 * (1.0 + confidence));
    (target < 1.0).then(|| (z * z * target / (1.0 - target)).ceil() as u64)
}

/// Of a rate: events at `instants` from `start` to `end`, in as many equal slices of time as the
/// `count` requests allow of which they are some. `scale` makes the reported rate of events per second.
///
/// # Errors
/// [`NoInterval::TooFew`].
pub fn rate(
    instants: &[f64],
    count: usize,
    start: f64,
    end: f64,
    scale: f64,
    confidence: f64,
) -> Result<Interval, NoInterval> {
    let number = Batches::number(count)?;
    let slice = (end - start) / number as f64;
    let mut counts = vec![0.0; number];
    for at in instants {
        counts[(((at - start) / slice) as usize).min(number - 1)] += 1.0;
    }
    let batches = Batches::of(counts.into_iter().map(|count: f64| count / slice).collect());
    let found = about(batches.mean() * scale, count, &batches, batches.adjusted_error(), scale, confidence);
    Ok(Interval { low: found.low.max(0.0), ..found })
}

/// Of the mean over independent replications.
///
/// # Errors
/// [`NoInterval::TooFew`] for fewer than two.
pub fn of_replications(values: &[f64], confidence: f64) -> Result<Interval, NoInterval> {
    if values.len() < 2 {
        return Err(NoInterval::TooFew { count: values.len(), needed: 2 });
    }
    let replications = Batches::of(values.to_vec());
    Ok(about(
        replications.mean(),
        values.len(),
        &replications,
        replications.standard_error(),
        1.0,
        confidence,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Purpose, Stream};
    use proptest::prelude::*;

    #[test]
    fn hand_computed_replications() {
        let found = of_replications(&[1.0, 2.0, 3.0], 0.95).unwrap();
        let half = 4.302_652_73 / 3.0_f64.sqrt();
        assert!((found.low - (2.0 - half)).abs() < 1e-8 && (found.high - (2.0 + half)).abs() < 1e-8);
        assert_eq!(of_replications(&[1.0], 0.95), Err(NoInterval::TooFew { count: 1, needed: 2 }));
    }

    #[test]
    fn a_run_without_a_miss_is_not_certain() {
        // Wilson at p = 1: n / (n + z²).
        let found = share(&[true; 300], 0.95).unwrap();
        assert!((found.low - 300.0 / (300.0 + 3.841_458_8)).abs() < 1e-8 && found.high == 1.0);
        assert_eq!(smallest_for_share(0.9, 0.95), Some(35));
        assert_eq!(smallest_for_share(1.0, 0.95), None);
    }

    #[test]
    fn too_few_and_too_extreme_say_so() {
        let values: Vec<f64> = (0..100).map(f64::from).collect();
        assert_eq!(mean(&values[..99], 0.95), Err(NoInterval::TooFew { count: 99, needed: 100 }));
        assert_eq!(percentile(&values, 99.0, 0.95), Err(NoInterval::Extreme { count: 100, percent: 99.0 }));
        let mixed: Vec<f64> = (0..100).map(|index| f64::from(index * 37 % 100)).collect();
        let found = percentile(&mixed, 50.0, 0.95).unwrap();
        assert!(found.low < 49.5 && found.value == 49.5 && 49.5 < found.high, "{found:?}");
    }

    /// Intervals of independent and of correlated values hold the truth about as often as they say.
    #[test]
    fn coverage() {
        let (mut means, mut medians, mut shares) = (0, 0, 0);
        const RUNS: u64 = 400;
        for seed in 0..RUNS {
            let mut stream = Stream::new(seed, Purpose(99), 0);
            // An autoregressive series whose neighbours correlate by one half.
            let mut state = 0.0;
            let values: Vec<f64> = (0..2_000)
                .map(|_| {
                    state = 0.5 * state + stream.normal();
                    state
                })
                .collect();
            let holds = |found: Result<Interval, NoInterval>, truth: f64| {
                u64::from(found.is_ok_and(|found| found.low <= truth && truth <= found.high))
            };
            means += holds(mean(&values, 0.95), 0.0);
            medians += holds(percentile(&values, 50.0, 0.95), 0.0);
            let met: Vec<bool> = values.iter().map(|value| *value > 0.0).collect();
            shares += holds(share(&met, 0.95), 0.5);
        }
        for covered in [means, medians, shares] {
            let covered = covered as f64 / RUNS as f64;
            assert!((0.92..=0.98).contains(&covered), "{means} {medians} {shares}");
        }
    }

    proptest! {
        #[test]
        fn limits_enclose_the_estimate(
            values in prop::collection::vec(0.0f64..10.0, 100..400),
            confidence in 0.5f64..0.99,
            percent in 30.0f64..70.0,
        ) {
            for found in [mean(&values, confidence), percentile(&values, percent, confidence)].into_iter().flatten() {
                prop_assert!(found.low <= found.value && found.value <= found.high);
            }
            let met: Vec<bool> = values.iter().map(|value| *value < 9.0).collect();
            let found = share(&met, confidence).unwrap();
            prop_assert!(0.0 <= found.low && found.low <= found.value && found.value <= found.high && found.high <= 1.0);
        }
    }
}
