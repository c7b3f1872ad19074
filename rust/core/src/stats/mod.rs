//! How far a run's numbers can be trusted: confidence intervals, where the warm-up ends, whether the
//! queue grew. `docs/metrics.md` has the formulas; every function is O(n log n) in the requests.

mod batches;
mod growth;
mod interval;
mod student;
mod warmup;

pub use batches::{Batches, MIN_BATCHES, MIN_PER_BATCH};
pub use growth::{Found, Growth, TooShort, Trend, found_on_arrival};
pub use interval::{
    Interval, NoInterval, mean, of_replications, percentile, rate, share, smallest_for_share,
};
pub use student::student_quantile;
pub use warmup::{Warmup, mser5};
