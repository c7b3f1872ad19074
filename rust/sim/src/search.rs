//! The largest rate that still attains a target.

/// Where a search looks, and how closely.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bisection {
    /// A first rate to try, in requests per second; doubled or halved until the answer is between
    /// two tried rates.
    pub start: f64,
    /// Width of the final bracket, relative to its upper end.
    pub tolerance: f64,
    /// Doublings or halvings at the most.
    pub max_doublings: u32,
}

impl Default for Bisection {
    /// From 1 request per second, to 1 %.
    fn default() -> Bisection {
        Bisection { start: 1.0, tolerance: 0.01, max_doublings: 24 }
    }
}

/// The bracket found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bracket {
    /// The largest rate tried that attains the target; zero if none did.
    pub low: f64,
    /// The smallest rate tried that does not; infinite if all did.
    pub high: f64,
}

/// Bisects for the largest rate at which `attains` holds. Assumes that it holds below and fails
/// above; every rate is asked once.
pub fn max_rate<E>(search: Bisection, mut attains: impl FnMut(f64) -> Result<bool, E>) -> Result<Bracket, E> {
    let mut bracket = Bracket { low: 0.0, high: f64::INFINITY };
    let mut rate = search.start;
    for _ in 0..=search.max_doublings {
        if attains(rate)? {
            bracket.low = rate;
        } else {
            bracket.high = rate;
        }
        if bracket.low > 0.0 && bracket.high.is_finite() {
            break;
        }
        rate *= if bracket.low > 0.0 { 2.0 } else { 0.5 };
    }
    if bracket.low == 0.0 || bracket.high.is_infinite() {
        return Ok(bracket);
    }
    while bracket.high - bracket.low > search.tolerance * bracket.high {
        let middle = 0.5 * (bracket.low + bracket.high);
        if middle <= bracket.low || middle >= bracket.high {
            // No number lies between them: closer is not to be had.
            break;
        }
        if attains(middle)? {
            bracket.low = middle;
        } else {
            bracket.high = middle;
        }
    }
    Ok(bracket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_the_threshold_from_either_side() {
        for threshold in [0.037, 1.0, 5.3, 900.0] {
            let found = max_rate(Bisection::default(), |rate| Ok::<_, ()>(rate <= threshold)).unwrap();
            assert!(found.low <= threshold && threshold < found.high);
            assert!(found.high - found.low <= 0.01 * found.high);
        }
    }

    #[test]
    fn a_tolerance_below_the_numbers_themselves_ends() {
        let search = Bisection { tolerance: 1e-30, ..Bisection::default() };
        let found = max_rate(search, |rate| Ok::<_, ()>(rate <= 5.3)).unwrap();
        assert!(found.low <= 5.3 && 5.3 < found.high && found.high - found.low < 1e-14);
    }

    #[test]
    fn says_when_there_is_no_threshold() {
        let search = Bisection { max_doublings: 6, ..Bisection::default() };
        assert_eq!(max_rate(search, |_| Ok::<_, ()>(false)).unwrap().low, 0.0);
        assert_eq!(max_rate(search, |_| Ok::<_, ()>(true)).unwrap().high, f64::INFINITY);
        assert_eq!(max_rate(search, |_| Err::<bool, _>("no")), Err("no"));
    }
}
