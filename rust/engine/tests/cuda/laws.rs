//! Law 1a: in the invariant tier a row's logits are, bit for bit, a function of weights, ids and
//! positions alone, whatever the companions, chunks, blocks or pool.

use std::sync::Arc;

use kvrelay_emulator::{Emulated, test_name};
use kvrelay_engine::backend::cuda::CudaWeights;
use kvrelay_engine::backend::{Backend, Logits, Row, copy_blocks};
use kvrelay_model::DType;
use kvrelay_model::sampling::uniform;

use crate::common::{BLOCK, alone, backend, bits, ids, invariant, row, run, spoil, tables, tiny, weights};

#[derive(Debug)]
struct Case {
    seed: u64,
    lengths: Vec<usize>,
    chunks: Vec<usize>,
    relay: bool,
}

impl Case {
    fn new(seed: u64) -> Self {
        let below = |stream: u64, limit: usize| (uniform(seed, stream) * limit as f64) as usize;
        let borders = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1];
        let length = |i: u64| {
            if below(10 + i, 2) == 0 { borders[below(20 + i, borders.len())] } else { 1 + below(30 + i, 24) }
        };
        Self {
            seed,
            lengths: (0..1 + below(1, 3) as u64).map(length).collect(),
            chunks: (0..1 + below(2, 5) as u64).map(|i| 1 + below(40 + i, 12)).collect(),
            relay: below(3, 2) == 0,
        }
    }
}

/// Runs the sequences of a case together, in chunks, over scattered blocks that held garbage; on the
/// way, with `relay`, everything moves to another backend's pool.
fn check(weights: &Arc<CudaWeights>, case: &Case) {
    let mut here = backend(weights, &invariant());
    let mut there = backend(weights, &invariant());
    let n = case.lengths.len();
    let texts: Vec<Vec<u32>> = (0..n).map(|i| ids(case.seed ^ i as u64, case.lengths[i])).collect();
    let (mut table, other) = (tables(case.seed, n), tables(case.seed + 1, n));
    let mut done = vec![0; n];
    let mut logits: Vec<Vec<u32>> = vec![vec![]; n];
    spoil(&here);
    spoil(&there);
    let mut moved = false;
    for step in 0.. {
        if case.relay && step == 2 && !moved {
            let pairs: Vec<(u32, u32)> = table.concat().into_iter().zip(other.concat()).collect();
            for group in 0..here.pool().geometry().num_layer_groups {
                // SAFETY: no step is running on either side.
                unsafe { copy_blocks(here.pool(), there.pool(), &pairs, Some(group)).unwrap() };
            }
            std::mem::swap(&mut here, &mut there);
            table.clone_from(&other);
            moved = true;
        }
        // Sequences join one step apart, so that companions differ at every step.
        let active: Vec<usize> = (0..n).filter(|&i| i <= step && done[i] < texts[i].len()).collect();
        if active.is_empty() && step >= n {
            break;
        }
        let size = |i: usize, done: &[usize]| {
            case.chunks[(step + i) % case.chunks.len()].min(texts[i].len() - done[i])
        };
        let rows: Vec<Row<'_>> = active
            .iter()
            .map(|&i| {
                let chunk = &texts[i][done[i]..done[i] + size(i, &done)];
                Row { logits: Logits::All, ..row(i as u32, chunk, done[i], &table[i]) }
            })
            .collect();
        let outputs = run(&mut here, &rows);
        for (&i, numbers) in active.iter().zip(outputs) {
            done[i] += size(i, &done);
            logits[i].extend(bits(&numbers));
        }
    }
    for (text, found) in texts.iter().zip(logits) {
        assert!(found == bits(&alone(&mut there, text)), "{case:?}");
    }
}

fn cases(dtype: DType, seeds: std::ops::Range<u64>) {
    let weights = weights(&tiny(dtype).model());
    for seed in seeds {
        check(&weights, &Case::new(seed));
    }
}

#[test]
fn logits_depend_on_the_row_alone() {
    Emulated::new(test_name!()).set("ORDER", "random").run(|| cases(DType::BF16, 0..12));
}

#[test]
fn so_do_those_of_quantised_weights() {
    let test = Emulated::new(test_name!());
    test.set("ORDER", "reverse").set("JITTER_US", 300).run(|| cases(DType::Q4_1, 100..106));
}

/// One operation at a time, of a stream drawn from a seed, and only when somebody waits: a wait that
/// was forgotten shows.
#[test]
fn streams_wait_for_each_other() {
    for seed in 0..3 {
        let test = Emulated::new(test_name!()).set("STREAMS", "deferred").set("SEED", seed);
        test.run(|| cases(DType::BF16, 200..203));
    }
}
