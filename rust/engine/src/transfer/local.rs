//! Copies inside the process, on a thread of their own, one job after the other: within the memory of
//! the machine or of a CUDA device, or from one device to another.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use kvrelay_core::event::TransferId;

use super::{Job, Outcome, Reports, Transport};
use crate::backend::copy_blocks;

/// Jobs that were started and have not ended, and which of them are to stop.
#[derive(Default)]
struct Jobs {
    open: BTreeSet<TransferId>,
    aborted: BTreeSet<TransferId>,
}

type Shared = Arc<Mutex<Jobs>>;

fn lock(jobs: &Shared) -> MutexGuard<'_, Jobs> {
    jobs.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The in-process transport.
pub struct Local {
    jobs: Shared,
    queue: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Local {
    /// Starts its thread.
    pub fn new(reports: Reports) -> std::io::Result<Local> {
        let jobs = Shared::default();
        let (queue, inbox) = channel();
        let shared = jobs.clone();
        let thread = std::thread::Builder::new()
            .name("kvrelay-transfer".into())
            .spawn(move || copy_all(&inbox, &shared, &reports))?;
        Ok(Local { jobs, queue: Some(queue), thread: Some(thread) })
    }
}

fn copy_all(inbox: &Receiver<Job>, jobs: &Shared, reports: &Reports) {
    while let Ok(job) = inbox.recv() {
        // A panic here is a bug, but one job's: the others' requests must not wait for ever.
        let complete = catch_unwind(AssertUnwindSafe(|| copy(&job, jobs))).unwrap_or(false);
        {
            let mut jobs = lock(jobs);
            jobs.open.remove(&job.id);
            jobs.aborted.remove(&job.id);
        }
        let outcome = if complete { Outcome::Complete } else { Outcome::Failed { quiesced: true } };
        reports.ended(job.id, outcome);
    }
}

/// Blocks that are copied before anybody looks whether the job was aborted.
const PORTION: usize = 64;

/// Copies whole blocks, some at a time; false if the job was aborted, a device failed, or the pools do
/// not fit.
fn copy(job: &Job, jobs: &Shared) -> bool {
    for portion in job.blocks.chunks(PORTION) {
        if lock(jobs).aborted.contains(&job.id) {
            return false;
        }
        // SAFETY: until this job's outcome is reported the scheduler keeps both ends' blocks
        // pinned: the sources are full blocks and the last block of a prompt that is done, which no
        // step writes before the transfer is over; the destinations belong to the request alone,
        // and no row of it runs there yet.
        let copied = unsafe { copy_blocks(&job.source, &job.destination, portion, None) };
        if copied.is_err() {
            return false;
        }
    }
    true
}

impl Transport for Local {
    fn start(&mut self, job: Job) {
        lock(&self.jobs).open.insert(job.id);
        if let Some(queue) = &self.queue {
            // The thread takes jobs until the queue is closed.
            let _ = queue.send(job);
        }
    }

    fn abort(&mut self, id: TransferId) {
        let mut jobs = lock(&self.jobs);
        if jobs.open.contains(&id) {
            jobs.aborted.insert(id);
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        {
            let mut jobs = lock(&self.jobs);
            let open = jobs.open.clone();
            jobs.aborted.extend(open);
        }
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
