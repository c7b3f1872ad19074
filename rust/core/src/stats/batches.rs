//! Batch means: consecutive observations are averaged until the averages are nearly independent.

use super::interval::NoInterval;

/// Fewest batches, and the most. Schmeiser (1982, "Batch size effects in the analysis of simulation
/// output"): beyond 30 nothing is gained, below 10 intervals become wide.
pub const MIN_BATCHES: usize = 10;
const MAX_BATCHES: usize = 20;
/// Fewest observations in a batch.
pub const MIN_PER_BATCH: usize = 10;
/// More than the fewest batches are taken only where each still has so many observations: long
/// batches matter more than many.
const AMPLE: usize = 100;

/// Beyond this correlation of neighbours the adjustment of the error says nothing any more.
const MOST_CORRELATION: f64 = 0.8;

/// Means of consecutive batches.
#[derive(Clone, Debug, PartialEq)]
pub struct Batches {
    means: Vec<f64>,
}

impl Batches {
    /// How many batches `count` observations make.
    ///
    /// # Errors
    /// [`NoInterval::TooFew`].
    pub fn number(count: usize) -> Result<usize, NoInterval> {
        let needed = MIN_BATCHES * MIN_PER_BATCH;
        if count < needed {
            return Err(NoInterval::TooFew { count, needed });
        }
        Ok((count / AMPLE).clamp(MIN_BATCHES, MAX_BATCHES))
    }

    /// `values` in their order, in `number` batches whose sizes differ by one at most.
    pub fn split(values: &[f64], number: usize) -> Batches {
        let border = |batch: usize| batch * values.len() / number;
        let mean = |batch: usize| {
            let part = &values[border(batch)..border(batch + 1)];
            part.iter().sum::<f64>() / part.len() as f64
        };
        Batches { means: (0..number).map(mean).collect() }
    }

    /// Of numbers that are means already, or independent replications.
    pub fn of(means: Vec<f64>) -> Batches {
        Batches { means }
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.means.len()
    }

    /// Their mean.
    pub fn mean(&self) -> f64 {
        self.means.iter().sum::<f64>() / self.means.len() as f64
    }

    fn squares(&self) -> f64 {
        let mean = self.mean();
        self.means.iter().map(|value| (value - mean) * (value - mean)).sum()
    }

    /// Standard error of their mean if they are independent.
    pub fn standard_error(&self) -> f64 {
        let count = self.means.len() as f64;
        (self.squares() / (count - 1.0) / count).sqrt()
    }

    /// Standard error of their mean where neighbours correlate by r > 0: as of a first-order
    /// autoregressive series, √((1 + r)/(1 − r)) times that of independent ones (Steiger et al. 2005,
    /// "ASAP3: a batch means procedure for steady-state simulation analysis"). A correlation found in
    /// few means is too low by (1 + 3r)/b (Kendall 1954, "Note on bias in the estimation of
    /// autocorrelation"), which is made good first.
    pub fn adjusted_error(&self) -> f64 {
        let count = self.means.len() as f64;
        let unbiased = (count * self.correlation() + 1.0) / (count - 3.0);
        let r = unbiased.clamp(0.0, MOST_CORRELATION);
        self.standard_error() * ((1.0 + r) / (1.0 - r)).sqrt()
    }

    /// Correlation of neighbours; zero when all are equal.
    pub fn correlation(&self) -> f64 {
        let (mean, squares) = (self.mean(), self.squares());
        let products = self.means.windows(2).map(|pair| (pair[0] - mean) * (pair[1] - mean));
        if squares > 0.0 { products.sum::<f64>() / squares } else { 0.0 }
    }

    /// The means themselves, in order.
    pub fn means(&self) -> &[f64] {
        &self.means
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_differ_by_one_at_most_and_nothing_is_lost() {
        let values: Vec<f64> = (0..103).map(f64::from).collect();
        let batches = Batches::split(&values, 10);
        assert_eq!(batches.count(), 10);
        assert_eq!(batches.means()[0], 4.5);
        assert_eq!(*batches.means().last().unwrap(), 97.0);
        assert_eq!([100, 1_999, 9_999].map(|count| Batches::number(count).unwrap()), [10, 19, 20]);
        assert!(Batches::number(99).is_err());
    }

    #[test]
    fn hand_computed_error_and_correlation() {
        let batches = Batches::of(vec![1.0, 2.0, 3.0, 6.0]);
        // Squares 4 + 1 + 0 + 9, over 3 and 4; neighbours 2 + 0 + 0.
        assert!((batches.standard_error() - (14.0_f64 / 12.0).sqrt()).abs() < 1e-15);
        assert!((batches.correlation() - 2.0 / 14.0).abs() < 1e-15);
        assert_eq!(Batches::of(vec![2.0; 5]).correlation(), 0.0);
    }
}
