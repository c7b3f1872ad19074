//! Recorded workloads: request traces in the formats that are in use.
//!
//! The first arrival becomes time 0, whatever the origin. Rows that are out of order are sorted
//! (rows of one instant keep their order) and counted in a warning; a row that is wrong is an error
//! with its file, line, field and value, and nothing is loaded. A unit mistake shows as arrivals
//! that no trace has, which are refused until the unit is given.

mod aiperf;
mod check;
mod error;
mod format;
mod gzip;
mod rows;
mod time;

use std::path::Path;

use kvrelay_core::request::PromptContent;
use kvrelay_core::time::{Nanos, Time};

use crate::closed::Turn;
use crate::record::Record;
pub use error::TraceError;
pub use format::Format;
use format::{Clock, Layout};
use rows::Row;
pub use time::TimeUnit;

/// How to read a trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TraceOptions {
    /// Its format; recognised by its fields if not given.
    pub format: Option<Format>,
    /// The unit of arrivals, if it is not the format's own; switches plausibility checks off.
    pub unit: Option<TimeUnit>,
    /// Only the first so many arrivals, in time order.
    pub limit: Option<usize>,
    /// The trace's clock ticks only this often: the arrivals of a slot, which would all come at
    /// once, are spread evenly over it. Not done unless asked for; Mooncake's conversation trace
    /// has slots of 3 s.
    pub slot: Option<Nanos>,
}

/// A trace, read and checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// The file's name.
    pub file: String,
    /// Its format.
    pub format: Format,
    /// Whether it has arrivals. Without, all requests are at 0.
    pub timed: bool,
    /// Its requests, in time order from 0; where there are sessions, one session after the other, each
    /// at its start.
    pub records: Vec<Record>,
    /// By request its place in a session; empty where requests wait for nothing.
    pub turns: Vec<Turn>,
    /// What was noticed and put right, or may surprise.
    pub warnings: Vec<String>,
}

/// Reads the trace at `path`.
///
/// # Errors
/// [`TraceError`], naming the file and what is wrong with it.
pub fn read(path: &Path, options: &TraceOptions) -> Result<Trace, TraceError> {
    let file = path.display().to_string();
    let bytes = std::fs::read(path);
    let bytes = bytes.map_err(|error| TraceError::Io { file: file.clone(), message: error.to_string() })?;
    parse(&file, &bytes, options)
}

/// Reads a trace from the bytes of `file`, which is only a name here.
///
/// # Errors
/// As [`read`].
pub fn parse(file: &str, bytes: &[u8], options: &TraceOptions) -> Result<Trace, TraceError> {
    if options.limit == Some(0) {
        return Err(TraceError::LimitZero);
    }
    let bytes = gzip::unpacked(file, bytes)?;
    let text = rows::text(file, &bytes)?;
    let (layout, columns) = recognise(file, text, options)?;
    let clock = unit_of(file, layout, options)?;
    if layout.format == Format::AiPerf {
        return aiperf::read(file, rows::lines(text), layout, clock, options);
    }
    let (timed, num_failed) = read_rows(file, text, layout, &columns, clock)?;
    if timed.is_empty() {
        return Err(TraceError::Empty { file: file.to_owned() });
    }
    let mut trace = Trace::new(file, layout, layout.arrival.is_some());
    if num_failed > 0 {
        trace.warnings.push(format!("{num_failed} requests without a response left out"));
    }
    trace.records = order(timed, layout, options, &mut trace)?;
    match options.slot {
        Some(Nanos::ZERO) => return Err(TraceError::SlotZero),
        Some(slot) => spread(&mut trace.records, slot),
        None => check::coarse_clock(&mut trace, layout),
    }
    if let Some(limit) = options.limit {
        trace.records.truncate(limit);
    }
    check::hash_ids(&mut trace);
    Ok(trace)
}

impl Trace {
    fn new(file: &str, layout: &Layout, timed: bool) -> Trace {
        let (records, turns, warnings) = (Vec::new(), Vec::new(), Vec::new());
        Trace { file: file.to_owned(), format: layout.format, timed, records, turns, warnings }
    }
}

/// A row with its arrival as written, in nanoseconds.
type Timed = (i128, Record);

/// The layout of a file, and the columns of a table.
fn recognise<'a>(
    file: &str,
    text: &'a str,
    options: &TraceOptions,
) -> Result<(&'static Layout, Vec<&'a str>), TraceError> {
    let first = rows::lines(text).next().ok_or_else(|| TraceError::Empty { file: file.to_owned() })?;
    let json = first.text.starts_with('{');
    let columns = if json { Vec::new() } else { rows::columns(first.text) };
    let sample = if json { Some(Row::object(file, first)?) } else { None };
    let names = sample.as_ref().map_or(columns.clone(), Row::names);
    let named = options.format.map(Format::layout).filter(|layout| layout.json == json);
    let layout = named.filter(|layout| json || layout.fits(&names));
    let recognised = if options.format.is_some() { layout } else { Layout::recognise(json, &names, text) };
    let layout = recognised.ok_or_else(|| TraceError::UnknownFormat {
        file: file.to_owned(),
        line: first.number,
        seen: rows::shortened(&names.join(", ")),
        known: Layout::all_described(),
    })?;
    Ok((layout, columns))
}

/// A file's rows, in its order, and how many requests were left out because they failed when the trace
/// was taken.
fn read_rows(
    file: &str,
    text: &str,
    layout: &Layout,
    columns: &[&str],
    clock: Option<Clock>,
) -> Result<(Vec<Timed>, usize), TraceError> {
    let (mut timed, mut num_failed) = (Vec::new(), 0);
    for line in rows::lines(text).skip(usize::from(!layout.json)) {
        let row = if layout.json { Row::object(file, line)? } else { Row::table(file, line, columns)? };
        if layout.zero_is_failed && row.is_zero(layout.output) {
            num_failed += 1;
        } else {
            timed.push(record(&row, layout, clock)?);
        }
    }
    Ok((timed, num_failed))
}

/// The clock to read arrivals by.
fn unit_of(file: &str, layout: &Layout, options: &TraceOptions) -> Result<Option<Clock>, TraceError> {
    match (layout.arrival, options.unit) {
        (Some((field, Clock::Dates)), Some(unit)) => {
            Err(TraceError::UnitOfDates { file: file.to_owned(), field, unit: unit.name() })
        }
        (Some(_), Some(unit)) => Ok(Some(Clock::Unit(unit))),
        (arrival, _) => Ok(arrival.map(|(_, clock)| clock)),
    }
}

fn record(row: &Row<'_>, layout: &Layout, clock: Option<Clock>) -> Result<Timed, TraceError> {
    let nanos = match (layout.arrival, clock) {
        (Some((field, _)), Some(Clock::Unit(unit))) => row.nanos(field, unit)?,
        (Some((field, _)), Some(Clock::Dates)) => row.date(field)?,
        _ => 0,
    };
    let content = match layout.hash_ids {
        Some((field, tokens_per_id)) => PromptContent::HashIds { ids: row.ids(field)?, tokens_per_id },
        None => PromptContent::Unique,
    };
    let record = Record {
        prompt_tokens: row.tokens(layout.prompt)?,
        output_tokens: row.tokens(layout.output)?,
        content,
        ..Record::default()
    };
    Ok((nanos, record))
}

/// The records in time order, the first at 0.
fn order(
    mut timed: Vec<Timed>,
    layout: &Layout,
    options: &TraceOptions,
    trace: &mut Trace,
) -> Result<Vec<Record>, TraceError> {
    let mut latest = i128::MIN;
    let mut late = 0;
    for (nanos, _) in &timed {
        late += usize::from(*nanos < latest);
        latest = latest.max(*nanos);
    }
    if late > 0 {
        timed.sort_by_key(|(nanos, _)| *nanos);
        let rows = if late == 1 { "row" } else { "rows" };
        trace.warnings.push(format!("{late} {rows} came before an earlier arrival: sorted by time"));
    }
    let (first, last) = (timed[0].0, latest);
    check::span(&trace.file, layout, options.unit, timed.len(), first, last)?;
    let from_first = timed.into_iter().map(|(nanos, record)| {
        let at = u64::try_from(nanos - first).expect("spans are checked to be short");
        Record { at: Time(at), ..record }
    });
    Ok(from_first.collect())
}

/// Spreads the arrivals of each slot evenly over it. A slot's ticks may be off by up to half a slot
/// (Mooncake's are, by up to 3 ms), so arrivals belong to the nearest one.
fn spread(records: &mut [Record], slot: Nanos) {
    let nearest = |record: &Record| record.at.0.saturating_add(slot.0 / 2) / slot.0;
    for group in records.chunk_by_mut(|a, b| nearest(a) == nearest(b)) {
        let start = nearest(&group[0]) * slot.0;
        let count = group.len() as u128;
        for (place, record) in group.iter_mut().enumerate() {
            let offset = u128::from(slot.0) * place as u128 / count;
            record.at = Time(start + offset as u64);
        }
    }
}
