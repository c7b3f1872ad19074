//! The splits of decode attention, each against its oracle: sums in f32 of products of 16-bit numbers. And the
//! law: with the invariant split, a row's result is the same to the bit in any batch.

use cudarc::driver::CudaSlice;
use half::{bf16, f16};
use kvrelay_kernels::launch::{
    AttentionDecode, AttentionDecodeCombine, DecodePlan, DecodeRows, Element, HEAD_DIMS,
    INVARIANT_SPLIT_TOKENS, KvLayout, Split,
};

use crate::device::Device;
use crate::numbers::{Numbers, Within, compare, compare_not_finite, identical, spacing, wide};
use crate::oracle::attention_decode::part;
use crate::oracle::attention_prefill::attention;
use crate::paged::Pool;

/// Lengths around a block, a part's share and a split; a padded row.
const LENGTHS: [usize; 7] = [1, 15, 16, 17, 0, INVARIANT_SPLIT_TOKENS, INVARIANT_SPLIT_TOKENS + 3];

pub(crate) fn check(device: &Device) {
    for head_dim in HEAD_DIMS {
        for (q_heads, kv_heads) in [(2, 2), (2, 1), (4, 1), (8, 1)] {
            let layout = KvLayout { block_size: 16, num_layers: 2, kv_heads, head_dim };
            one::<bf16>(device, layout, q_heads, &LENGTHS[..4], Split::Invariant);
            one::<f16>(device, layout, q_heads, &LENGTHS[..4], Split::Invariant);
        }
    }
    // Groups that are no power of two, and more heads than a block takes.
    for (q_heads, kv_heads) in [(6, 2), (7, 1), (16, 1), (22, 2)] {
        let layout = KvLayout { block_size: 5, num_layers: 1, kv_heads, head_dim: 80 };
        one::<bf16>(device, layout, q_heads, &[3, 41], Split::Invariant);
    }
    let layout = KvLayout { block_size: 16, num_layers: 1, kv_heads: 1, head_dim: 64 };
    one::<bf16>(device, layout, 4, &LENGTHS, Split::Invariant);
    one::<f16>(device, layout, 1, &LENGTHS, Split::Fast { multiprocessors: 30 });
    one::<f16>(device, layout, 2, &[200], Split::Fast { multiprocessors: 1 });
    let mut shapes = Numbers::of_this_run();
    for split in [Split::Invariant, Split::Fast { multiprocessors: 40 }] {
        let [block_size, kv_heads, group] = [33, 3, 12].map(|most| shapes.between(1, most));
        let layout = KvLayout { block_size, num_layers: 2, kv_heads, head_dim: HEAD_DIMS[shapes.below(5)] };
        let lengths = [(); 3].map(|()| shapes.between(1, 400));
        one::<bf16>(device, layout, kv_heads * group, &lengths, split);
    }
    company_changes_nothing::<bf16>(device);
    company_changes_nothing::<f16>(device);
    infinite_values_stay_with_those_that_see_them::<bf16>(device);
    infinite_values_stay_with_those_that_see_them::<f16>(device);
    scores_may_be_far_below_zero(device);
}

fn scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}

/// A batch on the device: row i sees the first `lengths[i]` tokens of sequence `sequences[i]`, or of i.
struct Batch<'a, T> {
    pool: &'a Pool<T>,
    q: &'a [T],
    q_heads: usize,
    lengths: &'a [usize],
    sequences: Option<&'a [i32]>,
    plan: DecodePlan,
}

impl<T: Element> Batch<'_, T> {
    fn lengths_there(&self, device: &Device) -> CudaSlice<i32> {
        device.upload(&self.lengths.iter().map(|&length| length as i32).collect::<Vec<_>>())
    }

    /// The splits' outputs and sums.
    fn splits(&self, device: &Device) -> [CudaSlice<f32>; 2] {
        let head_dim = self.pool.layout.head_dim;
        let lens = self.plan.workspace_len(self.lengths.len(), self.q_heads, head_dim);
        let [mut outputs, mut sums] = lens.map(|len| device.unwritten::<f32>(len));
        let (q, tables) = (device.upload(self.q), device.upload(&self.pool.tables));
        let lengths = self.lengths_there(device);
        let sequences = self.sequences.map(|sequences| device.upload(sequences));
        let parameters = AttentionDecode {
            outputs: outputs.as_view_mut(),
            sums: sums.as_view_mut(),
            q: q.as_view(),
            kv: self.pool.layer(),
            rows: DecodeRows {
                lengths: lengths.as_view(),
                sequences: sequences.as_ref().map(|sequences| sequences.as_view()),
                tables: tables.as_view(),
                max_blocks: self.pool.max_blocks,
            },
            plan: self.plan,
            q_heads: self.q_heads,
            q_stride: self.q.len() / self.lengths.len(),
            scale: scale(head_dim),
        };
        parameters.launch(&device.kernels, &device.stream).unwrap();
        [outputs, sums]
    }

    /// `[rows][q_heads][head_dim]`
    fn outputs(&self, device: &Device) -> Vec<T> {
        let head_dim = self.pool.layout.head_dim;
        let [outputs, sums] = self.splits(device);
        let lengths = self.lengths_there(device);
        let mut out = device.upload(&vec![T::from_f32(7.0); self.lengths.len() * self.q_heads * head_dim]);
        let parameters = AttentionDecodeCombine {
            out: out.as_view_mut(),
            outputs: outputs.as_view(),
            sums: sums.as_view(),
            lengths: lengths.as_view(),
            plan: self.plan,
            q_heads: self.q_heads,
            head_dim,
        };
        parameters.launch(&device.kernels, &device.stream).unwrap();
        device.download(&out)
    }
}

fn one<T: Element>(device: &Device, layout: KvLayout, q_heads: usize, lengths: &[usize], split: Split) {
    let KvLayout { kv_heads, head_dim, .. } = layout;
    let mut numbers = Numbers::new((head_dim + q_heads) as u64);
    let pool = Pool::<T>::new(device, &mut numbers, layout, layout.num_layers - 1, lengths);
    let stride = (q_heads + 1) * head_dim;
    let q: Vec<T> = numbers.elements(lengths.len() * stride, 4.0);
    let longest = lengths.iter().copied().max().unwrap();
    let plan = DecodePlan::new(split, lengths.len(), kv_heads, q_heads / kv_heads, longest);
    let batch = Batch { pool: &pool, q: &q, q_heads, lengths, sequences: None, plan };
    let [outputs, sums] = batch.splits(device).map(|memory| device.download(&memory));

    let q = wide(&q);
    for (row, &length) in lengths.iter().enumerate() {
        for head in 0..q_heads {
            let [keys, values] = pool.keys_and_values(row, head / (q_heads / kv_heads), length);
            for s in 0..length.div_ceil(plan.split_tokens) {
                let tokens =
                    s * plan.split_tokens * head_dim..length.min((s + 1) * plan.split_tokens) * head_dim;
                let query = &q[row * stride + head * head_dim..][..head_dim];
                let part = part(query, &keys[tokens.clone()], &values[tokens], f64::from(scale(head_dim)));
                let place = (row * q_heads + head) * plan.max_splits + s;
                let what = format!(
                    "attention_decode_{} with {q_heads} heads in {layout:?}, row {row} of {length}, head {head}, split {s}",
                    T::NAME
                );
                let [largest, sum] = [0, 1].map(|i| f64::from(sums[place * 2 + i]));
                compare(&what, &[largest], &[part.largest], Within { relative: 1e-5, absolute: 2e-5 });
                compare(&what, &[sum], &[part.sum], Within { relative: 5e-5, absolute: 0.0 });
                let output: Vec<f64> =
                    outputs[place * head_dim..][..head_dim].iter().map(|&x| x.into()).collect();
                compare(&what, &output, &part.output, Within { relative: 0.0, absolute: 5e-5 * part.sum });
            }
        }
    }
}

fn company_changes_nothing<T: Element>(device: &Device) {
    let (head_dim, q_heads) = (64, 4);
    let layout = KvLayout { block_size: 16, num_layers: 1, kv_heads: 2, head_dim };
    let mut numbers = Numbers::new(9);
    let lengths = [INVARIANT_SPLIT_TOKENS + 40, 3, 700];
    let pool = Pool::<T>::new(device, &mut numbers, layout, 0, &lengths);
    let row = q_heads * head_dim;
    let q: Vec<T> = numbers.elements(4 * row, 4.0);
    let bits = |elements: &[T]| elements.iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>();
    let run = |rows: &[usize], sequences: Option<&[i32]>, lengths: &[usize]| {
        let q: Vec<T> = rows.iter().flat_map(|&r| &q[r * row..(r + 1) * row]).copied().collect();
        let longest = lengths.iter().copied().max().unwrap();
        let plan = DecodePlan::new(Split::Invariant, lengths.len(), 2, 2, longest);
        bits(&Batch { pool: &pool, q: &q, q_heads, lengths, sequences, plan }.outputs(device))
    };
    let together = run(&[0, 1, 2], None, &lengths);
    for (i, &length) in lengths.iter().enumerate() {
        identical("a row alone", &run(&[i], Some(&[i as i32]), &[length]), &together[i * row..(i + 1) * row]);
    }
    // Two rows of one sequence, one of which stands before the other, and a padded row between.
    let mixed = run(&[3, 1, 0], Some(&[0, 0, 0]), &[100, 0, lengths[0]]);
    identical("the last of several rows", &mixed[2 * row..], &together[..row]);
    identical("a row before the end", &mixed[..row], &run(&[3], Some(&[0]), &[100]));
    identical("a padded row", &mixed[row..2 * row], &vec![0; row]);
}

/// A row a token of one sequence: one that does not see an infinite value does not notice, one that does
/// has what the oracle says.
fn infinite_values_stay_with_those_that_see_them<T: Element>(device: &Device) {
    const TOKENS: usize = 80;
    for (head_dim, q_heads) in [(64, 1), (80, 8), (128, 2), (256, 4)] {
        let layout = KvLayout { block_size: 16, num_layers: 1, kv_heads: 1, head_dim };
        let row = q_heads * head_dim;
        // Small, so that no weight vanishes.
        let q: Vec<T> = Numbers::new(3).elements(TOKENS * row, 0.5);
        let lengths: Vec<usize> = (1..=TOKENS).collect();
        let plan = DecodePlan::new(Split::Invariant, TOKENS, 1, q_heads, TOKENS);
        for (token, number) in [(40, f32::INFINITY), (3, f32::NAN)] {
            let mut pool = Pool::<T>::new(device, &mut Numbers::new(8), layout, 0, &[TOKENS]);
            pool.set(device, 0, token, 1, number);
            let sequences = Some(&[0; TOKENS][..]);
            let batch = Batch { pool: &pool, q: &q, q_heads, lengths: &lengths, sequences, plan };
            let found = wide(&batch.outputs(device));
            let ([keys, values], q) = (pool.keys_and_values(0, 0, TOKENS), wide(&q));
            for (head, found) in found.chunks(head_dim).enumerate() {
                let seen = (head / q_heads + 1) * head_dim;
                let query = &q[head * head_dim..][..head_dim];
                let expected = attention(query, &keys[..seen], &values[..seen], f64::from(scale(head_dim)));
                let what = format!("value {number} of token {token}, head {head} of {head_dim}");
                let within = Within { relative: spacing::<T>(), absolute: 1e-4 };
                compare_not_finite(&what, found, &expected, within);
            }
        }
    }
}

/// Scores are finite far below -1e30, where all keys but one are beyond reach.
fn scores_may_be_far_below_zero(device: &Device) {
    const TOKENS: usize = INVARIANT_SPLIT_TOKENS + 20;
    let layout = KvLayout { block_size: 16, num_layers: 1, kv_heads: 1, head_dim: 64 };
    let mut pool = Pool::<bf16>::new(device, &mut Numbers::new(4), layout, 0, &[TOKENS]);
    for token in 0..TOKENS {
        pool.set(device, 0, token, 0, if token == 5 { -1e16 } else { -2e16 });
    }
    let q = [bf16::from_f32(1e16); 64];
    for length in [6, 60, TOKENS] {
        let lengths = [length];
        let plan = DecodePlan::new(Split::Invariant, 1, 1, 1, length);
        let batch = Batch { pool: &pool, q: &q, q_heads: 1, lengths: &lengths, sequences: None, plan };
        let [_, values] = pool.keys_and_values(0, 0, 6);
        let exact = Within { relative: 0.0, absolute: 0.0 };
        compare("scores below -1e30", &wide(&batch.outputs(device)), &values[5 * 64..], exact);
    }
}
