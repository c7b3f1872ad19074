//! Tests' door to the emulated CUDA.
//!
//! The emulator itself is C++ (`cpp/`), built by `build_emulator.py` into stand-ins for `libcuda` and
//! `libcublas`: the kernels' own sources, compiled by g++, run on the CPU behind an unmodified cudarc. It
//! proves logic and never speed. `KVRELAY_EMULATED_CUDA` names the folder of the stand-ins; a process that
//! calls [`preload`] before anything else touches CUDA gets them in place of a driver.
//!
//! A driver is loaded once for the life of a process, and the emulator reads its settings then. So every
//! test runs in a child, the same test of the same program again: [`Emulated`].
//!
//! # Settings, all by environment
//! `KVRELAY_EMU_DEVICES` (1), `_MEMORY_MB` (2048 each), `_CAPABILITY` (90), `_MULTIPROCESSORS` (132),
//! `_ORDER` (`forward`, `reverse`, `random`: in which order a block's threads, and a graph's nodes, get
//! their turn), `_SEED` (0), `_JITTER_US` (0: the longest that a stream waits before an operation),
//! `_STREAMS` (`threads`, or `deferred`: one operation at a time, only when somebody waits, of a stream
//! drawn from the seed, so that a race shows in the same runs always), `_THREADS` (that run blocks),
//! `_KERNELS` (folders of kernels, parted by colons), `_PTX` (90: the newest PTX, times ten), `_PEER` (1),
//! `_FAIL_LAUNCH` (which launch of the process fails), `_LOST_AFTER` (after how many launches the device is
//! lost). `CUDA_VISIBLE_DEVICES` hides devices as it does for a driver.

use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Names the folder of the stand-ins.
pub const FOLDER: &str = "KVRELAY_EMULATED_CUDA";

/// Set in the children.
const CHILD: &str = "KVRELAY_EMULATED_CHILD";

/// A kernel that never ends must not hold up whoever runs the tests.
const LIMIT: Duration = Duration::from_secs(300);

/// The stand-ins, those first that others need.
const LIBRARIES: [&str; 4] = ["libcuda.so.1", "libcuda.so", "libcublas.so.13", "libcublas.so"];

/// The folder that [`FOLDER`] names, where it is set.
pub fn folder() -> Option<PathBuf> {
    env::var_os(FOLDER).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Loads the stand-ins, for the life of the process, so that whoever asks the loader for `libcuda` or
/// `libcublas` gets them, a driver of the machine or not. Whether [`FOLDER`] is set.
///
/// # Panics
/// If it is set and a library cannot be loaded from there.
pub fn preload() -> bool {
    let Some(folder) = folder() else { return false };
    for name in LIBRARIES {
        let path = folder.join(name);
        // SAFETY: its constructors only register what it holds.
        let library = unsafe { libloading::Library::new(&path) };
        let library = library.unwrap_or_else(|error| panic!("{FOLDER}: {}: {error}", path.display()));
        std::mem::forget(library);
    }
    true
}

/// The full name of the test that this is written in, be it in a closure of it.
#[macro_export]
macro_rules! test_name {
    () => {{
        fn here() {}
        let path = std::any::type_name_of_val(&here);
        let path = path.strip_suffix("::here").unwrap_or(path);
        let path = path.split("::{{closure}}").next().unwrap_or(path);
        path.split_once("::").map_or(path, |(_, name)| name)
    }};
}

/// Ends the process if what this returns lives for longer than `limit`.
fn end_if_longer_than(limit: Duration) -> Sender<()> {
    let (alive, gone) = channel();
    std::thread::spawn(move || {
        if gone.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            eprintln!("ended after {limit:?}");
            std::process::abort();
        }
    });
    alive
}

/// A test under the emulator, in a child process of its own.
#[derive(Clone, Debug)]
pub struct Emulated {
    test: String,
    settings: Vec<(String, String)>,
}

impl Emulated {
    /// The test of a name, as [`test_name!`] gives it.
    pub fn new(test: &str) -> Emulated {
        Emulated { test: test.to_owned(), settings: Vec::new() }
    }

    /// With a variable set for the child; an emulator's setting by what follows `KVRELAY_EMU_`.
    #[must_use]
    pub fn set(mut self, setting: &str, value: impl ToString) -> Emulated {
        self.settings.push((format!("KVRELAY_EMU_{setting}"), value.to_string()));
        self
    }

    /// In the child, runs `body` with the stand-ins loaded. In the parent, runs the child; what it wrote,
    /// to both of its outputs. `None` in the child, and where [`FOLDER`] is not set, which skips the test.
    ///
    /// # Panics
    /// If the child does not pass exactly this test.
    pub fn run(&self, body: impl FnOnce()) -> Option<String> {
        let Emulated { test, settings } = self;
        if env::var_os(CHILD).is_some() {
            assert!(preload(), "a child is given {FOLDER}");
            let _until_here = end_if_longer_than(LIMIT);
            body();
            return None;
        }
        if folder().is_none() {
            println!("skipped {test}: {FOLDER} is not set (make test-cuda sets it)");
            return None;
        }
        let output = Command::new(env::current_exe().expect("a test knows its program"))
            .args([test, "--exact", "--nocapture", "--include-ignored"])
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env(CHILD, "1")
            .envs(settings.iter().map(|(name, value)| (name, value)))
            .output()
            .expect("a test can be run again");
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        let passed = output.status.success() && text.contains("1 passed");
        assert!(passed, "{test} with {settings:?}: {}\n{text}", output.status);
        Some(text.into_owned())
    }

    /// Runs the test in the order of threads that kernels expect least and most: forward, reverse, and
    /// random by a few seeds.
    ///
    /// # Panics
    /// As [`Emulated::run`].
    pub fn run_in_every_order(&self, body: impl Fn()) {
        for (order, seed) in [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2)] {
            self.clone().set("ORDER", order).set("SEED", seed).run(&body);
        }
    }
}
