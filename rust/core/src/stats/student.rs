//! Quantiles of Student's t.
//!
//! Found by bisection of the upper tail, so they cost some microseconds and have no fitted constants.
//! The maths is `libm`'s: every platform gets the same bits.

#[cfg(test)]
use std::f64::consts::PI;

/// The quantile of probability `p` of Student's t with `degrees` of freedom; infinite at 0 and 1.
///
/// P(T > t) = I(ν / (ν + t²); ν/2, 1/2) / 2 for t ≥ 0 (DLMF 8.17 and Abramowitz and Stegun 26.7.1),
/// I being the regularised incomplete beta function.
pub fn student_quantile(p: f64, degrees: f64) -> f64 {
    quantile(p, |t| 0.5 * incomplete_beta(degrees / (degrees + t * t), 0.5 * degrees, 0.5))
}

/// Where a falling upper tail of a distribution symmetric about 0 leaves 1 − `p`.
fn quantile(p: f64, tail: impl Fn(f64) -> f64) -> f64 {
    if p < 0.5 {
        return -quantile(1.0 - p, tail);
    }
    let wanted = 1.0 - p;
    if wanted <= 0.0 {
        return f64::INFINITY;
    }
    let (mut low, mut high) = (0.0, 1.0);
    while tail(high) > wanted {
        (low, high) = (high, 2.0 * high);
    }
    loop {
        let middle = 0.5 * (low + high);
        if middle <= low || middle >= high {
            return middle;
        }
        if tail(middle) > wanted {
            low = middle;
        } else {
            high = middle;
        }
    }
}

/// The regularised incomplete beta function I(x; a, b): the continued fraction of DLMF 8.17.22,
/// which converges fast for x below (a + 1) / (a + b + 2); above, the symmetry of DLMF 8.17.4.
fn incomplete_beta(x: f64, a: f64, b: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return x.clamp(0.0, 1.0);
    }
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - incomplete_beta(1.0 - x, b, a);
    }
    let log_front = a * libm::log(x) + b * libm::log1p(-x) - log_beta(a, b);
    libm::exp(log_front) / (a * beta_fraction(x, a, b))
}

fn log_beta(a: f64, b: f64) -> f64 {
    libm::lgamma(a) + libm::lgamma(b) - libm::lgamma(a + b)
}

/// 1 + d₁/(1 + d₂/(1 + …)) of DLMF 8.17.22, by the modified Lentz method (Thompson and Barnett 1986).
fn beta_fraction(x: f64, a: f64, b: f64) -> f64 {
    /// Stands for a zero that would be divided by.
    const TINY: f64 = 1e-300;
    let away_from_zero = |value: f64| if value == 0.0 { TINY } else { value };
    let (mut value, mut upper, mut lower) = (1.0, 1.0, 0.0);
    for term in 1..=500u32 {
        let m = f64::from(term / 2);
        let coefficient = if term % 2 == 0 {
            m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m))
        } else {
            -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0))
        };
        lower = 1.0 / away_from_zero(1.0 + coefficient * lower);
        upper = away_from_zero(1.0 + coefficient / upper);
        let change = upper * lower;
        value *= change;
        if (change - 1.0_f64).abs() < f64::EPSILON {
            break;
        }
    }
    value
}

/// Density of Student's t: the derivative that tests hold the quantile against.
#[cfg(test)]
fn student_density(t: f64, degrees: f64) -> f64 {
    let front = libm::lgamma(0.5 * (degrees + 1.0)) - libm::lgamma(0.5 * degrees);
    libm::exp(front - 0.5 * (degrees + 1.0) * libm::log1p(t * t / degrees)) / (degrees * PI).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::inverse_normal_cdf;
    use proptest::prelude::*;

    #[test]
    fn known_tables() {
        // Abramowitz and Stegun, table 26.10, and the NIST/SEMATECH e-Handbook, 1.3.6.7.2.
        let table = [
            (0.975, 1.0, 12.706),
            (0.975, 2.0, 4.303),
            (0.95, 5.0, 2.015),
            (0.975, 9.0, 2.262),
            (0.99, 8.0, 2.896),
            (0.995, 10.0, 3.169),
            (0.975, 19.0, 2.093),
            (0.999, 20.0, 3.552),
            (0.9, 30.0, 1.310),
            (0.975, 100.0, 1.984),
        ];
        for (p, degrees, expected) in table {
            let found = student_quantile(p, degrees);
            assert!((found - expected).abs() < 6e-4, "t({p}, {degrees}) = {found}, not {expected}");
        }
    }

    proptest! {
        /// One degree of freedom is the Cauchy distribution, two have a closed form as well.
        #[test]
        fn closed_forms(p in 0.001f64..0.999) {
            let cauchy = -libm::cos(PI * p) / libm::sin(PI * p);
            prop_assert!((student_quantile(p, 1.0) - cauchy).abs() <= 1e-10 * (1.0 + cauchy.abs()));
            let two = (2.0 * p - 1.0) / (2.0 * p * (1.0 - p)).sqrt();
            prop_assert!((student_quantile(p, 2.0) - two).abs() <= 1e-10 * (1.0 + two.abs()));
        }

        /// Symmetric, rising in p, and wider than the normal, which it tends to.
        #[test]
        fn shape(p in 0.501f64..0.999, degrees in 1u32..200) {
            let degrees = f64::from(degrees);
            let t = student_quantile(p, degrees);
            prop_assert!((t + student_quantile(1.0 - p, degrees)).abs() < 1e-9 * (1.0 + t));
            prop_assert!(t > inverse_normal_cdf(p) && t > student_quantile(p, degrees + 1.0));
            prop_assert!((student_quantile(p, 1e7) - inverse_normal_cdf(p)).abs() < 1e-5);
            let step = 1e-5;
            let slope = (student_quantile(p + step, degrees) - student_quantile(p - step, degrees)) / (2.0 * step);
            prop_assert!((slope * student_density(t, degrees) - 1.0).abs() < 1e-3, "{} at {}", slope, t);
        }
    }
}
