//! The engine's clock: the only place outside a backend that reads one.

use std::time::{Duration, Instant};

use kvrelay_core::time::Time;

/// Nanoseconds since the engine's start; never decreasing, the same for all its threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    start: Instant,
}

impl Clock {
    /// A clock that starts now.
    #[expect(clippy::disallowed_methods, reason = "this is the engine's clock")]
    pub(crate) fn start() -> Clock {
        Clock { start: Instant::now() }
    }

    /// Now.
    pub(crate) fn now(&self) -> Time {
        Time(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// How long to wait until `at`; zero once it has come.
    pub(crate) fn until(&self, at: Time) -> Duration {
        Duration::from_nanos(at.saturating_since(self.now()).0)
    }
}
