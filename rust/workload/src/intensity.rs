//! Arrivals at a rate that changes: ramps, tides and bursts.
//!
//! By a change of time, exactly: the points of a Poisson process of rate 1, taken back through the
//! cumulative rate Λ(t) (the rate's integral from 0 to t), are those of the process with that rate
//! (Çinlar, "Introduction to Stochastic Processes", 1975, chapter 4). Nothing is drawn and thrown
//! away, so that a changed rate moves arrivals without reordering the draws behind them.
//!
//! Time 0 is where the rate begins, and the first request arrives when the process says so.

use kvrelay_core::rng::{Purpose, Stream};
use kvrelay_core::time::Time;

use crate::arrivals::{MAX_SECONDS, checked_time};
use crate::error::{WorkloadError, positive};

/// How the rate, in requests per second, changes with time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Intensity {
    /// On a straight line, over the whole of its extent.
    Ramp {
        /// At the start, at least 0.
        from: f64,
        /// At the end, at least 0; one of the two is above.
        to: f64,
    },
    /// `rate + amplitude · sin(2π · t / period)`.
    Sinusoid {
        /// Its mean, above 0.
        rate: f64,
        /// From 0 to `rate`.
        amplitude: f64,
        /// Seconds of a whole wave.
        period: f64,
    },
    /// One of two rates in turn, each for an exponentially distributed time, `on` first: a
    /// Markov-modulated Poisson process of two states.
    OnOff {
        /// Requests per second while on, above 0.
        rate_on: f64,
        /// Requests per second while off, at least 0.
        rate_off: f64,
        /// Mean of the times on, in seconds.
        mean_on: f64,
        /// Mean of the times off, in seconds.
        mean_off: f64,
    },
}

/// Where arrivals end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Extent {
    /// After so many requests. A ramp lasts as long as its mean takes for so many, and has exactly
    /// so many.
    Requests(usize),
    /// After so many seconds, with as many requests as chance has it.
    Seconds(f64),
}

/// More requests than memory has room for are refused before they are drawn, where their number is
/// not given but comes of other parameters.
pub(crate) const MAX_REQUESTS: u64 = 100_000_000;

/// The most phases of [`Intensity::OnOff`], so that a slip in its times does not look like a hang.
const MAX_PHASES: u64 = 10_000_000;

/// The arrival times of a process of this intensity, in order.
///
/// # Errors
/// When a rate or a time is out of range, no request arrives, or the last one comes after
/// [`MAX_SECONDS`].
pub fn varying_arrival_times(
    intensity: Intensity,
    extent: Extent,
    seed: u64,
) -> Result<Vec<Time>, WorkloadError> {
    check(intensity, extent)?;
    let seconds = match (intensity, extent) {
        (Intensity::Ramp { from, to }, Extent::Requests(num)) => ramp_times(from, to, num, seed),
        (_, extent) => times_along(Cumulative::new(intensity, extent, seed), extent, seed)?,
    };
    if let Extent::Seconds(duration) = extent
        && seconds.is_empty()
    {
        let range = "long enough for a request to arrive: none did";
        return Err(WorkloadError::parameter("duration", duration, range));
    }
    let hint = "raise the rates or ask for fewer requests";
    seconds.into_iter().map(|at| checked_time("the arrival process", at, hint)).collect()
}

fn check(intensity: Intensity, extent: Extent) -> Result<(), WorkloadError> {
    match intensity {
        Intensity::Ramp { from, to } => {
            not_negative("rate_from", from)?;
            not_negative("rate_to", to)?;
            if from == 0.0 && to == 0.0 {
                return Err(WorkloadError::parameter("rate_to", to, "above 0 where rate_from is 0"));
            }
        }
        Intensity::Sinusoid { rate, amplitude, period } => {
            positive("rate", rate)?;
            positive("period", period)?;
            if !(0.0..=rate).contains(&amplitude) {
                let range = format!("between 0 and the rate, which is {rate}");
                return Err(WorkloadError::parameter("amplitude", amplitude, range));
            }
        }
        Intensity::OnOff { rate_on, rate_off, mean_on, mean_off } => {
            positive("rate_on", rate_on)?;
            not_negative("rate_off", rate_off)?;
            positive("mean_on", mean_on)?;
            positive("mean_off", mean_off)?;
        }
    }
    match extent {
        Extent::Requests(0) => Err(WorkloadError::parameter("num_requests", 0, "at least 1")),
        Extent::Requests(_) => Ok(()),
        Extent::Seconds(duration) => {
            positive("duration", duration)?;
            checked_time("duration", duration, "ask for a shorter one")?;
            let mean = intensity.mean_rate() * duration;
            if mean > MAX_REQUESTS as f64 {
                let range = format!("at most {MAX_REQUESTS}; ask for a shorter duration");
                return Err(WorkloadError::parameter("the mean number of requests", mean, range));
            }
            Ok(())
        }
    }
}

fn not_negative(parameter: &str, value: f64) -> Result<(), WorkloadError> {
    if value >= 0.0 && value.is_finite() {
        return Ok(());
    }
    Err(WorkloadError::parameter(parameter, value, "at least 0 and finite"))
}

impl Intensity {
    /// Requests per second, on average over a long time.
    pub fn mean_rate(self) -> f64 {
        match self {
            Intensity::Ramp { from, to } => (from + to) / 2.0,
            Intensity::Sinusoid { rate, .. } => rate,
            Intensity::OnOff { rate_on, rate_off, mean_on, mean_off } => {
                (rate_on * mean_on + rate_off * mean_off) / (mean_on + mean_off)
            }
        }
    }
}

impl std::fmt::Display for Intensity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Intensity::Ramp { from, to } => write!(f, "Poisson on a ramp from {from} to {to} req/s"),
            Intensity::Sinusoid { rate, amplitude, period } => {
                write!(f, "Poisson at {rate} ± {amplitude} req/s in waves of {period} s")
            }
            Intensity::OnOff { rate_on, rate_off, mean_on, mean_off } => write!(
                f,
                "Poisson at {rate_on} req/s for {mean_on} s and {rate_off} req/s for {mean_off} s in turn (means)"
            ),
        }
    }
}

/// A ramp's arrivals, exactly `num` of them. Given how many there are, the points of a unit process
/// lie like its first `num` over the one after them, so these shares of Λ are exact as well.
fn ramp_times(from: f64, to: f64, num: usize, seed: u64) -> Vec<f64> {
    let mut points: Vec<f64> = UnitPoisson::new(seed).take(num + 1).collect();
    let end = points.pop().expect("one more than the requests was drawn");
    let duration = num as f64 / Intensity::Ramp { from, to }.mean_rate();
    let at = |point: f64| ramp_inverse(from, to, duration, point / end * num as f64);
    points.into_iter().map(at).collect()
}

/// The arrivals within `extent`, in seconds.
fn times_along(mut along: Cumulative, extent: Extent, seed: u64) -> Result<Vec<f64>, WorkloadError> {
    let (most, latest) = match extent {
        Extent::Requests(num) => (num, f64::INFINITY),
        Extent::Seconds(duration) => (usize::MAX, duration),
    };
    let mut times = Vec::new();
    for point in UnitPoisson::new(seed).take(most) {
        let at = along.inverse(point)?;
        if at >= latest {
            break;
        }
        times.push(at);
        if at > MAX_SECONDS {
            // The caller refuses it, with its number; what comes after changes nothing.
            break;
        }
    }
    Ok(times)
}

/// The points of a Poisson process of rate 1.
struct UnitPoisson {
    seed: u64,
    index: u64,
    at: f64,
}

impl UnitPoisson {
    fn new(seed: u64) -> UnitPoisson {
        UnitPoisson { seed, index: 0, at: 0.0 }
    }
}

impl Iterator for UnitPoisson {
    type Item = f64;

    fn next(&mut self) -> Option<f64> {
        self.at += Stream::new(self.seed, Purpose::ARRIVALS, self.index).exponential();
        self.index += 1;
        Some(self.at)
    }
}

/// A cumulative rate, to be inverted at increasing values.
enum Cumulative {
    Ramp { from: f64, to: f64, duration: f64 },
    Wave { rate: f64, amplitude: f64, period: f64 },
    Phases(Phases),
}

impl Cumulative {
    fn new(intensity: Intensity, extent: Extent, seed: u64) -> Cumulative {
        match intensity {
            Intensity::Ramp { from, to } => {
                let duration = match extent {
                    Extent::Seconds(duration) => duration,
                    Extent::Requests(num) => num as f64 / intensity.mean_rate(),
                };
                Cumulative::Ramp { from, to, duration }
            }
            Intensity::Sinusoid { rate, amplitude, period } => Cumulative::Wave { rate, amplitude, period },
            Intensity::OnOff { rate_on, rate_off, mean_on, mean_off } => {
                let rates = [rate_on, rate_off];
                Cumulative::Phases(Phases::new(rates, [mean_on, mean_off], seed))
            }
        }
    }

    /// The time at which it reaches `point`.
    fn inverse(&mut self, point: f64) -> Result<f64, WorkloadError> {
        match self {
            Cumulative::Ramp { from, to, duration } => Ok(ramp_inverse(*from, *to, *duration, point)),
            Cumulative::Wave { rate, amplitude, period } => {
                Ok(wave_inverse(*rate, *amplitude, *period, point))
            }
            Cumulative::Phases(phases) => phases.inverse(point),
        }
    }
}

/// Solves `from·t + (to − from)·t² / (2·duration) = point`, in the form that loses no digits when
/// the ramp is flat; infinite where the ramp has come to its end before.
fn ramp_inverse(from: f64, to: f64, duration: f64, point: f64) -> f64 {
    let slope = (to - from) / duration;
    let square = from * from + 2.0 * slope * point;
    // Past the end of a falling ramp there is no such time; the last digit at its very end is not past.
    if square < -1e-9 * from * from {
        return f64::INFINITY;
    }
    2.0 * point / (from + square.max(0.0).sqrt())
}

/// Solves `rate·t + amplitude·period/2π · (1 − cos(2π·t/period)) = point`.
///
/// Whole waves are divided off. Within one, Newton's steps are kept inside a bracket that each of
/// them narrows, since at a trough that touches 0 the slope vanishes.
fn wave_inverse(rate: f64, amplitude: f64, period: f64, point: f64) -> f64 {
    let per_wave = rate * period;
    let waves = (point / per_wave).floor();
    let rest = point - waves * per_wave;
    let turn = std::f64::consts::TAU;
    let (mut low, mut high) = (0.0, 1.0);
    // In shares of a wave.
    let mut share = rest / per_wave;
    for _ in 0..100 {
        let angle = turn * share;
        let excess = per_wave * share + amplitude * period / turn * (1.0 - libm::cos(angle)) - rest;
        if excess > 0.0 {
            high = share;
        } else {
            low = share;
        }
        let slope = (rate + amplitude * libm::sin(angle)) * period;
        let newton = share - excess / slope;
        let next = if newton > low && newton < high { newton } else { 0.5 * (low + high) };
        if next == share || low + f64::EPSILON > high {
            break;
        }
        share = next;
    }
    (waves + share) * period
}

/// The two rates in turn, phase by phase.
struct Phases {
    rates: [f64; 2],
    means: [f64; 2],
    seed: u64,
    /// The phase in progress, from 0: even ones are on.
    index: u64,
    /// When it began and ends, in seconds.
    start: f64,
    end: f64,
    /// The cumulative rate when it began.
    base: f64,
}

impl Phases {
    fn new(rates: [f64; 2], means: [f64; 2], seed: u64) -> Phases {
        let mut phases = Phases { rates, means, seed, index: 0, start: 0.0, end: 0.0, base: 0.0 };
        phases.end = phases.length();
        phases
    }

    /// How long the phase in progress lasts.
    fn length(&self) -> f64 {
        let mean = self.means[(self.index % 2) as usize];
        mean * Stream::new(self.seed, Purpose::PHASES, self.index).exponential()
    }

    fn inverse(&mut self, point: f64) -> Result<f64, WorkloadError> {
        loop {
            let rate = self.rates[(self.index % 2) as usize];
            let after = self.base + rate * (self.end - self.start);
            if point <= after && rate > 0.0 {
                return Ok(self.start + (point - self.base) / rate);
            }
            if self.start > MAX_SECONDS {
                return Ok(self.start);
            }
            if self.index == MAX_PHASES {
                let range = format!(
                    "longer: after {MAX_PHASES} phases the process has come to {} s only",
                    self.start
                );
                return Err(WorkloadError::parameter(
                    "mean_on + mean_off",
                    self.means[0] + self.means[1],
                    range,
                ));
            }
            (self.base, self.start, self.index) = (after, self.end, self.index + 1);
            self.end = self.start + self.length();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn seconds(intensity: Intensity, extent: Extent, seed: u64) -> Vec<f64> {
        let times = varying_arrival_times(intensity, extent, seed).unwrap();
        assert!(times.is_sorted());
        times.into_iter().map(Time::as_secs_f64).collect()
    }

    /// Whether `count` is within four standard deviations of a Poisson number of this mean.
    fn plausible(count: usize, mean: f64) -> bool {
        (count as f64 - mean).abs() <= 4.0 * mean.sqrt() + 1.0
    }

    fn within(times: &[f64], from: f64, to: f64) -> usize {
        times.iter().filter(|at| (from..to).contains(*at)).count()
    }

    #[test]
    fn windows_hold_what_the_integral_of_the_rate_says() {
        let (from, to, duration) = (2.0, 40.0, 500.0);
        let ramp = seconds(Intensity::Ramp { from, to }, Extent::Seconds(duration), 3);
        let (rate, amplitude, period) = (10.0, 10.0, 60.0);
        let wave = seconds(Intensity::Sinusoid { rate, amplitude, period }, Extent::Seconds(duration), 4);
        for window in 0..10 {
            let (a, b) = (f64::from(window) * 50.0, f64::from(window + 1) * 50.0);
            let mean = 50.0 * (from + (to - from) * (a + b) / 2.0 / duration);
            assert!(plausible(within(&ramp, a, b), mean), "ramp {a}: {} of {mean}", within(&ramp, a, b));
            let angle = |t: f64| libm::cos(std::f64::consts::TAU * t / period);
            let mean = rate * 50.0 + amplitude * period / std::f64::consts::TAU * (angle(a) - angle(b));
            assert!(plausible(within(&wave, a, b), mean), "wave {a}: {} of {mean}", within(&wave, a, b));
        }
    }

    #[test]
    fn bursts_come_at_the_rate_of_their_phase() {
        let intensity = Intensity::OnOff { rate_on: 50.0, rate_off: 2.0, mean_on: 5.0, mean_off: 15.0 };
        let duration = 4_000.0;
        let times = seconds(intensity, Extent::Seconds(duration), 5);
        let mut phases = Phases::new([50.0, 2.0], [5.0, 15.0], 5);
        let mut counts = [(0, 0.0); 2];
        while phases.start < duration {
            let (count, length) = &mut counts[(phases.index % 2) as usize];
            *count += within(&times, phases.start, phases.end.min(duration));
            *length += phases.end.min(duration) - phases.start;
            (phases.start, phases.index) = (phases.end, phases.index + 1);
            phases.end = phases.start + phases.length();
        }
        for ((count, length), rate) in counts.into_iter().zip([50.0, 2.0]) {
            assert!(plausible(count, rate * length), "{count} of {}", rate * length);
        }
        let silent = Intensity::OnOff { rate_on: 50.0, rate_off: 0.0, mean_on: 1.0, mean_off: 9.0 };
        let times = seconds(silent, Extent::Requests(20_000), 6);
        // Phases of means 1 and 9: 400 of each give the rate to about a tenth.
        assert!((20_000.0 / times.last().unwrap() / 5.0 - 1.0).abs() < 0.2);
    }

    #[test]
    fn a_ramp_of_so_many_requests_has_them_in_the_time_its_mean_takes() {
        for (from, to) in [(0.0, 10.0), (10.0, 0.0), (5.0, 5.0), (1.0, 9.0)] {
            let times = seconds(Intensity::Ramp { from, to }, Extent::Requests(4_000), 7);
            assert_eq!(times.len(), 4_000);
            let duration = 4_000.0 / ((from + to) / 2.0);
            assert!(*times.last().unwrap() < duration, "{from} to {to}");
            let half = (from + (to - from) / 4.0) * duration / 2.0;
            assert!(plausible(within(&times, 0.0, duration / 2.0), half), "{from} to {to}");
        }
    }

    #[test]
    fn impossible_rates_name_the_parameter_and_the_numbers() {
        let ramp = |from, to| Intensity::Ramp { from, to };
        let wave = |amplitude, period| Intensity::Sinusoid { rate: 3.0, amplitude, period };
        let bursts = |rate_off, mean_on| Intensity::OnOff { rate_on: 1.0, rate_off, mean_on, mean_off: 1e-9 };
        let (ten, minute) = (Extent::Requests(10), Extent::Seconds(60.0));
        for (intensity, extent, message) in [
            (ramp(-1.0, 2.0), ten, "rate_from is -1; it must be at least 0 and finite"),
            (ramp(1.0, f64::NAN), ten, "rate_to is NaN"),
            (ramp(0.0, 0.0), ten, "rate_to is 0; it must be above 0 where rate_from is 0"),
            (ramp(1.0, 2.0), Extent::Requests(0), "num_requests is 0; it must be at least 1"),
            (ramp(1.0, 2.0), Extent::Seconds(0.0), "duration is 0; it must be above 0"),
            (ramp(1.0, 2.0), Extent::Seconds(1e9), "duration spans 1000000000 s; a run holds at most"),
            (ramp(1e9, 2e9), minute, "the mean number of requests is 90000000000; it must be at most"),
            (ramp(1e-9, 1e-9), minute, "duration is 60; it must be long enough for a request"),
            (wave(3.1, 60.0), ten, "amplitude is 3.1; it must be between 0 and the rate, which is 3"),
            (wave(1.0, 0.0), ten, "period is 0"),
            (bursts(-1.0, 1.0), ten, "rate_off is -1"),
            (bursts(0.0, 0.0), ten, "mean_on is 0"),
            (bursts(0.0, 1e-9), ten, "mean_on + mean_off is 0.000000002; it must be longer: after 10000000"),
            (ramp(1e-7, 1e-7), ten, "the arrival process spans"),
        ] {
            let error = varying_arrival_times(intensity, extent, 0).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}\n{message}");
        }
    }

    proptest! {
        #[test]
        fn inverses_are_inverse(
            rate in 0.01f64..100.0, share in 0.0f64..=1.0, period in 0.1f64..1e4, at in 0.0f64..1e5,
            from in 0.0f64..100.0, to in 0.01f64..100.0, progress in 0.0f64..=1.0,
        ) {
            let amplitude = rate * share;
            let turn = std::f64::consts::TAU / period;
            let value = rate * at + amplitude / turn * (1.0 - libm::cos(turn * at));
            let found = wave_inverse(rate, amplitude, period, value);
            let again = rate * found + amplitude / turn * (1.0 - libm::cos(turn * found));
            prop_assert!((again - value).abs() <= 1e-9 * value + 1e-9 * rate, "{again} for {value}");

            let at = progress * period;
            let value = from * at + (to - from) / period * at * at / 2.0;
            let found = ramp_inverse(from, to, period, value);
            let again = from * found + (to - from) / period * found * found / 2.0;
            prop_assert!((again - value).abs() <= 1e-9 * (value + 1.0), "{again} for {value}");
        }

        #[test]
        fn times_are_ordered_and_reproducible(
            seed: u64, which in 0usize..3, rate in 0.1f64..100.0, other in 0.0f64..100.0, num in 1usize..300,
        ) {
            let intensity = [
                Intensity::Ramp { from: other, to: rate },
                Intensity::Sinusoid { rate, amplitude: other.min(rate), period: 7.0 },
                Intensity::OnOff { rate_on: rate, rate_off: other, mean_on: 3.0, mean_off: 5.0 },
            ][which];
            let make = |extent| varying_arrival_times(intensity, extent, seed).unwrap();
            let times = make(Extent::Requests(num));
            prop_assert!(times.len() == num && times.is_sorted());
            prop_assert_eq!(&times, &make(Extent::Requests(num)));
            let long = make(Extent::Seconds(400.0));
            prop_assert!(long.is_sorted() && *long.last().unwrap() <= Time::from_secs_f64(400.0));
            if which > 0 {
                let shared = times.len().min(long.len());
                prop_assert_eq!(&times[..shared], &long[..shared]);
            }
        }
    }
}
