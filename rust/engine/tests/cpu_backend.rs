//! The CPU backend on a tiny model: law 1a (a row's logits are bit for bit a function of weights,
//! ids and positions), what is refused, and what is left alone.

use std::sync::Arc;

use kvrelay_engine::backend::cpu::{CpuBackend, CpuConfig, CpuWeights, Tier};
use kvrelay_engine::backend::{Backend, BackendError, Input, Limits, Logits, Row};
use kvrelay_model::rope::RopeScaling;
use kvrelay_model::testing::TinyLlama;
use kvrelay_model::{DType, Model, SamplingParams};
use proptest::prelude::*;

#[path = "shared/law.rs"]
mod law;

use law::{BLOCK, BLOCKS, Case, ids, row, spoil, tables};

fn limits() -> Limits {
    Limits { max_rows: 8, max_tokens: 128, max_logits: 128, max_positions: 128, max_slots: 8 }
}

fn backend(weights: &Arc<CpuWeights>, threads: usize) -> CpuBackend {
    let config = CpuConfig { threads, cores: vec![], queue_depth: 3, block_size: BLOCK, num_blocks: BLOCKS };
    CpuBackend::new(weights.clone(), &config, limits()).unwrap()
}

fn weights(tiny: &TinyLlama, tier: Tier) -> Arc<CpuWeights> {
    Arc::new(CpuWeights::new(&tiny.model(), tier))
}

/// And the threads of the backend where they begin.
fn cases() -> impl Strategy<Value = (Case, usize)> {
    let length = prop_oneof![
        1_usize..40,
        Just(BLOCK - 1),
        Just(BLOCK),
        Just(BLOCK + 1),
        Just(3 * BLOCK - 1),
        Just(3 * BLOCK),
        Just(3 * BLOCK + 1)
    ];
    (
        any::<u64>(),
        prop::collection::vec(length, 1..4),
        prop::collection::vec(1_usize..17, 1..6),
        1_usize..4,
        any::<bool>(),
    )
        .prop_map(|(seed, lengths, chunks, threads, relay)| (Case { seed, lengths, chunks, relay }, threads))
}

fn check(weights: &Arc<CpuWeights>, (case, threads): &(Case, usize)) {
    law::check(case, backend(weights, *threads), backend(weights, 1), backend(weights, 1));
}

/// All logits of `ids`, alone, in one piece, on one thread.
fn alone(weights: &Arc<CpuWeights>, ids: &[u32]) -> Vec<f32> {
    law::alone(&mut backend(weights, 1), ids)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn logits_depend_on_the_row_alone(case in cases(), quantised: bool) {
        let dtype = if quantised { DType::Q4_1 } else { DType::F32 };
        let tiny = TinyLlama { num_layers: 2, dtype, ..TinyLlama::default() };
        check(&weights(&tiny, Tier::Scalar), &case);
    }

    /// The vector tier keeps the same promise on one machine.
    #[test]
    fn so_do_those_of_the_vector_tier(case in cases()) {
        let tiny = TinyLlama { num_layers: 2, dtype: DType::Q8_0, ..TinyLlama::default() };
        check(&weights(&tiny, Tier::Vector), &case);
    }
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    assert!(a.iter().all(|x| x.is_finite()));
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Every storage type: the vector tier is the scalar one up to rounding.
#[test]
fn tiers_agree() {
    for dtype in DType::ALL {
        for tied in [false, true] {
            let model = TinyLlama { dtype, tied, ..TinyLlama::default() }.model();
            let text = ids(5, 40);
            let scalar = alone(&Arc::new(CpuWeights::new(&model, Tier::Scalar)), &text);
            let vector = alone(&Arc::new(CpuWeights::new(&model, Tier::Vector)), &text);
            assert!(largest_difference(&scalar, &vector) < 1e-4, "{}", dtype.name());
        }
    }
}

/// A GGUF file and a Hugging Face folder of the same weights are the same model, bit for bit.
#[test]
fn formats_agree() {
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 64.0,
    };
    for (scaling, exact) in
        [(None, true), (Some(RopeScaling::Linear { factor: 4.0 }), true), (Some(llama3), false)]
    {
        let tiny = TinyLlama { rope_scaling: scaling, tied: true, shards: 2, ..TinyLlama::default() };
        let folder = tempfile::tempdir().unwrap();
        let hf = Model::load(tiny.write_hf(folder.path()).unwrap()).unwrap();
        let text = ids(9, 100);
        let from_hf = alone(&Arc::new(CpuWeights::new(&hf, Tier::Scalar)), &text);
        let from_gguf = alone(&weights(&tiny, Tier::Scalar), &text);
        // GGUF holds Llama 3's divisors in single precision.
        let bound = if exact { 0.0 } else { 1e-3 };
        assert!(largest_difference(&from_hf, &from_gguf) <= bound);
        if scaling.is_some() {
            let plain =
                alone(&weights(&TinyLlama { tied: true, ..TinyLlama::default() }, Tier::Scalar), &text);
            assert!(largest_difference(&plain, &from_gguf) > 0.01, "the scaling is applied");
        }
    }
}

/// Decode steps enqueued ahead, each fed by the one before, give what a host that waits for
/// every token gives; sampled tokens too, whatever the batch.
#[test]
fn queued_steps_feed_each_other() {
    let weights = weights(&TinyLlama::default(), Tier::Scalar);
    let table = tables(3, 2);
    let prompt = ids(1, 11);
    let sampling = |temperature| SamplingParams { temperature, top_k: 40, top_p: 0.9, seed: 77 };
    for temperature in [0.0, 0.8] {
        let sample = Some(sampling(temperature));
        // The host feeds each token back; a companion shares the batch.
        let mut host = backend(&weights, 2);
        let mut expected: Vec<u32> = vec![];
        let companion = ids(2, 20);
        for step in 0..8_usize {
            let fed = expected.last().map(std::slice::from_ref);
            let start = if step == 0 { 0 } else { prompt.len() + step - 1 };
            let main = Row { sample, ..row(0, fed.unwrap_or(&prompt), start, &table[0]) };
            let other = row(5, &companion[step..=step], step, &table[1]);
            let ticket = host.enqueue(&[other, main]).unwrap();
            let output = host.wait(ticket).unwrap();
            assert_eq!(output.rows[0].token, None);
            expected.push(output.rows[1].token.unwrap());
        }
        // Three steps are in the queue at a time.
        let mut ahead = backend(&weights, 1);
        let mut tickets = std::collections::VecDeque::new();
        let mut tokens = vec![];
        for step in 0..8_usize {
            let row = if step == 0 {
                Row { sample, ..row(3, &prompt, 0, &table[0]) }
            } else {
                let start = (prompt.len() + step - 1) as u32;
                let input = Input::LastSampled;
                Row { slot: 3, input, start, blocks: &table[0], sample, logits: Logits::Nothing }
            };
            if tickets.len() == ahead.queue_depth() {
                assert!(matches!(
                    ahead.enqueue(&[row]),
                    Err(BackendError::Limit { what: "steps in the queue", .. })
                ));
                let ticket = tickets.pop_front().unwrap();
                tokens.push(ahead.wait(ticket).unwrap().rows[0].token.unwrap());
            }
            tickets.push_back(ahead.enqueue(&[row]).unwrap());
        }
        for ticket in tickets {
            tokens.push(ahead.wait(ticket).unwrap().rows[0].token.unwrap());
        }
        assert_eq!(tokens, expected);
    }
}

#[test]
fn what_cannot_run_is_refused_with_both_numbers() {
    let weights = weights(&TinyLlama::default(), Tier::Scalar);
    let mut backend = backend(&weights, 1);
    let blocks: Vec<u32> = (0..16).collect();
    let many = vec![1; 129];
    let good = row(0, &[1, 2, 3], 0, &blocks);
    let nan = Some(SamplingParams { temperature: f32::NAN, ..SamplingParams::default() });
    let cases = [
        (vec![row(0, &many, 0, &blocks)], "tokens in a step: at most 128, found 129"),
        (vec![good; 9], "rows in a step: at most 8, found 9"),
        (vec![good; 2], "row 1: slot: expected a slot of its own (row 0 has it), found 0"),
        (vec![row(8, &[1], 0, &blocks)], "row 0: slot: expected below 8, found 8"),
        (vec![row(0, &[], 0, &blocks)], "row 0: tokens: expected at least 1, found 0"),
        (vec![row(0, &[288], 0, &blocks)], "row 0: token id: expected below 288, found 288"),
        (vec![row(0, &[1], 128, &blocks)], "row 0: last position: expected below 128, found 128"),
        (vec![row(0, &many[..9], 0, &blocks[..1])], "row 0: blocks: expected 2 for 9 tokens, found 1"),
        (vec![row(0, &[1], 0, &[64])], "row 0: block: expected below 64, found 64"),
        (vec![Row { sample: nan, ..good }], "row 0: sampling: expected valid parameters, found temperature"),
        (
            vec![Row { input: Input::LastSampled, ..good }],
            "row 0: input: expected a token sampled for this slot",
        ),
    ];
    for (rows, text) in cases {
        let error = backend.enqueue(&rows).unwrap_err().to_string();
        assert!(error.contains(text), "{error} lacks {text}");
    }
    let ticket = backend.enqueue(&[Row { sample: Some(SamplingParams::default()), ..good }]).unwrap();
    assert!(matches!(
        backend.wait(kvrelay_engine::backend::Ticket(9)),
        Err(BackendError::Ticket { expected: 1, found: 9 })
    ));
    backend.wait(ticket).unwrap();
    assert!(backend.wait(ticket).is_err());
    backend.release(0).unwrap();
    assert!(backend.enqueue(&[Row { input: Input::LastSampled, ..good }]).is_err());
    assert!(backend.release(8).unwrap_err().to_string().contains("at most 7, found 8"));
    let long = Limits { max_positions: 257, ..limits() };
    let error = CpuBackend::new(weights, &CpuConfig::default(), long).unwrap_err().to_string();
    assert!(
        error.contains("positions: expected at most 256, the model's context length, found 257"),
        "{error}"
    );
}

#[test]
fn progress_follows_the_layer_groups() {
    let weights = weights(&TinyLlama::default(), Tier::Scalar);
    let mut backend = backend(&weights, 2);
    let progress = backend.progress().clone();
    let pool = backend.pool().clone();
    let blocks: Vec<u32> = (0..16).collect();
    let text = ids(4, 100);
    let ticket = backend.enqueue(&[row(0, &text, 0, &blocks)]).unwrap();
    for group in 0..pool.geometry().num_layer_groups {
        progress.wait(ticket, group).unwrap();
        let mut out = vec![0.0; pool.geometry().group_range(group).len()];
        // SAFETY: the step has written this group of the block and writes no more to it.
        unsafe { pool.read_group(0, group, &mut out) };
        assert!(out.iter().any(|&x| x != 0.0));
    }
    backend.wait(ticket).unwrap();
    drop(backend);
    let later = kvrelay_engine::backend::Ticket(ticket.0 + 1);
    assert!(matches!(progress.wait(later, 0), Err(BackendError::Stopped(_))));
}

/// A number that is none stops its own step, with the row's name, and no later one.
#[test]
fn a_broken_row_is_an_error_of_its_step() {
    let weights = weights(&TinyLlama::default(), Tier::Scalar);
    let mut backend = backend(&weights, 1);
    let blocks: Vec<u32> = (0..16).collect();
    spoil(&backend);
    // Position 0 was never run, so this row reads garbage.
    let broken = Row { sample: Some(SamplingParams::default()), ..row(2, &[5], 1, &blocks) };
    let ticket = backend.enqueue(&[broken]).unwrap();
    let error = backend.wait(ticket).unwrap_err();
    assert!(matches!(error, BackendError::NotFinite { row: 0, slot: 2, .. }), "{error}");
    let good = Row { sample: Some(SamplingParams::default()), ..row(2, &[5], 0, &blocks) };
    let ticket = backend.enqueue(&[good]).unwrap();
    assert!(backend.wait(ticket).unwrap().rows[0].token.is_some());
}
