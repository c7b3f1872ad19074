//! What a device or a driver would refuse is refused, with both numbers.

use crate::common::{Gpu, emulated, error, ptx, raw, shape};
use cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as MAX_DYNAMIC;
use cudarc::driver::sys::CUresult::{self, *};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc::Ptx;
use kvrelay_emulator::test_name;

/// What a launch of a kernel of one pointer returns at once.
fn launch(gpu: &Gpu, kernel: &str, config: LaunchConfig) -> CUresult {
    let mut out = gpu.stream.alloc_zeros::<i32>(1024).unwrap();
    let kernel = gpu.kernel(kernel);
    // SAFETY: the kernel's parameter, and as many numbers behind it as a block has threads.
    match unsafe { gpu.stream.launch_builder(&kernel).arg(&mut out).launch(config) } {
        Ok(_) => gpu.stream.synchronize().map_or_else(|error| error.0, |()| CUDA_SUCCESS),
        Err(error) => error.0,
    }
}

#[test]
fn threads_and_blocks() {
    let text = emulated(test_name!()).run(|| {
        let gpu = Gpu::new(0);
        let try_shape = |grid_dim, block_dim| {
            let config = LaunchConfig { grid_dim, block_dim, shared_mem_bytes: 0 };
            launch(&gpu, "at_most_64_threads", config)
        };
        assert_eq!(try_shape((1, 1, 1), (64, 1, 1)), CUDA_SUCCESS);
        assert_eq!(try_shape((1, 1, 1), (65, 1, 1)), CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
        assert_eq!(try_shape((1, 1, 1), (1025, 1, 1)), CUDA_ERROR_INVALID_VALUE);
        assert_eq!(try_shape((1, 1, 1), (32, 33, 1)), CUDA_ERROR_INVALID_VALUE);
        assert_eq!(try_shape((1, 1, 1), (1, 1, 65)), CUDA_ERROR_INVALID_VALUE);
        assert_eq!(try_shape((0, 1, 1), (1, 1, 1)), CUDA_ERROR_INVALID_VALUE);
        assert_eq!(try_shape((1, 65536, 1), (1, 1, 1)), CUDA_ERROR_INVALID_VALUE);
        // A launch that was refused spoils nothing.
        assert_eq!(try_shape((1, 2, 1), (1, 1, 1)), CUDA_SUCCESS);
    });
    let Some(text) = text else { return };
    for expected in [
        "kernel at_most_64_threads: the block's number of threads, by its launch bounds, is 65, and can be 1 to 64",
        "the block's number of threads is 1056, and can be 1 to 1024",
        "the grid's x is 0, and can be 1 to 2147483647",
        "the grid's y is 65536, and can be 1 to 65535",
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
}

/// 4096 bytes are static. `optin` is what a block of the capability can have in all.
fn shared_memory(optin: u32) {
    let gpu = Gpu::new(0);
    let config = |shared_mem_bytes| LaunchConfig { shared_mem_bytes, ..shape(1, 1024) };
    let try_bytes = |bytes| launch(&gpu, "some_static_shared", config(bytes));
    assert_eq!(try_bytes(48 * 1024 - 4096), CUDA_SUCCESS);
    assert_eq!(try_bytes(48 * 1024 - 4095), CUDA_ERROR_INVALID_VALUE);
    let kernel = gpu.kernel("some_static_shared");
    let most = optin - 4096;
    assert_eq!(error(kernel.set_attribute(MAX_DYNAMIC, most as i32 + 1)), CUDA_ERROR_INVALID_VALUE);
    kernel.set_attribute(MAX_DYNAMIC, most as i32).unwrap();
    assert_eq!(try_bytes(most), CUDA_SUCCESS);
    assert_eq!(try_bytes(most + 1), CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn shared_memory_of_hopper() {
    let text = emulated(test_name!()).set("CAPABILITY", 90).run(|| shared_memory(227 * 1024));
    let expected = "45057 bytes of dynamic shared memory; it may have 45056 beside its 4096 static ones";
    assert!(text.is_none_or(|text| text.contains(expected)));
}

#[test]
fn shared_memory_of_ada() {
    emulated(test_name!()).set("CAPABILITY", 89).run(|| shared_memory(99 * 1024));
}

#[test]
fn parameters_of_another_size() {
    let text = emulated(test_name!()).run(|| {
        let gpu = Gpu::new(0);
        assert_eq!(error(gpu.module.load_function("two_kinds_of_count")), CUDA_ERROR_INVALID_IMAGE);
    });
    let expected = "parameter 1 of kernel two_kinds_of_count has 4 bytes in the image and 8 on the CPU";
    assert!(text.is_none_or(|text| text.contains(expected)));
}

#[test]
fn a_kernel_of_fewer_parameters() {
    let text = emulated(test_name!()).run(|| {
        let context = CudaContext::new(0).unwrap();
        let text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry write_at(.param .u64 a)\n{ ret; }\n";
        let module = context.load_module(Ptx::from_src(text)).unwrap();
        assert_eq!(error(module.load_function("write_at")), CUDA_ERROR_INVALID_IMAGE);
        // A name that another begins with.
        assert_eq!(error(module.load_function("write")), CUDA_ERROR_NOT_FOUND);
    });
    let expected = "kernel write_at has 1 parameters in the image and 2 on the CPU";
    assert!(text.is_none_or(|text| text.contains(expected)));
}

#[test]
fn newer_ptx() {
    let text = emulated(test_name!()).run(|| {
        let context = CudaContext::new(0).unwrap();
        let newer = ptx().replacen(".version 9.0", ".version 9.1", 1);
        assert_eq!(error(context.load_module(Ptx::from_src(newer))), CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
        context.load_module(Ptx::from_src(ptx())).unwrap();
    });
    assert!(text.is_none_or(|text| text.contains("PTX of version 9.1; the driver takes 9.0 at most")));
}

#[test]
fn ptx_for_a_newer_device() {
    emulated(test_name!()).set("CAPABILITY", 75).run(|| {
        let context = CudaContext::new(0).unwrap();
        assert_eq!(error(context.load_module(Ptx::from_src(ptx()))), CUDA_ERROR_NO_BINARY_FOR_GPU);
    });
}

#[test]
fn images_that_are_none() {
    emulated(test_name!()).run(|| {
        let context = CudaContext::new(0).unwrap();
        assert_eq!(error(context.load_module(Ptx::from_src("nothing"))), CUDA_ERROR_INVALID_IMAGE);
        // A fatbin that no library was built with: 16 bytes of header, and nothing behind them.
        let mut fatbin = vec![0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0];
        fatbin.extend([0; 8]);
        assert_eq!(error(context.load_module(Ptx::from_binary(fatbin))), CUDA_ERROR_NO_BINARY_FOR_GPU);
    });
}

/// A fatbin that says it has `bytes` behind its header, and has none.
fn fatbin(bytes: u64) -> Vec<u8> {
    let mut image = vec![0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0];
    image.extend(bytes.to_le_bytes());
    image
}

/// An image at the very end of what can be read.
fn load_at_the_end(image: &[u8]) -> CUresult {
    // SAFETY: two pages, of which one stays readable; the image ends with it.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let pages = libc::mmap(std::ptr::null_mut(), 8192, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(pages, libc::MAP_FAILED);
        let at = pages.cast::<u8>().add(4096 - image.len());
        at.copy_from_nonoverlapping(image.as_ptr(), image.len());
        assert_eq!(libc::mprotect(pages.add(4096), 4096, libc::PROT_NONE), 0);
        let mut module = std::ptr::null_mut();
        sys::cuModuleLoadData(&mut module, at.cast())
    }
}

#[test]
fn images_that_are_cut_off() {
    let text = emulated(test_name!()).run(|| {
        let context = CudaContext::new(0).unwrap();
        for image in [fatbin(1 << 40), fatbin(u64::MAX), fatbin(100_000), fatbin(1), fatbin(0)[..9].to_vec()]
        {
            assert_eq!(load_at_the_end(&image), CUDA_ERROR_INVALID_IMAGE);
        }
        assert_eq!(load_at_the_end(&[]), CUDA_ERROR_INVALID_IMAGE);
        assert_eq!(load_at_the_end(&ptx().as_bytes()[..100]), CUDA_ERROR_INVALID_IMAGE);
        // A file's length is known.
        let path = std::env::temp_dir().join(format!("kvrelay-cut-off-{}", std::process::id()));
        for image in [fatbin(1), Vec::new(), vec![0x50, 0xed, 0x55, 0xba]] {
            std::fs::write(&path, image).unwrap();
            let loaded = context.load_module(Ptx::from_file(&path));
            assert_eq!(error(loaded), CUDA_ERROR_INVALID_IMAGE);
        }
        std::fs::remove_file(&path).unwrap();
        context.load_module(Ptx::from_src(ptx())).unwrap();
    });
    assert!(text.is_none_or(|text| text.contains("an image ends before it should")));
}

#[test]
fn more_memory_than_there_can_be() {
    emulated(test_name!()).run(|| {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        // SAFETY: pointers that are valid for the calls.
        unsafe {
            let (mut host, mut device) = (std::ptr::null_mut(), 0);
            // What is there already must not make the sum wrap.
            raw(sys::cuMemAlloc_v2(&mut device, 4096)).unwrap();
            for bytes in [usize::MAX, usize::MAX - 4095, usize::MAX / 2, 1 << 46] {
                assert_eq!(sys::cuMemHostAlloc(&mut host, bytes, 0), CUDA_ERROR_OUT_OF_MEMORY, "{bytes}");
                assert_eq!(sys::cuMemAlloc_v2(&mut device, bytes), CUDA_ERROR_OUT_OF_MEMORY, "{bytes}");
                let pooled = sys::cuMemAllocAsync(&mut device, bytes, stream.cu_stream());
                assert_eq!(pooled, CUDA_ERROR_OUT_OF_MEMORY, "{bytes}");
            }
            raw(sys::cuMemHostAlloc(&mut host, 10, 0)).unwrap();
            assert_eq!(sys::cuMemHostRegister_v2(host, usize::MAX, 0), CUDA_ERROR_INVALID_VALUE);
            assert_eq!(sys::cuMemsetD32_v2(device, 0, usize::MAX / 4 + 2), CUDA_ERROR_INVALID_VALUE);
        }
    });
}

/// Memory of a pool needs no file; without files, memory of another kind says what is missing.
#[test]
fn more_allocations_than_files() {
    let text = emulated(test_name!()).run(|| {
        let few = libc::rlimit { rlim_cur: 64, rlim_max: 64 };
        // SAFETY: a limit of this process alone, and pointers that are valid for the calls.
        unsafe {
            let context = CudaContext::new(0).unwrap();
            let stream = context.new_stream().unwrap();
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &few), 0);
            let mut address = 0;
            for _ in 0..100 {
                raw(sys::cuMemAllocAsync(&mut address, 1000, stream.cu_stream())).unwrap();
            }
            let failed = (0..100).find(|_| sys::cuMemAlloc_v2(&mut address, 1000) != CUDA_SUCCESS);
            assert!(failed.is_some());
        }
    });
    assert!(text.is_none_or(|text| text.contains("no file is left to this process (ulimit -n)")));
}

/// A setting that is misspelt would otherwise test something else than was asked for.
#[test]
fn settings_that_are_none() {
    for (setting, value, expected) in [
        ("ORDER", "sideways", "KVRELAY_EMU_ORDER is \"sideways\"; it must be forward, reverse or random"),
        ("DEVICES", "2x", "KVRELAY_EMU_DEVICES is \"2x\"; it must be a number from 0 to 64"),
        ("STREAMS", "later", "KVRELAY_EMU_STREAMS is \"later\"; it must be threads or deferred"),
    ] {
        let child = emulated(test_name!()).set(setting, value);
        let outcome = std::panic::catch_unwind(|| child.run(|| drop(CudaContext::new(0))));
        match outcome {
            Ok(text) => assert!(text.is_none(), "{setting}={value} was taken"),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().expect("a panic with a text");
                assert!(text.contains(expected), "{text}");
            }
        }
    }
}
