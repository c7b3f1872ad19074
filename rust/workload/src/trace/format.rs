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
    /// AIPerf's form of Mooncake's (ai-dynamo/aiperf): milliseconds, sessions of several turns,
    /// hash ids only where there are some, prompts as lengths or as texts.
    AiPerf,
    /// LLMServingSim's JSON lines: nanoseconds.
    LlmServingSim,
    /// Azure's LLM inference traces of 2023 and 2024: date-times of 100 ns.
    Azure,
    /// Vidur's processed traces: seconds.
    Vidur,
    /// What splitwise-sim (Mutinifni/splitwise-sim) simulates: seconds.
    Splitwise,
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
    /// Field of prompts as texts, which may stand in place of their lengths.
    pub(super) prompt_text: Option<&'static str>,
    pub(super) output: &'static str,
    /// Field of hash ids, and the tokens one stands for.
    pub(super) hash_ids: Option<(&'static str, u32)>,
    /// A field that tells it from a format with otherwise the same fields.
    pub(super) marker: Option<&'static str>,
    /// Whether a row with 0 output tokens is a request that failed, rather than a mistake.
    pub(super) zero_is_failed: bool,
}

/// In the order in which they are tried: a format precedes those that have a part of its fields.
const LAYOUTS: [Layout; 9] = [
    Layout {
        format: Format::QwenBailian,
        name: "qwen-bailian",
        json: true,
        arrival: Some(("timestamp", Clock::Unit(TimeUnit::Seconds))),
        prompt: "input_length",
        prompt_text: None,
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
        prompt_text: None,
        output: "output_length",
        hash_ids: Some(("hash_ids", 512)),
        marker: None,
        zero_is_failed: false,
    },
    Layout {
        format: Format::AiPerf,
        name: "aiperf",
        json: true,
        arrival: Some(("timestamp", Clock::Unit(TimeUnit::Millis))),
        prompt: "input_length",
        prompt_text: Some("text_input"),
        output: "output_length",
        hash_ids: None,
        marker: None,
        zero_is_failed: false,
    },
    Layout {
        format: Format::LlmServingSim,
        name: "llmservingsim",
        json: true,
        arrival: Some(("arrival_time_ns", Clock::Unit(TimeUnit::Nanos))),
        prompt: "input_toks",
        prompt_text: None,
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
        prompt_text: None,
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
        prompt_text: None,
        output: "num_decode_tokens",
        hash_ids: None,
        marker: None,
        zero_is_failed: false,
    },
    Layout {
        format: Format::Splitwise,
        name: "splitwise",
        json: false,
        arrival: Some(("arrival_timestamp", Clock::Unit(TimeUnit::Seconds))),
        prompt: "prompt_size",
        prompt_text: None,
        output: "token_size",
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
        prompt_text: None,
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
        prompt_text: None,
        output: "num_decode_tokens",
        hash_ids: None,
        marker: None,
        zero_is_failed: false,
    },
];

/// Fields of [`Format::AiPerf`] that rows of [`Format::Mooncake`] do not have.
const AIPERF_ALONE: [&str; 4] = ["\"session_id\"", "\"text_input\"", "\"delay\"", "\"priority\""];

impl Layout {
    /// The fields a file must have to be of this format.
    pub(super) fn fields(&self) -> Vec<&'static str> {
        // Sessions begin at a time, or at a rate that is given; their later turns have none.
        let arrival = self.arrival.filter(|_| self.format != Format::AiPerf).map(|(field, _)| field);
        let ids = self.hash_ids.map(|(field, _)| field);
        [self.marker, arrival, Some(self.prompt), Some(self.output), ids].into_iter().flatten().collect()
    }

    /// Whether its fields are all among `names`.
    pub(super) fn fits(&self, names: &[&str]) -> bool {
        let has = |field: &str| names.contains(&field);
        let stands_in = |field: &str| field == self.prompt && self.prompt_text.is_some_and(has);
        self.fields().into_iter().all(|field| has(field) || stands_in(field))
    }

    /// The layout whose fields are all among `names`, those of the first row of `text`. Rows of AIPerf
    /// may look like Mooncake's until the first that belongs to a session.
    pub(super) fn recognise(json: bool, names: &[&str], text: &str) -> Option<&'static Layout> {
        let found = LAYOUTS.iter().find(|layout| layout.json == json && layout.fits(names))?;
        let is_aiperf = found.format == Format::Mooncake && AIPERF_ALONE.iter().any(|key| text.contains(key));
        Some(if is_aiperf { Format::AiPerf.layout() } else { found })
    }

    /// All formats with their fields, for messages.
    pub(super) fn all_described() -> String {
        let described = LAYOUTS.iter().map(|layout| {
            let kind = if layout.json { "JSON lines" } else { "CSV" };
            let instead = layout.prompt_text.map_or(String::new(), |text| format!(" or {text}"));
            let fields =
                layout.fields().join(", ").replacen(layout.prompt, &format!("{}{instead}", layout.prompt), 1);
            format!("{} ({kind}: {fields})", layout.name)
        });
        described.collect::<Vec<_>>().join("; ")
    }
}

impl Format {
    pub(super) fn layout(self) -> &'static Layout {
        let found = LAYOUTS.iter().find(|layout| layout.format == self);
        found.expect("every format has a layout")
    }

    /// The columns or fields that every file of it has.
    pub(crate) fn columns(self) -> Vec<&'static str> {
        self.layout().fields()
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
