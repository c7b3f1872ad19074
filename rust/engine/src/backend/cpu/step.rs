//! A step as the backend keeps it: copied, once it is checked, into buffers that are used again
//! and again.

use std::ops::Range;
use std::time::Duration;

use kvrelay_model::SamplingParams;

use crate::backend::{BackendError, Input, KvGeometry, Limits, Logits, Row, RowOutput};

/// A step's rows, and what came of them.
#[derive(Debug, Default)]
pub(super) struct StepBuffer {
    pub(super) ticket: u64,
    pub(super) rows: Vec<PlannedRow>,
    /// Given ids of all rows; a row that runs its last sampled token has one entry of no meaning.
    pub(super) ids: Vec<u32>,
    pub(super) blocks: Vec<u32>,
    pub(super) outputs: Vec<RowOutput>,
    pub(super) logits: Vec<f32>,
    pub(super) busy: Duration,
    pub(super) error: Option<BackendError>,
}

/// One row; ranges are into the step's ids and blocks.
#[derive(Debug, Clone)]
pub(super) struct PlannedRow {
    pub(super) slot: u32,
    pub(super) ids: Range<usize>,
    pub(super) last_sampled: bool,
    pub(super) start: usize,
    pub(super) blocks: Range<usize>,
    pub(super) sample: Option<SamplingParams>,
    pub(super) logits: Logits,
}

impl PlannedRow {
    /// Which of the step's tokens need logits.
    pub(super) fn wanted(&self) -> Range<usize> {
        let end = self.ids.end;
        match (self.logits, self.sample) {
            (Logits::All, _) => self.ids.clone(),
            (Logits::Nothing, None) => end..end,
            _ => end - 1..end,
        }
    }
}

impl StepBuffer {
    /// Buffers for the largest step.
    pub(super) fn new(limits: &Limits, geometry: &KvGeometry) -> Self {
        Self {
            rows: Vec::with_capacity(limits.max_rows),
            ids: Vec::with_capacity(limits.max_tokens),
            blocks: Vec::with_capacity(limits.max_rows * geometry.blocks_for(limits.max_positions)),
            outputs: Vec::with_capacity(limits.max_rows),
            ..Self::default()
        }
    }

    /// Copies rows that have passed [`super::super::checks::Checks::check`].
    pub(super) fn fill(&mut self, ticket: u64, rows: &[Row<'_>], geometry: &KvGeometry) {
        self.ticket = ticket;
        self.rows.clear();
        self.ids.clear();
        self.blocks.clear();
        self.outputs.clear();
        self.logits.clear();
        self.error = None;
        for row in rows {
            let (first_id, first_block) = (self.ids.len(), self.blocks.len());
            match row.input {
                Input::Tokens(ids) => self.ids.extend(ids),
                Input::LastSampled => self.ids.push(0),
            }
            let start = row.start as usize;
            self.blocks.extend(&row.blocks[..geometry.blocks_for(start + row.input.len())]);
            self.rows.push(PlannedRow {
                slot: row.slot,
                ids: first_id..self.ids.len(),
                last_sampled: matches!(row.input, Input::LastSampled),
                start,
                blocks: first_block..self.blocks.len(),
                sample: row.sample,
                logits: row.logits,
            });
        }
    }
}
