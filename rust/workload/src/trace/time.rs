//! Arrival times as traces write them: exact decimals in a unit, or date-times.

use kvrelay_core::latency::names::{UnknownName, canonical};

/// The unit of a trace's arrival times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeUnit {
    /// Seconds.
    Seconds,
    /// Milliseconds.
    Millis,
    /// Microseconds.
    Micros,
    /// Nanoseconds.
    Nanos,
}

impl TimeUnit {
    /// All of them, from coarse to fine.
    pub const ALL: [TimeUnit; 4] = [TimeUnit::Seconds, TimeUnit::Millis, TimeUnit::Micros, TimeUnit::Nanos];

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            TimeUnit::Seconds => "s",
            TimeUnit::Millis => "ms",
            TimeUnit::Micros => "us",
            TimeUnit::Nanos => "ns",
        }
    }

    /// The unit written as `name`.
    ///
    /// # Errors
    /// [`UnknownName`], with the units there are.
    pub fn named(name: &str) -> Result<TimeUnit, UnknownName> {
        let wanted = canonical(name);
        let found = TimeUnit::ALL.into_iter().find(|unit| unit.name() == wanted);
        found.ok_or_else(|| UnknownName::new("time unit", name, TimeUnit::ALL.map(TimeUnit::name)))
    }

    /// Nanoseconds in it.
    pub(super) fn nanos(self) -> i128 {
        match self {
            TimeUnit::Seconds => 1_000_000_000,
            TimeUnit::Millis => 1_000_000,
            TimeUnit::Micros => 1_000,
            TimeUnit::Nanos => 1,
        }
    }
}

/// A decimal number, exactly: `mantissa` · 10^`exponent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Decimal {
    mantissa: i128,
    exponent: i32,
}

/// More digits, or larger exponents, than any trace has; within it nothing below overflows.
const MOST_DIGITS: usize = 24;
const LARGEST_EXPONENT: i32 = 40;

impl Decimal {
    /// Reads `[-]digits[.digits][e[±]digits]`.
    pub(super) fn parse(text: &str) -> Option<Decimal> {
        let (number, exponent) = match text.split_once(['e', 'E']) {
            Some((number, exponent)) => (number, exponent.parse::<i32>().ok()?),
            None => (text, 0),
        };
        let (negative, digits) = match number.strip_prefix('-') {
            Some(digits) => (true, digits),
            None => (false, number.strip_prefix('+').unwrap_or(number)),
        };
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let all = || whole.bytes().chain(fraction.bytes());
        let num_digits = whole.len() + fraction.len();
        if num_digits == 0 || num_digits > MOST_DIGITS || !all().all(|digit| digit.is_ascii_digit()) {
            return None;
        }
        let mantissa = all().fold(0i128, |sum, digit| sum * 10 + i128::from(digit - b'0'));
        let exponent = exponent.checked_sub(i32::try_from(fraction.len()).ok()?)?;
        if exponent.abs() > LARGEST_EXPONENT {
            return None;
        }
        Some(Decimal { mantissa: if negative { -mantissa } else { mantissa }, exponent })
    }

    /// Times `factor`, rounded half up to a whole number, if that is below 10³⁰ or so.
    pub(super) fn scaled(self, factor: i128) -> Option<i128> {
        let scaled = self.mantissa.checked_mul(factor)?;
        let power = 10i128.checked_pow(self.exponent.unsigned_abs());
        if self.exponent >= 0 {
            return scaled.checked_mul(power?);
        }
        // A power beyond 128 bits divides anything to zero.
        Some(power.map_or(0, |power| (2 * scaled + power).div_euclid(2 * power)))
    }

    /// The number, if it is whole.
    pub(super) fn whole(self) -> Option<i128> {
        let (mut mantissa, mut exponent) = (self.mantissa, self.exponent);
        while exponent < 0 {
            if mantissa % 10 != 0 {
                return None;
            }
            (mantissa, exponent) = (mantissa / 10, exponent + 1);
        }
        mantissa.checked_mul(10i128.checked_pow(exponent.unsigned_abs())?)
    }
}

/// Nanoseconds since 1970 of `2023-11-16 18:15:46.6805900`: a `T` may stand for the blank, the
/// fraction may have 0 to 9 digits, and `Z` or `±hh:mm` may follow; without it the time is UTC.
pub(super) fn date_time(text: &str) -> Option<i128> {
    let (date, time) = text.split_once([' ', 'T'])?;
    let mut parts = date.split('-');
    let mut date_part = |width| fixed_digits(parts.next()?, width);
    let (year, month, day) = (date_part(4)?, date_part(2)?, date_part(2)?);
    if parts.next().is_some() {
        return None;
    }
    let (time, offset_minutes) = split_zone(time)?;
    let (clock, fraction) = time.split_once('.').unwrap_or((time, ""));
    let mut parts = clock.split(':');
    let mut clock_part = |most| fixed_digits(parts.next()?, 2).filter(|value| *value <= most);
    let (hour, minute, second) = (clock_part(23)?, clock_part(59)?, clock_part(59)?);
    if parts.next().is_some() || fraction.len() > 9 || time.ends_with('.') {
        return None;
    }
    let fraction_nanos = match fraction {
        "" => 0,
        digits => fixed_digits(digits, digits.len())? * 10i64.pow(9 - digits.len() as u32),
    };
    let seconds = days_since_1970(year, month, day)? * 86_400 + hour * 3_600 + minute * 60 + second;
    let seconds = i128::from(seconds) - i128::from(offset_minutes) * 60;
    Some(seconds * 1_000_000_000 + i128::from(fraction_nanos))
}

/// Digits, exactly `width` of them.
fn fixed_digits(text: &str, width: usize) -> Option<i64> {
    let fits = text.len() == width && text.bytes().all(|digit| digit.is_ascii_digit());
    fits.then(|| text.parse().ok()).flatten()
}

/// The time without its zone, and the zone's offset from UTC in minutes.
fn split_zone(time: &str) -> Option<(&str, i64)> {
    if let Some(time) = time.strip_suffix('Z') {
        return Some((time, 0));
    }
    let Some(sign_at) = time.find(['+', '-']) else {
        return Some((time, 0));
    };
    let (time, zone) = time.split_at(sign_at);
    let (hours, minutes) = zone[1..].split_once(':')?;
    let hours = fixed_digits(hours, 2).filter(|hours| *hours <= 23)?;
    let minutes = fixed_digits(minutes, 2).filter(|minutes| *minutes <= 59)?;
    let offset = hours * 60 + minutes;
    Some((time, if zone.starts_with('-') { -offset } else { offset }))
}

/// Days from 1970-01-01 to a date of the Gregorian calendar, from the year 1 on.
fn days_since_1970(year: i64, month: i64, day: i64) -> Option<i64> {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let month_index = usize::try_from(month - 1).ok()?;
    const LENGTHS: [i64; 12] = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let length = LENGTHS.get(month_index)? + i64::from(leap && month == 2);
    if year < 1 || !(1..=length).contains(&day) {
        return None;
    }
    let before = year - 1;
    let years = before * 365 + before / 4 - before / 100 + before / 400;
    let months = LENGTHS[..month_index].iter().sum::<i64>() + i64::from(leap && month > 2);
    // 719,162 days lie between 0001-01-01 and 1970-01-01.
    Some(years + months + day - 1 - 719_162)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn decimals_are_exact() {
        let nanos = |text: &str, unit: TimeUnit| Decimal::parse(text).unwrap().scaled(unit.nanos());
        assert_eq!(nanos("4.314579", TimeUnit::Seconds), Some(4_314_579_000));
        assert_eq!(nanos("-0.5", TimeUnit::Micros), Some(-500));
        assert_eq!(nanos("1.7e15", TimeUnit::Micros), Some(1_700_000_000_000_000_000));
        assert_eq!(nanos("0.4", TimeUnit::Nanos), Some(0));
        assert_eq!(nanos("1e-39", TimeUnit::Seconds), Some(0));
        assert_eq!(nanos("1778000000.123456789123", TimeUnit::Seconds), Some(1_778_000_000_123_456_789));
        for text in ["", ".", "1.2.3", "abc", "1e", "e5", "nan", "inf", "1e999", "0x10", "1_000", "--1"] {
            assert_eq!(Decimal::parse(text), None, "{text}");
        }
        assert_eq!(Decimal::parse("374.0").unwrap().whole(), Some(374));
        assert_eq!(Decimal::parse("3.74e2").unwrap().whole(), Some(374));
        assert_eq!(Decimal::parse("374.5").unwrap().whole(), None);
    }

    #[test]
    fn date_times_read_in_all_their_forms() {
        let base = 1_700_158_546_680_590_000;
        for text in [
            "2023-11-16 18:15:46.6805900",
            "2023-11-16T18:15:46.68059Z",
            "2023-11-16 18:15:46.680590+00:00",
            "2023-11-16 20:15:46.680590000+02:00",
            "2023-11-16 12:45:46.68059-05:30",
        ] {
            assert_eq!(date_time(text), Some(base), "{text}");
        }
        assert_eq!(date_time("2024-02-29 00:00:00"), Some(1_709_164_800_000_000_000));
        assert_eq!(date_time("1970-01-01 00:00:00"), Some(0));
        for text in [
            "2023-02-29 00:00:00",
            "2023-13-01 00:00:00",
            "2023-00-01 00:00:00",
            "2023-11-31 00:00:00",
            "2023-11-16",
            "2023-11-16 24:00:00",
            "2023-11-16 23:60:00",
            "2023-11-16 18:15",
            "16/11/2023 18:15:46",
            "2023-11-16 18:15:46.",
            "2023-11-16 18:15:46.1234567890",
            "2023-11-16 18:15:46+2",
            "",
        ] {
            assert_eq!(date_time(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn days_follow_each_other(day in 0i64..1_000_000) {
            // Walks the calendar by one day from a date, and must arrive one day later.
            let (year, month, date) = civil(day);
            prop_assert_eq!(days_since_1970(year, month, date), Some(day));
        }

        #[test]
        fn integers_pass_unchanged(value in 0u64..=u64::MAX) {
            prop_assert_eq!(Decimal::parse(&value.to_string()).unwrap().scaled(1), Some(i128::from(value)));
        }
    }

    /// The date of a day since 1970, by counting down whole years and months.
    fn civil(mut day: i64) -> (i64, i64, i64) {
        let (mut year, mut month) = (1970, 1);
        loop {
            let length = days_since_1970(year + 1, 1, 1).unwrap() - days_since_1970(year, 1, 1).unwrap();
            assert!(length == 365 || length == 366);
            if day < length {
                break;
            }
            (day, year) = (day - length, year + 1);
        }
        for length in [
            31,
            if (year % 4 == 0 && year % 100 != 0) || year % 400 == 0 { 29 } else { 28 },
            31,
            30,
            31,
            30,
            31,
            31,
            30,
            31,
            30,
        ] {
            if day < length {
                break;
            }
            (day, month) = (day - length, month + 1);
        }
        (year, month, day + 1)
    }
}
