//! Law 1a in the invariant tier, see `law`.

use kvrelay_emulator::{Emulated, test_name};
use kvrelay_model::DType;
use kvrelay_model::sampling::uniform;

use crate::common::{BLOCK, backend, invariant, tiny, weights};
use crate::law::{Case, check};

fn case(seed: u64) -> Case {
    let below = |stream: u64, limit: usize| (uniform(seed, stream) * limit as f64) as usize;
    let borders = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1];
    let length = |i: u64| {
        if below(10 + i, 2) == 0 { borders[below(20 + i, borders.len())] } else { 1 + below(30 + i, 24) }
    };
    Case {
        seed,
        lengths: (0..1 + below(1, 3) as u64).map(length).collect(),
        chunks: (0..1 + below(2, 5) as u64).map(|i| 1 + below(40 + i, 12)).collect(),
        relay: below(3, 2) == 0,
    }
}

fn cases(dtype: DType, seeds: std::ops::Range<u64>) {
    let weights = weights(&tiny(dtype).model());
    for seed in seeds {
        let [here, there, alone] = [(); 3].map(|()| backend(&weights, &invariant()));
        check(&case(seed), here, there, alone);
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
