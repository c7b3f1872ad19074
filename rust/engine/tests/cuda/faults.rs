//! Launches that fail and devices that are lost: clear errors, no hang, and the workers of other
//! devices live on.

use std::sync::Arc;

use kvrelay_core::policy::built_in;
use kvrelay_core::record::Status;
use kvrelay_emulator::{Emulated, test_name};
use kvrelay_engine::backend::cuda::CudaBackend;
use kvrelay_engine::backend::{Backend, BackendError, Row};
use kvrelay_engine::{DeviceChoice, Engine, Handle};
use kvrelay_model::{DType, SamplingParams};

use crate::common::{answer, backend, config, ids, invariant, row, submission, tables, tiny, weights};

/// Runs prompts until one fails; the error, and that of the call after it.
fn until_failure(backend: &mut CudaBackend) -> [BackendError; 2] {
    let table = &tables(1, 1)[0];
    let text = ids(1, 9);
    for _ in 0..100 {
        let row = Row { sample: Some(SamplingParams::default()), ..row(0, &text, 0, table) };
        let failed = match backend.enqueue(&[row]) {
            Ok(ticket) => backend.wait(ticket).map(drop),
            Err(error) => Err(error),
        };
        if let Err(error) = failed {
            return [error, backend.enqueue(&[row]).unwrap_err()];
        }
    }
    panic!("nothing ever failed");
}

fn check_failure(expected: &str) {
    let weights = weights(&tiny(DType::BF16).model());
    let mut backend = backend(&weights, &invariant());
    let progress = backend.progress().clone();
    let [error, after] = until_failure(&mut backend);
    assert!(matches!(&error, BackendError::Device { device, .. } if device == "cuda:0"), "{error}");
    assert!(error.to_string().contains(expected), "{error}");
    assert_eq!(after, BackendError::Stopped(error.to_string()));
    // Whoever waits for KV that will never be written is told.
    let next = kvrelay_engine::backend::Ticket(1000);
    assert!(matches!(progress.wait(next, 0), Err(BackendError::Stopped(_))));
    drop(backend);
    drop(weights);
}

#[test]
fn a_launch_that_fails() {
    let test = Emulated::new(test_name!()).set("FAIL_LAUNCH", 70);
    test.run(|| check_failure("CUDA error 719, CUDA_ERROR_LAUNCH_FAILED"));
}

#[test]
fn a_device_that_is_lost() {
    let test = Emulated::new(test_name!()).set("LOST_AFTER", 70);
    test.run(|| check_failure("CUDA_ERROR"));
}

/// Two workers on two devices, of which one is lost in the middle: every request ends with its own
/// tokens, those of the lost worker on the other one.
#[test]
fn workers_of_other_devices_live_on() {
    let expected = std::cell::RefCell::new(Vec::new());
    let tokens_of = |engine: &Engine| -> Vec<Vec<u32>> {
        let handles: Vec<Handle> =
            (0..6).map(|i| engine.submit(submission(ids(i, 20), 12)).unwrap()).collect();
        let tokens = handles.iter().map(|handle| {
            let (tokens, record) = answer(handle);
            assert_eq!(record.status, Status::Finished, "{:?}", record.reason);
            tokens
        });
        tokens.collect()
    };
    let test = Emulated::new(test_name!()).set("DEVICES", 2).set("MEMORY_MB", 256).set("FAIL_LAUNCH", 900);
    let text = test.run(|| {
        let model = Arc::new(tiny(DType::BF16).model());
        let engine =
            Engine::new(model.clone(), config("2M", DeviceChoice::AllCuda), built_in("fcfs").unwrap());
        let engine = engine.unwrap();
        // Until the launch that fails, and beyond it.
        for _ in 0..4 {
            let tokens = tokens_of(&engine);
            let mut expected = expected.borrow_mut();
            if expected.is_empty() {
                *expected = tokens;
            } else {
                assert_eq!(*expected, tokens);
            }
        }
        engine.check_idle().unwrap();
    });
    assert!(text.is_none_or(|text| text.contains("fails since KVRELAY_EMU_FAIL_LAUNCH says so")));
}

/// Where no worker is left, requests end with the driver's words.
#[test]
fn without_devices_requests_fail_and_nothing_hangs() {
    let test = Emulated::new(test_name!()).set("MEMORY_MB", 256).set("FAIL_LAUNCH", 300);
    test.run(|| {
        let model = Arc::new(tiny(DType::BF16).model());
        let engine = Engine::new(model, config("1P1D", DeviceChoice::Cuda(0)), built_in("fcfs").unwrap());
        let engine = engine.unwrap();
        let handles: Vec<Handle> =
            (0..4).map(|i| engine.submit(submission(ids(i, 20), 100)).unwrap()).collect();
        for handle in &handles {
            let (_, record) = answer(handle);
            assert_eq!(record.status, Status::Failed);
            let reason = record.reason.unwrap();
            assert!(reason.contains("cuda:0: ") || reason.contains("KV transfer"), "{reason}");
        }
        let (_, late) = answer(&engine.submit(submission(ids(9, 20), 5)).unwrap());
        assert_eq!(late.status, Status::Failed);
        assert!(late.reason.unwrap().contains("CUDA_ERROR_LAUNCH_FAILED"));
        engine.check_idle().unwrap();
    });
}
