//! A step checked against every limit, for every backend.

use super::{BackendError, Input, KvGeometry, Limits, Logits, Row};

/// Refuses limits, and what else must be at least 1, that no backend could work with.
pub(super) fn check_limits(
    limits: &Limits,
    context_length: usize,
    more: &[(&'static str, usize)],
) -> Result<(), BackendError> {
    let least = [
        ("rows in a step", limits.max_rows),
        ("tokens in a step", limits.max_tokens),
        ("logits in a step", limits.max_logits),
        ("positions", limits.max_positions),
        ("slots", limits.max_slots),
    ];
    for &(what, found) in more.iter().chain(&least) {
        if found == 0 {
            return Err(BackendError::Config { what, expected: "at least 1".into(), found: "0".into() });
        }
    }
    if limits.max_positions > context_length {
        let expected = format!("at most {context_length}, the model's context length");
        let found = limits.max_positions.to_string();
        return Err(BackendError::Config { what: "positions", expected, found });
    }
    Ok(())
}

/// A slot's last token is forgotten; `has_token` says of each slot whether it has one.
pub(super) fn forget_token(has_token: &mut [bool], slot: u32) -> Result<(), BackendError> {
    let limit = has_token.len().saturating_sub(1);
    let entry = has_token.get_mut(slot as usize);
    *entry.ok_or(BackendError::Limit { what: "slot", limit, found: slot as usize })? = false;
    Ok(())
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
