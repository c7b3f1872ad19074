//! Every tier and every storage of weights, against the CPU: teacher-forced logits.

use kvrelay_emulator::{Emulated, test_name};
use kvrelay_engine::backend::cuda::CudaConfig;
use kvrelay_engine::backend::{Backend, Logits, Row};
use kvrelay_model::DType;

use crate::common::{alone, backend, cpu, fast, ids, invariant, row, run, tables, tiny, weights};

/// How far a logit may be off, where bf16 rounds weights, activations and KV.
const WITHIN: f32 = 3e-2;

/// A first choice that leads by more must be the same.
const MARGIN: f32 = 0.1;

fn compare(what: &str, vocab: usize, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let mut worst = 0.0_f32;
    for (position, (found, expected)) in found.chunks(vocab).zip(expected.chunks(vocab)).enumerate() {
        for (f, e) in found.iter().zip(expected) {
            assert!(f.is_finite(), "{what}: position {position}");
            worst = worst.max((f - e).abs());
        }
        let mut order: Vec<usize> = (0..vocab).collect();
        order.sort_by(|&a, &b| expected[b].total_cmp(&expected[a]));
        if expected[order[0]] - expected[order[1]] > MARGIN {
            let first = (0..vocab).max_by(|&a, &b| found[a].total_cmp(&found[b])).unwrap();
            assert_eq!(first, order[0], "{what}: first choice at position {position}");
        }
    }
    println!("{what}: off by {worst}");
    assert!(worst <= WITHIN, "{what}: off by {worst}");
}

/// A prompt in one piece, then in chunks and single tokens, in each tier.
fn check(dtype: DType, tied: bool) {
    let model = kvrelay_model::testing::TinyLlama { tied, ..tiny(dtype) }.model();
    let text = ids(5, 40);
    let expected = alone(&mut cpu(&model), &text);
    let weights = weights(&model);
    let tiers =
        [("fast", fast()), ("own", CudaConfig { cublas: false, ..fast() }), ("invariant", invariant())];
    for (tier, config) in tiers {
        let mut backend = backend(&weights, &config);
        assert_eq!(backend.name().contains("cuBLAS"), tier == "fast", "{}", backend.name());
        let vocab = backend.vocab_size();
        let what = format!("{} in the {tier} tier", dtype.name());
        compare(&what, vocab, &alone(&mut backend, &text), &expected);
        let table = &tables(1, 1)[0];
        let mut pieces = vec![];
        for (start, end) in [(0, 7), (7, 8), (8, 9), (9, 24), (24, 25), (25, 40)] {
            let piece = Row { logits: Logits::All, ..row(2, &text[start..end], start, table) };
            pieces.extend(run(&mut backend, &[piece]).remove(0));
        }
        compare(&format!("{what}, in pieces"), vocab, &pieces, &expected);
    }
}

#[test]
fn numbers_of_16_bits() {
    Emulated::new(test_name!()).run(|| {
        check(DType::BF16, false);
        check(DType::F16, true);
    });
}

#[test]
fn numbers_of_32_bits() {
    Emulated::new(test_name!()).run(|| check(DType::F32, false));
}

#[test]
fn quantised_numbers() {
    Emulated::new(test_name!()).run(|| {
        check(DType::Q8_0, true);
        check(DType::Q4_0, false);
        check(DType::Q4_1, false);
    });
}
