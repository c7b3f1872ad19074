//! Law 1a, for every device: a row's logits are, bit for bit, a function of weights, ids and positions
//! alone, whatever the companions, chunks, blocks or pool.

use kvrelay_engine::backend::{Backend, Input, Logits, Row, RowOutput, copy_blocks};

pub(crate) const BLOCK: usize = 8;
pub(crate) const BLOCKS: usize = 64;

pub(crate) fn row<'a>(slot: u32, ids: &'a [u32], start: usize, blocks: &'a [u32]) -> Row<'a> {
    Row {
        slot,
        input: Input::Tokens(ids),
        start: start as u32,
        blocks,
        sample: None,
        logits: Logits::Nothing,
    }
}

/// Ordinary ids, others for every seed.
pub(crate) fn ids(seed: u64, count: usize) -> Vec<u32> {
    (0..count as u64).map(|i| (kvrelay_model::sampling::uniform(seed, i) * 270.0) as u32).collect()
}

/// A block table for each sequence out of one shuffled pool, none shared.
pub(crate) fn tables(seed: u64, sequences: usize) -> Vec<Vec<u32>> {
    let mut order: Vec<u32> = (0..BLOCKS as u32).collect();
    order.sort_by_key(|&b| kvrelay_core::rng::philox4x32([seed as u32, 1], [b, 0, 0, 0])[0]);
    order.chunks(BLOCKS / sequences).take(sequences).map(<[u32]>::to_vec).collect()
}

/// Runs a step; the logits that each row asked for.
pub(crate) fn run(backend: &mut dyn Backend, rows: &[Row<'_>]) -> Vec<Vec<f32>> {
    let vocab = backend.vocab_size();
    let ticket = backend.enqueue(rows).unwrap();
    let output = backend.wait(ticket).unwrap();
    let of = |r: &RowOutput| {
        output.logits[r.first_logits * vocab..(r.first_logits + r.num_logits) * vocab].to_vec()
    };
    output.rows.iter().map(of).collect()
}

/// All logits of `ids`, alone, in one piece.
pub(crate) fn alone(backend: &mut dyn Backend, ids: &[u32]) -> Vec<f32> {
    let blocks: Vec<u32> = (0..BLOCKS as u32).collect();
    let whole = Row { logits: Logits::All, ..row(0, ids, 0, &blocks) };
    run(backend, &[whole]).remove(0)
}

/// Fills every block with numbers that would be noticed.
pub(crate) fn spoil(backend: &dyn Backend) {
    let pool = backend.pool();
    for group in 0..pool.geometry().num_layer_groups {
        let garbage = vec![f32::NAN; pool.geometry().group_range(group).len()];
        for block in 0..pool.num_blocks() as u32 {
            // SAFETY: no step is running.
            unsafe { pool.write_group(block, group, &garbage) };
        }
    }
}

pub(crate) fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// Sequences that are run together, each in chunks.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) seed: u64,
    pub(crate) lengths: Vec<usize>,
    pub(crate) chunks: Vec<usize>,
    /// On the way everything moves to another backend's pool.
    pub(crate) relay: bool,
}

/// Runs the sequences of a case together, in chunks, over scattered blocks that held garbage; on the
/// way, with `relay`, everything moves from `here` to `there`. All logits must be those of each sequence
/// alone, as `alone` has them.
pub(crate) fn check<B: Backend>(case: &Case, mut here: B, mut there: B, mut alone: B) {
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
        assert!(found == bits(&self::alone(&mut alone, text)), "{case:?}");
    }
}
