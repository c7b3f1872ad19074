//! Looking on while a driver works through a workload: for progress bars, and for stopping it.

use std::ops::ControlFlow;

use crate::time::Time;

/// Looks on now and then.
pub trait Watch {
    /// So many requests have arrived and are over, and it is so late in the run. Breaking ends the
    /// run as interrupted.
    fn look(&mut self, arrived: u64, over: u64, now: Time) -> ControlFlow<()>;
}

/// Nobody looks on.
pub struct Unwatched;

impl Watch for Unwatched {
    fn look(&mut self, _: u64, _: u64, _: Time) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}
