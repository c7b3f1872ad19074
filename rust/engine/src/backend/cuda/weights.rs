//! A model's weights on a device, as the kernels multiply by them; shared by all its workers there.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use half::bf16;
use kvrelay_kernels::launch::{HEAD_DIMS, MAX_VOCAB, Weights};
use kvrelay_model::{DType, LlamaConfig, Model, Tensor};

use super::device::CudaDevice;
use super::memory::DeviceVec;
use super::staging::Staging;
use crate::backend::BackendError;

/// A model's weights in device memory. Matrices of the formats that kernels read stay as they are;
/// everything else becomes bf16.
#[derive(Debug)]
pub struct CudaWeights {
    pub(super) device: Arc<CudaDevice>,
    pub(super) config: LlamaConfig,
    pub(super) digest: u64,
    pub(super) embedding: Matrix,
    pub(super) layers: Vec<Layer>,
    pub(super) final_norm: DeviceVec<bf16>,
    /// `None` when the embedding serves for it.
    output: Option<Matrix>,
}

/// One layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attention_norm: DeviceVec<bf16>,
    /// Queries, keys and values, one below the other.
    pub(super) qkv: Matrix,
    pub(super) attention_output: Matrix,
    pub(super) ffn_norm: DeviceVec<bf16>,
    /// Gate and up projection, one below the other.
    pub(super) gate_up: Matrix,
    pub(super) down: Matrix,
}

/// `[outputs][inputs]`.
#[derive(Debug)]
pub(super) struct Matrix {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    elements: Elements,
}

#[derive(Debug)]
enum Elements {
    Plain(DeviceVec<bf16>),
    Quantised(DType, DeviceVec<u8>),
}

impl CudaWeights {
    /// Uploads a model's weights through pinned memory.
    ///
    /// # Errors
    /// [`BackendError::Config`] for a model that the kernels are not made for, naming what;
    /// [`BackendError::DeviceMemory`] and [`BackendError::Device`] if the device refuses.
    pub fn new(device: &Arc<CudaDevice>, model: &Model) -> Result<Arc<Self>, BackendError> {
        let config = model.config().clone();
        check(&config)?;
        let mut staging = Staging::new(device)?;
        let weights = model.weights();
        let mut layers = Vec::with_capacity(config.num_layers);
        for layer in &weights.layers {
            layers.push(Layer {
                attention_norm: vector(&mut staging, &layer.attention_norm)?,
                qkv: Matrix::new(&mut staging, &[&layer.query, &layer.key, &layer.value])?,
                attention_output: Matrix::new(&mut staging, &[&layer.attention_output])?,
                ffn_norm: vector(&mut staging, &layer.ffn_norm)?,
                gate_up: Matrix::new(&mut staging, &[&layer.gate, &layer.up])?,
                down: Matrix::new(&mut staging, &[&layer.down])?,
            });
        }
        let output =
            if weights.is_tied() { None } else { Some(Matrix::new(&mut staging, &[weights.output()])?) };
        let this = Self {
            device: device.clone(),
            config,
            digest: model.digest(),
            embedding: Matrix::new(&mut staging, &[&weights.embedding])?,
            layers,
            final_norm: vector(&mut staging, &weights.final_norm)?,
            output,
        };
        staging.finish()?;
        Ok(Arc::new(this))
    }

    /// Bytes of device memory that a model's weights take.
    pub fn num_bytes(model: &Model) -> u64 {
        let weights = model.weights();
        let norm = |tensor: &Tensor| 2 * tensor.columns() as u64;
        let layers = weights.layers.iter().map(|layer| {
            norm(&layer.attention_norm)
                + norm(&layer.ffn_norm)
                + Matrix::num_bytes(&[&layer.query, &layer.key, &layer.value])
                + Matrix::num_bytes(&[&layer.attention_output])
                + Matrix::num_bytes(&[&layer.gate, &layer.up])
                + Matrix::num_bytes(&[&layer.down])
        });
        let output = if weights.is_tied() { 0 } else { Matrix::num_bytes(&[weights.output()]) };
        layers.sum::<u64>() + Matrix::num_bytes(&[&weights.embedding]) + output + norm(&weights.final_norm)
    }

    /// The model's sizes.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// The device that holds them.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// Identity of the weights, see [`Model::digest`].
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// The matrix that makes logits.
    pub(super) fn output(&self) -> &Matrix {
        self.output.as_ref().unwrap_or(&self.embedding)
    }
}

/// Refuses sizes that no kernel is compiled for; [`super::supports`] asks the same beforehand.
pub(super) fn check(config: &LlamaConfig) -> Result<(), BackendError> {
    let refuse = |what, expected: String, found: usize| {
        Err(BackendError::Config { what, expected, found: found.to_string() })
    };
    if !HEAD_DIMS.contains(&config.head_dim) {
        return refuse("head dimension on CUDA", format!("one of {HEAD_DIMS:?}"), config.head_dim);
    }
    if config.vocab_size > MAX_VOCAB {
        return refuse("vocabulary on CUDA", format!("at most {MAX_VOCAB}"), config.vocab_size);
    }
    let widths = [("hidden size on CUDA", config.hidden_size), ("ffn size on CUDA", config.ffn_size)];
    match widths.into_iter().find(|(_, width)| width % 8 != 0) {
        Some((what, width)) => refuse(what, "a multiple of 8".into(), width),
        None => Ok(()),
    }
}

/// How matrices that go one below the other are stored: as they are if they agree on a format that
/// kernels read.
fn common_format(tensors: &[&Tensor]) -> Option<DType> {
    let dtype = tensors[0].dtype();
    let quantised = matches!(dtype, DType::Q4_0 | DType::Q4_1 | DType::Q8_0);
    (quantised && tensors.iter().all(|tensor| tensor.dtype() == dtype)).then_some(dtype)
}

fn vector(staging: &mut Staging, tensor: &Tensor) -> Result<DeviceVec<bf16>, BackendError> {
    let to = staging.vector("a norm's weights", tensor.columns())?;
    staging.upload(&to, rounded_rows(&[tensor]))?;
    Ok(to)
}

/// Rows of the tensors, one below the other, as the bytes of bf16 numbers.
fn rounded_rows<'a>(tensors: &'a [&'a Tensor]) -> impl Iterator<Item = Vec<u8>> + 'a {
    tensors.iter().flat_map(|tensor| {
        let mut numbers = vec![0.0; tensor.columns()];
        (0..tensor.rows().max(1)).map(move |row| {
            tensor.dequantise_row(row, &mut numbers);
            numbers.iter().flat_map(|&number| bf16::from_f32(number).to_le_bytes()).collect()
        })
    })
}

impl Matrix {
    fn new(staging: &mut Staging, tensors: &[&Tensor]) -> Result<Self, BackendError> {
        let inputs = tensors[0].columns();
        let outputs = tensors.iter().map(|tensor| tensor.rows()).sum();
        let elements = if let Some(dtype) = common_format(tensors) {
            let to = staging.vector("weights", Self::num_bytes(tensors) as usize)?;
            let rows =
                tensors.iter().flat_map(|tensor| (0..tensor.rows()).map(|row| tensor.row(row).to_vec()));
            staging.upload(&to, rows)?;
            Elements::Quantised(dtype, to)
        } else {
            let to = staging.vector("weights", outputs * inputs)?;
            staging.upload(&to, rounded_rows(tensors))?;
            Elements::Plain(to)
        };
        Ok(Self { outputs, inputs, elements })
    }

    fn num_bytes(tensors: &[&Tensor]) -> u64 {
        let bytes = |tensor: &&Tensor| match common_format(tensors) {
            Some(_) => tensor.num_bytes(),
            None => 2 * tensor.rows() * tensor.columns(),
        };
        tensors.iter().map(bytes).sum::<usize>() as u64
    }

    /// As the launchers take it.
    pub(super) fn weights(&self) -> Weights<'_, bf16> {
        match &self.elements {
            Elements::Plain(elements) => Weights::Plain(elements.view()),
            Elements::Quantised(DType::Q4_0, bytes) => Weights::Q4_0(bytes.view()),
            Elements::Quantised(DType::Q4_1, bytes) => Weights::Q4_1(bytes.view()),
            Elements::Quantised(_, bytes) => Weights::Q8_0(bytes.view()),
        }
    }

    /// Its elements where they are plain numbers.
    pub(super) fn plain(&self) -> Option<&DeviceVec<bf16>> {
        match &self.elements {
            Elements::Plain(elements) => Some(elements),
            Elements::Quantised(..) => None,
        }
    }
}

impl Staging {
    fn vector<T: cudarc::driver::DeviceRepr>(
        &self,
        what: &'static str,
        len: usize,
    ) -> Result<DeviceVec<T>, BackendError> {
        let stream: &Arc<CudaStream> = self.stream();
        DeviceVec::new(self.device(), stream, what, len)
    }
}
