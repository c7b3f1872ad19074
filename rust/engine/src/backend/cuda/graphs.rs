//! Decode steps as graphs: what a step of some shape launches, recorded once and launched as one.
//!
//! A graph holds addresses and sizes. The first are the same in every step, the second are the same
//! in every step of one [`Shape`], so a graph is kept for each. The first step of a shape runs
//! without, so that every kernel is loaded before one is recorded.

use std::collections::BTreeMap;
use std::fmt;

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::forward::Forward;
use super::inputs::{Offsets, Shape};
use crate::backend::BackendError;

/// A graph and the buffers' addresses that it was made for, which never change.
struct Graph(CudaGraph);

// SAFETY: a graph is used by one thread at a time; its owner is the only one.
unsafe impl Send for Graph {}

/// The graphs of a backend; at most one for each bucket of rows and of lengths.
#[derive(Default)]
pub(super) struct Graphs {
    /// `None` for a shape that was seen once.
    known: BTreeMap<Shape, Option<Graph>>,
}

impl fmt::Debug for Graphs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graphs({} shapes)", self.known.len())
    }
}

impl Graphs {
    /// How many graphs there are.
    pub(super) fn len(&self) -> usize {
        self.known.values().flatten().count()
    }

    /// Enqueues a step, by its graph where there is one by now.
    pub(super) fn enqueue(
        &mut self,
        forward: &mut Forward,
        shape: &Shape,
        offsets: &Offsets,
    ) -> Result<(), BackendError> {
        let Some(known) = self.known.get_mut(shape) else {
            self.known.insert(*shape, None);
            return forward.enqueue(shape, offsets, None);
        };
        let graph = match known {
            Some(graph) => graph,
            None => known.insert(record(forward, shape, offsets)?),
        };
        forward.device().told("launching a graph", graph.0.launch())
    }
}

fn record(forward: &mut Forward, shape: &Shape, offsets: &Offsets) -> Result<Graph, BackendError> {
    let (device, stream) = (forward.device().clone(), forward.stream.clone());
    // Of this thread: what others do meanwhile, such as allocate, is none of the graph's business.
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    device.told("recording a graph", stream.begin_capture(mode))?;
    let enqueued = forward.enqueue(shape, offsets, None);
    // Also where a launch was refused, or the stream would record for ever.
    let graph = device.told("recording a graph", stream.end_capture(CUgraphInstantiate_flags(0)));
    enqueued?;
    graph?.map(Graph).ok_or_else(|| BackendError::Device {
        device: format!("cuda:{}", device.ordinal()),
        doing: "recording a graph",
        reason: "it is empty".into(),
    })
}
