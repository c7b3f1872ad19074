//! A backend's threads: one leader that runs the steps, and helpers that share its loops.
//!
//! A loop is split so that each index is computed by one thread in the same way whoever it is;
//! so results do not depend on the number of threads.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Looks at a flag this often before sleeping: about the gap between two loops of a step. Longer
/// would take the core from whoever else needs it.
const SPINS: usize = 2000;

/// Memory of one thread that loops may use as they like.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Unpacked weights.
    pub(super) weights: Vec<f32>,
    /// Attention scores.
    pub(super) scores: Vec<f32>,
}

type Job<'a> = &'a (dyn Fn(usize, &mut Scratch) + Sync);

/// The leader's handle on its helpers.
pub(super) struct Team {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    scratch: Scratch,
}

struct Shared {
    /// Grows by one with each loop.
    round: AtomicUsize,
    /// Helpers that have not finished the loop.
    running: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    /// The loop's body while `running` is not 0.
    job: Mutex<Option<Job<'static>>>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Option<Job<'static>>> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Spins a while, then sleeps, until `done`.
    fn wait(&self, done: impl Fn() -> bool) {
        for _ in 0..SPINS {
            if done() {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.lock();
        while !done() {
            guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Team {
    /// Makes the calling thread the leader of `threads - 1` new helpers, each with memory made
    /// by `scratch`; thread `i` runs on core `cores[i]` where there is one.
    pub(super) fn new(
        threads: usize,
        cores: &[usize],
        scratch: impl Fn() -> Scratch,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            round: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            job: Mutex::new(None),
            changed: Condvar::new(),
        });
        pin(cores.first().copied());
        let mut team = Self { shared, helpers: vec![], scratch: scratch() };
        for index in 1..threads {
            let (shared, core, mut scratch) = (team.shared.clone(), cores.get(index).copied(), scratch());
            let helper =
                std::thread::Builder::new().name(format!("kvrelay-cpu-{index}")).spawn(move || {
                    pin(core);
                    help(&shared, index, &mut scratch);
                })?;
            team.helpers.push(helper);
        }
        Ok(team)
    }

    /// Threads, with the leader.
    pub(super) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `job(i, scratch)` on each thread `i`, and returns when all are done.
    pub(super) fn run(&mut self, job: Job<'_>) {
        if self.helpers.is_empty() {
            return job(0, &mut self.scratch);
        }
        // SAFETY: only the lifetime changes. Helpers use the job between the increment of
        // `round` and their decrement of `running`, and this function returns only after the
        // last of those, also when the leader's part panics.
        let lasting = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
        let shared = &self.shared;
        {
            let mut slot = shared.lock();
            *slot = Some(lasting);
            shared.running.store(self.helpers.len(), Ordering::Relaxed);
            shared.round.fetch_add(1, Ordering::Release);
            shared.changed.notify_all();
        }
        let scratch = &mut self.scratch;
        let mine = catch_unwind(AssertUnwindSafe(|| job(0, scratch)));
        shared.wait(|| shared.running.load(Ordering::Acquire) == 0);
        *shared.lock() = None;
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        assert!(!shared.panicked.load(Ordering::Relaxed), "a helper thread panicked");
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        {
            let _guard = self.shared.lock();
            self.shared.stop.store(true, Ordering::Release);
            self.shared.changed.notify_all();
        }
        for helper in self.helpers.drain(..) {
            // A helper's panic was already raised by `run`.
            let _ = helper.join();
        }
    }
}

fn help(shared: &Shared, index: usize, scratch: &mut Scratch) {
    let mut seen = 0;
    loop {
        let stop = || shared.stop.load(Ordering::Acquire);
        shared.wait(|| shared.round.load(Ordering::Acquire) != seen || stop());
        if stop() {
            return;
        }
        seen += 1;
        let job = *shared.lock();
        if let Some(job) = job
            && catch_unwind(AssertUnwindSafe(|| job(index, scratch))).is_err()
        {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        if shared.running.fetch_sub(1, Ordering::Release) == 1 {
            // Under the lock, so that a leader about to sleep does not miss it.
            let _guard = shared.lock();
            shared.changed.notify_all();
        }
    }
}

/// Thread `index`'s share of `0..total`, in whole units.
pub(super) fn share(total: usize, threads: usize, index: usize) -> Range<usize> {
    total * index / threads..total * (index + 1) / threads
}

/// Keeps the calling thread on `core`; a core that does not exist leaves it free.
fn pin(core: Option<usize>) {
    #[cfg(target_os = "linux")]
    if let Some(core) = core.filter(|&core| core < libc::CPU_SETSIZE as usize) {
        // SAFETY: the set is plain memory for which zero is the empty set, `core` is below its
        // size, and the call reads it only.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(core, &mut set);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = core;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_runs_every_loop_once() {
        for threads in 1..5 {
            let mut team = Team::new(threads, &[], Scratch::default).unwrap();
            let counts: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for round in 1..500 {
                team.run(&|index, _| {
                    counts[index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == round));
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_leader_and_the_team_ends() {
        for guilty in 0..2 {
            let mut team = Team::new(2, &[], Scratch::default).unwrap();
            let result = catch_unwind(AssertUnwindSafe(|| team.run(&|index, _| assert_ne!(index, guilty))));
            assert!(result.is_err());
        }
    }

    #[test]
    fn shares_tile_the_whole() {
        for total in [0, 1, 2, 7, 48] {
            for threads in 1..6 {
                let all: Vec<usize> = (0..threads).flat_map(|i| share(total, threads, i)).collect();
                assert_eq!(all, (0..total).collect::<Vec<_>>());
            }
        }
    }
}
