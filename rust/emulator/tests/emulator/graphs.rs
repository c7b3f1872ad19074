//! Work captured from streams is replayed with what is then in memory, in any order that its waits allow.

use std::sync::Arc;

use crate::common::{Gpu, emulated, error, hold, raw, shape};
use cudarc::driver::sys::CUstreamCaptureMode::{
    CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
};
use cudarc::driver::sys::{self, CUresult::*};
use cudarc::driver::{CudaSlice, CudaStream, PushKernelArg};
use kvrelay_emulator::test_name;

/// `out = from + 1`, 32 numbers.
fn add_one(gpu: &Gpu, stream: &Arc<CudaStream>, from: &CudaSlice<i32>, out: &mut CudaSlice<i32>) {
    let kernel = gpu.kernel("consume");
    // SAFETY: the kernel's parameters, and 32 numbers behind both.
    unsafe { stream.launch_builder(&kernel).arg(out).arg(from).launch(shape(1, 32)) }.unwrap();
}

fn zeros<const N: usize>(gpu: &Gpu) -> [CudaSlice<i32>; N] {
    let all = std::array::from_fn(|_| gpu.stream.alloc_zeros::<i32>(32).unwrap());
    gpu.stream.synchronize().unwrap();
    all
}

#[test]
fn a_chain_is_replayed() {
    emulated(test_name!()).run_in_every_order(|| {
        let gpu = Gpu::new(0);
        let [mut a, mut b, mut c] = zeros(&gpu);
        gpu.stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        add_one(&gpu, &gpu.stream, &a, &mut b);
        add_one(&gpu, &gpu.stream, &b, &mut c);
        let graph = gpu.stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
        graph.upload().unwrap();
        // Nothing has run yet, and every launch reads what is there by then.
        assert_eq!(gpu.stream.clone_dtoh(&c).unwrap(), [0; 32]);
        for value in [5, 70] {
            gpu.stream.memcpy_htod(&[value; 32], &mut a).unwrap();
            graph.launch().unwrap();
            assert_eq!(gpu.stream.clone_dtoh(&c).unwrap(), [value + 2; 32]);
        }
    });
}

/// Two branches of a capture, `a -> b` and `a -> c`, or `b -> c` if the second waits for the first.
fn two_branches(wait: bool) -> i32 {
    let gpu = Gpu::new(0);
    let other = gpu.context.new_stream().unwrap();
    let [a, mut b, mut c] = zeros(&gpu);
    gpu.stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    other.join(&gpu.stream).unwrap();
    add_one(&gpu, &gpu.stream, &a, &mut b);
    if wait {
        other.join(&gpu.stream).unwrap();
    }
    add_one(&gpu, &other, &b, &mut c);
    gpu.stream.join(&other).unwrap();
    let graph = gpu.stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
    graph.launch().unwrap();
    gpu.stream.clone_dtoh(&c).unwrap()[31]
}

#[test]
fn branches_that_wait() {
    emulated(test_name!()).run_in_every_order(|| assert_eq!(two_branches(true), 2));
}

#[test]
fn branches_that_forget_to_wait() {
    emulated(test_name!()).set("ORDER", "forward").run(|| assert_eq!(two_branches(false), 2));
}

#[test]
fn branches_that_forget_to_wait_in_reverse() {
    emulated(test_name!()).set("ORDER", "reverse").run(|| assert_eq!(two_branches(false), 1));
}

#[test]
fn a_branch_that_is_not_joined() {
    emulated(test_name!()).run(|| {
        let gpu = Gpu::new(0);
        let other = gpu.context.new_stream().unwrap();
        let [a, mut b] = zeros(&gpu);
        gpu.stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        other.join(&gpu.stream).unwrap();
        add_one(&gpu, &other, &a, &mut b);
        let ended = gpu.stream.end_capture(sys::CUgraphInstantiate_flags(0));
        assert_eq!(error(ended), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
        // Both streams are usable again.
        add_one(&gpu, &other, &a, &mut b);
        other.synchronize().unwrap();
    });
}

#[test]
fn streams_destroyed_in_a_capture() {
    emulated(test_name!()).run(|| {
        let gpu = Gpu::new(0);
        let [a, mut b] = zeros(&gpu);
        // One that has joined: what it recorded is lost, and the capture with it.
        let joined = gpu.context.new_stream().unwrap();
        gpu.stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        joined.join(&gpu.stream).unwrap();
        add_one(&gpu, &joined, &a, &mut b);
        drop(joined);
        let ended = gpu.stream.end_capture(sys::CUgraphInstantiate_flags(0));
        assert_eq!(error(ended), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        // The one that captures: nothing is captured any more.
        for mode in [CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL] {
            let origin = gpu.context.new_stream().unwrap();
            let other = gpu.context.new_stream().unwrap();
            origin.begin_capture(mode).unwrap();
            other.join(&origin).unwrap();
            drop(origin);
            add_one(&gpu, &other, &a, &mut b);
            other.synchronize().unwrap();
            let mut address = 0;
            // SAFETY: a pointer that is valid for the call.
            raw(unsafe { sys::cuMemAlloc_v2(&mut address, 1000) }).unwrap();
        }
        assert_eq!(gpu.stream.clone_dtoh(&b).unwrap(), [1; 32]);
    });
}

/// What a capture forbids, it forbids to its thread, wherever it is ended.
#[test]
fn a_capture_that_another_thread_ends() {
    emulated(test_name!()).run(|| {
        let gpu = Gpu::new(0);
        gpu.stream.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        let other = gpu.context.new_stream().unwrap();
        other.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        let mut address = 0;
        let mut allocate = || {
            // SAFETY: a pointer that is valid for the call.
            raw(unsafe { sys::cuMemAlloc_v2(&mut address, 1000) })
        };
        // The relaxed one forbids nothing, and its end allows nothing.
        gpu.stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap();
        assert_eq!(error(allocate()), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                gpu.context.bind_to_thread().unwrap();
                other.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap();
            });
        });
        allocate().unwrap();
    });
}

#[test]
fn what_cannot_be_captured() {
    emulated(test_name!()).run(|| {
        let gpu = Gpu::new(0);
        let other = gpu.context.new_stream().unwrap();
        let mut address = 0;
        gpu.stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        // SAFETY: a pointer that is valid for the call.
        let allocated = raw(unsafe { sys::cuMemAlloc_v2(&mut address, 1000) });
        assert_eq!(error(allocated), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        gpu.stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap();
        // SAFETY: as above.
        raw(unsafe { sys::cuMemAlloc_v2(&mut address, 1000) }).unwrap();

        gpu.stream.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        assert_eq!(error(gpu.stream.synchronize()), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        let ended = gpu.stream.end_capture(sys::CUgraphInstantiate_flags(0));
        assert_eq!(error(ended), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

        // Work outside of the capture that is still to come.
        let go = hold(&other);
        let event = other.record_event(None).unwrap();
        gpu.stream.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        assert_eq!(error(gpu.stream.wait(&event)), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        go.send(()).unwrap();
        let ended = gpu.stream.end_capture(sys::CUgraphInstantiate_flags(0));
        assert_eq!(error(ended), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    });
}

/// Captures as many additions as `to` says, from `from`, and does with the raw graph what the test does.
fn captured(gpu: &Gpu, from: &CudaSlice<i32>, to: &mut [&mut CudaSlice<i32>]) -> sys::CUgraph {
    gpu.stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    for out in to {
        add_one(gpu, &gpu.stream, from, out);
    }
    let mut graph = std::ptr::null_mut();
    // SAFETY: the stream is alive and capturing.
    raw(unsafe { sys::cuStreamEndCapture(gpu.stream.cu_stream(), &mut graph) }).unwrap();
    graph
}

#[test]
fn updates() {
    emulated(test_name!()).run(|| {
        let gpu = Gpu::new(0);
        let [a, mut b, mut c] = zeros(&gpu);
        let to_b = captured(&gpu, &a, &mut [&mut b]);
        let to_c = captured(&gpu, &a, &mut [&mut c]);
        let to_both = captured(&gpu, &a, &mut [&mut b, &mut c]);
        // SAFETY: handles that were just made, and are destroyed once.
        unsafe {
            let mut exec = std::ptr::null_mut();
            let mut info = std::mem::zeroed();
            raw(sys::cuGraphInstantiateWithFlags(&mut exec, to_b, 0)).unwrap();
            let update = raw(sys::cuGraphExecUpdate_v2(exec, to_both, &mut info));
            assert_eq!(error(update), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
            raw(sys::cuGraphExecUpdate_v2(exec, to_c, &mut info)).unwrap();
            raw(sys::cuGraphLaunch(exec, gpu.stream.cu_stream())).unwrap();
            assert_eq!(gpu.stream.clone_dtoh(&c).unwrap(), [1; 32]);
            assert_eq!(gpu.stream.clone_dtoh(&b).unwrap(), [0; 32]);
            for graph in [to_b, to_c, to_both] {
                raw(sys::cuGraphDestroy(graph)).unwrap();
            }
            raw(sys::cuGraphExecDestroy(exec)).unwrap();
            let launched = raw(sys::cuGraphLaunch(exec, gpu.stream.cu_stream()));
            assert_eq!(error(launched), CUDA_ERROR_INVALID_VALUE);
        }
    });
}
