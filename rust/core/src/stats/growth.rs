//! Whether the queue grew while requests arrived: whether the rate was sustainable at all.

use super::batches::{Batches, MIN_BATCHES, MIN_PER_BATCH};
use super::student::student_quantile;
use crate::record::RequestRecord;
use crate::time::Time;

/// Significance of the slope for the verdict that the queue grew.
const SIGNIFICANCE: f64 = 0.001;
/// Significance at which growth can no longer be ruled out.
const DOUBT: f64 = 0.05;
/// Significance of the drift against wandering at the edge.
const WANDERING: f64 = 0.025;
/// A slope can be certain and small. What matters: the last third holds so many times the requests of
/// the first third, and one more, or the system stays behind by so large a share of the arrivals.
const FACTOR: f64 = 1.5;
const BEHIND: f64 = 0.05;
/// A run starts empty and fills up, growing or not. So many median times in service are left out at its
/// start, but at least and at most so much of the arrivals' time.
const FILLING: f64 = 2.0;
const FILLING_SHARE: (f64, f64) = (0.1, 1.0 / 3.0);
/// Arrivals over fewer median times in service cannot tell filling from growth.
const LONG: f64 = 10.0;

/// Others that a request found when it arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// In the system, held ones included.
    pub present: u32,
    /// Of those, waiting: held, queued for prefill, or for room at a decode worker.
    pub waiting: u32,
}

/// Requests in the system while others arrived.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    /// Arrivals looked at, after the filling.
    pub count: usize,
    /// Leading arrivals left out.
    pub skipped: usize,
    /// Time of arrivals, in median times in service.
    pub length: f64,
    /// All that were there.
    pub present: Trend,
    /// Those that waited.
    pub waiting: Trend,
}

/// How a number of requests went, as arrivals found it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trend {
    /// Its mean over the first third of the arrivals.
    pub first_third: f64,
    /// The same over the last third.
    pub last_third: f64,
    /// Growth per arrival: the share of the arrivals that the system did not keep up with.
    pub slope: f64,
    /// The slope over its standard error.
    pub ratio: f64,
    /// The mean step from one tenth to the next over its standard error, were they those of a random
    /// walk: of a load at the very edge, where growth and shrinking are equally likely.
    pub drift: f64,
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

/// What each arrival finds; for records in the order of their arrivals.
pub fn found_on_arrival(requests: &[RequestRecord]) -> Vec<Found> {
    let mut changes: Vec<(Time, i64, i64)> = Vec::with_capacity(4 * requests.len());
    for record in requests {
        let never = record.end.unwrap_or(Time::MAX);
        let started = record.prefill_start.unwrap_or(never);
        changes.push((record.arrival, 1, 1));
        changes.push((started, 0, -1));
        changes.push((never, -1, 0));
        if let (Some(first), true) = (record.first_token, record.prefill_start.is_some()) {
            let moved = record.transfer_start.or(record.decode_start).unwrap_or(never).max(first);
            changes.extend([(first, 0, 1), (moved, 0, -1)]);
        }
    }
    changes.sort_unstable_by_key(|change| change.0);
    let (mut next, mut present, mut waiting) = (0, 0, 0);
    let mut look = |record: &RequestRecord| {
        // What changes at this very instant is settled, but for those that arrive with it.
        while changes.get(next).is_some_and(|change| change.0 < record.arrival) {
            (present, waiting) = (present + changes[next].1, waiting + changes[next].2);
            next += 1;
        }
        Found { present: present as u32, waiting: waiting.max(0) as u32 }
    };
    requests.iter().map(&mut look).collect()
}

impl Trend {
    fn of(series: &[f64]) -> Trend {
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
        let batches = Batches::split(series, MIN_BATCHES);
        let (slope, error) = line(batches.means());
        let third = series.len() / 3;
        Trend {
            first_third: mean(&series[..third]),
            last_third: mean(&series[series.len() - third..]),
            slope: slope * MIN_BATCHES as f64 / series.len() as f64,
            ratio: if slope == 0.0 { 0.0 } else { slope / error },
            drift: drift(batches.means()),
        }
    }

    fn certain(&self, significance: f64) -> bool {
        self.ratio > student_quantile(1.0 - significance, (MIN_BATCHES - 2) as f64)
    }

    fn grew(&self, significance: f64) -> bool {
        let matters = self.last_third > FACTOR * self.first_third + 1.0 || self.slope > BEHIND;
        matters && self.certain(significance)
    }
}

impl Growth {
    /// Of `requests` in the order of their arrivals, and what each found.
    ///
    /// The drain is no part of it, since only arrivals look. After the filling, the numbers found are
    /// averaged in ten batches and a line is fitted to them: slope and standard error are those of
    /// ordinary least squares, with eight degrees of freedom.
    ///
    /// # Errors
    /// [`TooShort`].
    pub fn of(requests: &[RequestRecord], found: &[Found]) -> Result<Growth, TooShort> {
        let (skipped, length) = filling(requests);
        let found = &found[skipped..];
        let (count, needed) = (found.len(), MIN_BATCHES * MIN_PER_BATCH / 2);
        if count < needed {
            return Err(TooShort { count, needed });
        }
        let trend = |number: fn(&Found) -> u32| {
            Trend::of(&found.iter().map(|found| f64::from(number(found))).collect::<Vec<_>>())
        };
        let (present, waiting) = (trend(|found| found.present), trend(|found| found.waiting));
        Ok(Growth { count, skipped, length, present, waiting })
    }

    /// Whether arrivals went on for long enough to tell growth from filling by all that were there.
    pub fn is_long(&self) -> bool {
        self.length >= LONG
    }

    /// Whether the queue grew: a slope beyond chance (0.1 %, one-sided) that matters. Of all requests
    /// present, if the run is long: more than 1.5 times as many in the last third as in the first, and
    /// one more, or 5 % of the arrivals left behind. Of those that wait, in any run: 5 % of the arrivals.
    pub fn grew(&self) -> bool {
        self.grew_beyond(f64::NEG_INFINITY)
    }

    fn grew_beyond(&self, drift: f64) -> bool {
        let Trend { slope, .. } = self.waiting;
        let waiting = slope > BEHIND && self.waiting.certain(SIGNIFICANCE) && self.waiting.drift > drift;
        waiting || (self.is_long() && self.present.grew(SIGNIFICANCE) && self.present.drift > drift)
    }

    /// Whether the same rate would make it grow with other arrivals as well: it grew, and faster than a
    /// load at the very edge lets it wander (2.5 %, one-sided).
    pub fn surely_grows(&self) -> bool {
        self.grew_beyond(student_quantile(1.0 - WANDERING, (MIN_BATCHES - 2) as f64))
    }

    /// Whether it may have grown: the slope at 5 %, or a run too short to tell. A rate is only said to
    /// be sustained without it.
    pub fn may_have_grown(&self) -> bool {
        !self.is_long() || self.grew() || self.present.grew(DOUBT)
    }
}

/// Leading arrivals that met a system which was still filling up, and the time of all arrivals in
/// median times in service (there, and not waiting).
fn filling(requests: &[RequestRecord]) -> (usize, f64) {
    let (Some(first), Some(last)) = (requests.first(), requests.last()) else { return (0, 0.0) };
    let span = last.arrival.saturating_since(first.arrival).0 as f64;
    let mut services: Vec<u64> = requests.iter().filter_map(service).collect();
    services.sort_unstable();
    let median = services.get(services.len() / 2).map_or(0.0, |service| *service as f64);
    let until = (FILLING * median).clamp(FILLING_SHARE.0 * span, FILLING_SHARE.1 * span);
    let early = |record: &RequestRecord| (record.arrival.saturating_since(first.arrival).0 as f64) < until;
    (requests.partition_point(early), if median > 0.0 { span / median } else { f64::INFINITY })
}

/// Nanoseconds from the start of prefill to the end, without waiting for room.
fn service(record: &RequestRecord) -> Option<u64> {
    let stay = record.end?.saturating_since(record.prefill_start?).0;
    Some(stay.saturating_sub(record.awaiting_room().map_or(0, |room| room.0)))
}

/// The mean difference of neighbours over its standard error. Differences of a random walk's averages
/// correlate by 1/4 (Working 1960, "Note on the correlation of first differences of averages in a random
/// chain"), so the variance of their mean is 1 + 2/4 times that of independent ones.
fn drift(values: &[f64]) -> f64 {
    let steps = Batches::of(values.windows(2).map(|pair| pair[1] - pair[0]).collect());
    let error = steps.standard_error() * 1.5_f64.sqrt();
    if steps.mean() == 0.0 { 0.0 } else { steps.mean() / error }
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
    use crate::record::Status;
    use crate::request::{ClassId, Request, RequestId};
    use crate::slo::Slo;
    use std::sync::Arc;

    /// Arrives, waits, is served.
    fn served(arrival: u64, wait: u64, service: u64) -> RequestRecord {
        let mut record = RequestRecord::new(&Request {
            id: RequestId(arrival),
            arrival: Time(arrival),
            prompt_tokens: 1,
            max_tokens: 1,
            priority: 0,
            slo: Slo::default(),
            class: ClassId(0),
            prefix: Arc::default(),
        });
        record.status = Status::Finished;
        record.prefill_start = Some(Time(arrival + wait));
        record.first_token = Some(Time(arrival + wait + service));
        (record.last_token, record.end) = (record.first_token, record.first_token);
        record
    }

    #[test]
    fn what_arrivals_find_by_hand() {
        // Served one after the other, 10 each: the second waits for 7, the third for 12.
        let requests = [served(0, 0, 10), served(3, 7, 10), served(8, 12, 10), served(20, 10, 10)];
        let found = found_on_arrival(&requests);
        let expected = [(0, 0), (1, 0), (2, 1), (2, 1)];
        assert_eq!(found.iter().map(|f| (f.present, f.waiting)).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn level_and_growing_queues() {
        let verdict = |wait: fn(u64) -> u64| {
            let requests: Vec<_> = (0..400).map(|i| served(10 * i, wait(i), 9)).collect();
            let growth = Growth::of(&requests, &found_on_arrival(&requests)).unwrap();
            (growth.grew(), growth.may_have_grown())
        };
        assert_eq!(verdict(|_| 0), (false, false));
        assert_eq!(verdict(|i| 50 + i * 7 % 13), (false, false));
        assert_eq!(verdict(|i| 2 * i), (true, true), "a fifth of the arrivals stays behind");
        let few: Vec<_> = (0..50).map(|i| served(10 * i, 0, 9)).collect();
        let short = Growth::of(&few, &found_on_arrival(&few)).unwrap_err();
        assert_eq!(short, TooShort { count: 45, needed: 50 });
    }

    #[test]
    fn a_line_by_hand() {
        let (slope, error) = line(&[1.0, 2.0, 4.0]);
        // Slope 3/2; residuals 1/6, −1/3, 1/6 about the line, one degree of freedom, squares 2.
        assert!((slope - 1.5).abs() < 1e-15 && (error - (1.0_f64 / 6.0 / 2.0).sqrt()).abs() < 1e-15);
        assert_eq!(line(&[3.0; 4]), (0.0, 0.0));
    }
}
