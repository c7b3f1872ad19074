//! Instants and durations. The core never reads a clock: every instant is given to it.
//!
//! Events happen at whole nanoseconds ([`Time`]). Step durations are whole picoseconds ([`Picos`])
//! and accumulate on a worker's [`PicoClock`], so that `k` steps taken as one jump end at exactly
//! the same event time as `k` single steps. Rounding each step to nanoseconds instead would not.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};

/// Picoseconds in a nanosecond.
const PICOS_PER_NANO: u64 = 1_000;

/// An instant, in nanoseconds since the start of a run.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

/// A duration in nanoseconds.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

/// A duration in picoseconds. A `u64` of them holds 213 days.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Picos(pub u64);

impl Time {
    /// The start of a run.
    pub const ZERO: Time = Time(0);
    /// Later than every event.
    pub const MAX: Time = Time(u64::MAX);
    /// The latest instant of a run: what picoseconds can count to, 213 days.
    pub const LONGEST: Time = Time(u64::MAX / PICOS_PER_NANO - 1);

    /// The instant `seconds` after the start; negative and NaN count as zero, the rest saturates.
    pub fn from_secs_f64(seconds: f64) -> Time {
        Time(Nanos::from_secs_f64(seconds).0)
    }

    /// Seconds since the start.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// Picoseconds since the start.
    pub fn as_picos(self) -> Picos {
        Picos(self.0.saturating_mul(PICOS_PER_NANO))
    }

    /// How long after `earlier` this is, or zero if it is before.
    pub fn saturating_since(self, earlier: Time) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Nanos {
    /// No time at all.
    pub const ZERO: Nanos = Nanos(0);

    /// `seconds` rounded to the nearest nanosecond; negative and NaN count as zero, the rest
    /// saturates.
    pub fn from_secs_f64(seconds: f64) -> Nanos {
        Nanos((seconds * 1e9).round() as u64)
    }

    /// In seconds.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }
}

impl Picos {
    /// No time at all.
    pub const ZERO: Picos = Picos(0);

    /// `milliseconds` rounded to the nearest picosecond; negative and NaN count as zero.
    pub fn from_millis_f64(milliseconds: f64) -> Picos {
        Picos((milliseconds * 1e9).round() as u64)
    }

    /// `seconds` rounded to the nearest picosecond; negative and NaN count as zero.
    pub fn from_secs_f64(seconds: f64) -> Picos {
        Picos((seconds * 1e12).round() as u64)
    }

    /// In seconds.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e12
    }
}

impl From<Nanos> for Picos {
    fn from(nanos: Nanos) -> Picos {
        Picos(nanos.0.saturating_mul(PICOS_PER_NANO))
    }
}

impl Add<Nanos> for Time {
    type Output = Time;
    fn add(self, rhs: Nanos) -> Time {
        Time(self.0.saturating_add(rhs.0))
    }
}

impl Sub for Time {
    type Output = Nanos;
    /// Panics when `rhs` is later: durations are never negative.
    fn sub(self, rhs: Time) -> Nanos {
        Nanos(self.0.checked_sub(rhs.0).expect("a later instant was subtracted from an earlier one"))
    }
}

impl Add for Picos {
    type Output = Picos;
    fn add(self, rhs: Picos) -> Picos {
        Picos(self.0.saturating_add(rhs.0))
    }
}

impl AddAssign for Picos {
    fn add_assign(&mut self, rhs: Picos) {
        *self = *self + rhs;
    }
}

impl std::iter::Sum for Picos {
    fn sum<I: Iterator<Item = Picos>>(iter: I) -> Picos {
        iter.fold(Picos::ZERO, Add::add)
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "t={:.9}s", self.as_secs_f64())
    }
}

impl fmt::Debug for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}ns", self.0)
    }
}

impl fmt::Debug for Picos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}ps", self.0)
    }
}

/// A worker's exact clock: picoseconds, continued without rounding while it stays busy.
///
/// Scheduler and simulator keep one each and advance them by the same rule, so they agree.
#[derive(Clone, Copy, Debug, Default)]
pub struct PicoClock {
    at: Picos,
}

impl PicoClock {
    /// Starts a run at `now`: from where the last one ended if that was this very instant (the
    /// fraction of a nanosecond is kept), otherwise from `now`.
    pub fn start(&mut self, now: Time) -> Picos {
        if self.time() != now {
            self.at = now.as_picos();
        }
        self.at
    }

    /// A run ended at `exact`, in picoseconds since the start of all; returns the event time: the
    /// ceiling in nanoseconds.
    pub fn end(&mut self, exact: Picos) -> Time {
        self.at = exact;
        self.time()
    }

    /// The event time of this instant.
    pub fn time(&self) -> Time {
        Time(self.at.0.div_ceil(PICOS_PER_NANO))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_survive_back_to_back_runs() {
        let mut clock = PicoClock::default();
        assert_eq!(clock.start(Time(5)), Picos(5_000));
        assert_eq!(clock.end(Picos(6_400)), Time(7));
        assert_eq!(clock.start(Time(7)), Picos(6_400));
        assert_eq!(clock.end(Picos(7_000)), Time(7));
        assert_eq!(clock.start(Time(9)), Picos(9_000));
    }

    #[test]
    fn odd_seconds_become_durations_without_wrapping() {
        assert_eq!(Nanos::from_secs_f64(-1.0), Nanos::ZERO);
        assert_eq!(Nanos::from_secs_f64(f64::NAN), Nanos::ZERO);
        assert_eq!(Nanos::from_secs_f64(f64::INFINITY), Nanos(u64::MAX));
        assert_eq!(Time::from_secs_f64(0.4), Time(400_000_000));
    }
}
