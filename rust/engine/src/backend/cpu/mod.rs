//! The CPU backend: a leader thread that runs steps, and helpers that share its loops.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod forward;
mod kernels;
mod panels;
mod plain;
mod rows;
mod step;
mod team;
#[cfg(target_arch = "x86_64")]
mod tile;
mod weights;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use self::forward::Forward;
use self::step::StepBuffer;
use super::checks::{self, Checks};
use super::{Backend, BackendError, KvGeometry, KvPool, Limits, Progress, Row, StepOutput, Ticket};

pub use kernels::{Tier, vector_instructions};
pub use weights::CpuWeights;

/// How a CPU backend runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuConfig {
    /// Threads, at least 1.
    pub threads: usize,
    /// Cores for them, in order; threads beyond the list run where the system puts them.
    pub cores: Vec<usize>,
    /// Steps that may be enqueued and not yet waited for, at least 1.
    pub queue_depth: usize,
    /// Tokens in a KV block.
    pub block_size: usize,
    /// KV blocks of the worker's own pool.
    pub num_blocks: usize,
}

impl Default for CpuConfig {
    fn default() -> Self {
        Self { threads: 1, cores: vec![], queue_depth: 2, block_size: 16, num_blocks: 256 }
    }
}

/// A worker's CPU backend.
#[derive(Debug)]
pub struct CpuBackend {
    name: String,
    limits: Limits,
    vocab_size: usize,
    queue_depth: usize,
    pool: Arc<KvPool>,
    progress: Arc<Progress>,
    /// `None` once the backend is being dropped.
    queue: Option<SyncSender<StepBuffer>>,
    done: Receiver<StepBuffer>,
    leader: Option<JoinHandle<()>>,
    /// Buffers that no step uses.
    free: Vec<StepBuffer>,
    /// The step whose outputs are on loan.
    current: Option<StepBuffer>,
    /// By slot, whether a step enqueued so far samples a token for it.
    has_token: Vec<bool>,
    /// Ticket of the next step to be enqueued, and of the next to be waited for.
    next: u64,
    oldest: u64,
}

impl CpuBackend {
    /// A backend with a pool of its own.
    pub fn new(weights: Arc<CpuWeights>, config: &CpuConfig, limits: Limits) -> Result<Self, BackendError> {
        let geometry = KvGeometry::new(weights.config(), weights.digest(), config.block_size);
        let pool = Arc::new(KvPool::new(geometry, config.num_blocks)?);
        // SAFETY: no one else knows the pool; whoever asks for it later must use it by the
        // contracts of its `unsafe` methods.
        unsafe { Self::with_pool(weights, config, limits, pool) }
    }

    /// A backend over a pool that others use too.
    ///
    /// # Safety
    /// While a step runs, no other user may write the blocks of its rows, nor read the positions
    /// that it writes, other than after [`Progress::wait`] for their layer group.
    pub unsafe fn with_pool(
        weights: Arc<CpuWeights>,
        config: &CpuConfig,
        limits: Limits,
        pool: Arc<KvPool>,
    ) -> Result<Self, BackendError> {
        let more = [("threads", config.threads), ("queue depth", config.queue_depth)];
        checks::check_limits(&limits, weights.config().context_length, &more)?;
        let geometry = KvGeometry::new(weights.config(), weights.digest(), pool.geometry().block_size);
        geometry.check_peer(pool.geometry())?;
        let depth = config.queue_depth;
        let (queue, steps) = sync_channel::<StepBuffer>(depth);
        let (finished, done) = sync_channel(depth);
        let progress = Arc::new(Progress::default());
        let (started, start) = sync_channel(1);
        let leader = {
            let (config, limits) = (config.clone(), limits.clone());
            let (weights, pool, progress) = (weights.clone(), pool.clone(), progress.clone());
            std::thread::Builder::new().name("kvrelay-cpu-0".into()).spawn(move || {
                let _end = StopOnDrop(progress.clone());
                match Forward::new(weights, pool, &limits, config.threads, &config.cores) {
                    Ok(forward) => {
                        // `new` waits for this, so someone listens.
                        let _ = started.send(Ok(()));
                        lead(forward, &steps, &finished, &progress);
                    }
                    Err(error) => drop(started.send(Err(error))),
                }
            })
        };
        let leader = leader.map_err(|error| BackendError::Stopped(error.to_string()))?;
        match start.recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(BackendError::Stopped(error.to_string())),
            Err(_) => return Err(BackendError::Stopped("its thread ended before it began".into())),
        }
        Ok(Self {
            name: format!("cpu ({:?}, {})", weights.tier, weights.isa.name()).to_lowercase(),
            vocab_size: weights.config.vocab_size,
            queue_depth: depth,
            progress,
            queue: Some(queue),
            done,
            leader: Some(leader),
            free: (0..=depth).map(|_| StepBuffer::new(&limits, pool.geometry())).collect(),
            current: None,
            has_token: vec![false; limits.max_slots],
            next: 1,
            oldest: 1,
            limits,
            pool,
        })
    }

    fn stopped<T>(&self) -> Result<T, BackendError> {
        Err(BackendError::Stopped("its thread ended".into()))
    }
}

/// Tells those who wait for progress that there will be none, however the leader ends.
struct StopOnDrop(Arc<Progress>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// The leader's loop: until the backend hangs up.
fn lead(
    mut forward: Forward,
    steps: &Receiver<StepBuffer>,
    finished: &SyncSender<StepBuffer>,
    progress: &Progress,
) {
    while let Ok(mut step) = steps.recv() {
        #[expect(clippy::disallowed_methods, reason = "workers report how long they worked")]
        let start = std::time::Instant::now();
        forward.run(&mut step, progress);
        step.busy = start.elapsed();
        if finished.send(step).is_err() {
            return;
        }
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn pool(&self) -> &Arc<KvPool> {
        &self.pool
    }

    fn queue_depth(&self) -> usize {
        self.queue_depth
    }

    fn enqueue(&mut self, rows: &[Row<'_>]) -> Result<Ticket, BackendError> {
        let queued = (self.next - self.oldest) as usize;
        if queued >= self.queue_depth {
            let limit = self.queue_depth;
            return Err(BackendError::Limit { what: "steps in the queue", limit, found: queued + 1 });
        }
        let checks = Checks {
            limits: &self.limits,
            geometry: self.pool.geometry(),
            num_blocks: self.pool.num_blocks(),
            vocab_size: self.vocab_size,
            has_token: &self.has_token,
        };
        checks.check(rows)?;
        let (Some(queue), Some(mut step)) = (&self.queue, self.free.pop()) else { return self.stopped() };
        step.fill(self.next, rows, self.pool.geometry());
        if queue.send(step).is_err() {
            return self.stopped();
        }
        for row in rows {
            // A prefill chunk that samples nothing begins the slot's text anew.
            self.has_token[row.slot as usize] = row.sample.is_some();
        }
        self.next += 1;
        Ok(Ticket(self.next - 1))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOutput<'_>, BackendError> {
        if ticket.0 != self.oldest || self.oldest == self.next {
            return Err(BackendError::Ticket { expected: self.oldest, found: ticket.0 });
        }
        let Ok(mut step) = self.done.recv() else { return self.stopped() };
        self.oldest += 1;
        let error = step.error.take();
        self.free.extend(self.current.take());
        let step = self.current.insert(step);
        match error {
            Some(error) => Err(error),
            None => Ok(StepOutput { rows: &step.outputs, logits: &step.logits, busy: step.busy }),
        }
    }

    fn release(&mut self, slot: u32) -> Result<(), BackendError> {
        checks::forget_token(&mut self.has_token, slot)
    }

    fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }
}

impl Drop for CpuBackend {
    fn drop(&mut self) {
        self.queue = None;
        // Steps still running give their results to no one; the leader sees the closed queue.
        while self.done.recv().is_ok() {}
        if let Some(leader) = self.leader.take() {
            // A panic of the leader was reported when it happened, and by every later call.
            let _ = leader.join();
        }
    }
}
