//! Streams run apart from each other, and only what is asked for orders them.

use std::sync::Arc;

use crate::common::{Gpu, emulated, error, hold, raw, shape};
use cudarc::driver::sys::{self, CUresult::*};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtrMut, PushKernelArg, result};
use kvrelay_emulator::test_name;

/// `produce` sets all of `value` to 41.
fn produce(gpu: &Gpu, stream: &Arc<CudaStream>, value: &mut CudaSlice<i32>) {
    let kernel = gpu.kernel("produce");
    // SAFETY: the kernel's parameters, and 32 numbers behind the first.
    unsafe { stream.launch_builder(&kernel).arg(value).arg(&41i32).launch(shape(1, 32)) }.unwrap();
}

/// `consume` sets all of `out` to what is in `value`, and one more.
fn consume(gpu: &Gpu, stream: &Arc<CudaStream>, value: &CudaSlice<i32>, out: &mut CudaSlice<i32>) {
    let kernel = gpu.kernel("consume");
    // SAFETY: the kernel's parameters, and 32 numbers behind both.
    unsafe { stream.launch_builder(&kernel).arg(out).arg(value).launch(shape(1, 32)) }.unwrap();
}

/// A value made on one stream and used on another; what came out.
fn handed_over(wait: bool) -> i32 {
    let gpu = Gpu::new(0);
    let (first, second) = (gpu.context.new_stream().unwrap(), gpu.context.new_stream().unwrap());
    let mut value = gpu.stream.alloc_zeros::<i32>(32).unwrap();
    let mut out = gpu.stream.alloc_zeros::<i32>(32).unwrap();
    gpu.stream.synchronize().unwrap();
    produce(&gpu, &first, &mut value);
    if wait {
        second.join(&first).unwrap();
    }
    consume(&gpu, &second, &value, &mut out);
    gpu.context.synchronize().unwrap();
    let out = gpu.stream.clone_dtoh(&out).unwrap();
    assert!(out.iter().all(|&one| one == out[0]), "{out:?}");
    out[0]
}

/// What the child prints of itself, for every seed.
fn over_seeds(test: &str, wait: bool) -> Vec<String> {
    let of_seed = |seed: u32| {
        let child = emulated(test).set("STREAMS", "deferred").set("SEED", seed);
        let text = child.run(|| println!("came out: {};", handed_over(wait)))?;
        Some(text.split_once("came out: ")?.1.split_once(';')?.0.to_owned())
    };
    (0..12).filter_map(of_seed).collect()
}

/// Without the wait some seeds run the second stream first, and the same seeds always do.
#[test]
fn a_forgotten_wait() {
    let seen = over_seeds(test_name!(), false);
    assert!(
        seen.is_empty() || (seen.contains(&"1".to_owned()) && seen.contains(&"42".to_owned())),
        "{seen:?}"
    );
    assert_eq!(over_seeds(test_name!(), false), seen);
}

#[test]
fn a_wait() {
    let seen = over_seeds(test_name!(), true);
    assert!(seen.iter().all(|out| out == "42"), "{seen:?}");
}

#[test]
fn a_wait_under_jitter() {
    for seed in 0..4 {
        let child = emulated(test_name!()).set("JITTER_US", 3000).set("SEED", seed);
        child.run(|| assert_eq!(handed_over(true), 42));
    }
}

/// The second stream is done while the first cannot even begin: they are threads, and share no order.
#[test]
fn streams_do_not_wait_for_each_other() {
    emulated(test_name!()).run(|| {
        let gpu = Gpu::new(0);
        let (first, second) = (gpu.context.new_stream().unwrap(), gpu.context.new_stream().unwrap());
        let mut value = gpu.stream.alloc_zeros::<i32>(32).unwrap();
        let mut out = gpu.stream.alloc_zeros::<i32>(32).unwrap();
        gpu.stream.synchronize().unwrap();
        let go = hold(&first);
        produce(&gpu, &first, &mut value);
        consume(&gpu, &second, &value, &mut out);
        second.synchronize().unwrap();
        // SAFETY: the handle of a stream that is alive.
        assert_eq!(error(raw(unsafe { sys::cuStreamQuery(first.cu_stream()) })), CUDA_ERROR_NOT_READY);
        assert_eq!(second.clone_dtoh(&out).unwrap(), [1; 32]);
        go.send(()).unwrap();
        first.synchronize().unwrap();
        assert_eq!(second.clone_dtoh(&value).unwrap(), [41; 32]);
    });
}

/// The default stream and a stream that was made to wait for it, in the order they were given work.
#[test]
fn the_default_stream_orders_others() {
    for seed in 0..4 {
        emulated(test_name!()).set("STREAMS", "deferred").set("SEED", seed).run(|| {
            let gpu = Gpu::new(0);
            let default = gpu.context.default_stream();
            let blocking = result::stream::create(result::stream::StreamKind::Default).unwrap();
            let mut value = default.alloc_zeros::<i32>(32).unwrap();
            let (address, _) = value.device_ptr_mut(&default);
            let mut seen = [0i32; 32];
            // SAFETY: 128 bytes behind the address; the streams are alive, and waited for.
            unsafe {
                raw(sys::cuMemsetD32Async(address, 1, 32, blocking)).unwrap();
                raw(sys::cuMemsetD32Async(address, 2, 32, default.cu_stream())).unwrap();
                raw(sys::cuMemsetD32Async(address, 3, 16, blocking)).unwrap();
                result::memcpy_dtoh_sync(&mut seen, address).unwrap();
                result::stream::destroy(blocking).unwrap();
            }
            assert_eq!((seen[0], seen[31]), (3, 2));
        });
    }
}

/// Pinned memory is read when the stream comes to it, pageable memory before the call returns.
#[test]
fn pinned_memory_is_read_late() {
    emulated(test_name!()).set("STREAMS", "deferred").run(|| {
        let gpu = Gpu::new(0);
        let mut device = gpu.stream.alloc_zeros::<u8>(2).unwrap();
        let (address, _) = device.device_ptr_mut(&gpu.stream);
        // SAFETY: a page of the driver's, and two bytes behind the device's address.
        unsafe {
            let pinned = result::malloc_host(1, 0).unwrap().cast::<u8>();
            let mut pageable = Box::new(1u8);
            pinned.write(1);
            let stream = gpu.stream.cu_stream();
            raw(sys::cuMemcpyHtoDAsync_v2(address, pinned.cast(), 1, stream)).unwrap();
            raw(sys::cuMemcpyHtoDAsync_v2(address + 1, (&raw const *pageable).cast(), 1, stream)).unwrap();
            pinned.write(2);
            *pageable = 2;
            gpu.stream.synchronize().unwrap();
            assert_eq!(gpu.stream.clone_dtoh(&device).unwrap(), [2, 1]);
            result::free_host(pinned.cast()).unwrap();
        }
    });
}

/// Asking again and again is enough for deferred work to be done.
#[test]
fn asking_makes_progress() {
    emulated(test_name!()).set("STREAMS", "deferred").run(|| {
        let gpu = Gpu::new(0);
        let mut value = gpu.stream.alloc_zeros::<i32>(32).unwrap();
        produce(&gpu, &gpu.stream, &mut value);
        let event = gpu.stream.record_event(None).unwrap();
        assert!(!event.is_complete(), "nothing has been done yet");
        while !event.try_is_complete().unwrap() {}
        assert_eq!(gpu.stream.clone_dtoh(&value).unwrap(), [41; 32]);
    });
}

#[test]
fn priorities() {
    emulated(test_name!()).run(|| {
        let _gpu = Gpu::new(0);
        let (mut least, mut greatest, mut priority) = (9, 9, 9);
        // SAFETY: every pointer is valid for its call, and the stream is the one just made.
        unsafe {
            raw(sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest)).unwrap();
            assert_eq!((least, greatest), (0, -5));
            let mut stream = std::ptr::null_mut();
            raw(sys::cuStreamCreateWithPriority(&mut stream, 1, -99)).unwrap();
            raw(sys::cuStreamGetPriority(stream, &mut priority)).unwrap();
            assert_eq!(priority, -5);
            raw(sys::cuStreamDestroy_v2(stream)).unwrap();
            assert_eq!(error(raw(sys::cuStreamSynchronize(stream))), CUDA_ERROR_INVALID_HANDLE);
        }
    });
}

#[test]
fn blocks_count_together() {
    emulated(test_name!()).set("THREADS", 4).run_in_every_order(|| {
        let gpu = Gpu::new(0);
        let mut out = gpu.stream.alloc_zeros::<i32>(1).unwrap();
        let kernel = gpu.kernel("count_threads");
        // SAFETY: the kernel's parameter, and a number behind it.
        unsafe { gpu.stream.launch_builder(&kernel).arg(&mut out).launch(shape(50, 96)) }.unwrap();
        assert_eq!(gpu.stream.clone_dtoh(&out).unwrap(), [50 * 96]);
    });
}
