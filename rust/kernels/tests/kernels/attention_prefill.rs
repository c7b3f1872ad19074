//! Prefill attention: weights and outputs are rounded to 16 bits, so that an output is off by half a
//! spacing of the largest value, and half of its own. And the law: how a prompt is cut into chunks, and who
//! else is in the batch, changes no bit of a row.

use half::{bf16, f16};
use kvrelay_kernels::launch::{AttentionPrefill, Element, HEAD_DIMS, KvLayout};

use crate::device::Device;
use crate::numbers::{Numbers, Within, compare, compare_not_finite, identical, spacing, wide};
use crate::oracle::attention_prefill::attention;
use crate::paged::Pool;

/// New tokens of a sequence, behind a prefix that the KV already holds.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    prefix: usize,
    new: usize,
}

pub(crate) fn check(device: &Device) {
    for head_dim in HEAD_DIMS {
        both(device, 16, head_dim, 2, 2, &[(0, 1), (0, 15), (0, 16), (0, 17)]);
        both(device, 5, head_dim, 3, 1, &[(40, 3), (0, 0), (30, 66)]);
    }
    for (q_heads, kv_heads) in [(1, 1), (4, 2), (6, 2), (4, 1), (7, 1), (8, 1), (16, 1)] {
        let layout = KvLayout { block_size: 16, num_layers: 2, kv_heads, head_dim: 64 };
        one::<bf16>(device, layout, q_heads, &[Chunk { prefix: 63, new: 2 }]);
    }
    // A first and a last sequence with nothing new.
    both(device, 16, 80, 2, 1, &[(17, 0), (3, 130), (0, 0)]);
    let mut shapes = Numbers::of_this_run();
    let [block_size, kv_heads, group] = [33, 2, 3].map(|most| shapes.between(1, most));
    let chunks = [(); 3].map(|()| (shapes.below(80), shapes.below(80) + 1));
    both(device, block_size, HEAD_DIMS[shapes.below(5)], kv_heads * group, kv_heads, &chunks);
    chunks_change_nothing::<bf16>(device, 64);
    chunks_change_nothing::<f16>(device, 256);
    what_comes_later_changes_nothing::<bf16>(device, 64);
    what_comes_later_changes_nothing::<f16>(device, 80);
    what_comes_later_changes_nothing::<bf16>(device, 256);
    scores_may_be_far_below_zero::<bf16>(device);
}

fn both(
    device: &Device,
    block_size: usize,
    head_dim: usize,
    q_heads: usize,
    kv_heads: usize,
    chunks: &[(usize, usize)],
) {
    let layout = KvLayout { block_size, num_layers: 2, kv_heads, head_dim };
    let chunks: Vec<Chunk> = chunks.iter().map(|&(prefix, new)| Chunk { prefix, new }).collect();
    one::<bf16>(device, layout, q_heads, &chunks);
    one::<f16>(device, layout, q_heads, &chunks);
}

fn scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}

/// A row of q is `[q_heads + 3][head_dim]`: rows need not be next to each other.
fn q_stride(q_heads: usize, head_dim: usize) -> usize {
    (q_heads + 3) * head_dim
}

/// The outputs, `[rows][q_heads][head_dim]`, of chunks whose rows are those of `q` in order; chunk i belongs to
/// sequence i of the pool.
fn launch<T: Element>(device: &Device, pool: &Pool<T>, q: &[T], q_heads: usize, chunks: &[Chunk]) -> Vec<T> {
    let head_dim = pool.layout.head_dim;
    let rows: usize = chunks.iter().map(|chunk| chunk.new).sum();
    let mut first_rows = vec![0];
    for chunk in chunks {
        first_rows.push(first_rows[first_rows.len() - 1] + chunk.new as i32);
    }
    let contexts: Vec<i32> = chunks.iter().map(|chunk| (chunk.prefix + chunk.new) as i32).collect();
    let (q_there, tables) = (device.upload(q), device.upload(&pool.tables));
    let (first_rows, contexts) = (device.upload(&first_rows), device.upload(&contexts));
    let mut out = device.upload(&vec![T::from_f32(7.0); rows * q_heads * head_dim]);
    let parameters = AttentionPrefill {
        out: out.as_view_mut(),
        q: q_there.as_view(),
        kv: pool.layer(),
        first_rows: first_rows.as_view(),
        contexts: contexts.as_view(),
        tables: tables.as_view(),
        rows,
        max_rows: chunks.iter().map(|chunk| chunk.new).max().unwrap(),
        q_heads,
        q_stride: q_stride(q_heads, head_dim),
        scale: scale(head_dim),
    };
    parameters.launch(&device.kernels, &device.stream).unwrap();
    device.download(&out)
}

fn one<T: Element>(device: &Device, layout: KvLayout, q_heads: usize, chunks: &[Chunk]) {
    let head_dim = layout.head_dim;
    let mut numbers = Numbers::new((head_dim * q_heads + chunks.len()) as u64);
    let lengths: Vec<usize> = chunks.iter().map(|chunk| chunk.prefix + chunk.new).collect();
    let pool = Pool::<T>::new(device, &mut numbers, layout, 1, &lengths);
    let rows: usize = chunks.iter().map(|chunk| chunk.new).sum();
    // Large enough that some keys weigh much more than others.
    let q: Vec<T> = numbers.elements(rows * q_stride(q_heads, head_dim), 4.0);
    let found = wide(&launch(device, &pool, &q, q_heads, chunks));

    let q = wide(&q);
    let mut row = 0;
    for (sequence, chunk) in chunks.iter().enumerate() {
        for head in 0..q_heads {
            let kv_head = head / (q_heads / layout.kv_heads);
            let [keys, values] = pool.keys_and_values(sequence, kv_head, chunk.prefix + chunk.new);
            for i in 0..chunk.new {
                let seen = (chunk.prefix + i + 1) * head_dim;
                let query = &q[(row + i) * q_stride(q_heads, head_dim) + head * head_dim..][..head_dim];
                let expected = attention(query, &keys[..seen], &values[..seen], f64::from(scale(head_dim)));
                let found = &found[((row + i) * q_heads + head) * head_dim..][..head_dim];
                let what = format!(
                    "attention_prefill_{} with {q_heads} heads in {layout:?}, row {i} of {chunk:?}, head {head}",
                    T::NAME
                );
                let half = spacing::<T>() / 2.0;
                compare(&what, found, &expected, Within { relative: half, absolute: half + 1e-5 });
            }
        }
        row += chunk.new;
    }
}

fn chunks_change_nothing<T: Element>(device: &Device, head_dim: usize) {
    const TOKENS: usize = 150;
    let layout = KvLayout { block_size: 16, num_layers: 1, kv_heads: 1, head_dim };
    let q_heads = 2;
    let mut numbers = Numbers::new(head_dim as u64);
    // The sequence itself, and a neighbour.
    let pool = Pool::<T>::new(device, &mut numbers, layout, 0, &[TOKENS, 40]);
    let q: Vec<T> = numbers.elements(TOKENS * q_stride(q_heads, head_dim), 4.0);
    let other: Vec<T> = numbers.elements(40 * q_stride(q_heads, head_dim), 4.0);
    let whole =
        launch(device, &pool, &q, q_heads, &[Chunk { prefix: 0, new: TOKENS }, Chunk { prefix: 0, new: 0 }]);
    let mut in_chunks = Vec::new();
    let mut prefix = 0;
    for new in [1, 63, 64, 5, 16, 1] {
        let mine = &q[prefix * q_stride(q_heads, head_dim)..][..new * q_stride(q_heads, head_dim)];
        let chunks = [Chunk { prefix, new }, Chunk { prefix: 0, new: 40 }];
        let out = launch(device, &pool, &[mine, &other].concat(), q_heads, &chunks);
        in_chunks.extend_from_slice(&out[..new * q_heads * head_dim]);
        prefix += new;
    }
    assert_eq!(prefix, TOKENS);
    let bits = |elements: &[T]| elements.iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>();
    identical("a prompt in chunks", &bits(&in_chunks), &bits(&whole));
}

/// Rows before a token whose key or value is infinite or no number have the bits that they have without it,
/// in one chunk or in several; those that see it have what the oracle says.
fn what_comes_later_changes_nothing<T: Element>(device: &Device, head_dim: usize) {
    const TOKENS: usize = 80;
    let layout = KvLayout { block_size: 16, num_layers: 1, kv_heads: 1, head_dim };
    let q_heads = 2;
    let stride = q_stride(q_heads, head_dim);
    let bits = |elements: &[T]| elements.iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>();
    let pool = || Pool::<T>::new(device, &mut Numbers::new(head_dim as u64), layout, 0, &[TOKENS]);
    // Small, so that no weight vanishes.
    let q: Vec<T> = Numbers::new(3).elements(TOKENS * stride, 0.5);
    let run = |pool: &Pool<T>, chunks: &[usize]| {
        let mut prefix = 0;
        let mut out = Vec::new();
        for &new in chunks {
            let rows = &q[prefix * stride..(prefix + new) * stride];
            out.extend(launch(device, pool, rows, q_heads, &[Chunk { prefix, new }]));
            prefix += new;
        }
        out
    };
    let row = q_heads * head_dim;
    let clean = run(&pool(), &[TOKENS]);
    for (half, token, number) in [
        (1, 40, f32::NAN),
        (1, 70, f32::INFINITY),
        (1, 31, f32::NEG_INFINITY),
        (1, 79, f32::NAN),
        (0, 40, f32::NAN),
        (0, 0, f32::INFINITY),
    ] {
        let mut pool = pool();
        pool.set(device, 0, token, half, number);
        let what = format!("{number} in half {half} of token {token}, heads of {head_dim}");
        let found = run(&pool, &[TOKENS]);
        identical(&what, &bits(&found[..token * row]), &bits(&clean[..token * row]));
        identical(&what, &bits(&run(&pool, &[7, 64, 9])), &bits(&found));
        let ([keys, values], q, found) = (pool.keys_and_values(0, 0, TOKENS), wide(&q), wide(&found));
        for i in token..TOKENS {
            for head in 0..q_heads {
                let seen = (i + 1) * head_dim;
                let query = &q[i * stride + head * head_dim..][..head_dim];
                let expected = attention(query, &keys[..seen], &values[..seen], f64::from(scale(head_dim)));
                let found = &found[i * row + head * head_dim..][..head_dim];
                let half = spacing::<T>() / 2.0;
                let within = Within { relative: half, absolute: half + 1e-5 };
                compare_not_finite(&format!("{what}, row {i}"), found, &expected, within);
            }
        }
    }
}

/// Scores are finite far below -1e30, where all keys but one are beyond reach.
fn scores_may_be_far_below_zero<T: Element>(device: &Device) {
    let layout = KvLayout { block_size: 16, num_layers: 1, kv_heads: 1, head_dim: 64 };
    let mut pool = Pool::<T>::new(device, &mut Numbers::new(4), layout, 0, &[3]);
    for token in 0..3 {
        pool.set(device, 0, token, 0, -1e16 * (1 + token) as f32);
    }
    let q = vec![T::from_f32(1e16); 3 * q_stride(1, 64)];
    let found = wide(&launch(device, &pool, &q, 1, &[Chunk { prefix: 0, new: 3 }]));
    let [_, values] = pool.keys_and_values(0, 0, 1);
    for row in found.chunks(64) {
        compare("scores below -1e30", row, &values, Within { relative: 0.0, absolute: 0.0 });
    }
}
