//! Sampling: the very tokens of the CPU's sampler.

use kvrelay_kernels::launch::Sample;
use kvrelay_model::SamplingParams;

use crate::device::Device;
use crate::numbers::{Numbers, identical};
use crate::oracle::sample::sample;

/// One row's request.
struct Row {
    logits: Vec<f32>,
    params: SamplingParams,
    position: u64,
}

pub(crate) fn check(device: &Device) {
    let random_vocab = Numbers::of_this_run().between(2, 3000);
    for vocab in [1, 2, 5, 33, 1024, 1025, 2500, random_vocab] {
        let mut numbers = Numbers::new(vocab as u64);
        let made_up = |numbers: &mut Numbers| {
            let spread = [0.0, 0.1, 4.0, 30.0][numbers.below(4)];
            numbers.floats(vocab, spread)
        };
        random(device, &mut numbers, vocab, 24, made_up);
        // A few values only, so that many are equal, and both zeros.
        let ties =
            |numbers: &mut Numbers| (0..vocab).map(|_| [0.0, -0.0, 1.0, -2.5][numbers.below(4)]).collect();
        random(device, &mut numbers, vocab, 24, ties);
    }
    extremes(device);
    out_of_range(device);
    not_finite(device);
}

fn random(
    device: &Device,
    numbers: &mut Numbers,
    vocab: usize,
    rows: usize,
    logits: impl Fn(&mut Numbers) -> Vec<f32>,
) {
    let top_ks = [0, -1, 1, 2, 7, 50, vocab as i64 - 1, vocab as i64, vocab as i64 + 1, i64::from(i32::MAX)];
    let rows = (0..rows).map(|_| {
        let params = SamplingParams {
            temperature: [0.0, 0.3, 1.0, 2.0][numbers.below(4)],
            top_k: top_ks[numbers.below(top_ks.len())],
            top_p: [1.0, 1.0, 0.5, 0.9, 0.01, 0.9999, f32::MIN_POSITIVE][numbers.below(7)],
            seed: numbers.bits(),
        };
        let position = numbers.bits() >> [0, 31, 55][numbers.below(3)];
        Row { logits: logits(numbers), params, position }
    });
    compare(device, vocab, &rows.collect::<Vec<_>>());
}

fn extremes(device: &Device) {
    let logits = vec![1e30, -1e30, 0.0, f32::MAX, f32::MAX, f32::MIN, -f32::MIN_POSITIVE];
    let mut rows = Vec::new();
    for temperature in [f32::from_bits(1), f32::MIN_POSITIVE, 1e-30, 1e30, f32::MAX] {
        for (top_k, top_p) in [(0, 1.0), (3, 1.0), (0, 0.9), (5, 0.4)] {
            let params = SamplingParams { temperature, top_k, top_p, seed: u64::MAX };
            rows.push(Row { logits: logits.clone(), params, position: 1 << 40 });
        }
    }
    compare(device, logits.len(), &rows);
}

/// What no valid request has means the same as on the CPU.
fn out_of_range(device: &Device) {
    let mut numbers = Numbers::new(6);
    let mut rows = Vec::new();
    for top_p in [0.0, -0.0, -1.0, f32::NEG_INFINITY, 1.5, f32::INFINITY, f32::NAN, 0.9] {
        for temperature in [1.0, -1.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            for top_k in [0, 7, -5] {
                let params = SamplingParams { temperature, top_k, top_p, seed: numbers.bits() };
                rows.push(Row { logits: numbers.floats(40, 2.0), params, position: 3 });
            }
        }
    }
    compare(device, 40, &rows);
}

fn not_finite(device: &Device) {
    let mut rows = Vec::new();
    for wrong in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (first, second, temperature) in [(0, 299, 0.0), (40, 41, 1.0), (299, 299, 1.0)] {
            let mut logits = vec![0.5; 300];
            logits[second] = f32::NAN;
            logits[first] = wrong;
            rows.push(Row {
                logits,
                params: SamplingParams { temperature, ..Default::default() },
                position: 3,
            });
        }
    }
    compare(device, 300, &rows);
}

fn compare(device: &Device, vocab: usize, rows: &[Row]) {
    let of = |get: fn(&Row) -> f32| device.upload(&rows.iter().map(get).collect::<Vec<_>>());
    let whole = |get: fn(&Row) -> u64| device.upload(&rows.iter().map(get).collect::<Vec<_>>());
    let logits = device.upload(&rows.iter().flat_map(|row| row.logits.clone()).collect::<Vec<_>>());
    let top_ks = device.upload(&rows.iter().map(|row| row.params.top_k as i32).collect::<Vec<_>>());
    let (temperatures, top_ps) = (of(|row| row.params.temperature), of(|row| row.params.top_p));
    let (seeds, positions) = (whole(|row| row.params.seed), whole(|row| row.position));
    let mut tokens = device.unwritten::<i32>(rows.len());
    let parameters = Sample {
        tokens: tokens.as_view_mut(),
        logits: logits.as_view(),
        temperatures: temperatures.as_view(),
        top_ks: top_ks.as_view(),
        top_ps: top_ps.as_view(),
        seeds: seeds.as_view(),
        positions: positions.as_view(),
        vocab,
    };
    parameters.launch(&device.kernels, &device.stream).unwrap();
    let expected: Vec<i32> = rows.iter().map(|row| sample(&row.logits, &row.params, row.position)).collect();
    identical(&format!("tokens of {vocab}"), &device.download(&tokens), &expected);
}
