//! When requests arrive.
//!
//! The first request arrives at 0; each later one a gap after the one before it. `rate` is the
//! process's: gaps have mean 1 / rate. A sample's own rate, (n − 1) gaps over the time from first
//! to last, scatters about it by a share of about cv / √n; [`Workload::rate`] tells it and
//! [`Workload::at_rate`] sets it.
//!
//! [`Workload::rate`]: crate::Workload::rate
//! [`Workload::at_rate`]: crate::Workload::at_rate

use kvrelay_core::rng::{Purpose, Stream};
use kvrelay_core::time::Time;

use crate::error::{WorkloadError, positive};

/// The longest a workload may be, in seconds: 200 days. Workers count picoseconds in 64 bits, which
/// hold 213.
pub const MAX_SECONDS: f64 = 200.0 * 86_400.0;

/// The law of the gaps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Process {
    /// Exponential gaps: coefficient of variation 1.
    Poisson,
    /// Gamma-distributed gaps.
    Gamma {
        /// Their coefficient of variation, above 0; burstier than Poisson above 1.
        cv: f64,
    },
    /// Equal gaps.
    Fixed,
}

impl Process {
    /// A gap of mean 1.
    fn gap(self, seed: u64, index: u64) -> f64 {
        let mut stream = Stream::new(seed, Purpose::ARRIVALS, index);
        match self {
            Process::Poisson => stream.exponential(),
            Process::Gamma { cv } => stream.gamma(1.0 / (cv * cv)) * (cv * cv),
            Process::Fixed => 1.0,
        }
    }
}

/// The arrival times of `num_requests` requests, in order.
///
/// # Errors
/// When `rate` or a cv is not positive and finite, there is no request, or the last one comes after
/// [`MAX_SECONDS`].
pub fn arrival_times(
    process: Process,
    rate: f64,
    num_requests: usize,
    seed: u64,
) -> Result<Vec<Time>, WorkloadError> {
    positive("rate", rate)?;
    if let Process::Gamma { cv } = process
        && !(1e-3..=1e3).contains(&cv)
    {
        return Err(WorkloadError::parameter("cv", cv, "between 0.001 and 1000"));
    }
    if num_requests == 0 {
        return Err(WorkloadError::parameter("num_requests", 0, "at least 1"));
    }
    let mut gaps = 0.0;
    let mut times = vec![Time::ZERO];
    times.reserve_exact(num_requests - 1);
    for index in 1..num_requests {
        gaps += process.gap(seed, index as u64);
        times.push(checked_time("the arrival process", gaps / rate, "raise rate or ask for fewer requests")?);
    }
    Ok(times)
}

/// The instant `seconds` after the start, if a run can hold it.
pub(crate) fn checked_time(what: &str, seconds: f64, hint: &'static str) -> Result<Time, WorkloadError> {
    if seconds <= MAX_SECONDS {
        return Ok(Time::from_secs_f64(seconds));
    }
    Err(WorkloadError::TooLong { what: what.to_owned(), seconds, limit: MAX_SECONDS, hint })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn seconds(times: &[Time]) -> f64 {
        times.last().unwrap().as_secs_f64()
    }

    #[test]
    fn gaps_have_the_mean_and_variation_asked_for() {
        let (num, rate) = (20_001, 4.0);
        let gamma = |cv| (Process::Gamma { cv }, cv);
        for (process, cv) in [(Process::Poisson, 1.0), gamma(0.5), gamma(1.0), gamma(3.0)] {
            let times = arrival_times(process, rate, num, 1).unwrap();
            let gaps: Vec<f64> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
            let count = gaps.len() as f64;
            let mean = gaps.iter().sum::<f64>() / count;
            assert!((mean * rate - 1.0).abs() < 3.0 * cv / count.sqrt(), "{process:?}: mean {mean}");
            let std = (gaps.iter().map(|gap| (gap - mean) * (gap - mean)).sum::<f64>() / count).sqrt();
            assert!((std / mean / cv - 1.0).abs() < 0.1, "{process:?}: cv {}", std / mean);
        }
    }

    #[test]
    fn fixed_gaps_do_not_drift() {
        let times = arrival_times(Process::Fixed, 3.0, 3_000_001, 9).unwrap();
        assert_eq!(
            (times[0], times[1], times[3_000_000]),
            (Time(0), Time(333_333_333), Time(1_000_000_000_000_000))
        );
    }

    #[test]
    fn impossible_arrivals_name_the_parameter_and_the_numbers() {
        let error = |process, rate, num| arrival_times(process, rate, num, 0).unwrap_err().to_string();
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(error(Process::Poisson, rate, 1).starts_with(&format!("rate is {rate}")));
        }
        assert_eq!(error(Process::Poisson, 1.0, 0), "num_requests is 0; it must be at least 1");
        assert!(error(Process::Gamma { cv: 0.0 }, 1.0, 1).starts_with("cv is 0"));
        let message = error(Process::Fixed, 1e-7, 3);
        assert!(message.contains("20000000 s") && message.contains("17280000 s"), "{message}");
    }

    proptest! {
        #[test]
        fn times_are_ordered_reproducible_and_a_prefix_of_longer_ones(
            seed: u64, rate in 1e-3f64..1e6, cv in 0.05f64..20.0, num in 1usize..300,
        ) {
            let process = Process::Gamma { cv };
            let times = arrival_times(process, rate, num, seed).unwrap();
            prop_assert_eq!(times.len(), num);
            prop_assert!(times.is_sorted() && times[0] == Time::ZERO);
            let longer = arrival_times(process, rate, num + 50, seed).unwrap();
            prop_assert_eq!(&longer[..num], &times[..]);
            let faster = seconds(&arrival_times(process, rate * 2.0, num, seed).unwrap());
            prop_assert!((faster * 2.0 - seconds(&times)).abs() <= 3e-9 + seconds(&times) * 1e-12);
        }
    }
}
