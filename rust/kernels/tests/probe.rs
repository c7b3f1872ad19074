//! What the probe says of machines with and without a driver. A driver is loaded once for the life
//! of a process, so each stand-in is probed in a child: the same test of this very program, run
//! again with the stand-in first on the loader's path.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

use kvrelay_kernels::{Driver, NoCuda, Version, embedded};

/// Set in the children.
const CHILD: &str = "KVRELAY_TEST_CHILD";

/// Runs `check` in a child that finds the libraries in `folder`, with `variables` set.
fn in_child(test: &str, folder: &Path, variables: &[(&str, &str)]) {
    let before = env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let output = Command::new(env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env("LD_LIBRARY_PATH", format!("{}:{before}", folder.display()))
        .env(CHILD, "1")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{test}: {:?}\n{text}", output.status);
}

/// Probes, in a child, the stand-in driver that is compiled with `defines`.
fn with_stand_in(test: &str, defines: &[&str], variables: &[(&str, &str)], check: impl FnOnce(NoCuda)) {
    if env::var_os(CHILD).is_some() {
        return check(Driver::probe().unwrap_err());
    }
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libcuda.so.1");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/stand_in_libcuda.c");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", source, "-o"])
        .arg(&library)
        .args(defines.iter().map(|define| format!("-D{define}")))
        .status();
    match compiled {
        Err(error) => return println!("skipped {test}: no C compiler ({error})"),
        Ok(status) => assert!(status.success(), "cc: {status}"),
    }
    // The name that cudarc tries first: a real driver's must not win.
    fs::copy(&library, folder.path().join("libcuda.so")).unwrap();
    in_child(test, folder.path(), variables);
}

/// Whatever this machine has, the probe agrees with the loader, and says why if it is of no use.
#[test]
fn this_machine() {
    let found = Driver::probe();
    // SAFETY: what the probe has just done.
    let present = unsafe { libloading::Library::new("libcuda.so.1") }.is_ok();
    assert_eq!(present, found != Err(NoCuda::NoLibrary), "{found:?}");
    if !present {
        let reason = found.clone().unwrap_err();
        assert_eq!(reason.to_string(), "no libcuda.so.1 was found");
        assert!(reason.devices().is_empty());
    }
    assert_eq!(Driver::probe(), found);
}

#[test]
fn a_file_that_is_no_library() {
    if env::var_os(CHILD).is_some() {
        let message = Driver::probe().unwrap_err().to_string();
        assert!(message.starts_with("libcuda.so.1 could not be loaded (") && message.len() > 40, "{message}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        fs::write(folder.path().join(name), "not a library").unwrap();
    }
    in_child("a_file_that_is_no_library", folder.path(), &[]);
}

#[test]
fn a_library_without_functions() {
    with_stand_in("a_library_without_functions", &["EMPTY"], &[], |reason| {
        assert_eq!(reason, NoCuda::NoFunction { function: "cuInit" });
        assert!(reason.to_string().contains("libcuda.so.1 that was found has no cuInit"), "{reason}");
    });
}

#[test]
fn a_library_that_only_starts() {
    with_stand_in("a_library_that_only_starts", &["PARTIAL"], &[], |reason| {
        assert_eq!(reason, NoCuda::NoFunction { function: "cuDeviceGetCount" });
    });
}

#[test]
fn a_driver_without_a_device() {
    with_stand_in("a_driver_without_a_device", &["INIT=100"], &[], |reason| {
        assert_eq!(
            reason.to_string(),
            "the CUDA driver found no device (CUDA error 100, CUDA_ERROR_NO_DEVICE: no CUDA-capable device is \
             detected)"
        );
    });
}

#[test]
fn a_driver_that_counts_none() {
    with_stand_in("a_driver_that_counts_none", &["COUNT=0"], &[], |reason| {
        assert_eq!(reason.to_string(), "the CUDA driver found no device");
    });
}

#[test]
fn a_count_below_none() {
    with_stand_in("a_count_below_none", &["COUNT=(-1)"], &[], |reason| {
        assert!(matches!(reason, NoCuda::NoDevice { error: None, .. }), "{reason}");
    });
}

#[test]
fn hidden_devices() {
    with_stand_in("hidden_devices", &["COUNT=2"], &[("CUDA_VISIBLE_DEVICES", "")], |reason| {
        let message = reason.to_string();
        assert!(message.contains("found no device (CUDA error 100"), "{message}");
        assert!(message.ends_with("CUDA_VISIBLE_DEVICES is set to \"\""), "{message}");
    });
}

#[test]
fn a_driver_that_fails() {
    with_stand_in("a_driver_that_fails", &["INIT=803"], &[], |reason| {
        let message = reason.to_string();
        let expected =
            "cuInit gave CUDA error 803, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: system has unsupported";
        assert!(message.contains(expected), "{message}");
    });
}

/// A number that no release of CUDA had when cudarc was made.
#[test]
fn a_failure_without_a_name() {
    with_stand_in("a_failure_without_a_name", &["INIT=4711", "NAMELESS"], &[], |reason| {
        let NoCuda::Failed { function, error } = &reason else { panic!("{reason}") };
        assert_eq!((*function, error.code, &error.meaning), ("cuInit", 4711, &None));
        assert!(reason.to_string().contains("CUDA error 4711"), "{reason}");
    });
}

#[test]
fn devices_are_listed_and_not_usable() {
    with_stand_in("devices_are_listed_and_not_usable", &["COUNT=2"], &[], |reason| {
        let [first, second] = reason.devices() else { panic!("{reason}") };
        assert_eq!((first.name.as_str(), second.name.as_str()), ("Stand-in 0", "Stand-in 1"));
        assert_eq!((first.memory_bytes, second.memory_bytes), (3 << 29, 3 << 30));
        assert_eq!(second.compute_capability, Version { major: 9, minor: 1 });
        assert_eq!(second.driver_version, Version { major: 12, minor: 8 });
        // The stand-in's driver is older than what the kernels need, where this build has any.
        let why = match embedded() {
            None => "this build of kvrelay was built without CUDA kernels, so it cannot use",
            Some(_) => "the CUDA driver is too old: it runs CUDA 12.8, the kernels need 13.0; it lists",
        };
        let listed = "cuda:0 (Stand-in 0, 1.5 GiB, compute capability 9.0, driver for CUDA 12.8), cuda:1 \
                      (Stand-in 1, 3.0 GiB, compute capability 9.1, driver for CUDA 12.8)";
        assert_eq!(reason.to_string(), format!("{why} {listed}"));
    });
}
