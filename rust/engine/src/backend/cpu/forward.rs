//! A step, layer by layer.
//!
//! Each phase is one parallel loop in which a thread writes only its share, and reads only what
//! earlier phases have written; [`Team::run`] is the border between phases. A row's numbers go
//! through the same operations in the same order whoever its neighbours are: matrix products are
//! per row, keys and values are written by KV head, attention is per token and KV head.

use std::ops::Range;
use std::sync::Arc;

use kvrelay_model::{Sampler, rope};

use super::panels::PANEL;
use super::plain::KvHead;
use super::rows::Rows;
use super::step::StepBuffer;
use super::team::{Scratch, Team, share};
use super::weights::{CpuWeights, Layer, Matrix};
use crate::backend::{BackendError, KvPool, Limits, Logits, Progress, RowOutput};

/// All that a leader needs to run steps.
pub(super) struct Forward {
    weights: Arc<CpuWeights>,
    pool: Arc<KvPool>,
    team: Team,
    buffers: Buffers,
    /// `[position][head_dim]`: cosines, then sines.
    rotations: Vec<f32>,
    /// By slot.
    last_sampled: Vec<u32>,
    sampler: Sampler,
    tokens: Vec<Token>,
    /// The tokens whose logits are computed.
    wanted: Vec<usize>,
}

/// One token of a step.
#[derive(Debug, Clone)]
struct Token {
    id: u32,
    position: usize,
    blocks: Range<usize>,
}

/// The activations; widths are rounded up to whole panels.
struct Buffers {
    stream: Vec<f32>,
    normed: Vec<f32>,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    mixed: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    delta: Vec<f32>,
    selected: Vec<f32>,
    logits: Vec<f32>,
}

/// The buffers as views, for the loops of one step.
#[derive(Clone, Copy)]
struct Views {
    stream: Rows,
    normed: Rows,
    query: Rows,
    key: Rows,
    value: Rows,
    mixed: Rows,
    gate: Rows,
    up: Rows,
    delta: Rows,
    selected: Rows,
    logits: Rows,
}

/// What the loops of one step share.
struct Pass<'a> {
    weights: &'a CpuWeights,
    pool: &'a KvPool,
    rotations: &'a [f32],
    blocks: &'a [u32],
    tokens: &'a [Token],
    wanted: &'a [usize],
    views: Views,
    threads: usize,
}

impl Forward {
    /// Buffers for the largest step. Runs on the thread that will lead.
    pub(super) fn new(
        weights: Arc<CpuWeights>,
        pool: Arc<KvPool>,
        limits: &Limits,
        threads: usize,
        cores: &[usize],
    ) -> std::io::Result<Self> {
        let config = &weights.config;
        let scratch =
            || Scratch { weights: vec![0.0; weights.scratch_len()], scores: vec![0.0; limits.max_positions] };
        let team = Team::new(threads, cores, scratch)?;
        let mut rotations = vec![0.0; limits.max_positions * config.head_dim];
        for (position, out) in rotations.chunks_exact_mut(config.head_dim).enumerate() {
            rope::rotation(&config.rope_frequencies, position, out);
        }
        Ok(Self {
            team,
            buffers: Buffers::new(&weights, limits),
            rotations,
            last_sampled: vec![0; limits.max_slots],
            sampler: Sampler::new(config.vocab_size),
            tokens: Vec::with_capacity(limits.max_tokens),
            wanted: Vec::with_capacity(limits.max_logits),
            weights,
            pool,
        })
    }

    /// Runs a step and leaves its outputs in it.
    pub(super) fn run(&mut self, step: &mut StepBuffer, progress: &Progress) {
        self.plan(step);
        let pass = Pass {
            weights: &self.weights,
            pool: &self.pool,
            rotations: &self.rotations,
            blocks: &step.blocks,
            tokens: &self.tokens,
            wanted: &self.wanted,
            views: self.buffers.views(&self.weights),
            threads: self.team.threads(),
        };
        pass.layers(&mut self.team, step.ticket, progress);
        if !self.wanted.is_empty() {
            self.team.run(&|i, _| pass.select(i));
            self.team.run(&|i, scratch| pass.logits(i, scratch));
        }
        if let Err(error) = self.finish(step) {
            step.error = Some(error);
        }
    }

    fn plan(&mut self, step: &StepBuffer) {
        self.tokens.clear();
        self.wanted.clear();
        for row in &step.rows {
            let given = step.ids[row.ids.clone()].iter().enumerate();
            self.tokens.extend(given.map(|(offset, &id)| Token {
                id: if row.last_sampled { self.last_sampled[row.slot as usize] } else { id },
                position: row.start + offset,
                blocks: row.blocks.clone(),
            }));
            self.wanted.extend(row.wanted());
        }
    }

    /// Samples and hands out, from the logits in `wanted` order.
    fn finish(&mut self, step: &mut StepBuffer) -> Result<(), BackendError> {
        let vocab = self.weights.config.vocab_size;
        let stride = width(vocab);
        let mut next = 0;
        for (index, row) in step.rows.iter().enumerate() {
            let count = row.wanted().len();
            let logits = |i: usize| &self.buffers.logits[i * stride..][..vocab];
            let first_logits = step.logits.len() / vocab;
            if row.logits != Logits::Nothing {
                for i in next..next + count {
                    step.logits.extend_from_slice(logits(i));
                }
            }
            let mut token = None;
            if let Some(sample) = &row.sample {
                let position = (row.start + row.ids.len()) as u64;
                let sampled = self.sampler.sample(logits(next + count - 1), sample, position);
                let sampled = sampled.map_err(|error| BackendError::NotFinite {
                    row: index,
                    slot: row.slot,
                    reason: error.to_string(),
                })?;
                self.last_sampled[row.slot as usize] = sampled;
                token = Some(sampled);
            }
            let num_logits = step.logits.len() / vocab - first_logits;
            step.outputs.push(RowOutput { slot: row.slot, token, first_logits, num_logits });
            next += count;
        }
        Ok(())
    }
}

impl Pass<'_> {
    fn layers(&self, team: &mut Team, ticket: u64, progress: &Progress) {
        team.run(&|i, _| self.embed(i));
        let geometry = self.pool.geometry();
        let mut group = 0;
        for (index, layer) in self.weights.layers.iter().enumerate() {
            team.run(&|i, _| self.norm(&layer.attention_norm, index > 0, i));
            team.run(&|i, scratch| self.project(layer, i, scratch));
            team.run(&|i, _| self.place(index, i));
            if geometry.layers_of(group).end == index + 1 {
                group += 1;
                progress.advance(ticket, group);
            }
            team.run(&|i, scratch| self.attend(index, i, scratch));
            let views = self.views;
            team.run(&|i, scratch| {
                self.multiply(&layer.attention_output, views.mixed, views.delta, i, scratch)
            });
            team.run(&|i, _| self.norm(&layer.ffn_norm, true, i));
            team.run(&|i, scratch| self.gate(layer, i, scratch));
            team.run(&|i, scratch| self.multiply(&layer.down, views.gate, views.delta, i, scratch));
        }
    }

    /// This thread's tokens.
    fn tokens_of(&self, thread: usize) -> Range<usize> {
        share(self.tokens.len(), self.threads, thread)
    }

    fn embed(&self, thread: usize) {
        let hidden = self.weights.config.hidden_size;
        for t in self.tokens_of(thread) {
            // SAFETY: this phase writes the stream only, each thread its own tokens.
            let out = unsafe { self.views.stream.columns_mut(t, 0..hidden) };
            self.weights.embedding.dequantise_row(self.tokens[t].id as usize, out);
        }
    }

    /// Adds the last product to the stream, if there is one, and norms the stream.
    fn norm(&self, weight: &[f32], add: bool, thread: usize) {
        let (hidden, views) = (self.weights.config.hidden_size, self.views);
        for t in self.tokens_of(thread) {
            // SAFETY: this phase writes stream and normed, each thread its own tokens; the
            // kernels were chosen for this machine.
            unsafe {
                let delta = add.then(|| &views.delta.row(t)[..hidden]);
                let (stream, out) =
                    (views.stream.columns_mut(t, 0..hidden), views.normed.columns_mut(t, 0..hidden));
                (self.weights.kernels.norm)(stream, delta, weight, self.weights.config.rms_eps, out);
            }
        }
    }

    /// This thread's outputs of `to = from * matrix`.
    fn multiply(&self, matrix: &Matrix, from: Rows, to: Rows, thread: usize, scratch: &mut Scratch) {
        let units = share(matrix.units(), self.threads, thread);
        // SAFETY: this phase writes `to` only, each thread its own units of it.
        unsafe { matrix.multiply(self.weights, units, from, to, self.tokens.len(), scratch) };
    }

    fn project(&self, layer: &Layer, thread: usize, scratch: &mut Scratch) {
        let views = self.views;
        for (matrix, to) in
            [(&layer.query, views.query), (&layer.key, views.key), (&layer.value, views.value)]
        {
            self.multiply(matrix, views.normed, to, thread, scratch);
        }
    }

    /// Turns queries and keys, and writes keys and values to the blocks. By KV head, so that two
    /// rows that (wrongly) share a block still have one writer.
    fn place(&self, layer: usize, thread: usize) {
        let (config, views) = (&self.weights.config, self.views);
        let dim = config.head_dim;
        let group = config.num_heads / config.num_kv_heads;
        let size = self.pool.geometry().block_size;
        for head in (thread..config.num_kv_heads).step_by(self.threads) {
            let (keys, values) = self.offsets(layer, head);
            for (t, token) in self.tokens.iter().enumerate() {
                let rotation = &self.rotations[token.position * dim..][..dim];
                let block = self.blocks[token.blocks.start + token.position / size];
                let at = token.position % size * dim;
                // SAFETY: this phase writes queries, keys and the KV of the step's positions,
                // each thread those of its KV heads; offsets lie inside the block; the
                // scheduler keeps others from these positions; the kernels are this machine's.
                unsafe {
                    for query in head * group..(head + 1) * group {
                        (self.weights.kernels.rotate)(
                            views.query.columns_mut(t, query * dim..(query + 1) * dim),
                            rotation,
                        );
                    }
                    let columns = head * dim..(head + 1) * dim;
                    let key = views.key.columns_mut(t, columns.clone());
                    (self.weights.kernels.rotate)(key, rotation);
                    let value = &views.value.row(t)[columns];
                    let block = self.pool.block(block);
                    std::ptr::copy_nonoverlapping(key.as_ptr(), block.add(keys + at), dim);
                    std::ptr::copy_nonoverlapping(value.as_ptr(), block.add(values + at), dim);
                }
            }
        }
    }

    /// Elements from the start of a block to a head's keys, and to its values.
    fn offsets(&self, layer: usize, head: usize) -> (usize, usize) {
        let geometry = self.pool.geometry();
        let half = geometry.half_layer_len();
        let keys = layer * 2 * half + head * geometry.block_size * geometry.head_dim;
        (keys, keys + half)
    }

    fn attend(&self, layer: usize, thread: usize, scratch: &mut Scratch) {
        let (config, views) = (&self.weights.config, self.views);
        let dim = config.head_dim;
        let group = config.num_heads / config.num_kv_heads;
        // Neighbouring tokens cost about the same, so threads take turns.
        for unit in (thread..self.tokens.len() * config.num_kv_heads).step_by(self.threads) {
            let (t, head) = (unit / config.num_kv_heads, unit % config.num_kv_heads);
            let token = &self.tokens[t];
            let (keys, values) = self.offsets(layer, head);
            let blocks = &self.blocks[token.blocks.clone()];
            let kv = KvHead { pool: self.pool, blocks, keys, values, len: token.position + 1 };
            for query in head * group..(head + 1) * group {
                let columns = query * dim..(query + 1) * dim;
                // SAFETY: this phase writes `mixed` only, each thread its own heads; all
                // positions up to the token's are written; the kernels are this machine's.
                unsafe {
                    let out = views.mixed.columns_mut(t, columns.clone());
                    (self.weights.kernels.attend)(&views.query.row(t)[columns], kv, &mut scratch.scores, out);
                }
            }
        }
    }

    /// This thread's outputs of the gated feed-forward layer, into `gate`.
    fn gate(&self, layer: &Layer, thread: usize, scratch: &mut Scratch) {
        let views = self.views;
        self.multiply(&layer.gate, views.normed, views.gate, thread, scratch);
        self.multiply(&layer.up, views.normed, views.up, thread, scratch);
        let columns = layer.gate.outputs_of(&share(layer.gate.units(), self.threads, thread));
        for t in 0..self.tokens.len() {
            // SAFETY: this thread alone has written, and now changes, these columns; the
            // kernels are this machine's.
            unsafe {
                let up = views.up.columns_mut(t, columns.clone());
                (self.weights.kernels.swiglu)(views.gate.columns_mut(t, columns.clone()), up);
            }
        }
    }

    /// The final norm of the tokens whose logits are wanted.
    fn select(&self, thread: usize) {
        let (hidden, views) = (self.weights.config.hidden_size, self.views);
        for i in share(self.wanted.len(), self.threads, thread) {
            let t = self.wanted[i];
            // SAFETY: this phase writes stream and selected, each thread its own wanted tokens,
            // none of which occurs twice; the kernels are this machine's.
            unsafe {
                let stream = views.stream.columns_mut(t, 0..hidden);
                let out = views.selected.columns_mut(i, 0..hidden);
                let delta = Some(&views.delta.row(t)[..hidden]);
                (self.weights.kernels.norm)(
                    stream,
                    delta,
                    &self.weights.final_norm,
                    self.weights.config.rms_eps,
                    out,
                );
            }
        }
    }

    fn logits(&self, thread: usize, scratch: &mut Scratch) {
        let output = &self.weights.output;
        let units = share(output.units(), self.threads, thread);
        let (from, to) = (self.views.selected, self.views.logits);
        // SAFETY: this phase writes logits only, each thread its own units of them.
        unsafe { output.multiply(self.weights, units, from, to, self.wanted.len(), scratch) };
    }
}

/// Room for `len` outputs in whole panels.
fn width(len: usize) -> usize {
    len.next_multiple_of(PANEL)
}

impl Buffers {
    fn new(weights: &CpuWeights, limits: &Limits) -> Self {
        let config = &weights.config;
        let rows = |count: usize, len: usize| vec![0.0; count * width(len)];
        let (tokens, hidden) = (limits.max_tokens, config.hidden_size);
        let (heads, kv) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
        Self {
            stream: rows(tokens, hidden),
            normed: rows(tokens, hidden),
            query: rows(tokens, heads),
            key: rows(tokens, kv),
            value: rows(tokens, kv),
            mixed: rows(tokens, heads),
            gate: rows(tokens, config.ffn_size),
            up: rows(tokens, config.ffn_size),
            delta: rows(tokens, hidden),
            selected: rows(limits.max_logits, hidden),
            logits: rows(limits.max_logits, config.vocab_size),
        }
    }

    fn views(&mut self, weights: &CpuWeights) -> Views {
        let config = &weights.config;
        let hidden = width(config.hidden_size);
        let (heads, kv) =
            (width(config.num_heads * config.head_dim), width(config.num_kv_heads * config.head_dim));
        let ffn = width(config.ffn_size);
        Views {
            stream: Rows::new(&mut self.stream, hidden),
            normed: Rows::new(&mut self.normed, hidden),
            query: Rows::new(&mut self.query, heads),
            key: Rows::new(&mut self.key, kv),
            value: Rows::new(&mut self.value, kv),
            mixed: Rows::new(&mut self.mixed, heads),
            gate: Rows::new(&mut self.gate, ffn),
            up: Rows::new(&mut self.up, ffn),
            delta: Rows::new(&mut self.delta, hidden),
            selected: Rows::new(&mut self.selected, hidden),
            logits: Rows::new(&mut self.logits, width(config.vocab_size)),
        }
    }
}
