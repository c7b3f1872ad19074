//! The CUDA backend: steps enqueued on a stream of its own, and waited for by events.
//!
//! There is no thread of its own: [`Backend::enqueue`] launches and returns, so that the next step is
//! in the device's queue while the present one runs. Errors of the driver end the backend: after one
//! the device's state is not known, and every later call says so.

mod buffers;
mod cublas;
mod device;
mod forward;
mod graphs;
mod inputs;
mod memory;
mod pool;
mod product;
mod staging;
mod step;
mod weights;

use std::collections::VecDeque;
use std::sync::Arc;

use cudarc::driver::{CudaStream, result};
use kvrelay_kernels::launch::Split;
use kvrelay_model::{DType, LlamaConfig};

use self::buffers::{Buffers, Sizes};
use self::cublas::CuBlas;
use self::forward::Forward;
use self::graphs::Graphs;
use self::inputs::{Buckets, Inputs};
use self::product::{Own, Product};
use self::step::{Events, StepBuffer};
use super::checks::{Checks, check_limits, forget_token};
use super::{Backend, BackendError, KvGeometry, KvPool, Limits, Progress, Row, StepOutput, Ticket};

pub use device::CudaDevice;
pub(crate) use pool::DeviceMemory;
pub use weights::CudaWeights;

/// How a CUDA backend runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaConfig {
    /// Every row's numbers depend, bit for bit, on its own tokens alone; or as fast as may be.
    pub invariant: bool,
    /// Decode steps are launched as graphs. The numbers are the same without.
    pub graphs: bool,
    /// Multiply by cuBLAS where it is found; never in the invariant tier.
    pub cublas: bool,
    /// Its kernels go before those of the device's other workers that are not urgent.
    pub urgent: bool,
    /// Steps that may be enqueued and not yet waited for, at least 1.
    pub queue_depth: usize,
    /// Tokens in a KV block.
    pub block_size: usize,
    /// KV blocks of the worker's own pool.
    pub num_blocks: usize,
}

impl Default for CudaConfig {
    fn default() -> Self {
        Self {
            invariant: false,
            graphs: true,
            cublas: true,
            urgent: false,
            queue_depth: 2,
            block_size: 16,
            num_blocks: 256,
        }
    }
}

/// Whether the kernels are made for a model; what is wrong with it otherwise.
///
/// # Errors
/// [`BackendError::Config`], naming the size and what it may be.
pub fn supports(config: &LlamaConfig) -> Result<(), BackendError> {
    weights::check(config)
}

/// The layout of KV blocks on a device.
pub fn geometry(config: &LlamaConfig, model_digest: u64, block_size: usize) -> KvGeometry {
    KvGeometry::new(config, model_digest, block_size).with_dtype(DType::BF16)
}

/// Bytes of device memory that a backend's buffers take beside its pool and the weights.
pub fn buffer_bytes(device: &CudaDevice, model: &LlamaConfig, config: &CudaConfig, limits: &Limits) -> u64 {
    sizes(device, model, config, limits, &geometry(model, 0, config.block_size)).bytes()
}

fn uses_cublas(config: &CudaConfig) -> bool {
    config.cublas && !config.invariant && cublas::is_present()
}

fn sizes(
    device: &CudaDevice,
    model: &LlamaConfig,
    config: &CudaConfig,
    limits: &Limits,
    geometry: &KvGeometry,
) -> Sizes {
    let split = if config.invariant {
        Split::Invariant
    } else {
        Split::Fast { multiprocessors: device.multiprocessors() }
    };
    Sizes::new(model, limits, Buckets::new(limits, geometry), split, uses_cublas(config))
}

/// A worker's CUDA backend.
#[derive(Debug)]
pub struct CudaBackend {
    name: String,
    limits: Limits,
    config: CudaConfig,
    pool: Arc<KvPool>,
    progress: Arc<Progress>,
    forward: Forward,
    graphs: Graphs,
    buckets: Buckets,
    inputs: Inputs,
    events: Arc<Events>,
    /// Buffers that no step uses.
    free: Vec<StepBuffer>,
    /// Steps that were enqueued, the oldest first.
    queued: VecDeque<StepBuffer>,
    /// The step whose outputs are on loan.
    current: Option<StepBuffer>,
    /// By slot, whether a step enqueued so far samples a token for it.
    has_token: Vec<bool>,
    /// Ticket of the next step to be enqueued, and of the next to be waited for.
    next: u64,
    oldest: u64,
    /// Why no later step will run.
    failed: Option<String>,
}

impl CudaBackend {
    /// A backend with a pool of its own, on the device that holds the weights. All it ever allocates
    /// is allocated here, but for the graphs of decode steps.
    ///
    /// # Errors
    /// [`BackendError::Config`] for limits that cannot be, [`BackendError::DeviceMemory`] with both
    /// numbers where the device has no room, [`BackendError::Device`] if the driver refuses.
    pub fn new(weights: Arc<CudaWeights>, config: &CudaConfig, limits: Limits) -> Result<Self, BackendError> {
        let more = [("queue depth", config.queue_depth)];
        check_limits(&limits, weights.config().context_length, &more)?;
        let device = weights.device().clone();
        let geometry = geometry(weights.config(), weights.digest(), config.block_size);
        let pool = Arc::new(KvPool::on_device(geometry, config.num_blocks, &device)?);
        let buckets = Buckets::new(&limits, pool.geometry());
        let sizes = sizes(&device, weights.config(), config, &limits, pool.geometry());
        let stream = device.stream_of_priority(config.urgent)?;
        let buffers = Buffers::new(&device, &stream, &sizes, weights.config())?;
        let product = product(&device, &stream, config)?;
        let num_groups = pool.geometry().num_layer_groups;
        let num_buffers = config.queue_depth + 1;
        let events = Arc::new(Events::new(&device, num_buffers, num_groups)?);
        let free = (0..num_buffers).map(|index| StepBuffer::new(&device, index, &sizes, &limits));
        let free = free.collect::<Result<_, _>>()?;
        let tier = if config.invariant { "invariant" } else { "fast" };
        let name = format!("cuda:{} ({}, {tier}, {})", device.ordinal(), device.name(), product.name());
        let forward = Forward::new(weights, stream, buffers, sizes, pool.clone(), product);
        Ok(Self {
            name,
            config: config.clone(),
            progress: Arc::new(Progress::with_marks(events.clone())),
            forward: forward.expect("the pool was made on the device"),
            graphs: Graphs::default(),
            inputs: Inputs::new(&limits, &buckets),
            buckets,
            events,
            free,
            queued: VecDeque::with_capacity(config.queue_depth),
            current: None,
            has_token: vec![false; limits.max_slots],
            next: 1,
            oldest: 1,
            failed: None,
            pool,
            limits,
        })
    }

    /// How many shapes of decode steps have a graph.
    pub fn num_graphs(&self) -> usize {
        self.graphs.len()
    }

    /// Enqueues a checked step whose buffer is `step`.
    fn launch(&mut self, step: &mut StepBuffer, rows: &[Row<'_>]) -> Result<(), BackendError> {
        let device = self.forward.device().clone();
        device.told("binding its context", device.context().bind_to_thread())?;
        let split = !self.config.invariant;
        let shape = self.inputs.gather(rows, split, &self.buckets, &mut step.wants);
        let offsets = self.inputs.pack(step.input.bytes_mut());
        let stream = self.forward.stream.clone();
        let events = self.events.of(step.index);
        device.told("recording an event", events.begin.record(&stream))?;
        // SAFETY: the buffer is left alone until the step is over; the device's is as long.
        let copied = unsafe {
            let from = &step.input.bytes()[..offsets.bytes];
            result::memcpy_htod_async(self.forward.buffers.input.pointer(), from, stream.cu_stream())
        };
        device.told("copying a step's inputs", copied)?;
        let single = rows.iter().all(|row| row.input.len() == 1);
        if self.config.graphs && single {
            self.graphs.enqueue(&mut self.forward, &shape, &offsets)?;
            for mark in &events.groups {
                device.told("recording an event", mark.record(&stream))?;
            }
        } else {
            self.forward.enqueue(&shape, &offsets, Some(&events.groups))?;
        }
        step.fetch(&self.forward, shape.wanted)?;
        device.told("recording an event", events.done.record(&stream))
    }

    /// Ends the backend for an error.
    fn fail(&mut self, error: &BackendError) {
        self.failed.get_or_insert_with(|| error.to_string());
        self.progress.stop();
    }
}

fn product(
    device: &Arc<CudaDevice>,
    stream: &Arc<CudaStream>,
    config: &CudaConfig,
) -> Result<Box<dyn Product>, BackendError> {
    let own = Own { device: device.clone(), stream: stream.clone() };
    if uses_cublas(config) { Ok(Box::new(CuBlas::new(own)?)) } else { Ok(Box::new(own)) }
}

impl Backend for CudaBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn vocab_size(&self) -> usize {
        self.forward.weights.config().vocab_size
    }

    fn pool(&self) -> &Arc<KvPool> {
        &self.pool
    }

    fn queue_depth(&self) -> usize {
        self.config.queue_depth
    }

    fn runs_ahead(&self) -> bool {
        self.config.queue_depth > 1
    }

    fn enqueue(&mut self, rows: &[Row<'_>]) -> Result<Ticket, BackendError> {
        if let Some(reason) = &self.failed {
            return Err(BackendError::Stopped(reason.clone()));
        }
        let queued = (self.next - self.oldest) as usize;
        if queued >= self.config.queue_depth {
            let limit = self.config.queue_depth;
            return Err(BackendError::Limit { what: "steps in the queue", limit, found: queued + 1 });
        }
        let checks = Checks {
            limits: &self.limits,
            geometry: self.pool.geometry(),
            num_blocks: self.pool.num_blocks(),
            vocab_size: self.vocab_size(),
            has_token: &self.has_token,
        };
        checks.check(rows)?;
        let mut step = self.free.pop().expect("there is one buffer more than steps in the queue");
        step.begin(self.next);
        if !rows.is_empty()
            && let Err(error) = self.launch(&mut step, rows)
        {
            self.fail(&error);
            // The device may still read it.
            self.queued.push_back(step);
            return Err(error);
        }
        step.is_empty = rows.is_empty();
        self.events.assign(step.index, self.next);
        self.progress.advance(self.next, self.pool.geometry().num_layer_groups);
        self.queued.push_back(step);
        for row in rows {
            // A prefill chunk that samples nothing begins the slot's text anew.
            self.has_token[row.slot as usize] = row.sample.is_some();
        }
        self.next += 1;
        Ok(Ticket(self.next - 1))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOutput<'_>, BackendError> {
        if let Some(reason) = &self.failed {
            return Err(BackendError::Stopped(reason.clone()));
        }
        if ticket.0 != self.oldest || self.oldest == self.next {
            return Err(BackendError::Ticket { expected: self.oldest, found: ticket.0 });
        }
        let mut step = self.queued.pop_front().expect("a ticket stands for a queued step");
        let events = self.events.of(step.index);
        let busy = if step.is_empty { Ok(None) } else { events.wait(self.forward.device()).map(Some) };
        self.oldest += 1;
        self.free.extend(self.current.take());
        let busy = match busy {
            Ok(busy) => busy.unwrap_or_default(),
            Err(error) => {
                self.current = Some(step);
                self.fail(&error);
                return Err(error);
            }
        };
        let error = step.read();
        let step = self.current.insert(step);
        match error {
            Some(error) => Err(error),
            None => Ok(StepOutput { rows: &step.outputs, logits: &step.logits, busy }),
        }
    }

    fn release(&mut self, slot: u32) -> Result<(), BackendError> {
        forget_token(&mut self.has_token, slot)
    }

    fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        self.progress.stop();
        // Before the buffers go; on a lost device there is nothing to wait for.
        let _ = self.forward.stream.synchronize();
    }
}
