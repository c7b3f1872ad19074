//! Every tier and every storage of weights, against the CPU: teacher-forced logits.

use kvrelay_emulator::{Emulated, test_name};
use kvrelay_engine::backend::cuda::CudaConfig;
use kvrelay_engine::backend::{Backend, Logits, Row};
use kvrelay_model::DType;

use crate::common::{alone, backend, cpu, fast, ids, invariant, row, run, tables, tiny, weights};

/// How far a position's logits may be off, as a share of their size: bf16 keeps 8 bits of every weight,
/// activation, key and value, and some twenty such roundings follow each other.
const WITHIN: f64 = 3e-2;

/// A first choice that leads by more must be the same.
const MARGIN: f32 = 0.1;

fn size(numbers: impl Iterator<Item = f32>) -> f64 {
    numbers.map(|number| f64::from(number).powi(2)).sum::<f64>().sqrt()
}

fn first_and_lead(logits: &[f32]) -> (usize, f32) {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    (order[0], logits[order[0]] - logits[order[1]])
}

fn compare(what: &str, vocab: usize, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let mut num_leading = 0;
    for (position, (found, expected)) in found.chunks(vocab).zip(expected.chunks(vocab)).enumerate() {
        let off = size(found.iter().zip(expected).map(|(f, e)| f - e)) / size(expected.iter().copied());
        // Not a number is never near.
        assert!(off <= WITHIN, "{what}: position {position} is off by {off}");
        let (first, lead) = first_and_lead(expected);
        if lead > MARGIN {
            num_leading += 1;
            assert_eq!(first_and_lead(found).0, first, "{what}: first choice at position {position}");
        }
    }
    assert!(num_leading * 2 > expected.len() / vocab, "{what}: {num_leading} first choices lead by {MARGIN}");
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
