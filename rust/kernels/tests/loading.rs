//! The embedded kernels, loaded through the one door.

use kvrelay_emulator::{Emulated, test_name};
use kvrelay_kernels::{Driver, ModuleError};

#[test]
fn the_kernels_load() {
    Emulated::new(test_name!()).set("DEVICES", 2).run(|| {
        let devices = Driver::probe().unwrap();
        assert_eq!(devices.len(), 2);
        let module = devices.open(1).unwrap();
        assert_eq!((module.ordinal(), module.context().ordinal()), (1, 1));
        module.function("rms_norm_bf16").unwrap();
    });
}

#[test]
fn what_is_not_there_is_named() {
    Emulated::new(test_name!()).run(|| {
        let devices = Driver::probe().unwrap();
        let error = devices.open(3).unwrap_err();
        assert_eq!(error, ModuleError::NoSuchDevice { ordinal: 3, count: 1 });
        assert_eq!(error.to_string(), "there is no cuda:3; the CUDA driver lists 1, cuda:0 to cuda:0");
        let error = devices.open(0).unwrap().function("no_such_kernel").unwrap_err().to_string();
        let expected = "cuda:0: looking up the kernel no_such_kernel failed: CUDA error 500, \
                        CUDA_ERROR_NOT_FOUND: named symbol not found";
        assert_eq!(error, expected);
    });
}

#[test]
fn old_devices_are_refused() {
    Emulated::new(test_name!()).set("CAPABILITY", 75).run(|| {
        let reason = Driver::probe().unwrap_err().to_string();
        assert!(reason.contains("the kernels need compute capability 8.0 or newer"), "{reason}");
        assert!(reason.contains("compute capability 7.5"), "{reason}");
    });
}
