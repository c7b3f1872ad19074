//! A trace's text as rows with named fields, whether JSON lines or comma-separated values.
//!
//! A byte-order mark, carriage returns, blank lines and a missing last newline make no difference.

use std::borrow::Cow;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::error::TraceError;
use super::time::{Decimal, TimeUnit, date_time};
use crate::error::MAX_TOKENS;

/// A line that is not blank, and its number from 1.
#[derive(Clone, Copy)]
pub(super) struct Line<'a> {
    pub(super) number: usize,
    pub(super) text: &'a str,
}

/// The text in `bytes`.
pub(super) fn text<'a>(file: &str, bytes: &'a [u8]) -> Result<&'a str, TraceError> {
    let not_text = |line, problem| TraceError::NotText { file: file.to_owned(), line, problem };
    if bytes.starts_with(&[0xFF, 0xFE]) || bytes.starts_with(&[0xFE, 0xFF]) {
        return Err(not_text(1, "UTF-16; save it as UTF-8"));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        not_text(1 + before.iter().filter(|byte| **byte == b'\n').count(), "not UTF-8")
    })?;
    Ok(text.strip_prefix('\u{FEFF}').unwrap_or(text))
}

/// The lines of `text` that are not blank.
pub(super) fn lines(text: &str) -> impl Iterator<Item = Line<'_>> {
    let numbered =
        text.lines().enumerate().map(|(index, text)| Line { number: index + 1, text: text.trim() });
    numbered.filter(|line| !line.text.is_empty())
}

/// The names of a table's columns.
pub(super) fn columns(header: &str) -> Vec<&str> {
    header.split(',').map(cell).collect()
}

/// A cell without blanks and quotes around it.
fn cell(text: &str) -> &str {
    let text = text.trim();
    text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text)
}

/// One request's fields.
pub(super) struct Row<'a> {
    pub(super) file: &'a str,
    pub(super) line: usize,
    cells: Cells<'a>,
}

enum Cells<'a> {
    Object(Map<String, Value>),
    Table { columns: &'a [&'a str], values: Vec<&'a str> },
}

impl<'a> Row<'a> {
    /// The row of a line that holds a JSON object.
    pub(super) fn object(file: &'a str, line: Line<'_>) -> Result<Row<'a>, TraceError> {
        match serde_json::from_str::<Map<String, Value>>(line.text) {
            Ok(object) => Ok(Row { file, line: line.number, cells: Cells::Object(object) }),
            Err(error) => Err(TraceError::Value {
                file: file.to_owned(),
                line: line.number,
                field: "the line".to_owned(),
                value: shortened(line.text),
                expected: format!("a JSON object ({error})"),
            }),
        }
    }

    /// The row of a line of comma-separated values.
    pub(super) fn table(
        file: &'a str,
        line: Line<'a>,
        columns: &'a [&'a str],
    ) -> Result<Row<'a>, TraceError> {
        let values: Vec<&str> = line.text.split(',').map(cell).collect();
        if values.len() != columns.len() {
            return Err(TraceError::Value {
                file: file.to_owned(),
                line: line.number,
                field: "the line".to_owned(),
                value: format!("{} ({} values)", shortened(line.text), values.len()),
                expected: format!("{} values: {}", columns.len(), columns.join(", ")),
            });
        }
        Ok(Row { file, line: line.number, cells: Cells::Table { columns, values } })
    }

    fn error(&self, field: &str, value: impl ToString, expected: impl ToString) -> TraceError {
        TraceError::Value {
            file: self.file.to_owned(),
            line: self.line,
            field: field.to_owned(),
            value: shortened(&value.to_string()),
            expected: expected.to_string(),
        }
    }

    /// The names of its fields.
    pub(super) fn names(&self) -> Vec<&str> {
        match &self.cells {
            Cells::Object(object) => object.keys().map(String::as_str).collect(),
            Cells::Table { columns, .. } => columns.to_vec(),
        }
    }

    /// The text of a number or a cell.
    fn scalar(&self, field: &str, expected: &str) -> Result<Cow<'_, str>, TraceError> {
        match &self.cells {
            Cells::Object(object) => match object.get(field) {
                Some(Value::Number(number)) => Ok(Cow::Owned(number.to_string())),
                Some(other) => Err(self.error(field, other, expected)),
                None => Err(self.error(field, "missing", expected)),
            },
            Cells::Table { columns, values } => match columns.iter().position(|column| *column == field) {
                Some(index) => Ok(Cow::Borrowed(values[index])),
                None => Err(self.error(field, "missing", expected)),
            },
        }
    }

    /// A number of tokens.
    pub(super) fn tokens(&self, field: &str) -> Result<u32, TraceError> {
        let expected = format!("a whole number of tokens between 1 and {MAX_TOKENS}");
        let text = self.scalar(field, &expected)?;
        let whole = Decimal::parse(&text).and_then(Decimal::whole);
        let tokens = whole.and_then(|whole| u32::try_from(whole).ok());
        let tokens = tokens.filter(|tokens| (1..=MAX_TOKENS).contains(tokens));
        tokens.ok_or_else(|| self.error(field, quoted(&text), expected))
    }

    /// Whether `field` holds a zero.
    pub(super) fn is_zero(&self, field: &str) -> bool {
        let number = self.scalar(field, "a number").ok().and_then(|text| Decimal::parse(&text));
        number.and_then(Decimal::whole) == Some(0)
    }

    /// An arrival in nanoseconds, of a number in `unit`.
    pub(super) fn nanos(&self, field: &str, unit: TimeUnit) -> Result<i128, TraceError> {
        self.time(field, unit, "an arrival")
    }

    /// A pause in nanoseconds, of a number in `unit`.
    pub(super) fn pause(&self, field: &str, unit: TimeUnit) -> Result<i128, TraceError> {
        self.time(field, unit, "a pause")
    }

    fn time(&self, field: &str, unit: TimeUnit, what: &str) -> Result<i128, TraceError> {
        let expected = format!("{what} in {}, at least 0", unit.name());
        let text = self.scalar(field, &expected)?;
        let nanos = Decimal::parse(&text).and_then(|decimal| decimal.scaled(unit.nanos()));
        nanos.filter(|nanos| *nanos >= 0).ok_or_else(|| self.error(field, quoted(&text), expected))
    }

    /// An arrival in nanoseconds since 1970, of a date-time.
    pub(super) fn date(&self, field: &str) -> Result<i128, TraceError> {
        let expected = "a date-time such as 2023-11-16 18:15:46.6805900";
        let text = self.scalar(field, expected)?;
        date_time(&text).ok_or_else(|| self.error(field, quoted(&text), expected))
    }

    /// The value of a field that an object has, unless it is null.
    pub(super) fn given(&self, field: &str) -> Option<&Value> {
        match &self.cells {
            Cells::Object(object) => object.get(field).filter(|value| !value.is_null()),
            Cells::Table { .. } => None,
        }
    }

    /// A text.
    pub(super) fn string(&self, field: &str) -> Result<&str, TraceError> {
        let value = self.given(field);
        let missing = || self.error(field, value.map_or("missing".to_owned(), Value::to_string), "a text");
        value.and_then(Value::as_str).ok_or_else(missing)
    }

    /// A whole number of 32 bits.
    pub(super) fn integer(&self, field: &str) -> Result<i32, TraceError> {
        let expected = "a whole number of 32 bits";
        let text = self.scalar(field, expected)?;
        let whole = Decimal::parse(&text).and_then(Decimal::whole);
        let found = whole.and_then(|whole| i32::try_from(whole).ok());
        found.ok_or_else(|| self.error(field, quoted(&text), expected))
    }

    /// A list of 64-bit ids.
    pub(super) fn ids(&self, field: &str) -> Result<Arc<[u64]>, TraceError> {
        let expected = "a list of whole numbers of 64 bits";
        let value = match &self.cells {
            Cells::Object(object) => object.get(field),
            Cells::Table { .. } => None,
        };
        let Some(Value::Array(items)) = value else {
            return Err(self.error(field, value.map_or("missing".to_owned(), Value::to_string), expected));
        };
        let ids = items.iter().map(|item| item.as_u64().ok_or_else(|| self.error(field, item, expected)));
        ids.collect()
    }
}

/// Numbers stay bare in messages; anything else is quoted, an empty cell above all.
fn quoted(text: &str) -> String {
    if Decimal::parse(text).is_some() { text.to_owned() } else { format!("{text:?}") }
}

/// At most 80 letters of a value.
pub(super) fn shortened(text: &str) -> String {
    const MOST: usize = 80;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
