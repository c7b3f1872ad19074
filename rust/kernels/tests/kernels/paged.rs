//! A made-up pool of KV blocks, and sequences that hold some of them.

use cudarc::driver::CudaSlice;
use kvrelay_kernels::launch::{Element, KvLayout, Layer};

use crate::device::Device;
use crate::numbers::{Numbers, wide};
use crate::oracle::paged::{gathered, place};

/// A pool, in which every block belongs to one sequence, in no order.
pub(crate) struct Pool<T> {
    pub(crate) layout: KvLayout,
    pub(crate) layer: usize,
    pub(crate) there: CudaSlice<T>,
    /// `[sequences][max_blocks]`; unused places hold a block that is nowhere.
    pub(crate) tables: Vec<i32>,
    pub(crate) max_blocks: usize,
    numbers: Vec<f64>,
}

impl<T: Element> Pool<T> {
    /// For sequences of these lengths. What lies behind a sequence's end in its last block is not a
    /// number: whoever reads it shows.
    pub(crate) fn new(
        device: &Device,
        numbers: &mut Numbers,
        layout: KvLayout,
        layer: usize,
        lengths: &[usize],
    ) -> Self {
        let blocks_of = |length: &usize| length.div_ceil(layout.block_size);
        let max_blocks = lengths.iter().map(blocks_of).max().unwrap_or(0).max(1);
        let mut free = numbers.shuffled(lengths.iter().map(blocks_of).sum::<usize>() + 2);
        let mut elements: Vec<T> = numbers.elements(free.len() * layout.block_len(), 1.0);
        let mut tables = vec![i32::MAX; lengths.len() * max_blocks];
        for (length, table) in lengths.iter().zip(tables.chunks_mut(max_blocks)) {
            for block in table.iter_mut().take(blocks_of(length)) {
                *block = free.pop().unwrap();
            }
            spoil_behind(&mut elements, layout, table, *length);
        }
        let there = device.upload(&elements);
        Self { layout, layer, there, tables, max_blocks, numbers: wide(&elements) }
    }

    /// Puts `number` into all elements of a token's key (0) or value (1), in all heads.
    pub(crate) fn set(&mut self, device: &Device, sequence: usize, token: usize, half: usize, number: f32) {
        let KvLayout { block_size, kv_heads, head_dim, .. } = self.layout;
        let block = self.tables[sequence * self.max_blocks + token / block_size] as usize;
        for head in 0..kv_heads {
            let start = place(self.layout, block, self.layer, half, head, token % block_size);
            self.numbers[start..start + head_dim].fill(number.into());
        }
        self.there = device.upload(&self.numbers.iter().map(|&x| T::from_f32(x as f32)).collect::<Vec<_>>());
    }

    pub(crate) fn layer(&self) -> Layer<'_, T> {
        Layer { pool: self.there.as_view(), layout: self.layout, layer: self.layer }
    }

    /// The first `length` keys and values of a sequence's head: each `[length][head_dim]`.
    pub(crate) fn keys_and_values(&self, sequence: usize, head: usize, length: usize) -> [Vec<f64>; 2] {
        let table = &self.tables[sequence * self.max_blocks..(sequence + 1) * self.max_blocks];
        [0, 1].map(|half| gathered(&self.numbers, self.layout, self.layer, half, head, table, length))
    }
}

fn spoil_behind<T: Element>(elements: &mut [T], layout: KvLayout, table: &[i32], length: usize) {
    let used = length % layout.block_size;
    if used == 0 {
        return;
    }
    let block = table[length / layout.block_size] as usize;
    let tokens = elements[block * layout.block_len()..(block + 1) * layout.block_len()]
        .chunks_mut(layout.head_dim)
        .enumerate();
    for (_, token) in tokens.filter(|(i, _)| i % layout.block_size >= used) {
        token.fill(T::from_f32(f32::NAN));
    }
}
