//! The one door from Python into long Rust work: the GIL is released, Ctrl-C is looked for,
//! progress is told.

use std::ops::ControlFlow;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use kvrelay_core::time::Time;
use kvrelay_core::watch::Watch;
use pyo3::prelude::*;

/// How often a long call looks for Ctrl-C and tells its progress.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(100);

#[expect(clippy::disallowed_methods, reason = "when to look for Ctrl-C decides nothing that a run records")]
fn now() -> Instant {
    Instant::now()
}

/// Looks for signals and reports progress, at most every [`LOOK_EVERY`].
pub(crate) struct Doorkeeper {
    progress: Option<Py<PyAny>>,
    last_look: Instant,
    /// What made the call stop: the signal handler's exception, or the callback's.
    pub(crate) raised: Option<PyErr>,
}

impl Doorkeeper {
    /// `progress(arrived, over, seconds)` is called now and then.
    pub(crate) fn new(progress: Option<Py<PyAny>>) -> Doorkeeper {
        Doorkeeper { progress, last_look: now(), raised: None }
    }
}

impl Watch for Doorkeeper {
    /// Looks if it is time to.
    fn look(&mut self, arrived: u64, over: u64, at: Time) -> ControlFlow<()> {
        if self.last_look.elapsed() < LOOK_EVERY {
            return ControlFlow::Continue(());
        }
        self.last_look = now();
        let looked = Python::attach(|py| {
            py.check_signals()?;
            match &self.progress {
                Some(progress) => progress.call1(py, (arrived, over, at.as_secs_f64())).map(|_| ()),
                None => Ok(()),
            }
        });
        match looked {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                self.raised = Some(error);
                ControlFlow::Break(())
            }
        }
    }
}

/// The process an object belongs to: threads do not survive a fork.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    /// This one.
    pub(crate) fn this() -> Process {
        Process(std::process::id())
    }

    /// Whether it still is.
    pub(crate) fn is_this(self) -> bool {
        self == Process::this()
    }

    /// An error in a forked child.
    pub(crate) fn check(self, py: Python<'_>) -> PyResult<()> {
        if self.is_this() {
            return Ok(());
        }
        Err(self.error(py, "this engine belongs to", "make a new one here, or start"))
    }

    fn error(self, py: Python<'_>, what: &str, remedy: &str) -> PyErr {
        let here = Process::this().0;
        let message = format!(
            "{what} process {}, and this is its forked child {here}: {remedy} processes with the \"spawn\" method",
            self.0
        );
        crate::error::raise(py, "ForkError", message)
    }
}

/// Before anything is awaited: an error in a forked child of a process that has awaited before.
///
/// The threads that would complete it are the first process's, once for all engines.
pub(crate) fn check_awaits(py: Python<'_>) -> PyResult<()> {
    static FIRST: OnceLock<Process> = OnceLock::new();
    let first = *FIRST.get_or_init(Process::this);
    if first.is_this() {
        return Ok(());
    }
    Err(first.error(py, "asyncio streams run in", "use streams without asyncio here, or start"))
}
