//! Queries and keys turned: one rounding of two products. Keys and values land where the layout says, and
//! nothing else of the pool changes by a bit; values are moved only.

use half::{bf16, f16};
use kvrelay_kernels::launch::{Element, KvLayout, LayerMut, RopeAppend, RopePairs};
use kvrelay_model::rope::{RopeScaling, frequencies, rotation};

use crate::device::Device;
use crate::numbers::{Numbers, Within, compare, identical, spacing, wide};
use crate::oracle::paged::place;
use crate::oracle::rope_append::rotated;

const MAX_POSITIONS: usize = 600;

pub(crate) fn check(device: &Device) {
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 64.0,
    };
    let scalings = [None, Some(RopeScaling::Linear { factor: 4.0 }), Some(llama3)];
    for (i, (rows, q_heads, kv_heads, head_dim)) in
        [(1, 1, 1, 64), (5, 7, 1, 80), (3, 4, 2, 96), (2, 9, 3, 128), (4, 2, 2, 256)].into_iter().enumerate()
    {
        let layout = KvLayout { block_size: [16, 3, 8][i % 3], num_layers: 3, kv_heads, head_dim };
        for pairs in [RopePairs::Halves, RopePairs::Interleaved] {
            let table = rotations(head_dim, scalings[i % 3]);
            one::<bf16>(device, rows, q_heads, layout, pairs, &table);
            one::<f16>(device, rows, q_heads, layout, pairs, &table);
        }
    }
    random(device);
}

/// A made-up shape.
fn random(device: &Device) {
    let mut shapes = Numbers::of_this_run();
    let [rows, q_heads, kv_heads, block_size] = [9, 12, 4, 40].map(|most| shapes.between(1, most));
    let layout = KvLayout {
        block_size,
        num_layers: shapes.between(2, 5),
        kv_heads,
        head_dim: 8 * shapes.between(1, 32),
    };
    let pairs = [RopePairs::Halves, RopePairs::Interleaved][shapes.below(2)];
    let table = rotations(layout.head_dim, None);
    // Each row has a slot of its own.
    one::<bf16>(device, rows.min(7 * block_size), q_heads, layout, pairs, &table);
}

/// `[positions][2][head_dim / 2]`
fn rotations(head_dim: usize, scaling: Option<RopeScaling>) -> Vec<f32> {
    let frequencies = frequencies(head_dim, 1e4, scaling);
    let mut table = vec![0.0; MAX_POSITIONS * head_dim];
    for (position, out) in table.chunks_mut(head_dim).enumerate() {
        rotation(&frequencies, position, out);
    }
    table
}

fn one<T: Element>(
    device: &Device,
    rows: usize,
    q_heads: usize,
    layout: KvLayout,
    pairs: RopePairs,
    table: &[f32],
) {
    const BLOCKS: usize = 7;
    let KvLayout { block_size, kv_heads, head_dim, .. } = layout;
    let layer = 1;
    let mut numbers = Numbers::new((rows * head_dim) as u64);
    let row = (q_heads + 2 * kv_heads) * head_dim;
    let qkv: Vec<T> = numbers.elements(rows * row, 2.0);
    let positions: Vec<i32> = (0..rows).map(|_| numbers.below(MAX_POSITIONS) as i32).collect();
    let mut slots: Vec<i64> =
        numbers.shuffled(BLOCKS * block_size).into_iter().take(rows).map(i64::from).collect();
    // Of several rows the second is padded.
    if let Some(slot) = slots.get_mut(1) {
        *slot = -1;
    }
    let before: Vec<T> = numbers.elements(BLOCKS * layout.block_len(), 1.0);
    let (mut qkv_there, mut pool) = (device.upload(&qkv), device.upload(&before));
    let (table_there, positions_there, slots_there) =
        (device.upload(table), device.upload(&positions), device.upload(&slots));
    let parameters = RopeAppend {
        qkv: qkv_there.as_view_mut(),
        kv: LayerMut { pool: pool.as_view_mut(), layout, layer },
        rotations: table_there.as_view(),
        positions: positions_there.as_view(),
        slots: slots_there.as_view(),
        q_heads,
        pairs,
    };
    parameters.launch(&device.kernels, &device.stream).unwrap();

    let what = format!("rope_append_{} of {q_heads} and {kv_heads} heads of {head_dim}, {pairs:?}", T::NAME);
    // A difference of two products of up to 2 may be small: its error is of their size.
    let within = Within { relative: spacing::<T>(), absolute: 1e-6 };
    let found = wide(&device.download(&qkv_there));
    let mut expected_pool = wide(&before);
    let found_pool = wide(&device.download(&pool));
    for (r, row) in wide(&qkv).chunks(row).enumerate() {
        let at = positions[r] as usize * head_dim;
        let rotation: Vec<f64> = table[at..at + head_dim].iter().map(|&x| f64::from(x)).collect();
        let heads: Vec<&[f64]> = row.chunks(head_dim).collect();
        let turned = |head: &&[f64]| rotated(head, &rotation, pairs == RopePairs::Interleaved);
        let queries: Vec<f64> = heads[..q_heads].iter().flat_map(turned).collect();
        compare(&what, &found[r * row.len()..][..queries.len()], &queries, within);
        identical(&what, &found[r * row.len() + queries.len()..(r + 1) * row.len()], &row[queries.len()..]);
        if let Ok(slot) = usize::try_from(slots[r]) {
            for head in 0..kv_heads {
                let [key, value] =
                    [0, 1].map(|half| place(layout, slot / block_size, layer, half, head, slot % block_size));
                compare(&what, &found_pool[key..key + head_dim], &turned(&heads[q_heads + head]), within);
                expected_pool[key..key + head_dim].copy_from_slice(&found_pool[key..key + head_dim]);
                expected_pool[value..value + head_dim].copy_from_slice(heads[q_heads + kv_heads + head]);
            }
        }
    }
    identical(&what, &found_pool, &expected_pool);
}
