//! Devices, their memory, and what goes between them; and faults on purpose.

use crate::common::{Gpu, emulated, error, raw, shape};
use cudarc::driver::sys::{self, CUresult::*};
use cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut, PushKernelArg, result};
use kvrelay_emulator::test_name;

#[test]
fn copies_between_two_devices() {
    emulated(test_name!()).set("DEVICES", 2).set("JITTER_US", 500).run(|| {
        let (here, there) = (Gpu::new(0), Gpu::new(1));
        let numbers: Vec<i32> = (0..1000).collect();
        let source = here.stream.clone_htod(&numbers).unwrap();
        let mut target = there.stream.alloc_zeros::<i32>(1000).unwrap();
        here.stream.synchronize().unwrap();
        there.stream.memcpy_dtod(&source, &mut target).unwrap();
        assert_eq!(there.stream.clone_dtoh(&target).unwrap(), numbers);
        // By name, the devices must be those that the addresses are of.
        let (to, _) = target.device_ptr_mut(&there.stream);
        let (from, _) = source.device_ptr(&here.stream);
        let (a, b) = (here.context.cu_ctx(), there.context.cu_ctx());
        // SAFETY: 4000 bytes behind both addresses, and contexts and a stream that are alive.
        let copy = |to_context, from_context| unsafe {
            raw(sys::cuMemcpyPeerAsync(to, to_context, from, from_context, 4000, there.stream.cu_stream()))
        };
        copy(b, a).unwrap();
        assert_eq!(error(copy(a, b)), CUDA_ERROR_INVALID_VALUE);
        there.stream.synchronize().unwrap();
    });
}

#[test]
fn peer_access() {
    emulated(test_name!()).set("DEVICES", 2).run(|| {
        let (here, there) = (Gpu::new(0), Gpu::new(1));
        here.context.bind_to_thread().unwrap();
        let mut can = 0;
        // SAFETY: contexts that are alive, and a pointer that is valid for the call.
        unsafe {
            raw(sys::cuDeviceCanAccessPeer(&mut can, 0, 1)).unwrap();
            assert_eq!(can, 1);
            let enable = || raw(sys::cuCtxEnablePeerAccess(there.context.cu_ctx(), 0));
            enable().unwrap();
            assert_eq!(error(enable()), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
            raw(sys::cuCtxDisablePeerAccess(there.context.cu_ctx())).unwrap();
            let own = raw(sys::cuCtxEnablePeerAccess(here.context.cu_ctx(), 0));
            assert_eq!(error(own), CUDA_ERROR_INVALID_DEVICE);
        }
    });
}

#[test]
fn no_peer_access() {
    emulated(test_name!()).set("DEVICES", 2).set("PEER", 0).run(|| {
        let (here, there) = (Gpu::new(0), Gpu::new(1));
        here.context.bind_to_thread().unwrap();
        // SAFETY: a context that is alive.
        let enabled = raw(unsafe { sys::cuCtxEnablePeerAccess(there.context.cu_ctx(), 0) });
        assert_eq!(error(enabled), CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    });
}

#[test]
fn memory_runs_out_and_comes_back() {
    emulated(test_name!()).set("MEMORY_MB", 8).run(|| {
        let gpu = Gpu::new(0);
        assert_eq!(gpu.context.mem_get_info().unwrap(), (8 << 20, 8 << 20));
        let most = gpu.stream.alloc_zeros::<u8>(6 << 20).unwrap();
        assert_eq!(gpu.context.mem_get_info().unwrap().0, 2 << 20);
        assert_eq!(error(gpu.stream.alloc_zeros::<u8>((2 << 20) + 1)), CUDA_ERROR_OUT_OF_MEMORY);
        drop(most);
        gpu.stream.synchronize().unwrap();
        gpu.stream.alloc_zeros::<u8>(8 << 20).unwrap();
    });
}

#[test]
fn what_an_address_is() {
    emulated(test_name!()).set("DEVICES", 2).run(|| {
        let gpu = Gpu::new(1);
        use sys::CUpointer_attribute_enum::*;
        let ask = |attribute, address| {
            let mut answer = 0u64;
            // SAFETY: no attribute asked for here is longer than 8 bytes.
            raw(unsafe { sys::cuPointerGetAttribute((&raw mut answer).cast(), attribute, address) })
                .map(|()| answer)
        };
        // SAFETY: freed below, and not used after.
        unsafe {
            let plain = result::malloc_sync(1000).unwrap();
            let pooled = result::malloc_async(gpu.stream.cu_stream(), 1000).unwrap();
            assert_eq!(ask(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, plain + 999).unwrap(), 2);
            assert_eq!(ask(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, plain).unwrap(), 1);
            assert_eq!(ask(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, plain + 7).unwrap(), plain);
            assert_eq!(ask(CU_POINTER_ATTRIBUTE_RANGE_SIZE, plain + 7).unwrap(), 1000);
            assert_eq!(ask(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, plain).unwrap(), 1);
            assert_eq!(ask(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pooled).unwrap(), 0);
            result::free_sync(plain).unwrap();
            assert_eq!(error(ask(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, plain)), CUDA_ERROR_INVALID_VALUE);
            assert_eq!(error(result::free_sync(plain)), CUDA_ERROR_INVALID_VALUE);
        }
    });
}

#[test]
fn many_copies_in_one_call() {
    let text = emulated(test_name!()).run(|| {
        let gpu = Gpu::new(0);
        let source = gpu.stream.clone_htod(&(0..64).collect::<Vec<i32>>()).unwrap();
        let mut target = gpu.stream.alloc_zeros::<i32>(64).unwrap();
        let (from, _) = source.device_ptr(&gpu.stream);
        let (to, _) = target.device_ptr_mut(&gpu.stream);
        let copy = |last: u64| {
            let (mut to, mut from, mut sizes) = ([to, to + 64], [from + 128, from + last], [64, 32]);
            // SAFETY: every list has two entries, the attributes one; the stream is alive.
            unsafe {
                let mut attributes: sys::CUmemcpyAttributes = std::mem::zeroed();
                attributes.srcAccessOrder = sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
                let (to, from, sizes, stream) =
                    (to.as_mut_ptr(), from.as_mut_ptr(), sizes.as_mut_ptr(), gpu.stream.cu_stream());
                raw(sys::cuMemcpyBatchAsync_v2(to, from, sizes, 2, &mut attributes, &mut 0, 1, stream))
            }
        };
        copy(0).unwrap();
        let seen = gpu.stream.clone_dtoh(&target).unwrap();
        assert_eq!(seen[..16], (32..48).collect::<Vec<i32>>());
        assert_eq!(seen[16..24], (0..8).collect::<Vec<i32>>());
        assert_eq!(seen[24..], [0; 40]);
        let (mut nowhere, mut size) = ([64u64], [4usize]);
        // SAFETY: refused before anything is touched.
        let refused = unsafe {
            let mut attributes = std::mem::zeroed();
            let (a, b, stream) = (nowhere.as_mut_ptr(), size.as_mut_ptr(), gpu.stream.cu_stream());
            raw(sys::cuMemcpyBatchAsync_v2(a, a, b, 1, &mut attributes, &mut 0, 1, stream))
        };
        assert_eq!(error(refused), CUDA_ERROR_INVALID_VALUE);
    });
    assert!(text.is_none_or(|text| {
        text.contains("copy 0 of 1 in a batch is of 4 bytes, and neither end is a device's")
    }));
}

#[test]
fn parts_of_a_device() {
    emulated(test_name!()).set("MULTIPROCESSORS", 132).run(|| {
        let gpu = Gpu::new(0);
        // SAFETY: every pointer is valid for its call, and every handle was made just before.
        unsafe {
            let sm = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
            let mut whole: sys::CUdevResource = std::mem::zeroed();
            raw(sys::cuDeviceGetDevResource(0, &mut whole, sm)).unwrap();
            assert_eq!(whole.__bindgen_anon_1.sm.smCount, 132);
            let (mut parts, mut rest) = ([whole; 2], whole);
            let mut groups = 1;
            let split =
                sys::cuDevSmResourceSplitByCount(parts.as_mut_ptr(), &mut groups, &whole, &mut rest, 0, 76);
            raw(split).unwrap();
            let counts = (parts[0].__bindgen_anon_1.sm.smCount, rest.__bindgen_anon_1.sm.smCount);
            assert_eq!((groups, counts), (1, (80, 52)));

            let mut description = std::ptr::null_mut();
            raw(sys::cuDevResourceGenerateDesc(&mut description, parts.as_mut_ptr(), 1)).unwrap();
            let mut green = std::ptr::null_mut();
            raw(sys::cuGreenCtxCreate(&mut green, description, 0, 1)).unwrap();
            let mut stream = std::ptr::null_mut();
            raw(sys::cuGreenCtxStreamCreate(&mut stream, green, 1, 0)).unwrap();
            let mut context = std::ptr::null_mut();
            raw(sys::cuCtxFromGreenCtx(&mut context, green)).unwrap();
            let mut held: sys::CUdevResource = std::mem::zeroed();
            raw(sys::cuCtxGetDevResource(context, &mut held, sm)).unwrap();
            assert_eq!(held.__bindgen_anon_1.sm.smCount, 80);

            // Memory is the device's, whoever works on it.
            let mut numbers = gpu.stream.alloc_zeros::<i32>(32).unwrap();
            let (address, _) = numbers.device_ptr_mut(&gpu.stream);
            gpu.stream.synchronize().unwrap();
            raw(sys::cuMemsetD32Async(address, 7, 32, stream)).unwrap();
            raw(sys::cuStreamSynchronize(stream)).unwrap();
            raw(sys::cuStreamDestroy_v2(stream)).unwrap();
            raw(sys::cuGreenCtxDestroy(green)).unwrap();
            assert_eq!(gpu.stream.clone_dtoh(&numbers).unwrap(), [7; 32]);
        }
    });
}

/// Launches `count_threads` of one thread; what waiting for it returns.
fn launch(gpu: &Gpu) -> Result<(), cudarc::driver::DriverError> {
    let mut out = gpu.stream.alloc_zeros::<i32>(1)?;
    let kernel = gpu.module.load_function("count_threads")?;
    // SAFETY: the kernel's parameter, and a number behind it.
    unsafe { gpu.stream.launch_builder(&kernel).arg(&mut out).launch(shape(1, 1)) }?;
    gpu.stream.synchronize()
}

#[test]
fn a_launch_that_fails_on_purpose() {
    let text = emulated(test_name!()).set("FAIL_LAUNCH", 3).run(|| {
        let gpu = Gpu::new(0);
        launch(&gpu).unwrap();
        launch(&gpu).unwrap();
        assert_eq!(error(launch(&gpu)), CUDA_ERROR_LAUNCH_FAILED);
        assert_eq!(error(launch(&gpu)), CUDA_ERROR_LAUNCH_FAILED);
    });
    let expected = "kernel count_threads, launch 3, fails since KVRELAY_EMU_FAIL_LAUNCH says so";
    assert!(text.is_none_or(|text| text.contains(expected)));
}

#[test]
fn a_device_that_is_lost() {
    emulated(test_name!()).set("DEVICES", 2).set("LOST_AFTER", 2).run(|| {
        let (gpu, other) = (Gpu::new(0), Gpu::new(1));
        launch(&gpu).unwrap();
        launch(&gpu).unwrap();
        assert_eq!(error(launch(&gpu)), CUDA_ERROR_DEVICE_UNAVAILABLE);
        assert_eq!(error(gpu.stream.alloc_zeros::<u8>(1)), CUDA_ERROR_DEVICE_UNAVAILABLE);
        assert_eq!(error(CudaContext::new(0)), CUDA_ERROR_DEVICE_UNAVAILABLE);
        // The other device still copies.
        assert_eq!(other.stream.clone_dtoh(&other.stream.clone_htod(&[1, 2]).unwrap()).unwrap(), [1, 2]);
    });
}

#[test]
fn properties() {
    emulated(test_name!()).set("DEVICES", 3).set("CAPABILITY", 89).set("MEMORY_MB", 100).run(|| {
        assert_eq!(CudaContext::device_count().unwrap(), 3);
        let context = CudaContext::new(2).unwrap();
        assert_eq!(context.name().unwrap(), "Emulated device 2");
        assert_eq!(context.compute_capability().unwrap(), (8, 9));
        assert_eq!(context.total_mem().unwrap(), 100 << 20);
        let shared = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        assert_eq!(context.attribute(shared).unwrap(), 99 << 10);
        assert_eq!(error(CudaContext::new(3)), CUDA_ERROR_INVALID_DEVICE);
    });
}

#[test]
fn a_forked_child_cannot_use_it() {
    emulated(test_name!()).run(|| {
        let _gpu = Gpu::new(0);
        let mut count = 0;
        // SAFETY: the child calls one function, and leaves without returning to the test.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                let code = sys::cuDeviceGetCount(&mut count) as i32;
                libc::_exit(code);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            assert!(libc::WIFEXITED(status), "{status}");
            assert_eq!(libc::WEXITSTATUS(status), CUDA_ERROR_NOT_INITIALIZED as i32);
        }
    });
}
