//! Published workloads as numbers: length percentiles with their rank correlation, rate and
//! burstiness, computed from the public traces each names.

mod data;

use kvrelay_core::latency::names::{UnknownName, canonical};

use crate::arrivals::Process;
use crate::lengths::{LengthPair, Lengths};
use data::PRESETS;

/// A published workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Preset {
    /// Its name.
    pub name: &'static str,
    /// Where the numbers come from, and under which licence.
    pub source: &'static str,
    /// Requests they were computed from.
    pub num_requests: u32,
    /// Percentiles 0 to 100 of prompt lengths, in tokens.
    pub prompt_tokens: [u32; 101],
    /// Percentiles 0 to 100 of output lengths, in tokens.
    pub output_tokens: [u32; 101],
    /// Means of prompt and output lengths over the source.
    pub mean_tokens: (f64, f64),
    /// Spearman's rank correlation between the two.
    pub spearman: f64,
    /// Requests per second, where the source has arrivals worth the name.
    pub rate: Option<f64>,
    /// Coefficient of variation of the gaps between arrivals, where known.
    pub cv: Option<f64>,
}

impl Preset {
    /// The preset called `name`.
    ///
    /// # Errors
    /// [`UnknownName`], with the names there are.
    pub fn named(name: &str) -> Result<&'static Preset, UnknownName> {
        let wanted = canonical(name);
        let found = PRESETS.iter().find(|preset| preset.name == wanted);
        found.ok_or_else(|| UnknownName::new("workload preset", name, Preset::names()))
    }

    /// The presets there are.
    pub fn names() -> impl Iterator<Item = &'static str> {
        PRESETS.iter().map(|preset| preset.name)
    }

    /// Its joint distribution of lengths.
    pub fn lengths(&self) -> LengthPair {
        let lengths = |percentiles: &[u32; 101], mean| {
            let percentiles = percentiles.map(f64::from);
            Lengths::empirical_with_mean(&percentiles, mean).expect("the table's percentiles are in order")
        };
        let prompt = lengths(&self.prompt_tokens, self.mean_tokens.0);
        let output = lengths(&self.output_tokens, self.mean_tokens.1);
        LengthPair::correlated(prompt, output, self.spearman).expect("the table holds correlations")
    }

    /// Its arrivals: gamma with the published variation, otherwise Poisson.
    pub fn process(&self) -> Process {
        self.cv.map_or(Process::Poisson, |cv| Process::Gamma { cv })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_draws_lengths_of_its_means() {
        assert_eq!(PRESETS.len(), 6);
        for preset in PRESETS {
            let (prompt, output) = preset.lengths().means();
            let tolerance = 0.001;
            assert!((prompt / preset.mean_tokens.0 - 1.0).abs() < tolerance, "{}: {prompt}", preset.name);
            assert!((output / preset.mean_tokens.1 - 1.0).abs() < tolerance, "{}: {output}", preset.name);
        }
    }

    #[test]
    fn numbers_are_the_published_ones() {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../../shared/measured/length_quantiles.json");
        let Ok(text) = std::fs::read_to_string(&file) else {
            println!("skipped: {} is not there", file.display());
            return;
        };
        let published: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(published.as_object().unwrap().len(), 1 + PRESETS.len());
        for preset in PRESETS {
            let row = &published[preset.name];
            assert_eq!(row["source"], preset.source);
            assert_eq!(row["num_requests"], preset.num_requests);
            assert_eq!(row["prompt_tokens"], serde_json::json!(preset.prompt_tokens.to_vec()));
            assert_eq!(row["output_tokens"], serde_json::json!(preset.output_tokens.to_vec()));
            assert_eq!(row["mean"], serde_json::json!([preset.mean_tokens.0, preset.mean_tokens.1]));
            assert_eq!(row["spearman"].as_f64(), Some(preset.spearman));
            assert_eq!(row["rate"].as_f64(), preset.rate);
            assert_eq!(row["cv_interarrival"].as_f64(), preset.cv);
        }
    }

    #[test]
    fn an_unknown_preset_lists_the_known_ones() {
        let message = Preset::named("azure-conv").unwrap_err().to_string();
        assert!(message.contains("nearest first: azure-co"), "{message}");
        assert!(Preset::names().all(|name| message.contains(name)));
        assert_eq!(Preset::named("Azure_Conv_2023").unwrap().name, "azure-conv-2023");
    }
}
