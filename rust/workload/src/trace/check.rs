//! What is odd about a whole trace: units that cannot be right, clocks that are coarse, ids that do
//! not cover their prompts.

use kvrelay_core::request::PromptContent;

use super::format::{Clock, Layout};
use super::time::TimeUnit;
use super::{Trace, TraceError};
use crate::arrivals::MAX_SECONDS;

const NANOS: f64 = 1e-9;
const TEN_YEARS: i128 = 10 * 365 * 86_400 * 1_000_000_000;
/// From 2010 to 2100, in seconds since 1970.
const EPOCH_SECONDS: std::ops::Range<i128> = 1_262_304_000..4_102_444_800;

/// Whether a number that is `nanos` when taken in `taken` would be a date of our time in `unit`.
fn is_date(nanos: i128, taken: TimeUnit, unit: TimeUnit) -> bool {
    let seconds = nanos / taken.nanos() * unit.nanos() / TimeUnit::Seconds.nanos();
    EPOCH_SECONDS.contains(&seconds)
}

/// Refuses spans that no run can hold, and arrivals that look like another unit's unless the unit
/// was given.
pub(super) fn span(
    file: &str,
    layout: &Layout,
    given: Option<TimeUnit>,
    num_rows: usize,
    first: i128,
    last: i128,
) -> Result<(), TraceError> {
    let Some((field, clock)) = layout.arrival else {
        return Ok(());
    };
    let taken = match (given, clock) {
        (Some(unit), _) | (None, Clock::Unit(unit)) => Some(unit),
        (None, Clock::Dates) => None,
    };
    let unit = taken.map_or("date-times", TimeUnit::name);
    if let (Some(taken), None) = (taken, given)
        && let Some(problem) = implausible(taken, first, last)
    {
        let (first, last) = (first as f64 * NANOS, last as f64 * NANOS);
        return Err(TraceError::Implausible {
            file: file.to_owned(),
            num_rows,
            first,
            last,
            field,
            unit,
            problem,
        });
    }
    let seconds = (last - first) as f64 * NANOS;
    if seconds > MAX_SECONDS {
        let limit = MAX_SECONDS;
        return Err(TraceError::TooLong { file: file.to_owned(), num_rows, seconds, limit, field, unit });
    }
    Ok(())
}

/// What is wrong with arrivals from `first` to `last` nanoseconds, if anything.
fn implausible(taken: TimeUnit, first: i128, last: i128) -> Option<String> {
    let span = last - first;
    if span > TEN_YEARS {
        return Some(format!("are {:.0} years", span as f64 / (TEN_YEARS as f64 / 10.0)));
    }
    let as_date = TimeUnit::ALL.into_iter().find(|unit| is_date(first, taken, *unit));
    match as_date {
        Some(unit) if unit == taken => None,
        // A trace that begins late is rare, one whose numbers then happen to be dates even rarer.
        Some(unit) if span > 0 && first > 100 * span => {
            Some(format!("begin late for their span, and would be dates of our time in {}", unit.name()))
        }
        None if first > TEN_YEARS => {
            Some("begin after more than ten years, and are no dates of our time".to_owned())
        }
        _ if (1..1_000).contains(&span) => Some(format!("are {span} ns: nobody sends requests that fast")),
        _ => None,
    }
}

/// Rows from which a coarse clock is worth a warning.
const ROWS_TO_JUDGE: usize = 100;

/// Warns when most arrivals share their instant with others: bursts that the clock made.
pub(super) fn coarse_clock(trace: &mut Trace, layout: &Layout) {
    let num_rows = trace.records.len();
    let instants = trace.records.chunk_by(|a, b| a.at == b.at).count();
    if layout.arrival.is_some() && num_rows >= ROWS_TO_JUDGE && instants * 2 < num_rows {
        trace.warnings.push(format!(
            "{num_rows} arrivals fall on {instants} instants, as a coarse clock makes them: kept as they are; slot= spreads them"
        ));
    }
}

/// Warns when hash ids do not cover their prompts exactly.
pub(super) fn hash_ids(trace: &mut Trace) {
    let uneven = trace.records.iter().filter(|record| match &record.content {
        PromptContent::Unique => false,
        PromptContent::HashIds { ids, tokens_per_id } => {
            u64::from(record.prompt_tokens).div_ceil(u64::from(*tokens_per_id)) != ids.len() as u64
        }
    });
    let count = uneven.count();
    if count > 0 {
        let rows = if count == 1 { "row has" } else { "rows have" };
        trace.warnings.push(format!("{count} {rows} more or fewer hash ids than its prompt has blocks"));
    }
}
