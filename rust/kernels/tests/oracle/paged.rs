//! Where a token's keys and values lie, worked out from the documented layout: blocks of
//! `[layer][key or value][kv_head][token][head_dim]`.

use kvrelay_kernels::launch::KvLayout;

/// The first element of a head of a token; `half` is 0 for keys and 1 for values.
pub(crate) fn place(
    layout: KvLayout,
    block: usize,
    layer: usize,
    half: usize,
    head: usize,
    offset: usize,
) -> usize {
    let KvLayout { block_size, num_layers, kv_heads, head_dim } = layout;
    ((((block * num_layers + layer) * 2 + half) * kv_heads + head) * block_size + offset) * head_dim
}

/// A sequence's keys or values of one head: `[length][head_dim]`.
pub(crate) fn gathered(
    pool: &[f64],
    layout: KvLayout,
    layer: usize,
    half: usize,
    head: usize,
    table: &[i32],
    length: usize,
) -> Vec<f64> {
    let token = |t: usize| {
        let block = table[t / layout.block_size] as usize;
        let start = place(layout, block, layer, half, head, t % layout.block_size);
        &pool[start..start + layout.head_dim]
    };
    (0..length).flat_map(token).copied().collect()
}
