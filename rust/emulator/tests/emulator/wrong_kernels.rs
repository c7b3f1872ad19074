//! Kernels that are wrong on purpose are caught, and their right twins pass in every order.

use crate::common::{Gpu, emulated, error, shape};
use cudarc::driver::sys::CUresult::{
    self, CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_LAUNCH_FAILED, CUDA_SUCCESS,
};
use cudarc::driver::{LaunchConfig, PushKernelArg};
use kvrelay_emulator::test_name;

/// `mirrored` or its twin without the barrier; how many of the 128 sums are right.
fn right_sums(kernel: &str) -> usize {
    let gpu = Gpu::new(0);
    let x: Vec<f32> = (1..=128u16).map(f32::from).collect();
    let input = gpu.stream.clone_htod(&x).unwrap();
    let mut out = gpu.stream.alloc_zeros::<f32>(128).unwrap();
    let kernel = gpu.kernel(kernel);
    // SAFETY: the kernel's parameters, and 128 floats behind both.
    unsafe { gpu.stream.launch_builder(&kernel).arg(&mut out).arg(&input).launch(shape(1, 128)) }.unwrap();
    gpu.stream.clone_dtoh(&out).unwrap().iter().filter(|&&sum| sum == 129.0).count()
}

#[test]
fn a_barrier() {
    emulated(test_name!()).run_in_every_order(|| assert_eq!(right_sums("mirrored"), 128));
}

/// In any one order somebody reads before somebody writes: never are all sums right.
#[test]
fn a_missing_barrier() {
    emulated(test_name!()).run_in_every_order(|| assert!(right_sums("mirrored_without_barrier") < 128));
}

/// Launches a kernel of one pointer, waits, and expects its launch to have failed.
fn fails_alone(kernel: &str, threads: u32) {
    let gpu = Gpu::new(0);
    let mut out = gpu.stream.alloc_zeros::<f32>(128).unwrap();
    let kernel = gpu.kernel(kernel);
    // SAFETY: the kernel's parameter, and 128 floats behind it.
    unsafe { gpu.stream.launch_builder(&kernel).arg(&mut out).launch(shape(1, threads)) }.unwrap();
    assert_eq!(error(gpu.stream.synchronize()), CUDA_ERROR_LAUNCH_FAILED);
    // As on a GPU, the context is of no use from then on.
    assert_eq!(error(gpu.stream.alloc_zeros::<f32>(1)), CUDA_ERROR_LAUNCH_FAILED);
}

#[test]
fn a_block_that_parts_at_two_barriers() {
    if let Some(text) = emulated(test_name!()).run(|| fails_alone("two_barriers", 128)) {
        let expected =
            "kernel two_barriers (barriers.cu), block (0, 0, 0), thread (64, 0, 0): the block diverges";
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_barrier_that_a_lane_does_not_reach() {
    if let Some(text) = emulated(test_name!()).run(|| fails_alone("barrier_and_shuffle", 32)) {
        let expected = "no thread can go on: 31 wait at __syncthreads, 1 in a warp function, 0 have ended";
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_mask_without_its_caller() {
    if let Some(text) = emulated(test_name!()).run(|| fails_alone("shuffle_of_others", 32)) {
        assert!(text.contains("thread (16, 0, 0): a lane calls a warp function with a mask"), "{text}");
    }
}

#[test]
fn threads_that_have_ended_are_not_waited_for() {
    emulated(test_name!()).run_in_every_order(|| {
        let gpu = Gpu::new(0);
        let kernel = gpu.kernel("early_exits");
        for (threads, stay) in [(128, 128), (128, 96), (64, 32), (96, 64)] {
            let mut out = gpu.stream.alloc_zeros::<i32>(2).unwrap();
            let mut launch = gpu.stream.launch_builder(&kernel);
            // SAFETY: the kernel's parameters, and 2 numbers behind the first.
            unsafe { launch.arg(&mut out).arg(&stay).launch(shape(1, threads)) }.unwrap();
            assert_eq!(gpu.stream.clone_dtoh(&out).unwrap(), [stay, 32]);
        }
    });
}

/// A write beside an allocation of 100 floats.
fn out_of_bounds(index: i64) {
    let gpu = Gpu::new(0);
    let mut out = gpu.stream.alloc_zeros::<f32>(100).unwrap();
    let kernel = gpu.kernel("write_at");
    // SAFETY: not at all, which is what is tested; the emulator keeps it from this process.
    unsafe { gpu.stream.launch_builder(&kernel).arg(&mut out).arg(&index).launch(shape(1, 1)) }.unwrap();
    assert_eq!(error(gpu.stream.synchronize()), CUDA_ERROR_ILLEGAL_ADDRESS);
}

const NOBODYS: &str =
    "kernel write_at (memory.cu), block (0, 0, 0), thread (0, 0, 0): it touches the address 0x";

#[test]
fn far_before_the_beginning() {
    let text = emulated(test_name!()).run(|| out_of_bounds(-(1 << 20)));
    assert!(text.is_none_or(|text| text.contains(NOBODYS)));
}

#[test]
fn far_past_the_end() {
    let text = emulated(test_name!()).run(|| out_of_bounds(1 << 20));
    assert!(text.is_none_or(|text| text.contains(NOBODYS)));
}

/// Within the pages of an allocation nothing faults, and it is seen after the kernel.
#[test]
fn just_before_the_beginning() {
    let text = emulated(test_name!()).run(|| out_of_bounds(-2));
    let expected = "kernel write_at, or one beside it: something was written 8 bytes before the beginning of an \
                    allocation of 400 bytes";
    assert!(text.is_none_or(|text| text.contains(expected)));
}

#[test]
fn just_past_the_end() {
    let text = emulated(test_name!()).run(|| out_of_bounds(100));
    let expected = "kernel write_at, or one beside it: something was written 0 bytes past the end of an \
                    allocation of 400 bytes";
    assert!(text.is_none_or(|text| text.contains(expected)));
}

#[test]
fn memory_that_was_freed() {
    let text = emulated(test_name!()).run(|| {
        let gpu = Gpu::new(0);
        let mut out = gpu.stream.alloc_zeros::<f32>(1).unwrap();
        let freed = gpu.stream.alloc_zeros::<f32>(100).unwrap();
        let (address, _) = cudarc::driver::DevicePtr::device_ptr(&freed, &gpu.stream);
        gpu.stream.synchronize().unwrap();
        drop(freed);
        gpu.stream.synchronize().unwrap();
        // Whatever is given out next, it is not what was freed.
        let _others: Vec<_> = (0..8).map(|_| gpu.stream.alloc_zeros::<f32>(100).unwrap()).collect();
        let kernel = gpu.kernel("read_at");
        let mut launch = gpu.stream.launch_builder(&kernel);
        // SAFETY: not at all, which is what is tested.
        unsafe { launch.arg(&mut out).arg(&address).arg(&3i64).launch(shape(1, 1)) }.unwrap();
        assert_eq!(error(gpu.stream.synchronize()), CUDA_ERROR_ILLEGAL_ADDRESS);
    });
    assert!(text.is_none_or(|text| text.contains("kernel read_at")));
}

#[test]
fn memory_that_nobody_has_written() {
    emulated(test_name!()).run_in_every_order(|| {
        let gpu = Gpu::new(0);
        // SAFETY: read only to see what an emulator puts there.
        let fresh = unsafe { gpu.stream.alloc::<f32>(1000) }.unwrap();
        assert!(gpu.stream.clone_dtoh(&fresh).unwrap().iter().all(|value| value.is_nan()));
        // Blocks that the same threads ran before leave nothing behind either.
        for blocks in [1, 8] {
            let mut out = gpu.stream.alloc_zeros::<f32>(64).unwrap();
            let kernel = gpu.kernel("read_unwritten_shared");
            let config = cudarc::driver::LaunchConfig { shared_mem_bytes: 128, ..shape(blocks, 32) };
            // SAFETY: the kernel's parameter, 64 floats behind it, and 128 bytes of shared memory.
            unsafe { gpu.stream.launch_builder(&kernel).arg(&mut out).launch(config) }.unwrap();
            let seen = gpu.stream.clone_dtoh(&out).unwrap();
            assert!(seen.iter().all(|value| value.is_nan()), "{seen:?}");
        }
    });
}

#[test]
fn a_stack_that_overflows() {
    let text = emulated(test_name!()).run(|| {
        let gpu = Gpu::new(0);
        let mut out = gpu.stream.alloc_zeros::<i32>(1).unwrap();
        let kernel = gpu.kernel("deep_recursion");
        let mut launch = gpu.stream.launch_builder(&kernel);
        // SAFETY: the kernel's parameters; that its stack is too small is what is tested.
        unsafe { launch.arg(&mut out).arg(&1_000_000i32).launch(shape(1, 1)) }.unwrap();
        assert_eq!(error(gpu.stream.synchronize()), CUDA_ERROR_ILLEGAL_ADDRESS);
    });
    assert!(text.is_none_or(|text| text.contains("kernel deep_recursion")));
}

/// How many of 128 floats come through shared memory as they were.
fn copied(kernel: &str) -> Result<usize, cudarc::driver::DriverError> {
    let gpu = Gpu::new(0);
    let x: Vec<f32> = (0..128u16).map(f32::from).collect();
    let input = gpu.stream.clone_htod(&x)?;
    let mut out = gpu.stream.alloc_zeros::<f32>(128)?;
    let kernel = gpu.kernel(kernel);
    // SAFETY: the kernel's parameters, and 128 floats behind both.
    unsafe { gpu.stream.launch_builder(&kernel).arg(&mut out).arg(&input).launch(shape(1, 32)) }?;
    Ok(gpu.stream.clone_dtoh(&out)?.iter().zip(&x).filter(|(a, b)| a == b).count())
}

#[test]
fn copies_in_the_background() {
    emulated(test_name!()).run_in_every_order(|| {
        assert_eq!(copied("copy_and_wait").unwrap(), 128);
        assert_eq!(copied("copy_and_wait_too_late").unwrap(), 0);
    });
}

#[test]
fn copies_that_are_never_waited_for() {
    let text = emulated(test_name!())
        .run(|| assert_eq!(error(copied("copy_and_never_wait")), CUDA_ERROR_LAUNCH_FAILED));
    assert!(text.is_none_or(|text| text.contains("asynchronous copies that it has not waited for")));
}

/// What a launch of a kernel of numbers, one of them given, ends in.
fn ends_in(kernel: &str, number: i32, shared_mem_bytes: u32) -> CUresult {
    let gpu = Gpu::new(0);
    let mut out = gpu.stream.alloc_zeros::<f32>(32).unwrap();
    let kernel = gpu.kernel(kernel);
    let config = LaunchConfig { shared_mem_bytes, ..shape(1, 32) };
    // SAFETY: the kernel's parameters, and 32 numbers behind the first; what else it does is what is tested.
    unsafe { gpu.stream.launch_builder(&kernel).arg(&mut out).arg(&number).launch(config) }.unwrap();
    gpu.stream.synchronize().map_or_else(|error| error.0, |()| CUDA_SUCCESS)
}

/// A kernel as above with several numbers, each in a child of its own, all of which must fail alike.
fn all_end_in(test: &str, kernel: &str, shared: u32, numbers: &[i32], ends: CUresult, expected: &str) {
    for number in numbers {
        let child = emulated(test).set("TEST_NUMBER", number);
        let text = child.run(|| {
            let number = std::env::var("KVRELAY_EMU_TEST_NUMBER").unwrap().parse().unwrap();
            assert_eq!(ends_in(kernel, number, shared), ends);
        });
        let Some(text) = text else { return };
        assert!(text.contains(&format!("kernel {kernel} (")), "{text}");
        assert!(text.contains(expected), "{number}: {text}");
    }
}

#[test]
fn just_past_static_shared_memory() {
    let numbers = [32, 33, 47, 48, 95, 1000, -1, -3];
    let expected = "block (0, 0, 0), one of its threads: something was written";
    let kernel = "write_static_shared";
    all_end_in(test_name!(), kernel, 0, &numbers, CUDA_ERROR_ILLEGAL_ADDRESS, expected);
}

#[test]
fn past_an_array_of_shared_memory() {
    let numbers = [32, 33, 96, -1, 1 << 20];
    let expected = "block (0, 0, 0), thread (7, 0, 0): memory.cu:";
    let kernel = "write_beside_an_array";
    all_end_in(test_name!(), kernel, 0, &numbers, CUDA_ERROR_LAUNCH_FAILED, expected);
}

#[test]
fn just_past_dynamic_shared_memory() {
    let expected = "past the end of the dynamic shared memory of 1000 bytes";
    let (kernel, numbers) = ("write_dynamic_shared", [1000, 1001, 1023]);
    all_end_in(test_name!(), kernel, 1000, &numbers, CUDA_ERROR_ILLEGAL_ADDRESS, expected);
}

#[test]
fn just_before_dynamic_shared_memory() {
    let expected = "before the beginning of the dynamic shared memory of 1000 bytes";
    let (kernel, numbers) = ("write_dynamic_shared", [-1, -1000]);
    all_end_in(test_name!(), kernel, 1000, &numbers, CUDA_ERROR_ILLEGAL_ADDRESS, expected);
}

#[test]
fn far_past_dynamic_shared_memory() {
    let expected = "block (0, 0, 0), thread (7, 0, 0): it touches the address 0x";
    let (kernel, numbers) = ("write_dynamic_shared", [1024, 2000, 1 << 20]);
    all_end_in(test_name!(), kernel, 1000, &numbers, CUDA_ERROR_ILLEGAL_ADDRESS, expected);
}

#[test]
fn the_whole_of_shared_memory() {
    emulated(test_name!()).run_in_every_order(|| {
        for (kernel, number, bytes) in [
            ("write_static_shared", 31, 0),
            ("write_dynamic_shared", 999, 1000),
            ("write_beside_an_array", 31, 0),
        ] {
            assert_eq!(ends_in(kernel, number, bytes), CUDA_SUCCESS);
        }
    });
}

#[test]
fn a_division_by_zero() {
    let expected = "block (0, 0, 0), thread (3, 0, 0): it divides an integer by zero";
    all_end_in(test_name!(), "divide", 0, &[3], CUDA_ERROR_LAUNCH_FAILED, expected);
}

#[test]
fn a_remainder_by_zero() {
    let expected = "block (0, 0, 0), thread (9, 0, 0): it divides an integer by zero";
    all_end_in(test_name!(), "remainder_by", 0, &[9], CUDA_ERROR_LAUNCH_FAILED, expected);
}

/// Launches a kernel that takes 16 bytes from a number of floats into 64 of them.
fn taken_from(kernel: &str, from: i32) -> CUresult {
    let gpu = Gpu::new(0);
    let x = gpu.stream.alloc_zeros::<f32>(64).unwrap();
    let mut out = gpu.stream.alloc_zeros::<f32>(1).unwrap();
    let kernel = gpu.kernel(kernel);
    let mut launch = gpu.stream.launch_builder(&kernel);
    // SAFETY: the kernel's parameters; both pointers have what it touches.
    unsafe { launch.arg(&mut out).arg(&x).arg(&from).launch(shape(1, 1)) }.unwrap();
    gpu.stream.synchronize().map_or_else(|error| error.0, |()| CUDA_SUCCESS)
}

#[test]
fn a_vector_from_between() {
    let text = emulated(test_name!()).run(|| {
        assert_eq!(taken_from("read_vector", 4), CUDA_SUCCESS);
        assert_eq!(taken_from("read_vector", 5), CUDA_ERROR_LAUNCH_FAILED);
    });
    let expected = "kernel read_vector (memory.cu), block (0, 0, 0), thread (0, 0, 0): memory.cu:";
    assert!(text.is_none_or(|text| text.contains(expected) && text.contains("which is no multiple of 16")));
}

#[test]
fn a_copy_from_between() {
    let text = emulated(test_name!()).run(|| {
        assert_eq!(taken_from("copy_from", 4), CUDA_SUCCESS);
        assert_eq!(taken_from("copy_from", 5), CUDA_ERROR_LAUNCH_FAILED);
    });
    let expected = "an asynchronous copy is from or to an address that is no multiple of its bytes";
    assert!(text.is_none_or(|text| text.contains(expected)));
}
