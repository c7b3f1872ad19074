//! Why a trace cannot be read: always with the file, mostly with the line.

/// Why a trace cannot be read.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("{file}: {message}")]
    Io {
        /// The file.
        file: String,
        /// The system's message.
        message: String,
    },
    /// The file is compressed, and cannot be unpacked.
    #[error("{file}: cannot be unpacked with gzip: {problem}")]
    Packed {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// The file is no text.
    #[error("{file}, line {line}: {problem}")]
    NotText {
        /// The file.
        file: String,
        /// The line, from 1.
        line: usize,
        /// What it is instead.
        problem: &'static str,
    },
    /// No rows.
    #[error("{file}: no requests in it (0 rows)")]
    Empty {
        /// The file.
        file: String,
    },
    /// None of the formats.
    #[error("{file}, line {line}: no known trace format has {seen}; known: {known}")]
    UnknownFormat {
        /// The file.
        file: String,
        /// The line looked at.
        line: usize,
        /// The columns or fields there.
        seen: String,
        /// The formats and what they have.
        known: String,
    },
    /// A value that is missing or wrong.
    #[error("{file}, line {line}: {field} is {value}; it must be {expected}")]
    Value {
        /// The file.
        file: String,
        /// The line, from 1.
        line: usize,
        /// Column or field.
        field: String,
        /// What is there.
        value: String,
        /// What must be.
        expected: String,
    },
    /// Arrivals that no trace has: most likely the wrong unit.
    #[error(
        "{file}: {num_rows} arrivals from {first} s to {last} s, taking `{field}` in {unit}, {problem}; say what the unit is (unit=\"s\", \"ms\", \"us\" or \"ns\")"
    )]
    Implausible {
        /// The file.
        file: String,
        /// Rows in it.
        num_rows: usize,
        /// First arrival in seconds.
        first: f64,
        /// Last arrival in seconds.
        last: f64,
        /// The column or field of arrivals.
        field: &'static str,
        /// The unit it was taken in.
        unit: &'static str,
        /// What is wrong with that.
        problem: String,
    },
    /// Arrivals over more time than a run can hold.
    #[error(
        "{file}: {num_rows} arrivals span {seconds} s, taking `{field}` in {unit}; a run holds at most {limit} s"
    )]
    TooLong {
        /// The file.
        file: String,
        /// Rows in it.
        num_rows: usize,
        /// From first to last.
        seconds: f64,
        /// The most there may be.
        limit: f64,
        /// The column or field of arrivals.
        field: &'static str,
        /// The unit it was taken in.
        unit: &'static str,
    },
    /// A unit was given for date-times.
    #[error("{file}: `{field}` holds date-times, which have no unit to give (unit={unit:?})")]
    UnitOfDates {
        /// The file.
        file: String,
        /// The column of arrivals.
        field: &'static str,
        /// The unit given.
        unit: &'static str,
    },
    /// Lengths without arrivals.
    #[error(
        "{file}: a list of lengths without arrivals ({columns}); give a rate, in requests per second (rate=)"
    )]
    RateNeeded {
        /// The file.
        file: String,
        /// The columns it has.
        columns: String,
    },
    /// A limit of no rows.
    #[error("limit is 0; it must be at least 1 request")]
    LimitZero,
    /// Slots were to be spread of arrivals that wait for completions.
    #[error("{file}: has sessions, whose turns wait for each other: slot= cannot spread them")]
    SlotOfSessions {
        /// The file.
        file: String,
    },
    /// A slot of no time.
    #[error("slot is 0 s; it must be above 0")]
    SlotZero,
}
