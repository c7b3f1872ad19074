//! What a step reads beside weights and KV: ids, positions, block tables, how to sample. All of it is
//! packed into one buffer, so that it is one copy to the device.
//!
//! Rows of several tokens come first where prefill has a kernel of its own, then those of one token. A
//! step of single tokens is padded to a *bucket*: a power of two of rows, and of the longest length,
//! so that few shapes occur and each can be a graph.

use std::mem::size_of;
use std::ops::Range;

use crate::backend::{Input, KvGeometry, Limits, Logits, Row};

/// Bytes at which parts begin, as kernels ask for.
const ALIGNMENT: usize = 16;

/// The shortest length that is told apart.
const SHORTEST: usize = 256;

/// A part of the buffer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    Sources,
    Positions,
    Slots,
    Lengths,
    Sequences,
    FirstRows,
    Contexts,
    Tables,
    Wanted,
    Keep,
    Temperatures,
    TopKs,
    TopPs,
    Seeds,
    Counters,
}

const NUM_PARTS: usize = 15;

/// Where each part begins, in bytes, and where the last ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Offsets {
    starts: [usize; NUM_PARTS],
    pub(super) bytes: usize,
}

impl Offsets {
    fn of(lengths: [usize; NUM_PARTS]) -> Self {
        let mut bytes = 0;
        let starts = lengths.map(|length| {
            let start = bytes;
            bytes = (start + length).next_multiple_of(ALIGNMENT);
            start
        });
        Self { starts, bytes }
    }

    /// Bytes of `count` elements of a part.
    pub(super) fn range<T>(&self, part: Part, count: usize) -> Range<usize> {
        let start = self.starts[part as usize];
        start..start + count * size_of::<T>()
    }
}

/// The sizes of a step: all that its launches depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Shape {
    /// Tokens, padded ones included.
    pub(super) tokens: usize,
    /// Those of them, in front, that the prefill kernel attends.
    pub(super) prefill_tokens: usize,
    /// Rows that these belong to, and the longest of them.
    pub(super) prefill_rows: usize,
    pub(super) longest_prefill: usize,
    /// Block tables.
    pub(super) tables: usize,
    /// Blocks of a table.
    pub(super) max_blocks: usize,
    /// The longest length of a single token, as a bucket.
    pub(super) max_length: usize,
    /// Positions whose logits are computed, padded ones included.
    pub(super) wanted: usize,
}

/// One row's outputs: which of the wanted positions are its own.
#[derive(Debug, Clone)]
pub(super) struct Wants {
    pub(super) slot: u32,
    pub(super) wanted: Range<usize>,
    pub(super) sampled: bool,
    pub(super) logits: bool,
}

/// A step's inputs, gathered on the host.
#[derive(Debug, Default)]
pub(super) struct Inputs {
    sources: Vec<i32>,
    positions: Vec<i32>,
    slots: Vec<i64>,
    lengths: Vec<i32>,
    sequences: Vec<i32>,
    first_rows: Vec<i32>,
    contexts: Vec<i32>,
    tables: Vec<i32>,
    wanted: Vec<i32>,
    keep: Vec<i32>,
    temperatures: Vec<f32>,
    top_ks: Vec<i32>,
    top_ps: Vec<f32>,
    seeds: Vec<u64>,
    counters: Vec<u64>,
    /// Rows in the order of their tokens.
    order: Vec<usize>,
    /// By row, where its tokens begin.
    begins: Vec<usize>,
}

/// The buckets of a backend.
#[derive(Debug, Clone, Copy)]
pub(super) struct Buckets {
    pub(super) max_rows: usize,
    /// Positions of a sequence, in whole blocks.
    pub(super) max_positions: usize,
    pub(super) block_size: usize,
}

impl Buckets {
    pub(super) fn new(limits: &Limits, geometry: &KvGeometry) -> Self {
        let block_size = geometry.block_size;
        let max_positions = limits.max_positions.next_multiple_of(block_size);
        Self { max_rows: limits.max_rows, max_positions, block_size }
    }

    pub(super) fn rows(&self, rows: usize) -> usize {
        rows.next_power_of_two().min(self.max_rows)
    }

    pub(super) fn length(&self, length: usize) -> usize {
        length.max(SHORTEST).next_power_of_two().min(self.max_positions)
    }

    /// Every bucket of rows, each with every bucket of lengths.
    pub(super) fn all(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let doubled = |from: usize, most: usize| {
            std::iter::successors(Some(from.min(most)), move |&n| (n < most).then(|| (2 * n).min(most)))
        };
        let lengths = move || doubled(SHORTEST, self.max_positions);
        doubled(1, self.max_rows).flat_map(move |rows| lengths().map(move |length| (rows, length)))
    }
}

impl Inputs {
    /// With room for the largest step, so that none is made in one.
    pub(super) fn new(limits: &Limits, buckets: &Buckets) -> Self {
        let (tokens, rows) = (limits.max_tokens.max(limits.max_rows), limits.max_rows);
        let wanted = limits.max_logits.max(limits.max_rows);
        let tables = rows * buckets.max_positions.div_ceil(buckets.block_size);
        Self {
            sources: Vec::with_capacity(tokens),
            positions: Vec::with_capacity(tokens),
            slots: Vec::with_capacity(tokens),
            lengths: Vec::with_capacity(tokens),
            sequences: Vec::with_capacity(tokens),
            first_rows: Vec::with_capacity(rows + 1),
            contexts: Vec::with_capacity(rows),
            tables: Vec::with_capacity(tables),
            wanted: Vec::with_capacity(wanted),
            keep: Vec::with_capacity(wanted),
            temperatures: Vec::with_capacity(wanted),
            top_ks: Vec::with_capacity(wanted),
            top_ps: Vec::with_capacity(wanted),
            seeds: Vec::with_capacity(wanted),
            counters: Vec::with_capacity(wanted),
            order: Vec::with_capacity(rows),
            begins: Vec::with_capacity(rows),
        }
    }

    /// Bytes of the largest step.
    pub(super) fn max_bytes(limits: &Limits, buckets: &Buckets) -> usize {
        let (tokens, rows) = (limits.max_tokens.max(limits.max_rows), limits.max_rows);
        let wanted = limits.max_logits.max(limits.max_rows);
        let tables = rows * buckets.max_positions.div_ceil(buckets.block_size);
        let counts =
            [[tokens; 2], [2 * tokens, tokens], [tokens, rows + 1], [rows, tables], [wanted; 2], [wanted; 2]];
        let [seeds, counters, top_ps] = [2 * wanted, 2 * wanted, wanted];
        let numbers = counts.as_flattened().iter().sum::<usize>() + seeds + counters + top_ps;
        4 * numbers + NUM_PARTS * ALIGNMENT
    }

    /// Gathers a step that was checked. `split`: rows of several tokens are for the prefill kernel.
    /// Which wanted positions are whose comes in `wants`, in the order of the rows.
    pub(super) fn gather(
        &mut self,
        rows: &[Row<'_>],
        split: bool,
        buckets: &Buckets,
        wants: &mut Vec<Wants>,
    ) -> Shape {
        self.clear();
        let is_prefill = |row: &Row<'_>| split && row.input.len() > 1;
        self.order.extend((0..rows.len()).filter(|&i| is_prefill(&rows[i])));
        let prefill_rows = self.order.len();
        self.order.extend((0..rows.len()).filter(|&i| !is_prefill(&rows[i])));
        self.begins.resize(rows.len(), 0);
        let ends = rows.iter().map(|row| row.start as usize + row.input.len());
        let longest = buckets.length(ends.max().unwrap_or(1));
        let mut shape = Shape {
            tokens: 0,
            prefill_tokens: 0,
            prefill_rows,
            longest_prefill: 0,
            tables: rows.len(),
            max_blocks: longest.div_ceil(buckets.block_size),
            max_length: longest,
            wanted: 0,
        };
        for table in 0..self.order.len() {
            let row = &rows[self.order[table]];
            self.begins[self.order[table]] = self.sources.len();
            self.add_tokens(row, table, shape.max_blocks, buckets.block_size);
            if table < prefill_rows {
                self.first_rows.push(self.sources.len() as i32);
                self.contexts.push(row.start as i32 + row.input.len() as i32);
                shape.prefill_tokens = self.sources.len();
                shape.longest_prefill = shape.longest_prefill.max(row.input.len());
            }
        }
        self.add_wanted(rows, wants);
        let single = rows.iter().all(|row| row.input.len() == 1);
        if single {
            self.pad(buckets.rows(rows.len()), shape.max_blocks);
            shape.tables = self.sources.len();
        }
        shape.tokens = self.sources.len();
        shape.wanted = self.wanted.len();
        shape
    }

    fn clear(&mut self) {
        self.sources.clear();
        self.positions.clear();
        self.slots.clear();
        self.lengths.clear();
        self.sequences.clear();
        self.first_rows.clear();
        self.first_rows.push(0);
        self.contexts.clear();
        self.tables.clear();
        self.wanted.clear();
        self.keep.clear();
        self.temperatures.clear();
        self.top_ks.clear();
        self.top_ps.clear();
        self.seeds.clear();
        self.counters.clear();
        self.order.clear();
        self.begins.clear();
    }

    fn add_tokens(&mut self, row: &Row<'_>, table: usize, max_blocks: usize, block_size: usize) {
        match row.input {
            Input::Tokens(ids) => self.sources.extend(ids.iter().map(|&id| id as i32)),
            // As `FeedTokens` has it.
            Input::LastSampled => self.sources.push(-2 - row.slot as i32),
        }
        let end = row.start as usize + row.input.len();
        for position in row.start as usize..end {
            let block = row.blocks[position / block_size] as usize;
            self.positions.push(position as i32);
            self.slots.push((block * block_size + position % block_size) as i64);
            self.lengths.push(position as i32 + 1);
            self.sequences.push(table as i32);
        }
        let blocks = &row.blocks[..end.div_ceil(block_size)];
        self.tables.extend(blocks.iter().map(|&block| block as i32));
        self.tables.resize((table + 1) * max_blocks, 0);
    }

    fn add_wanted(&mut self, rows: &[Row<'_>], wants: &mut Vec<Wants>) {
        wants.clear();
        for (row, &begin) in rows.iter().zip(&self.begins) {
            let count = match (row.logits, row.sample) {
                (Logits::All, _) => row.input.len(),
                (Logits::Nothing, None) => 0,
                _ => 1,
            };
            let first = self.wanted.len();
            let end = begin + row.input.len();
            for token in end - count..end {
                let sample = row.sample.filter(|_| token + 1 == end);
                self.wanted.push(token as i32);
                self.keep.push(sample.map_or(-1, |_| row.slot as i32));
                let params = sample.unwrap_or_default();
                self.temperatures.push(params.temperature);
                self.top_ks.push(params.top_k.clamp(0, i64::from(i32::MAX)) as i32);
                self.top_ps.push(params.top_p);
                self.seeds.push(params.seed);
                self.counters.push(u64::from(row.start) + row.input.len() as u64);
            }
            wants.push(Wants {
                slot: row.slot,
                wanted: first..first + count,
                sampled: row.sample.is_some(),
                logits: row.logits != Logits::Nothing,
            });
        }
    }

    /// Rows that are none, up to a bucket: they read and write nothing.
    fn pad(&mut self, bucket: usize, max_blocks: usize) {
        self.sources.resize(bucket, -1);
        self.positions.resize(bucket, 0);
        self.slots.resize(bucket, -1);
        self.lengths.resize(bucket, 0);
        self.sequences.resize(bucket, 0);
        self.tables.resize(bucket * max_blocks, 0);
        self.wanted.resize(bucket, -1);
        self.keep.resize(bucket, -1);
        self.temperatures.resize(bucket, 0.0);
        self.top_ks.resize(bucket, 0);
        self.top_ps.resize(bucket, 1.0);
        self.seeds.resize(bucket, 0);
        self.counters.resize(bucket, 0);
    }

    /// Packs all parts into `buffer`; they lie in the same places for the same [`Shape`].
    pub(super) fn pack(&self, buffer: &mut [u8]) -> Offsets {
        // In the order of `Part`.
        let parts = [
            bytes_of(&self.sources),
            bytes_of(&self.positions),
            bytes_of(&self.slots),
            bytes_of(&self.lengths),
            bytes_of(&self.sequences),
            bytes_of(&self.first_rows),
            bytes_of(&self.contexts),
            bytes_of(&self.tables),
            bytes_of(&self.wanted),
            bytes_of(&self.keep),
            bytes_of(&self.temperatures),
            bytes_of(&self.top_ks),
            bytes_of(&self.top_ps),
            bytes_of(&self.seeds),
            bytes_of(&self.counters),
        ];
        let offsets = Offsets::of(parts.map(<[u8]>::len));
        for (part, start) in parts.into_iter().zip(offsets.starts) {
            buffer[start..start + part.len()].copy_from_slice(part);
        }
        offsets
    }
}

/// Numbers that kernels read, as bytes.
trait Plain: Copy {}
impl Plain for i32 {}
impl Plain for i64 {}
impl Plain for u64 {}
impl Plain for f32 {}

fn bytes_of<T: Plain>(numbers: &[T]) -> &[u8] {
    // SAFETY: these types have no padding, and bytes no alignment.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}
