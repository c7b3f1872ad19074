//! An engine's workers, made on the devices that its description names: memory is reckoned, and
//! refused with the numbers, before it is taken.

use std::sync::{Arc, OnceLock};

use kvrelay_core::cluster::Role;
use kvrelay_core::scheduler::Limits;
use kvrelay_model::Model;

use crate::backend::cpu::{CpuBackend, CpuConfig, CpuWeights, Tier};
use crate::backend::cuda::{self, CudaBackend, CudaConfig, CudaDevice, CudaWeights};
use crate::backend::{self, Backend, BackendError, KvGeometry};
use crate::config::{EngineConfig, Numerics};
use crate::error::EngineError;
use crate::setup::{kv_blocks, kv_blocks_in, step_limits};
use crate::{cores, memory};

/// KV of a CPU worker unless the caller says.
const CPU_KV_MEMORY: u64 = 512 << 20;

/// The share of a device's free memory that workers may take unless the caller says; the rest is for
/// graphs and what the driver needs.
const CUDA_SHARE: (u64, u64) = (9, 10);

/// Workers that are made and have not started.
pub(crate) struct Fleet {
    pub(crate) backends: Vec<Box<dyn Backend>>,
    pub(crate) placed: Vec<Placed>,
    pub(crate) apart: Apart,
}

/// Threads and cores of a worker.
#[derive(Clone, Debug, Default)]
pub(crate) struct Placed {
    pub(crate) threads: usize,
    pub(crate) cores: Vec<usize>,
}

/// What computes beside the workers.
pub(crate) enum Apart {
    /// The workers' own weights where they are CPUs; made when first needed otherwise.
    Cpu { tier: Tier, weights: OnceLock<Arc<CpuWeights>> },
    /// On the first device.
    Cuda { weights: Arc<CudaWeights>, invariant: bool },
}

impl Apart {
    /// For workers of devices of one's own.
    pub(crate) fn unknown(numerics: Numerics) -> Apart {
        Apart::Cpu { tier: tier(numerics), weights: OnceLock::new() }
    }

    /// A backend for one sequence.
    pub(crate) fn backend(
        &self,
        model: &Model,
        limits: backend::Limits,
        block_size: usize,
    ) -> Result<Box<dyn Backend>, BackendError> {
        let num_blocks = limits.max_positions.div_ceil(block_size);
        match self {
            Apart::Cpu { tier, weights } => {
                let cpu = CpuConfig { block_size, num_blocks, ..CpuConfig::default() };
                let weights = weights.get_or_init(|| Arc::new(CpuWeights::new(model, *tier)));
                Ok(Box::new(CpuBackend::new(weights.clone(), &cpu, limits)?))
            }
            Apart::Cuda { weights, invariant } => {
                let invariant = *invariant;
                let config = CudaConfig { invariant, block_size, num_blocks, ..CudaConfig::default() };
                Ok(Box::new(CudaBackend::new(weights.clone(), &config, limits)?))
            }
        }
    }
}

fn tier(numerics: Numerics) -> Tier {
    match numerics {
        Numerics::Invariant => Tier::Scalar,
        Numerics::Fast => Tier::Vector,
    }
}

/// Makes the workers of `config`.
pub(crate) fn make(model: &Arc<Model>, config: &EngineConfig, limits: &Limits) -> Result<Fleet, EngineError> {
    let devices = config.device.open(model, config.topology.roles().len())?;
    if devices.is_empty() { on_cpu(model, config, limits) } else { on_cuda(model, config, limits, &devices) }
}

fn on_cpu(model: &Arc<Model>, config: &EngineConfig, limits: &Limits) -> Result<Fleet, EngineError> {
    let step = step_limits(limits);
    let workers = config.topology.roles().len();
    let geometry = KvGeometry::new(model.config(), model.digest(), limits.block_tokens as usize);
    let kv_blocks = kv_blocks(config, &geometry, CPU_KV_MEMORY)?;
    let plan = memory::Plan::new(model, config.numerics, &geometry, &step, workers, kv_blocks);
    plan.check(memory::available())?;
    let cores = cores::available();
    let default_threads = cores::threads_per_worker(&cores, workers);
    let threads = config.threads_per_worker.unwrap_or(default_threads);
    let weights = Arc::new(CpuWeights::new(model, tier(config.numerics)));
    let mut backends: Vec<Box<dyn Backend>> = Vec::with_capacity(workers);
    let mut placed = Vec::with_capacity(workers);
    for index in 0..workers {
        let cores = if config.pin { cores::of_worker(&cores, workers, threads, index) } else { Vec::new() };
        let cpu = CpuConfig {
            threads,
            cores: cores.clone(),
            queue_depth: 2,
            block_size: limits.block_tokens as usize,
            num_blocks: kv_blocks as usize,
        };
        backends.push(Box::new(CpuBackend::new(weights.clone(), &cpu, step.clone())?));
        placed.push(Placed { threads, cores });
    }
    let apart = Apart::Cpu { tier: tier(config.numerics), weights: OnceLock::from(weights) };
    Ok(Fleet { backends, placed, apart })
}

/// What the workers of a device need beside their KV.
struct Needs {
    device: Arc<CudaDevice>,
    workers: u64,
    weights: u64,
    buffers: u64,
    free: u64,
}

impl Needs {
    /// Bytes of KV that each worker can have.
    fn kv_room(&self) -> u64 {
        let (of, whole) = CUDA_SHARE;
        (self.free / whole * of).saturating_sub(self.weights + self.buffers) / self.workers
    }

    fn check(&self, kv: u64) -> Result<(), EngineError> {
        let kv = kv.saturating_mul(self.workers);
        let needed = self.weights.saturating_add(self.buffers).saturating_add(kv);
        if needed <= self.free {
            return Ok(());
        }
        Err(EngineError::DeviceMemory {
            device: format!("cuda:{}", self.device.ordinal()),
            needed,
            free: self.free,
            parts: memory::parts(self.weights, kv, self.buffers),
        })
    }
}

fn on_cuda(
    model: &Arc<Model>,
    config: &EngineConfig,
    limits: &Limits,
    devices: &[Arc<CudaDevice>],
) -> Result<Fleet, EngineError> {
    let step = step_limits(limits);
    let workers = config.topology.roles().len();
    let used = devices.len();
    let geometry = cuda::geometry(model.config(), model.digest(), limits.block_tokens as usize);
    let mut cuda_config = CudaConfig {
        invariant: config.numerics == Numerics::Invariant,
        block_size: limits.block_tokens as usize,
        ..CudaConfig::default()
    };
    let needs = |(index, device): (usize, &Arc<CudaDevice>)| {
        let here = (workers - index).div_ceil(used) as u64;
        Ok(Needs {
            device: device.clone(),
            workers: here,
            weights: CudaWeights::num_bytes(model),
            buffers: here * cuda::buffer_bytes(device, model.config(), &cuda_config, &step),
            free: device.memory()?.0,
        })
    };
    let needs: Vec<Needs> = devices.iter().enumerate().map(needs).collect::<Result<_, BackendError>>()?;
    // The same for all, so that every worker can hold what another sends.
    let room = needs.iter().map(Needs::kv_room).min().unwrap_or(0);
    let block = geometry.block_bytes() as u64;
    let blocks = match config.kv_blocks.or(config.kv_memory.map(|_| 0)) {
        None if room < block => 1,
        None => kv_blocks_in(room, &geometry)?,
        Some(_) => kv_blocks(config, &geometry, room)?,
    };
    needs.iter().try_for_each(|needs| needs.check(u64::from(blocks) * block))?;
    cuda_config.num_blocks = blocks as usize;
    let weights: Vec<Arc<CudaWeights>> =
        needs.iter().map(|needs| CudaWeights::new(&needs.device, model)).collect::<Result<_, _>>()?;
    let mut backends: Vec<Box<dyn Backend>> = Vec::with_capacity(workers);
    for (index, role) in config.topology.roles().into_iter().enumerate() {
        let weights = weights[index % used].clone();
        // Where they share a device, a token that somebody waits for goes before a prompt.
        let config = CudaConfig { urgent: role == Role::Decode, ..cuda_config.clone() };
        backends.push(Box::new(CudaBackend::new(weights, &config, step.clone())?));
    }
    let apart = Apart::Cuda { weights: weights[0].clone(), invariant: cuda_config.invariant };
    Ok(Fleet { backends, placed: vec![Placed::default(); workers], apart })
}
