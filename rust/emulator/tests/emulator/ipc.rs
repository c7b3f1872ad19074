//! Device memory between two processes.

use std::process::Command;

use crate::common::{emulated, error, raw};
use cudarc::driver::sys::{self, CUresult::*};
use cudarc::driver::{CudaContext, result};
use kvrelay_emulator::test_name;

/// Set for the process that opens the memory: its handle, in hexadecimal.
const HANDLE: &str = "KVRELAY_TEST_IPC_HANDLE";

fn to_hex(handle: &sys::CUipcMemHandle) -> String {
    handle.reserved.iter().map(|&byte| format!("{:02x}", byte as u8)).collect()
}

fn from_hex(text: &str) -> sys::CUipcMemHandle {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    for (at, byte) in handle.reserved.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap() as _;
    }
    handle
}

/// Doubles every number of the other process's.
fn other_process(text: &str) {
    let _context = CudaContext::new(0).unwrap();
    let mut address = 0;
    // SAFETY: 1000 numbers are behind the handle, as the other process says.
    unsafe {
        raw(sys::cuIpcOpenMemHandle_v2(&mut address, from_hex(text), 1)).unwrap();
        let mut numbers = [0i32; 1000];
        result::memcpy_dtoh_sync(&mut numbers, address).unwrap();
        result::memcpy_htod_sync(address, &numbers.map(|number| 2 * number)).unwrap();
        // Not its own to export, and no allocation of its own to free.
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        assert_eq!(error(raw(sys::cuIpcGetMemHandle(&mut handle, address))), CUDA_ERROR_INVALID_VALUE);
        raw(sys::cuIpcCloseMemHandle(address)).unwrap();
        assert_eq!(error(result::memcpy_dtoh_sync(&mut numbers, address)), CUDA_ERROR_INVALID_VALUE);
        // What is no handle of this emulator's.
        let foreign = sys::CUipcMemHandle { reserved: [1; 64] };
        let opened = raw(sys::cuIpcOpenMemHandle_v2(&mut address, foreign, 1));
        assert_eq!(error(opened), CUDA_ERROR_INVALID_VALUE);
    }
}

fn this_process(test: &str) {
    let context = CudaContext::new(0).unwrap();
    let numbers: Vec<i32> = (0..1000).collect();
    // SAFETY: the memory is freed when the other process has ended.
    unsafe {
        let address = result::malloc_sync(4000).unwrap();
        result::memcpy_htod_sync(address, &numbers).unwrap();
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        raw(sys::cuIpcGetMemHandle(&mut handle, address)).unwrap();
        // A process cannot open what is its own.
        let mut again = 0;
        assert_eq!(error(raw(sys::cuIpcOpenMemHandle_v2(&mut again, handle, 1))), CUDA_ERROR_INVALID_CONTEXT);

        let program = std::env::current_exe().unwrap();
        let child =
            Command::new(program).args([test, "--exact"]).env(HANDLE, to_hex(&handle)).output().unwrap();
        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));

        let mut seen = vec![0i32; 1000];
        result::memcpy_dtoh_sync(&mut seen, address).unwrap();
        assert!(seen.iter().zip(&numbers).all(|(&seen, &number)| seen == 2 * number), "{seen:?}");
        result::free_sync(address).unwrap();

        // From a pool, it cannot be exported.
        let stream = context.new_stream().unwrap();
        let pooled = result::malloc_async(stream.cu_stream(), 4000).unwrap();
        assert_eq!(error(raw(sys::cuIpcGetMemHandle(&mut handle, pooled))), CUDA_ERROR_INVALID_VALUE);
    }
}

#[test]
fn two_processes_share_memory() {
    let test = test_name!();
    emulated(test).run(|| match std::env::var(HANDLE) {
        Ok(text) => other_process(&text),
        Err(_) => this_process(test),
    });
}

/// The number of a file is given out again; what it then names is not what the handle was made for.
#[test]
fn a_handle_of_memory_that_was_freed() {
    let test = test_name!();
    emulated(test).run(|| {
        let _context = CudaContext::new(0).unwrap();
        if let Ok(text) = std::env::var(HANDLE) {
            let mut address = 0;
            // SAFETY: a pointer that is valid for the call.
            let opened = raw(unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, from_hex(&text), 1) });
            assert_eq!(error(opened), CUDA_ERROR_INVALID_VALUE);
            return;
        }
        // SAFETY: memory that nobody uses.
        unsafe {
            let freed = result::malloc_sync(4000).unwrap();
            let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
            raw(sys::cuIpcGetMemHandle(&mut handle, freed)).unwrap();
            result::free_sync(freed).unwrap();
            let again = result::malloc_sync(4000).unwrap();
            let program = std::env::current_exe().unwrap();
            let child =
                Command::new(program).args([test, "--exact"]).env(HANDLE, to_hex(&handle)).output().unwrap();
            assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
            result::free_sync(again).unwrap();
        }
    });
}
