//! KV between pools of a device, and of two: what arrives, when, and what becomes of what is aborted.

use std::sync::Arc;

use kvrelay_core::event::Action;
use kvrelay_core::policy::built_in;
use kvrelay_core::record::Status;
use kvrelay_core::request::{Arrival, Scheduled};
use kvrelay_core::watch::Unwatched;
use kvrelay_emulator::{Emulated, test_name};
use kvrelay_engine::backend::cuda::{CudaDevice, geometry};
use kvrelay_engine::backend::{KvPool, Location, copy_blocks};
use kvrelay_engine::{DeviceChoice, Engine, EngineConfig, Entry, Handle, Recording, RunOptions, replay};
use kvrelay_model::{DType, Model};

use crate::common::{BLOCK, answer, config, device, ids, next_token, submission, tiny};

fn model() -> Arc<Model> {
    Arc::new(tiny(DType::BF16).model())
}

/// Numbers that bf16 holds, others for every block and group.
fn numbers(block: u32, group: usize, count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| (i % 120) as f32 + 128.0 * (block + 1) as f32 * (1 << group) as f32)
        .map(bf16)
        .collect()
}

/// As bf16 rounds it: the upper half, of numbers whose lower half is ignored here.
fn bf16(number: f32) -> f32 {
    f32::from_bits(number.to_bits() & 0xffff_0000)
}

fn pool(device: &Arc<CudaDevice>, blocks: usize) -> KvPool {
    let model = model();
    KvPool::on_device(geometry(model.config(), model.digest(), BLOCK), blocks, device).unwrap()
}

fn check_copies(here: &KvPool, there: &KvPool) {
    let groups = here.geometry().num_layer_groups;
    let len = |group| here.geometry().group_range(group).len();
    let read = |pool: &KvPool, block, group| {
        let mut out = vec![0.0; len(group)];
        // SAFETY: this test is the only user of both pools.
        unsafe { pool.read_group(block, group, &mut out) };
        out
    };
    for (block, group) in (0..5).flat_map(|block| (0..groups).map(move |group| (block, group))) {
        // SAFETY: as above.
        unsafe { here.write_group(block, group, &numbers(block, group, len(group))) };
    }
    // Neighbours at both ends, at one, and at none.
    let pairs = [(0, 3), (1, 4), (2, 0), (4, 2)];
    // SAFETY: as above.
    unsafe { copy_blocks(here, there, &pairs, Some(1)).unwrap() };
    for (from, to) in pairs {
        assert!(read(there, to, 0).iter().all(|&x| x == 0.0), "only the group asked for is copied");
        assert_eq!(read(there, to, 1), numbers(from, 1, len(1)));
    }
    // SAFETY: as above.
    unsafe { copy_blocks(here, there, &pairs, None).unwrap() };
    for (from, to) in pairs {
        assert_eq!(read(there, to, 0), numbers(from, 0, len(0)));
    }
    assert!(read(there, 1, 0).iter().all(|&x| x == 0.0), "no other block changes");
    // SAFETY: as above.
    let beyond = unsafe { copy_blocks(here, there, &[(5, 0)], None) };
    assert!(beyond.unwrap_err().to_string().contains("block: at most 4, found 5"));
}

#[test]
fn blocks_are_copied_whole_and_by_group() {
    for peer in [1, 0] {
        Emulated::new(test_name!()).set("DEVICES", 2).set("PEER", peer).run(|| {
            let devices = [device(0), device(1)];
            let [here, other, there] = [&devices[0], &devices[0], &devices[1]].map(|device| pool(device, 5));
            assert_eq!(there.location(), Location::Cuda { ordinal: 1 });
            check_copies(&here, &other);
            check_copies(&here, &there);
            let back = pool(&devices[0], 5);
            check_copies(&there, &back);
        });
    }
}

fn named() -> Box<dyn kvrelay_core::policy::Policy> {
    built_in("disaggregated").unwrap()
}

fn transfers(recording: &Recording) -> Vec<bool> {
    let actions = |entry: &Entry| match entry {
        Entry::Handle { actions, .. } => actions.clone(),
        Entry::PolicyExchanged => Vec::new(),
    };
    let is_early = |action: Action| match action {
        Action::Transfer { during, .. } => Some(during.is_some()),
        _ => None,
    };
    recording.entries.iter().flat_map(actions).filter_map(is_early).collect()
}

/// KV leaves while the last of its prompt is computed, and the recording replays the same (law 6).
#[test]
fn transfers_follow_the_last_chunk() {
    let test = Emulated::new(test_name!()).set("DEVICES", 2).set("MEMORY_MB", 256).set("JITTER_US", 200);
    test.run(|| {
        for device in [DeviceChoice::Cuda(0), DeviceChoice::AllCuda] {
            let config = EngineConfig { record: true, ..config("1P1D", device) };
            let engine = Engine::new(model(), config, named()).unwrap();
            let handles: Vec<Handle> =
                (0..5).map(|i| engine.submit(submission(ids(i, 40), 4)).unwrap()).collect();
            for handle in &handles {
                assert_eq!(answer(handle).1.status, Status::Finished);
            }
            engine.check_idle().unwrap();
            let recordings = engine.recordings().unwrap();
            let early = transfers(&recordings[0]);
            assert_eq!(early.len(), 5);
            assert!(early.iter().filter(|&&early| early).count() >= 3, "{early:?}");
            replay(&recordings[0], named()).unwrap();
        }
    });
}

/// Names of runs begin anew with every session: what is served after a measured run is relayed as what
/// was served before it.
#[test]
fn sessions_follow_each_other() {
    let test = Emulated::new(test_name!()).set("MEMORY_MB", 256).set("JITTER_US", 500);
    test.run(|| {
        let config = EngineConfig { prefix_caching: false, ..config("1P1D", DeviceChoice::Cuda(0)) };
        let engine = Engine::new(model(), config, named()).unwrap();
        let served = || {
            let requests = (0..4).map(|i| engine.submit(submission(ids(i, 40), 6)).unwrap());
            let handles: Vec<Handle> = requests.collect();
            handles.iter().map(|handle| answer(handle).0).collect::<Vec<_>>()
        };
        let before = served();
        for _ in 0..2 {
            let arrival =
                Arrival { prompt_tokens: 30, output_tokens: 4, max_tokens: 4, ..Arrival::default() };
            let source = Box::new(Scheduled::new(vec![arrival; 3]));
            let run = engine.run(source, None, RunOptions::default(), &mut Unwatched).unwrap();
            assert!(run.log.requests.iter().all(|record| record.status == Status::Finished));
            assert_eq!(served(), before);
        }
        engine.check_idle().unwrap();
    });
}

/// Requests are cancelled at every moment of their lives; whatever was under way ends, no block is
/// lost, and the next is served.
#[test]
fn cancelled_requests_leave_nothing_behind() {
    let test = Emulated::new(test_name!()).set("DEVICES", 2).set("MEMORY_MB", 256).set("JITTER_US", 1000);
    test.run(|| {
        let engine = Engine::new(model(), config("1P1D", DeviceChoice::AllCuda), named()).unwrap();
        let prompt = ids(1, 40);
        let expected = answer(&engine.submit(submission(prompt.clone(), 6)).unwrap()).0;
        for i in 0..24 {
            let handle = engine.submit(submission(ids(100 + i, 40), 50)).unwrap();
            // Before it has begun, with its KV on the way, or while it decodes.
            for _ in 0..i % 4 {
                next_token(&handle);
            }
            handle.cancel();
            let (_, record) = answer(&handle);
            assert!(matches!(record.status, Status::Cancelled | Status::Finished), "{record:?}");
        }
        engine.check_idle().unwrap();
        assert_eq!(answer(&engine.submit(submission(prompt, 6)).unwrap()).0, expected);
        engine.check_idle().unwrap();
    });
}

/// The relay under a stream of operations that are done one at a time, late, in an order drawn from a
/// seed: a copy that did not wait for its layer group would show.
#[test]
fn copies_wait_for_what_they_copy() {
    for seed in 0..4 {
        let test = Emulated::new(test_name!()).set("STREAMS", "deferred").set("SEED", seed);
        test.set("DEVICES", 2).set("MEMORY_MB", 256).run(|| {
            let model = model();
            let tokens = |topology, device| {
                let engine = Engine::new(model.clone(), config(topology, device), named()).unwrap();
                let handles: Vec<Handle> =
                    (0..3).map(|i| engine.submit(submission(ids(i, 17 + i as usize), 5)).unwrap()).collect();
                handles.iter().map(|handle| answer(handle).0).collect::<Vec<_>>()
            };
            let expected = tokens("1M", DeviceChoice::Cuda(0));
            assert_eq!(tokens("1P1D", DeviceChoice::Cuda(0)), expected);
            assert_eq!(tokens("1P1D", DeviceChoice::AllCuda), expected);
        });
    }
}
