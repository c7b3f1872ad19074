//! A step as the backend keeps it: checked against every limit, then copied into buffers that
//! are used again and again.

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

/// What a step is checked against.
pub(super) struct Checks<'a> {
    pub(super) limits: &'a Limits,
    pub(super) geometry: &'a KvGeometry,
    pub(super) num_blocks: usize,
    pub(super) vocab_size: usize,
    /// By slot, whether an earlier step samples a token for it.
    pub(super) has_token: &'a [bool],
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

    /// Copies rows that have passed [`Checks::check`].
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

impl Checks<'_> {
    /// Refuses a step that breaks a limit or names what does not exist.
    pub(super) fn check(&self, rows: &[Row<'_>]) -> Result<(), BackendError> {
        let limits = self.limits;
        let logits = |row: &Row<'_>| match (row.logits, row.sample) {
            (Logits::All, _) => row.input.len(),
            (Logits::Nothing, None) => 0,
            _ => 1,
        };
        let totals = [
            ("rows in a step", limits.max_rows, rows.len()),
            ("tokens in a step", limits.max_tokens, rows.iter().map(|r| r.input.len()).sum()),
            ("logits in a step", limits.max_logits, rows.iter().map(logits).sum()),
        ];
        for (what, limit, found) in totals {
            if found > limit {
                return Err(BackendError::Limit { what, limit, found });
            }
        }
        for (index, row) in rows.iter().enumerate() {
            self.check_row(index, row)?;
            if let Some(other) = rows[..index].iter().position(|other| other.slot == row.slot) {
                let expected = format!("a slot of its own (row {other} has it)");
                return Err(refuse(index, "slot", expected, row.slot));
            }
        }
        Ok(())
    }

    fn check_row(&self, index: usize, row: &Row<'_>) -> Result<(), BackendError> {
        let Limits { max_slots, max_positions, .. } = *self.limits;
        if row.slot as usize >= max_slots {
            return Err(refuse(index, "slot", format!("below {max_slots}"), row.slot));
        }
        match row.input {
            Input::Tokens([]) => return Err(refuse(index, "tokens", "at least 1", 0)),
            Input::Tokens(ids) => {
                if let Some(id) = ids.iter().find(|&&id| id as usize >= self.vocab_size) {
                    return Err(refuse(index, "token id", format!("below {}", self.vocab_size), id));
                }
            }
            Input::LastSampled if !self.has_token[row.slot as usize] => {
                return Err(refuse(index, "input", "a token sampled for this slot before", "none"));
            }
            Input::LastSampled => {}
        }
        let end = row.start as usize + row.input.len();
        if end > max_positions {
            return Err(refuse(index, "last position", format!("below {max_positions}"), end - 1));
        }
        let needed = self.geometry.blocks_for(end);
        if row.blocks.len() < needed {
            let expected = format!("{needed} for {end} tokens");
            return Err(refuse(index, "blocks", expected, row.blocks.len()));
        }
        if let Some(block) = row.blocks[..needed].iter().find(|&&block| block as usize >= self.num_blocks) {
            return Err(refuse(index, "block", format!("below {}", self.num_blocks), block));
        }
        match row.sample.map(|sample| sample.validate()) {
            Some(Err(error)) => Err(refuse(index, "sampling", "valid parameters", error)),
            _ => Ok(()),
        }
    }
}

fn refuse(row: usize, what: &'static str, expected: impl ToString, found: impl ToString) -> BackendError {
    BackendError::Row { row, what, expected: expected.to_string(), found: found.to_string() }
}
