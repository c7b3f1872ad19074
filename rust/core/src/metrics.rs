//! Metrics over records, exactly as DESIGN defines them.

use crate::record::{GapRun, RequestRecord, Status, Verdict};
use crate::request::ClassId;
use crate::time::Time;

/// Who counted how, and what follows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attainment {
    /// Requests within every objective.
    pub good: u64,
    /// Good ones and misses: the denominator.
    pub offered: u64,
    /// Requests on neither side.
    pub out: u64,
    /// Requests on neither side because they have no objective.
    pub without_slo: u64,
}

impl Attainment {
    /// Counts the requests of `class`, or of all.
    pub fn of(requests: &[RequestRecord], class: Option<ClassId>) -> Attainment {
        let mut counts = Attainment::default();
        for record in requests.iter().filter(|record| class.is_none_or(|class| record.class == class)) {
            match record.verdict() {
                Verdict::Good => (counts.good, counts.offered) = (counts.good + 1, counts.offered + 1),
                Verdict::Miss => counts.offered += 1,
                Verdict::Out => counts.out += 1,
            }
            counts.without_slo += u64::from(!record.slo.is_some());
        }
        counts
    }

    /// good / offered; undefined when nothing was offered.
    pub fn ratio(&self) -> Option<f64> {
        (self.offered > 0).then(|| self.good as f64 / self.offered as f64)
    }
}

/// First arrival to the last counted event, in seconds. Tokens count, and the ends of requests that
/// finished, were refused, failed, or missed an objective; a client that goes away or a run that ends
/// does not, or whoever waits longest before hanging up would lower everybody's goodput.
pub fn makespan(requests: &[RequestRecord]) -> Option<f64> {
    let first = requests.iter().map(|record| record.arrival).min()?;
    let counted = |record: &RequestRecord| match record.status {
        Status::Finished | Status::Refused | Status::Failed => record.end.or(record.last_token),
        Status::Live | Status::Cancelled | Status::CutOff => {
            let missed = record.verdict() == Verdict::Miss;
            record.end.filter(|_| missed).or(record.last_token)
        }
    };
    let last: Time = requests.iter().filter_map(counted).max()?;
    Some(last.saturating_since(first).as_secs_f64())
}

/// Which requests count, by their arrival: those in [start, end), each with all its later milestones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The first instant of it.
    pub start: Time,
    /// The first instant after it.
    pub end: Time,
}

impl Window {
    /// Whether a request counts.
    pub fn holds(&self, record: &RequestRecord) -> bool {
        (self.start..self.end).contains(&record.arrival)
    }

    /// Its length: what rates over it are divided by.
    pub fn seconds(&self) -> f64 {
        self.end.saturating_since(self.start).as_secs_f64()
    }
}

/// Rates of a run or of a window of it, per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Good requests.
    pub good: f64,
    /// Finished requests.
    pub finished: f64,
    /// Output tokens of finished requests.
    pub output_tokens: f64,
}

impl Rates {
    /// Over `seconds`: the makespan of a whole run, the length of a window. `None` when that is zero.
    pub fn of(requests: &[RequestRecord], seconds: Option<f64>) -> Option<Rates> {
        let seconds = seconds.filter(|seconds| *seconds > 0.0)?;
        let finished = requests.iter().filter(|record| record.status == Status::Finished);
        let (count, tokens) =
            finished.fold((0u64, 0u64), |(n, t), record| (n + 1, t + u64::from(record.output_tokens)));
        Some(Rates {
            good: Attainment::of(requests, None).good as f64 / seconds,
            finished: count as f64 / seconds,
            output_tokens: tokens as f64 / seconds,
        })
    }
}

/// good / makespan in requests per second, as load generators report it.
pub fn goodput(requests: &[RequestRecord]) -> Option<f64> {
    Some(Rates::of(requests, makespan(requests))?.good)
}

/// Finished requests and their output tokens per second of makespan.
pub fn throughput(requests: &[RequestRecord]) -> Option<(f64, f64)> {
    Rates::of(requests, makespan(requests)).map(|rates| (rates.finished, rates.output_tokens))
}

/// Mean and percentiles of the values that are defined.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    sorted: Vec<f64>,
}

impl Distribution {
    /// Of the defined values, in any order. NaN is not a value.
    pub fn new(values: impl IntoIterator<Item = f64>) -> Distribution {
        let mut sorted: Vec<f64> = values.into_iter().filter(|value| !value.is_nan()).collect();
        sorted.sort_by(f64::total_cmp);
        Distribution { sorted }
    }

    /// How many values are defined.
    pub fn count(&self) -> usize {
        self.sorted.len()
    }

    /// Their mean.
    pub fn mean(&self) -> Option<f64> {
        (!self.sorted.is_empty()).then(|| self.sorted.iter().sum::<f64>() / self.sorted.len() as f64)
    }

    /// The `percent`-th percentile, interpolated linearly between order statistics (numpy's
    /// default); `percent` is clamped to 0..=100.
    pub fn percentile(&self, percent: f64) -> Option<f64> {
        let last = self.sorted.len().checked_sub(1)?;
        let place = percent.clamp(0.0, 100.0) / 100.0 * last as f64;
        let (low, fraction) = (place.floor() as usize, place.fract());
        let high = self.sorted[(low + 1).min(last)];
        Some(self.sorted[low] + (high - self.sorted[low]) * fraction)
    }

    /// The largest value.
    pub fn max(&self) -> Option<f64> {
        self.sorted.last().copied()
    }
}

/// Inter-token latencies pooled over requests: each gap counts once.
#[derive(Clone, Debug, Default)]
pub struct PooledGaps {
    /// Gap in seconds, how often; ascending.
    sorted: Vec<(f64, u64)>,
    count: u64,
}

impl PooledGaps {
    /// Expands runs of gaps; work is one entry a step, not one a token.
    pub fn new(runs: &[GapRun]) -> PooledGaps {
        let mut sorted: Vec<(f64, u64)> = Vec::new();
        for run in runs {
            for index in 0..run.count {
                let picos = run.first.0 as i128 + i128::from(run.delta) * i128::from(index);
                sorted.push((picos as f64 * 1e-12, u64::from(run.weight)));
            }
        }
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
        let count = sorted.iter().map(|(_, weight)| weight).sum();
        PooledGaps { sorted, count }
    }

    /// Gaps in all.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Mean gap in seconds.
    pub fn mean(&self) -> Option<f64> {
        let total: f64 = self.sorted.iter().map(|(gap, weight)| gap * *weight as f64).sum();
        (self.count > 0).then(|| total / self.count as f64)
    }

    /// Percentiles in seconds, interpolated as [`Distribution::percentile`] does.
    pub fn percentiles(&self, percents: &[f64]) -> Option<Vec<f64>> {
        let last = self.count.checked_sub(1)?;
        let mut ends = Vec::with_capacity(self.sorted.len());
        let mut end = 0;
        for (_, weight) in &self.sorted {
            end += weight;
            ends.push(end);
        }
        let value = |rank: u64| self.sorted[ends.partition_point(|end| *end <= rank)].0;
        let at = |percent: &f64| {
            let place = percent.clamp(0.0, 100.0) / 100.0 * last as f64;
            let (low, fraction) = (place.floor() as u64, place.fract());
            let floor = value(low);
            floor + (value((low + 1).min(last)) - floor) * fraction
        };
        Some(percents.iter().map(at).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Picos;
    use proptest::prelude::*;

    #[test]
    fn percentiles_interpolate_and_undefined_values_do_not_count() {
        let values = Distribution::new([4.0, 1.0, f64::NAN, 3.0, 2.0]);
        assert_eq!(values.count(), 4);
        assert_eq!(values.percentile(50.0), Some(2.5));
        assert_eq!(values.percentile(100.0), Some(4.0));
        assert_eq!(Distribution::new([]).percentile(50.0), None);
        assert_eq!(Distribution::new([]).mean(), None);
    }

    proptest! {
        #[test]
        fn pooled_gaps_equal_their_expansion(runs in prop::collection::vec((1u64..1_000, 0i64..50, 1u32..6, 1u32..5), 1..8)) {
            let runs: Vec<GapRun> = runs.into_iter().map(|(first, delta, count, weight)|
                GapRun { first: Picos(first * 1_000), delta: delta * 1_000, count, weight }).collect();
            let all: Vec<f64> = runs.iter().flat_map(|run| (0..run.count * run.weight)
                .map(|i| (run.first.0 as i64 + run.delta * i64::from(i / run.weight)) as f64 * 1e-12)).collect();
            let expected = Distribution::new(all);
            let pooled = PooledGaps::new(&runs);
            prop_assert_eq!(pooled.count() as usize, expected.count());
            for (percent, found) in [0.0, 12.5, 50.0, 99.0, 100.0].iter().zip(pooled.percentiles(&[0.0, 12.5, 50.0, 99.0, 100.0]).unwrap()) {
                prop_assert!((found - expected.percentile(*percent).unwrap()).abs() < 1e-15);
            }
            prop_assert!((pooled.mean().unwrap() - expected.mean().unwrap()).abs() < 1e-12);
        }
    }
}
