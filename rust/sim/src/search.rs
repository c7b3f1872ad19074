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

/// Bisections that share what they tried: several thresholds of one family of runs.
#[derive(Clone, Debug)]
pub struct Search<J> {
    settings: Bisection,
    /// Rates tried so far, ascending, and how each was judged.
    tried: Vec<(f64, J)>,
}

impl<J> Search<J> {
    /// Nothing tried yet.
    pub fn new(settings: Bisection) -> Search<J> {
        Search { settings, tried: Vec::new() }
    }

    /// Brackets the largest rate at which `holds` is true of the judgement of that rate and of every
    /// lower one tried. No rate is judged twice. `tolerance` is the width of the bracket, relative to
    /// its upper end.
    pub fn bracket<E>(
        &mut self,
        tolerance: f64,
        holds: impl Fn(&J) -> bool,
        judge: &mut impl FnMut(f64) -> Result<J, E>,
    ) -> Result<Bracket, E> {
        let mut outward = 0;
        loop {
            let held = self.tried.iter().take_while(|(_, judgement)| holds(judgement)).count();
            let low = held.checked_sub(1).map_or(0.0, |last| self.tried[last].0);
            let high = self.tried.get(held).map_or(f64::INFINITY, |(rate, _)| *rate);
            let next = match (low > 0.0, high.is_finite()) {
                (false, false) => self.settings.start,
                (true, false) => 2.0 * low,
                (false, true) => 0.5 * high,
                (true, true) => 0.5 * (low + high),
            };
            let between = low > 0.0 && high.is_finite();
            // Where no number lies between them, closer is not to be had.
            let narrow = high - low <= tolerance * high || next <= low || next >= high;
            if if between { narrow } else { outward > self.settings.max_doublings } {
                return Ok(Bracket { low, high });
            }
            outward += u32::from(!between);
            let judgement = judge(next)?;
            let place = self.tried.partition_point(|(rate, _)| *rate < next);
            self.tried.insert(place, (next, judgement));
        }
    }
}

/// Bisects for the largest rate at which `attains` holds. Assumes that it holds below and fails
/// above; every rate is asked once.
pub fn max_rate<E>(search: Bisection, mut attains: impl FnMut(f64) -> Result<bool, E>) -> Result<Bracket, E> {
    Search::new(search).bracket(search.tolerance, |attained| *attained, &mut attains)
}

/// How a rate did: from the strictest reading of its run to the mildest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// The lower confidence limit attains the target, and the queue surely does not grow.
    pub sustained: bool,
    /// The estimate attains it, and the queue was not seen to grow.
    pub attained: bool,
    /// The upper limit attains it, and the queue was not seen to grow.
    pub possible: bool,
}

/// The largest rate, and the interval that its runs leave for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaxRate {
    /// The largest rate tried that attains, and the smallest that does not.
    pub rate: Bracket,
    /// The largest rate that is sustained, it and every lower one tried; zero if none is.
    pub low: f64,
    /// The smallest rate that is not even possible; infinite if all are.
    pub high: f64,
}

/// Halvings or doublings at the most on the way to an end of the interval.
const MAX_OUTWARD: u32 = 10;

/// Bisects for the largest rate that attains, then for the ends of its interval: to `ends`, relative to
/// the rate, and outward, so they hold the true one. Without `low` the lower end is not looked for.
pub fn max_rate_interval<E>(
    settings: Bisection,
    ends: f64,
    low: bool,
    mut judge: impl FnMut(f64) -> Result<Judgement, E>,
) -> Result<MaxRate, E> {
    let mut search = Search::new(settings);
    let rate = search.bracket(settings.tolerance, |run: &Judgement| run.attained, &mut judge)?;
    search.settings.max_doublings = MAX_OUTWARD;
    let low = if low { search.bracket(ends, |run| run.sustained, &mut judge)?.low } else { 0.0 };
    let high = search.bracket(ends, |run| run.possible, &mut judge)?.high;
    Ok(MaxRate { rate, low, high })
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

    #[test]
    fn an_interval_encloses_the_rate_and_no_rate_is_judged_twice() {
        let mut asked = Vec::new();
        let found = max_rate_interval(Bisection::default(), 0.02, true, |rate| {
            asked.push(rate);
            let judgement =
                Judgement { sustained: rate <= 4.0, attained: rate <= 5.0, possible: rate <= 5.5 };
            Ok::<_, ()>(judgement)
        })
        .unwrap();
        assert!(found.low <= 4.0 && found.low > 4.0 * 0.97, "{found:?}");
        assert!(found.rate.low <= 5.0 && 5.0 < found.rate.high, "{found:?}");
        assert!(found.high > 5.5 && found.high < 5.5 * 1.03, "{found:?}");
        let count = asked.len();
        asked.sort_by(f64::total_cmp);
        asked.dedup();
        assert_eq!(asked.len(), count);
    }

    #[test]
    fn a_lower_rate_that_is_not_sustained_bounds_the_lower_end() {
        // Unsure at 1, where every search begins, and sure at 2 and 4: only what lies below 1 counts.
        let judge = |rate: f64| {
            let judgement = Judgement {
                sustained: rate != 1.0 && rate < 5.0,
                attained: rate < 5.0,
                possible: rate < 6.0,
            };
            Ok::<_, ()>(judgement)
        };
        let found = max_rate_interval(Bisection::default(), 0.02, true, judge).unwrap();
        assert!(found.low < 1.0 && found.low > 0.97, "{found:?}");
    }
}
