//! Where the warm-up ends, by a rule that nobody tunes.

/// Observations averaged before the rule looks: the 5 of MSER-5.
const BATCH: usize = 5;

/// What the rule found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Warmup {
    /// Leading observations to leave out.
    pub skipped: usize,
    /// Whether the first half had an end of the warm-up. If not, all of that half is left out: the
    /// run is too short, or never settles.
    pub settled: bool,
}

/// MSER-5: of all truncations at a batch of five, the one that leaves the mean of the rest with the
/// smallest marginal standard error, Σ(y − ȳ)² / m² over the m batches that are left (White 1997, "An
/// effective truncation heuristic for bias reduction in simulation output"; White, Cobb and Spratt
/// 2000). Only the first half is searched: where the smallest lies at its end, it is no minimum but
/// the lack of data.
pub fn mser5(values: &[f64]) -> Warmup {
    let batches: Vec<f64> =
        values.chunks_exact(BATCH).map(|five| five.iter().sum::<f64>() / BATCH as f64).collect();
    let half = batches.len() / 2;
    let (mut sum, mut squares) = (0.0, 0.0);
    // About the last value, so that the squares of large means do not cancel.
    let origin = batches.last().copied().unwrap_or(0.0);
    let mut best = (f64::INFINITY, 0);
    for skipped in (0..batches.len()).rev() {
        let value = batches[skipped] - origin;
        (sum, squares) = (sum + value, squares + value * value);
        let left = (batches.len() - skipped) as f64;
        let error = (squares - sum * sum / left).max(0.0) / (left * left);
        if skipped <= half && error <= best.0 {
            best = (error, skipped);
        }
    }
    let (_, skipped) = best;
    Warmup { skipped: skipped * BATCH, settled: half == 0 || skipped < half }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Purpose, Stream};

    #[test]
    fn a_step_is_cut_where_it_is() {
        let values: Vec<f64> = (0..200).map(|index| if index < 40 { 9.0 } else { 1.0 }).collect();
        assert_eq!(mser5(&values), Warmup { skipped: 40, settled: true });
    }

    #[test]
    fn a_level_series_keeps_nearly_all_and_a_trend_does_not_settle() {
        let mut stream = Stream::new(3, Purpose(99), 0);
        let level: Vec<f64> = (0..1_000).map(|_| stream.normal()).collect();
        let found = mser5(&level);
        assert!(found.settled && found.skipped < 400, "{found:?}");
        let trend: Vec<f64> = level.iter().zip(0..).map(|(noise, at)| noise + f64::from(at)).collect();
        assert!(!mser5(&trend).settled);
    }

    #[test]
    fn short_series_are_kept() {
        assert_eq!(mser5(&[]), Warmup { skipped: 0, settled: true });
        assert_eq!(mser5(&[5.0, 1.0, 1.0]), Warmup { skipped: 0, settled: true });
        assert_eq!(mser5(&[1.0; 50]), Warmup { skipped: 0, settled: true });
    }
}
