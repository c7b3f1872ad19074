//! What the tests of the emulator share: its kernels that are wrong on purpose, and a device to run them on.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, DriverError, LaunchConfig, result};
use cudarc::nvrtc::Ptx;
use kvrelay_emulator::{Emulated, folder};

/// A test with the kernels of `wrong/`.
pub(crate) fn emulated(test: &str) -> Emulated {
    let kernels = folder().unwrap_or_default().join("wrong");
    Emulated::new(test).set("KERNELS", kernels.display())
}

/// The PTX that nvcc made of `wrong/`.
pub(crate) fn ptx() -> String {
    let folder = folder().expect("a child has the folder of the emulator");
    std::fs::read_to_string(folder.with_file_name("wrong.ptx")).expect("it is beside the emulator's folder")
}

/// A device with the kernels of `wrong/` loaded.
pub(crate) struct Gpu {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) module: Arc<CudaModule>,
    pub(crate) stream: Arc<CudaStream>,
}

impl Gpu {
    pub(crate) fn new(ordinal: usize) -> Gpu {
        let context = CudaContext::new(ordinal).unwrap();
        // What waits for what is the test's to say, and not cudarc's to guess.
        // SAFETY: every slice outlives the work that uses it: tests wait before they end.
        unsafe { context.disable_event_tracking() };
        let module = context.load_module(Ptx::from_src(ptx())).unwrap();
        let stream = context.new_stream().unwrap();
        Gpu { context, module, stream }
    }

    pub(crate) fn kernel(&self, name: &str) -> CudaFunction {
        self.module.load_function(name).unwrap()
    }
}

/// A grid of blocks of threads in a row.
pub(crate) fn shape(blocks: u32, threads: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 }
}

/// The error of a call that must fail.
pub(crate) fn error<T>(result: Result<T, DriverError>) -> CUresult {
    result.err().expect("the call must fail").0
}

/// What one of cudarc's raw calls returned.
pub(crate) fn raw(result: sys::CUresult) -> Result<(), DriverError> {
    result.result()
}

/// Holds the stream up: what it is given from now on waits until something is sent.
pub(crate) fn hold(stream: &CudaStream) -> Sender<()> {
    unsafe extern "C" fn wait(gone: *mut c_void) {
        // SAFETY: the box that was made a pointer of below, once.
        let gone = unsafe { Box::from_raw(gone.cast::<Receiver<()>>()) };
        gone.recv().expect("the test lets it go");
    }
    let (go, gone) = channel::<()>();
    let gone = Box::into_raw(Box::new(gone)).cast();
    // SAFETY: the stream is alive, and the function gets what it expects.
    unsafe { result::stream::launch_host_function(stream.cu_stream(), wait, gone) }.unwrap();
    go
}
