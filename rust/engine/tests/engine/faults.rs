//! Workers, transfers and numbers that break.

use kvrelay_core::record::Status;
use kvrelay_core::request::{Arrival, Scheduled};
use kvrelay_core::watch::Unwatched;
use kvrelay_engine::{Engine, EngineConfig, EngineError, Handle, RunOptions};
use kvrelay_model::SamplingParams;

use crate::common::{alone, answer, config, ids, model, policy, submission, troubled};
use crate::doubles::{Broken, Trouble};

/// A worker that fails or panics is lost; its requests go on elsewhere, and no token comes twice.
#[test]
fn a_lost_worker_costs_time_and_no_token() {
    for trouble in [Trouble::Fail(9), Trouble::Panic(9), Trouble::Fail(0)] {
        let engine = troubled(config("2M"), 1, trouble, "fcfs");
        let handles: Vec<Handle> =
            (0..8).map(|i| engine.submit(submission(ids(i, 20), 25)).unwrap()).collect();
        for (i, handle) in handles.iter().enumerate() {
            let answer = answer(handle);
            assert_eq!(answer.ids, alone(&ids(i as u64, 20), 25, SamplingParams::default()));
            assert_eq!((answer.record.status, answer.record.output_tokens), (Status::Finished, 25));
        }
        engine.check_idle().unwrap();
    }
}

/// Without a worker that could go on, requests end with an error: those that are live and those
/// that come.
#[test]
fn without_workers_requests_fail_and_nothing_hangs() {
    for (topology, index) in [("1M", 0), ("1P1D", 0), ("1P1D", 1)] {
        let engine = troubled(config(topology), index, Trouble::Fail(1), "disaggregated");
        let handles: Vec<Handle> =
            (0..4).map(|i| engine.submit(submission(ids(i, 20), 25)).unwrap()).collect();
        for handle in &handles {
            let record = answer(handle).record;
            if record.status == Status::Failed {
                let reason = record.reason.unwrap();
                assert!(reason.contains("no worker is left") && reason.contains("on purpose"), "{reason}");
            }
        }
        let late = answer(&engine.submit(submission(ids(9, 20), 25)).unwrap()).record;
        assert_eq!(late.status, Status::Failed);
        let arrival = Arrival { prompt_tokens: 9, output_tokens: 5, max_tokens: 5, ..Arrival::default() };
        let source = Box::new(Scheduled::new(vec![arrival]));
        let run = engine.run(source, None, RunOptions::default(), &mut Unwatched);
        assert!(matches!(run, Err(EngineError::WorkerLost(_))), "{run:?}");
        engine.check_idle().unwrap();
    }
}

/// Logits that are no numbers end their own request only.
#[test]
fn a_poisoned_request_fails_alone() {
    let params = SamplingParams::default();
    let expected: Vec<Vec<u32>> = (0..6).map(|i| alone(&ids(i, 20), 10, params)).collect();
    let unseen = |id: &u32| !expected.iter().flatten().any(|seen| seen == id);
    let poison = (259..288).find(unseen).unwrap();
    let mut bad = ids(7, 20);
    bad[19] = poison;
    // Where only the decode worker chokes on the id, the prompt goes through.
    let chokes = [true, alone(&bad, 10, params)[..9].contains(&poison)];
    for (index, chokes) in chokes.into_iter().enumerate() {
        let engine = troubled(config("1P1D"), index, Trouble::Poison(poison), "disaggregated");
        let companion = |i: u64| engine.submit(submission(ids(i, 20), 10)).unwrap();
        let before = (0..3).map(companion).collect::<Vec<_>>();
        let poisoned = engine.submit(submission(bad.clone(), 10)).unwrap();
        let after = (3..6).map(companion).collect::<Vec<_>>();
        for (handle, expected) in before.iter().chain(&after).zip(&expected) {
            assert_eq!(answer(handle).ids, *expected);
        }
        let record = answer(&poisoned).record;
        assert_eq!(record.status, if chokes { Status::Failed } else { Status::Finished });
        if chokes {
            let reason = record.reason.unwrap();
            assert!(reason.contains(&format!("worker {index}: on purpose")), "{reason}");
        }
        engine.check_idle().unwrap();
    }
}

/// Requests whose transfers fail end with an error and give their blocks back; the next is served.
#[test]
fn failed_transfers_are_errors_that_the_user_sees() {
    const BROKEN: usize = 50;
    let config =
        EngineConfig { transport: Some(Broken::transport(BROKEN)), prefix_caching: false, ..config("1P1D") };
    let engine = Engine::new(model(), config, policy("disaggregated")).unwrap();
    let handles: Vec<Handle> =
        (0..BROKEN as u64).map(|i| engine.submit(submission(ids(i, 20), 5)).unwrap()).collect();
    for handle in &handles {
        let record = answer(handle).record;
        assert_eq!(record.status, Status::Failed);
        assert_eq!(record.reason.unwrap().as_ref(), "KV transfer from worker 0 to worker 1 failed");
        assert!(record.first_token.is_some() && record.transfer_end.is_none());
    }
    let healthy = answer(&engine.submit(submission(ids(77, 20), 5)).unwrap());
    assert_eq!(healthy.ids, alone(&ids(77, 20), 5, SamplingParams::default()));
    engine.check_idle().unwrap();
}
