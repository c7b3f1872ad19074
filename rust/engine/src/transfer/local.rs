//! Copies inside the process: within the memory of the machine or of a CUDA device, or from one device
//! to another. Each source has a thread of its own, which copies one job after the other, so that a
//! job that follows a run holds up none of another worker.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use kvrelay_core::event::TransferId;

use super::{Job, Outcome, Reports, Transport};
use crate::backend::{BackendError, copy_blocks};

/// Blocks that are copied before anybody looks whether the job was aborted.
const PORTION: usize = 64;

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
    reports: Reports,
    /// By the address of the source's pool, which lives as long as its workers.
    threads: BTreeMap<usize, (Sender<Job>, JoinHandle<()>)>,
}

impl Local {
    /// Threads are started as sources first send.
    pub fn new(reports: Reports) -> std::io::Result<Local> {
        Ok(Local { jobs: Shared::default(), reports, threads: BTreeMap::new() })
    }

    /// The queue of a job's source.
    fn queue(&mut self, job: &Job) -> std::io::Result<Sender<Job>> {
        let source = Arc::as_ptr(&job.source).addr();
        if !self.threads.contains_key(&source) {
            let (queue, inbox) = channel();
            let (jobs, reports) = (self.jobs.clone(), self.reports.clone());
            let thread = std::thread::Builder::new()
                .name("kvrelay-transfer".into())
                .spawn(move || copy_all(&inbox, &jobs, &reports))?;
            self.threads.insert(source, (queue, thread));
        }
        Ok(self.threads[&source].0.clone())
    }
}

fn copy_all(inbox: &Receiver<Job>, jobs: &Shared, reports: &Reports) {
    while let Ok(job) = inbox.recv() {
        // A panic here is a bug, but one job's: the others' requests must not wait for ever.
        let copied = catch_unwind(AssertUnwindSafe(|| copy(&job, jobs)));
        {
            let mut jobs = lock(jobs);
            jobs.open.remove(&job.id);
            jobs.aborted.remove(&job.id);
        }
        let complete = matches!(copied, Ok(Ok(true)));
        let outcome = if complete { Outcome::Complete } else { Outcome::Failed { quiesced: true } };
        reports.ended(job.id, outcome);
    }
}

/// Copies a job's blocks; false if it was aborted.
fn copy(job: &Job, jobs: &Shared) -> Result<bool, BackendError> {
    let goes_on = || !lock(jobs).aborted.contains(&job.id);
    let Some(during) = &job.during else {
        for portion in job.blocks.chunks(PORTION) {
            if !goes_on() {
                return Ok(false);
            }
            // SAFETY: until this job's outcome is reported the scheduler keeps both ends' blocks
            // pinned: the sources are full blocks and the last block of a prompt that is done, which
            // no step writes before the transfer is over; the destinations belong to the request
            // alone, and no row of it runs there yet.
            unsafe { copy_blocks(&job.source, &job.destination, portion, None)? };
        }
        return Ok(true);
    };
    for group in 0..job.source.geometry().num_layer_groups {
        during.wait(group)?;
        if !goes_on() {
            return Ok(false);
        }
        // SAFETY: as above, and the run has written this group of the last blocks. Where it must be
        // run again without one of its rows, it writes the same numbers once more, up to the rounding
        // of another batch.
        unsafe { copy_blocks(&job.source, &job.destination, &job.blocks, Some(group))? };
    }
    Ok(true)
}

impl Transport for Local {
    fn start(&mut self, job: Job) {
        let id = job.id;
        lock(&self.jobs).open.insert(id);
        // A thread takes jobs until its queue is closed.
        let sent = self.queue(&job).is_ok_and(|queue| queue.send(job).is_ok());
        if !sent {
            lock(&self.jobs).open.remove(&id);
            self.reports.ended(id, Outcome::Failed { quiesced: true });
        }
    }

    fn abort(&mut self, id: TransferId) {
        let mut jobs = lock(&self.jobs);
        if jobs.open.contains(&id) {
            jobs.aborted.insert(id);
        }
    }

    fn follows_runs(&self) -> bool {
        true
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        {
            let mut jobs = lock(&self.jobs);
            let open = jobs.open.clone();
            jobs.aborted.extend(open);
        }
        for (queue, thread) in std::mem::take(&mut self.threads).into_values() {
            drop(queue);
            let _ = thread.join();
        }
    }
}
