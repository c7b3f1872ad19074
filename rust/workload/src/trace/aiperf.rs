//! AIPerf's form of Mooncake's format (ai-dynamo/aiperf, `dataset/loader/mooncake_trace.py`): rows may
//! belong to sessions, and then come one after the other.
//!
//! The first row of a session comes at its `timestamp`; a later one `delay` milliseconds after the one
//! before it is over, and not before a `timestamp` of its own. Its prompt is the conversation so far
//! and its own input, as AIPerf sends it, unless `context_mode` says that its input is all of that.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvrelay_core::request::PromptContent;
use kvrelay_core::time::{Nanos, Time};

use super::format::{Clock, Layout};
use super::rows::{Line, Row};
use super::time::TimeUnit;
use super::{Trace, TraceError, TraceOptions, check, spread};
use crate::closed::{Conversation, Turn};
use crate::error::MAX_TOKENS;
use crate::record::Record;

/// Bytes of a token of text, where a prompt is given as text: its length is counted by no tokenizer
/// here. English text under today's vocabularies has about four.
const TEXT_BYTES_PER_TOKEN: usize = 4;

/// The `context_mode` of rows whose input is the whole conversation.
const WHOLE_CONTEXT: &str = "message_array_with_responses";

/// A row as it stands.
struct Said {
    line: usize,
    timestamp: Option<i128>,
    delay: i128,
    input_tokens: u32,
    output_tokens: u32,
    hash_ids: Option<Arc<[u64]>>,
    priority: Option<i32>,
    whole_context: bool,
}

/// The requests of an AIPerf file, session by session.
pub(super) fn read<'a>(
    file: &str,
    lines: impl Iterator<Item = Line<'a>>,
    layout: &'static Layout,
    clock: Option<Clock>,
    options: &TraceOptions,
) -> Result<Trace, TraceError> {
    let unit = match clock {
        Some(Clock::Unit(unit)) => unit,
        _ => TimeUnit::Millis,
    };
    let mut num_texts = 0;
    let mut sessions: Vec<Vec<Said>> = Vec::new();
    let mut known = BTreeMap::new();
    for line in lines {
        let row = Row::object(file, line)?;
        let said = said(&row, layout, unit, &mut num_texts)?;
        match row.given("session_id") {
            None => sessions.push(vec![said]),
            Some(id) => {
                let place = *known.entry(id.to_string()).or_insert(sessions.len());
                sessions.resize_with(sessions.len().max(place + 1), Vec::new);
                sessions[place].push(said);
            }
        }
    }
    let timed = sessions.iter().any(|session| session[0].timestamp.is_some());
    let starts = starts(file, &mut sessions, timed)?;
    let latest = sessions.iter().flatten().filter_map(|said| said.timestamp).max().unwrap_or(0);
    let (first, num_rows) = (starts.first().copied().unwrap_or(0), sessions.iter().map(Vec::len).sum());
    if timed {
        check::span(file, layout, options.unit, num_rows, first, latest.max(first))?;
    }
    let mut trace = Trace::new(file, layout, timed);
    for (index, (session, start)) in sessions.iter().zip(&starts).enumerate() {
        append(&mut trace, index as u32, session, |at| nanos_since(first, at), *start)?;
    }
    let limit = options.limit.unwrap_or(usize::MAX);
    trace.records.truncate(limit);
    trace.turns.truncate(limit);
    if num_texts > 0 {
        trace.warnings.push(format!(
            "{num_texts} prompts are texts: their lengths are taken as {TEXT_BYTES_PER_TOKEN} bytes a token"
        ));
    }
    let has_sessions = trace.turns.iter().any(|turn| turn.number > 0);
    if !has_sessions {
        trace.turns.clear();
    }
    match options.slot {
        Some(Nanos::ZERO) => return Err(TraceError::SlotZero),
        Some(_) if has_sessions => return Err(TraceError::SlotOfSessions { file: file.to_owned() }),
        Some(slot) => spread(&mut trace.records, slot),
        None if timed && !has_sessions => check::coarse_clock(&mut trace, layout),
        None => {}
    }
    check::hash_ids(&mut trace);
    Ok(trace)
}

fn said(row: &Row<'_>, layout: &Layout, unit: TimeUnit, num_texts: &mut usize) -> Result<Said, TraceError> {
    let timestamp = row.given("timestamp").map(|_| row.nanos("timestamp", unit)).transpose()?;
    let delay = row.given("delay").map(|_| row.pause("delay", unit)).transpose()?;
    let text = row.given("text_input").filter(|_| row.given(layout.prompt).is_none());
    let input_tokens = match text {
        None => row.tokens(layout.prompt)?,
        Some(_) => {
            *num_texts += 1;
            let tokens = row.string("text_input")?.len().div_ceil(TEXT_BYTES_PER_TOKEN).max(1);
            u32::try_from(tokens).unwrap_or(u32::MAX).min(MAX_TOKENS)
        }
    };
    let whole_context = row.given("context_mode").is_some() && row.string("context_mode")? == WHOLE_CONTEXT;
    Ok(Said {
        line: row.line,
        timestamp,
        delay: delay.unwrap_or(0),
        input_tokens,
        output_tokens: row.tokens(layout.output)?,
        hash_ids: row.given("hash_ids").map(|_| row.ids("hash_ids")).transpose()?,
        priority: row.given("priority").map(|_| row.integer("priority")).transpose()?,
        whole_context,
    })
}

/// The sessions in order of their starts, and those; all 0 in a file without times.
fn starts(file: &str, sessions: &mut [Vec<Said>], timed: bool) -> Result<Vec<i128>, TraceError> {
    if !timed {
        return Ok(vec![0; sessions.len()]);
    }
    let missing = |said: &Said| TraceError::Value {
        file: file.to_owned(),
        line: said.line,
        field: "timestamp".to_owned(),
        value: "missing".to_owned(),
        expected: "there: other sessions begin with one".to_owned(),
    };
    if let Some(untimed) = sessions.iter().find(|session| session[0].timestamp.is_none()) {
        return Err(missing(&untimed[0]));
    }
    sessions.sort_by_key(|session| session[0].timestamp);
    Ok(sessions.iter().filter_map(|session| session[0].timestamp).collect())
}

/// Nanoseconds from the first start; spans are checked to be short.
fn nanos_since(first: i128, at: i128) -> Time {
    Time(u64::try_from((at - first).max(0)).unwrap_or(u64::MAX))
}

/// Adds a session's turns.
fn append(
    trace: &mut Trace,
    index: u32,
    session: &[Said],
    since_start: impl Fn(i128) -> Time,
    start: i128,
) -> Result<(), TraceError> {
    let alone = session.len() == 1;
    let mut conversation =
        Conversation::beginning(index, session[0].hash_ids.clone().unwrap_or_else(|| Arc::from([])));
    for (number, said) in session.iter().enumerate() {
        let own = || match &said.hash_ids {
            Some(ids) => PromptContent::HashIds { ids: Arc::clone(ids), tokens_per_id: 512 },
            None => PromptContent::Unique,
        };
        let (prompt_tokens, content) = if alone || said.whole_context {
            (said.input_tokens, own())
        } else {
            conversation.ask(said.input_tokens).map_err(|tokens| TraceError::Value {
                file: trace.file.clone(),
                line: said.line,
                field: "the conversation up to input_length".to_owned(),
                value: tokens.to_string(),
                expected: format!("at most {MAX_TOKENS} tokens"),
            })?
        };
        conversation.answer(said.output_tokens);
        let at = since_start(start);
        trace.records.push(Record {
            at,
            prompt_tokens,
            output_tokens: said.output_tokens,
            priority: said.priority,
            content,
            ..Record::default()
        });
        trace.turns.push(Turn {
            session: index,
            number: number as u32,
            think: Nanos(u64::try_from(said.delay).unwrap_or(u64::MAX)),
            earliest: said.timestamp.map_or(at, &since_start),
        });
    }
    Ok(())
}
