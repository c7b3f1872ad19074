//! Whether the queue grew while requests arrived: whether the rate was sustainable at all.

use super::batches::{Batches, MIN_BATCHES, MIN_PER_BATCH};
use super::student::student_quantile;
use crate::record::RequestRecord;
use crate::time::Time;

/// Significance of the slope for the verdict that the queue grew.
const SIGNIFICANCE: f64 = 0.001;
/// Significance at which growth can no longer be ruled out.
const DOUBT: f64 = 0.05;
/// A slope can be certain and small. What matters: the last third holds so many times the requests of
/// the first third, and one more, or the system stays behind by so large a share of the arrivals.
const FACTOR: f64 = 1.5;
const BEHIND: f64 = 0.05;
/// A run starts empty and fills up, growing or not: at least and at most so much of the arrivals' time
/// is left out at its start.
const FILLING: (f64, f64) = (0.1, 1.0 / 3.0);

/// Requests in the system while others arrived.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    /// Arrivals looked at, after the filling.
    pub count: usize,
    /// Leading arrivals left out.
    pub skipped: usize,
    /// Mean number of requests that the arrivals of the first third found.
    pub first_third: f64,
    /// The same for the last third.
    pub last_third: f64,
    /// Growth per arrival: the share of the arrivals that the system did not keep up with.
    pub slope: f64,
    /// The slope over its standard error.
    pub ratio: f64,
}

/// Fewer arrivals than it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{count} arrivals after the start-up are too few: at least {needed} are needed")]
pub struct TooShort {
    /// How many there are.
    pub count: usize,
    /// How many are needed.
    pub needed: usize,
}

/// How many requests each arrival finds in the system, held ones included; for records in the order
/// of their arrivals.
pub fn found_on_arrival(requests: &[RequestRecord]) -> Vec<u32> {
    let mut ends: Vec<Time> = requests.iter().filter_map(|record| record.end).collect();
    ends.sort_unstable();
    let mut over = 0;
    let mut found = Vec::with_capacity(requests.len());
    for (arrived, record) in requests.iter().enumerate() {
        while ends.get(over).is_some_and(|end| *end <= record.arrival) {
            over += 1;
        }
        found.push(arrived.saturating_sub(over) as u32);
    }
    found
}

impl Growth {
    /// Of `requests` in the order of their arrivals, of which each found so many others.
    ///
    /// The drain is no part of it, since only arrivals look. Left out at the start is the median time
    /// that requests were there, but at least a tenth and at most a third of the time of arrivals. The
    /// rest is averaged in ten batches, and a line is fitted to them: slope and standard error are those
    /// of ordinary least squares, with eight degrees of freedom.
    ///
    /// # Errors
    /// [`TooShort`].
    pub fn of(requests: &[RequestRecord], found: &[u32]) -> Result<Growth, TooShort> {
        let skipped = filling(requests);
        let series: Vec<f64> = found[skipped..].iter().map(|found| f64::from(*found)).collect();
        let count = series.len();
        let needed = MIN_BATCHES * MIN_PER_BATCH / 2;
        if count < needed {
            return Err(TooShort { count, needed });
        }
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
        let batches = Batches::split(&series, MIN_BATCHES);
        let (slope, error) = line(batches.means());
        Ok(Growth {
            count,
            skipped,
            first_third: mean(&series[..count / 3]),
            last_third: mean(&series[count - count / 3..]),
            slope: slope * MIN_BATCHES as f64 / count as f64,
            ratio: if slope == 0.0 { 0.0 } else { slope / error },
        })
    }

    fn beyond(&self, significance: f64) -> bool {
        self.ratio > student_quantile(1.0 - significance, (MIN_BATCHES - 2) as f64)
            && (self.last_third > FACTOR * self.first_third + 1.0 || self.slope > BEHIND)
    }

    /// Whether the queue grew: a slope beyond chance (0.1 %, one-sided), and either more than 1.5 times
    /// the requests in the last third as in the first, and one more, or 5 % of the arrivals left behind.
    pub fn grew(&self) -> bool {
        self.beyond(SIGNIFICANCE)
    }

    /// Whether it may have grown: the same at 5 %. A rate is only said to be sustained without it.
    pub fn may_have_grown(&self) -> bool {
        self.beyond(DOUBT)
    }
}

/// Leading arrivals that met a system which was still filling up.
fn filling(requests: &[RequestRecord]) -> usize {
    let (Some(first), Some(last)) = (requests.first(), requests.last()) else { return 0 };
    let span = last.arrival.saturating_since(first.arrival).as_secs_f64();
    let mut stays: Vec<u64> = requests
        .iter()
        .filter_map(|record| record.end.map(|end| end.saturating_since(record.arrival).0))
        .collect();
    stays.sort_unstable();
    let median = stays.get(stays.len() / 2).map_or(0.0, |stay| *stay as f64 / 1e9);
    let until = median.clamp(FILLING.0 * span, FILLING.1 * span);
    requests.partition_point(|record| record.arrival.saturating_since(first.arrival).as_secs_f64() < until)
}

/// Least squares of `values` over 0, 1, 2, …: the slope and its standard error.
fn line(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let place = |index: usize| index as f64 - 0.5 * (count - 1.0);
    let squares: f64 = (0..values.len()).map(|index| place(index) * place(index)).sum();
    let slope = values.iter().enumerate().map(|(i, value)| place(i) * value).sum::<f64>() / squares;
    let off = |(index, value): (usize, &f64)| value - mean - slope * place(index);
    let residuals: f64 = values.iter().enumerate().map(off).map(|off| off * off).sum();
    (slope, (residuals / (count - 2.0) / squares).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_by_hand() {
        let (slope, error) = line(&[1.0, 2.0, 4.0]);
        // Slope 3/2; residuals 1/6, −1/3, 1/6 about the line, one degree of freedom, squares 2.
        assert!((slope - 1.5).abs() < 1e-15 && (error - (1.0_f64 / 6.0 / 2.0).sqrt()).abs() < 1e-15);
        assert_eq!(line(&[3.0; 4]), (0.0, 0.0));
    }
}
