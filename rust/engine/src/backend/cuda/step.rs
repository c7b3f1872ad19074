//! A step between its enqueuing and its outputs: pinned memory at both ends, and its events.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cudarc::driver::{CudaEvent, result};

use super::buffers::Sizes;
use super::device::CudaDevice;
use super::forward::Forward;
use super::inputs::Wants;
use super::memory::Pinned;
use crate::backend::{BackendError, Limits, Marks, RowOutput};

/// The events of one buffer's steps.
#[derive(Debug)]
pub(super) struct StepEvents {
    pub(super) begin: CudaEvent,
    /// Behind the kernel that writes the KV of each layer group.
    pub(super) groups: Vec<CudaEvent>,
    pub(super) done: CudaEvent,
    /// The step that they were last recorded for.
    ticket: AtomicU64,
}

/// The events of all buffers, for the backend and for those who wait for layer groups.
#[derive(Debug)]
pub(super) struct Events {
    device: Arc<CudaDevice>,
    steps: Vec<StepEvents>,
}

impl Events {
    pub(super) fn new(
        device: &Arc<CudaDevice>,
        num_buffers: usize,
        num_groups: usize,
    ) -> Result<Self, BackendError> {
        let step = |_| {
            Ok(StepEvents {
                begin: device.event()?,
                groups: (0..num_groups).map(|_| device.event()).collect::<Result<_, _>>()?,
                done: device.event()?,
                ticket: AtomicU64::new(0),
            })
        };
        let steps = (0..num_buffers).map(step).collect::<Result<_, BackendError>>()?;
        Ok(Self { device: device.clone(), steps })
    }

    pub(super) fn of(&self, index: usize) -> &StepEvents {
        &self.steps[index]
    }

    /// Buffer `index` holds step `ticket`, whose events are recorded.
    pub(super) fn assign(&self, index: usize, ticket: u64) {
        self.steps[index].ticket.store(ticket, Ordering::Release);
    }
}

impl Marks for Events {
    fn wait(&self, ticket: u64, group: usize) -> Result<(), BackendError> {
        // A step whose events are another's by now is over: its buffer was free.
        let Some(step) = self.steps.iter().find(|step| step.ticket.load(Ordering::Acquire) == ticket) else {
            return Ok(());
        };
        self.device.told("waiting for a layer group", step.groups[group].synchronize())
    }
}

impl StepEvents {
    /// Waits for the step; how long the device worked on it.
    pub(super) fn wait(&self, device: &CudaDevice) -> Result<Duration, BackendError> {
        device.told("a step", self.done.synchronize())?;
        let milliseconds = device.told("reading the time of a step", self.begin.elapsed_ms(&self.done))?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

/// A step's memory on the host.
#[derive(Debug)]
pub(super) struct StepBuffer {
    /// Its number, by which its events are found.
    pub(super) index: usize,
    pub(super) input: Pinned,
    /// The tokens, as the device writes them.
    tokens: Pinned,
    ticket: u64,
    pub(super) is_empty: bool,
    pub(super) wants: Vec<Wants>,
    pub(super) outputs: Vec<RowOutput>,
    pub(super) logits: Vec<f32>,
    vocab: usize,
}

impl StepBuffer {
    pub(super) fn new(
        device: &Arc<CudaDevice>,
        index: usize,
        sizes: &Sizes,
        limits: &Limits,
    ) -> Result<Self, BackendError> {
        Ok(Self {
            index,
            input: Pinned::new(device, sizes.input)?,
            tokens: Pinned::new(device, size_of::<i32>() * sizes.wanted())?,
            ticket: 0,
            is_empty: true,
            wants: Vec::with_capacity(limits.max_rows),
            outputs: Vec::with_capacity(limits.max_rows),
            logits: Vec::new(),
            vocab: sizes.vocab(),
        })
    }

    pub(super) fn begin(&mut self, ticket: u64) {
        self.ticket = ticket;
        self.is_empty = true;
        self.wants.clear();
        self.outputs.clear();
        self.logits.clear();
    }

    /// Enqueues the way back of `wanted` tokens, and of the logits that were asked for; these go to
    /// memory that is not pinned, so a step that gives any is waited for here.
    pub(super) fn fetch(&mut self, forward: &Forward, wanted: usize) -> Result<(), BackendError> {
        let (device, stream) = (forward.device(), forward.stream.cu_stream());
        if wanted == 0 {
            return Ok(());
        }
        let bytes = &mut self.tokens.bytes_mut()[..size_of::<i32>() * wanted];
        // SAFETY: the buffer is left alone until the step is over; both ends are as long.
        let copied = unsafe { result::memcpy_dtoh_async(bytes, forward.buffers.tokens.pointer(), stream) };
        device.told("copying the tokens", copied)?;
        for wants in self.wants.iter().filter(|wants| wants.logits) {
            let (first, count) = (wants.wanted.start * self.vocab, wants.wanted.len() * self.vocab);
            let have = self.logits.len();
            self.logits.resize(have + count, 0.0);
            let from = forward.buffers.logits.pointer() + (first * size_of::<f32>()) as u64;
            // SAFETY: pageable memory is written before the call returns; both ends are as long.
            let copied = unsafe { result::memcpy_dtoh_async(&mut self.logits[have..], from, stream) };
            device.told("copying the logits", copied)?;
        }
        Ok(())
    }

    /// Makes the outputs of a step that is over; the first row whose logits were no numbers.
    pub(super) fn read(&mut self) -> Option<BackendError> {
        let token = |index: usize| {
            let at = size_of::<i32>() * index;
            i32::from_le_bytes(self.tokens.bytes()[at..at + 4].try_into().unwrap_or_default())
        };
        let mut first_logits = 0;
        for (row, wants) in self.wants.iter().enumerate() {
            let num_logits = if wants.logits { wants.wanted.len() } else { 0 };
            let token = wants.sampled.then(|| token(wants.wanted.end - 1));
            if let Some(id) = token.filter(|&token| token < 0) {
                let reason = format!("logit {} is not a finite number", -1 - id);
                return Some(BackendError::NotFinite { row, slot: wants.slot, reason });
            }
            let token = token.map(|token| token as u32);
            self.outputs.push(RowOutput { slot: wants.slot, token, first_logits, num_logits });
            first_logits += num_logits;
        }
        None
    }
}
