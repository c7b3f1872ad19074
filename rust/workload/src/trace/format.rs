//! The trace formats, one entry each: what their fields are called, and in which units.

use kvrelay_core::latency::names::{UnknownName, canonical};

use super::time::TimeUnit;

/// A trace format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Mooncake's JSON lines (kvcache-ai/Mooncake, FAST25-release/traces): milliseconds, and hash
    /// ids of 512-token blocks.
    Mooncake,
    /// Qwen-Bailian's JSON lines (alibaba-edu/qwen-bailian-usagetraces-anon): seconds, and hash ids
    /// of 16-token blocks.
    QwenBailian,
    /// LLMServingSim's JSON lines: nanoseconds.
    LlmServingSim,
    /// Azure's LLM inference traces of 2023 and 2024: date-times of 100 ns.
    Azure,
    /// Vidur's processed traces: seconds.
    Vidur,
    /// BurstGPT's tables (HPMLL/BurstGPT), with or without session columns: seconds. Requests that
    /// got no response there (0 response tokens) are left out, with a warning that counts them.
    BurstGpt,
    /// Lengths alone, as Sarathi-Serve and Vidur keep them: arrivals are made up at a given rate.
    Lengths,
}

/// How a format writes arrivals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Clock {
    /// Numbers in a unit.
    Unit(TimeUnit),
    /// Date-times.
    Dates,
}

/// Where a format keeps what.
pub(super) struct Layout {
    pub(super) format: Format,
    pub(super) name: &'static str,
    pub(super) json: bool,
    /// Field and clock of arrivals; none in lists of lengths.
    pub(super) arrival: Option<(&'static str, Clock)>,
    pub(super) prompt: &'static str,
    pub(super) output: &'static str,
    /// Field of hash ids, and the tokens one stands for.
    pub(super) hash_ids: Option<(&'static str, u32)>,
    /// A field that tells it from a format with otherwise the same fields.
    pub(super) marker: Option<&'static str>,
    /// Whether a row with 0 output tokens is a request that failed, rather than a mistake.
    pub(super) zero_is_failed: bool,
}

/// In the order in which they are tried: a format precedes those that have a part of its fields.
const LAYOUTS: [Layout; 7] = [
    Layout {
        format: Format::QwenBailian,
        name: "qwen-bailian",
        json: true,
        arrival: Some(("timestamp", Clock::Unit(TimeUnit::Seconds))),
        prompt: "input_length",
        output: "output_length",
        hash_ids: Some(("hash_ids", 16)),
        marker: Some("chat_id"),
        zero_is_failed: false,
    },
    Layout {
        format: Format::Mooncake,
        name: "mooncake",
        json: true,
        arrival: Some(("timestamp", Clock::Unit(TimeUnit::Millis))),
        prompt: "input_length",
        output: "output_length",
        hash_ids: Some(("hash_ids", 512)),
        marker: None,
        zero_is_failed: false,
    },
    Layout {
        format: Format::LlmServingSim,
        name: "llmservingsim",
        json: true,
        arrival: Some(("arrival_time_ns", Clock::Unit(TimeUnit::Nanos))),
        prompt: "input_toks",
        output: "output_toks",
        hash_ids: None,
        marker: None,
        zero_is_failed: false,
    },
    Layout {
        format: Format::Azure,
        name: "azure",
        json: false,
        arrival: Some(("TIMESTAMP", Clock::Dates)),
        prompt: "ContextTokens",
        output: "GeneratedTokens",
        hash_ids: None,
        marker: None,
        zero_is_failed: false,
    },
    Layout {
        format: Format::Vidur,
        name: "vidur",
        json: false,
        arrival: Some(("arrived_at", Clock::Unit(TimeUnit::Seconds))),
        prompt: "num_prefill_tokens",
        output: "num_decode_tokens",
        hash_ids: None,
        marker: None,
        zero_is_failed: false,
    },
    Layout {
        format: Format::BurstGpt,
        name: "burstgpt",
        json: false,
        arrival: Some(("Timestamp", Clock::Unit(TimeUnit::Seconds))),
        prompt: "Request tokens",
        output: "Response tokens",
        hash_ids: None,
        marker: None,
        zero_is_failed: true,
    },
    Layout {
        format: Format::Lengths,
        name: "lengths",
        json: false,
        arrival: None,
        prompt: "num_prefill_tokens",
        output: "num_decode_tokens",
        hash_ids: None,
        marker: None,
        zero_is_failed: false,
    },
];

impl Layout {
    /// The fields a file must have to be of this format.
    pub(super) fn fields(&self) -> Vec<&'static str> {
        let arrival = self.arrival.map(|(field, _)| field);
        let ids = self.hash_ids.map(|(field, _)| field);
        [self.marker, arrival, Some(self.prompt), Some(self.output), ids].into_iter().flatten().collect()
    }

    /// The layout whose fields are all among `names`.
    pub(super) fn recognise(json: bool, names: &[&str]) -> Option<&'static Layout> {
        let has_all = |layout: &&Layout| layout.fields().iter().all(|field| names.contains(field));
        LAYOUTS.iter().filter(|layout| layout.json == json).find(has_all)
    }

    /// All formats with their fields, for messages.
    pub(super) fn all_described() -> String {
        let described = LAYOUTS.iter().map(|layout| {
            let kind = if layout.json { "JSON lines" } else { "CSV" };
            format!("{} ({kind}: {})", layout.name, layout.fields().join(", "))
        });
        described.collect::<Vec<_>>().join("; ")
    }
}

impl Format {
    pub(super) fn layout(self) -> &'static Layout {
        let found = LAYOUTS.iter().find(|layout| layout.format == self);
        found.expect("every format has a layout")
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.layout().name
    }

    /// The format called `name`.
    ///
    /// # Errors
    /// [`UnknownName`], with the formats there are.
    pub fn named(name: &str) -> Result<Format, UnknownName> {
        let wanted = canonical(name);
        let found = LAYOUTS.iter().find(|layout| layout.name == wanted);
        let known = || UnknownName::new("trace format", name, LAYOUTS.iter().map(|layout| layout.name));
        found.map(|layout| layout.format).ok_or_else(known)
    }
}
