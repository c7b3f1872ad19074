//! Named profiles: the latency coefficients and KV capacities that DistServe (OSDI'24) published
//! with its simulator, for its own engine (`"distserve"`) and for the vLLM of its time (`"vllm"`).
//!
//! A step costs, in milliseconds, `(a + b·Σl + c·Σl²) / PP + 1·PP` for prompts and
//! `(a + b·Σcontext + c·B) / PP` for decode, with a set for batches below 95 rows and one above.
//! That is the time of *one stage*, and so the interval between two steps of a full pipeline; a
//! request passes `PP` of them. Prompts were at most 2,048 tokens: OPT has no more positions.

mod data;

use super::linear::{DecodeTerms, Linear, PrefillTerms};
use super::names::{UnknownName, canonical};
use data::{CAPACITIES, COEFFICIENTS, LARGE_FROM};

/// The profiles there are.
pub const PROFILE_NAMES: [&str; 2] = ["distserve", "vllm"];

/// Milliseconds that a prompt step takes longer for each pipeline stage.
const PREFILL_MS_PER_STAGE: f64 = 1.0;

/// Why there is no such profile.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProfileError {
    /// No profile of this name.
    #[error(transparent)]
    Name(#[from] UnknownName),
    /// The model is not covered at all.
    #[error("no {table} is published for {model}, only for {}", known.join(", "))]
    Model {
        /// What was looked up: a profile's coefficients, or the KV capacities.
        table: String,
        /// The model, as given.
        model: String,
        /// The models that are covered.
        known: Vec<&'static str>,
    },
    /// The model is covered, but not at this parallelism.
    #[error("no {table} is published for {model} at tp = {tp}, pp = {pp}, only at {}", list(known))]
    Parallelism {
        /// What was looked up: a profile's coefficients, or the KV capacities.
        table: String,
        /// The model, as given.
        model: String,
        /// GPUs that share a layer.
        tp: u32,
        /// Pipeline stages.
        pp: u32,
        /// The tensor parallelism that is covered, each with its numbers of pipeline stages (none
        /// listed: from 1 on).
        known: Vec<(u32, Vec<u32>)>,
    },
}

fn list(known: &[(u32, Vec<u32>)]) -> String {
    let entry = |(tp, stages): &(u32, Vec<u32>)| {
        let stages: Vec<String> = stages.iter().map(u32::to_string).collect();
        let stages = if stages.is_empty() { "from 1".to_owned() } else { format!("= {}", stages.join(", ")) };
        format!("tp = {tp} (pp {stages})")
    };
    known.iter().map(entry).collect::<Vec<_>>().join(", ")
}

/// Why `rows`, a table's model, tensor parallelism and pipeline stages (`None`: from 1 on) in order, have
/// nothing for a model at some parallelism.
fn not_published(
    table: String,
    model: &str,
    (tp, pp): (u32, u32),
    rows: impl Iterator<Item = (&'static str, u32, Option<u32>)>,
) -> ProfileError {
    let wanted = canonical(model);
    let mut models: Vec<&'static str> = Vec::new();
    let mut known: Vec<(u32, Vec<u32>)> = Vec::new();
    for (name, row_tp, stages) in rows {
        if models.last() != Some(&name) {
            models.push(name);
        }
        if name == wanted {
            match known.last_mut() {
                Some((tp, all)) if *tp == row_tp => all.extend(stages),
                _ => known.push((row_tp, stages.into_iter().collect())),
            }
        }
    }
    let model = model.to_owned();
    if known.is_empty() {
        return ProfileError::Model { table, model, known: models };
    }
    ProfileError::Parallelism { table, model, tp, pp, known }
}

/// The coefficients published under `name` for `model` on A100-80GB with `tp` GPUs a layer and `pp`
/// pipeline stages (any number: one stage's time is computed from the whole's).
///
/// # Errors
/// [`ProfileError`], with the models, or this model's parallelism, that are published.
pub fn profile(name: &str, model: &str, tp: u32, pp: u32) -> Result<Linear, ProfileError> {
    let engine = canonical(name);
    if !PROFILE_NAMES.contains(&engine.as_str()) {
        return Err(UnknownName::new("latency profile", name, PROFILE_NAMES).into());
    }
    let wanted = canonical(model);
    let found = COEFFICIENTS.iter().find(|set| set.engine == engine && set.model == wanted && set.tp == tp);
    let (Some(set), true) = (found, pp > 0) else {
        let sets = COEFFICIENTS.iter().filter(|set| set.engine == engine);
        let rows = sets.map(|set| (set.model, set.tp, None));
        return Err(not_published(format!("{engine} profile"), model, (tp, pp), rows));
    };
    let stages = f64::from(pp);
    let [constant, per_token, per_square] = set.prefill.map(|x| x / stages);
    Ok(Linear {
        prefill: PrefillTerms { constant: constant + PREFILL_MS_PER_STAGE * stages, per_token, per_square },
        decode_small: decode_terms(set.decode_small, stages),
        decode_large: decode_terms(set.decode_large, stages),
        large_from: LARGE_FROM,
    })
}

fn decode_terms(published: [f64; 3], stages: f64) -> DecodeTerms {
    let [constant, per_context, per_row] = published.map(|x| x / stages);
    DecodeTerms { constant, per_context, per_row }
}

/// The tokens of KV that DistServe's engine holds for `model` on `tp` · `pp` A100-80GB.
///
/// # Errors
/// [`ProfileError`], with the models, or this model's parallelism, that are published.
pub fn published_kv_capacity_tokens(model: &str, tp: u32, pp: u32) -> Result<u64, ProfileError> {
    let wanted = canonical(model);
    let found = CAPACITIES.iter().find(|row| (row.0, row.1, row.2) == (wanted.as_str(), tp, pp));
    if let Some(row) = found {
        return Ok(row.3);
    }
    let rows = CAPACITIES.iter().map(|row| (row.0, row.1, Some(row.2)));
    Err(not_published("KV capacity".to_owned(), model, (tp, pp), rows))
}

#[cfg(test)]
mod tests {
    use super::super::LatencyModel;
    use super::*;
    use crate::step::StepShape;
    use crate::time::Picos;
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    /// A file beside the repository, or `None`, said aloud, in a clone that stands alone.
    fn shared(path: &str) -> Option<String> {
        let file =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/measured/distserve").join(path);
        let text = std::fs::read_to_string(&file).ok();
        if text.is_none() {
            println!("skipped: {} is not there", file.display());
        }
        text
    }

    #[test]
    fn coefficients_are_the_published_ones_to_the_last_digit() {
        for engine in PROFILE_NAMES {
            let Some(text) = shared(&format!("profiler-a100-80g.{engine}.json")) else { return };
            let sets: BTreeMap<String, BTreeMap<String, serde_json::Value>> =
                serde_json::from_str(&text).unwrap();
            let mut count = 0;
            for (model, by_tp) in &sets {
                for (tp, published) in by_tp {
                    let model = model.strip_prefix("facebook/").unwrap();
                    let profile = profile(engine, model, tp.parse().unwrap(), 1).unwrap();
                    let numbers =
                        |key: &str| -> Vec<f64> { serde_json::from_value(published[key].clone()).unwrap() };
                    let p = profile.prefill;
                    let prefill = numbers("prefill");
                    assert_eq!(
                        vec![p.constant, p.per_token, p.per_square],
                        [prefill[0] + 1.0, prefill[1], prefill[2]]
                    );
                    for (key, d) in [
                        ("decoding_smallbs", profile.decode_small),
                        ("decoding_largebs", profile.decode_large),
                    ] {
                        assert_eq!(
                            vec![d.constant, d.per_context, d.per_row],
                            numbers(key),
                            "{engine} {model} {tp}"
                        );
                    }
                    assert_eq!(published["decoding_large_small_bs_threshold"], profile.large_from);
                    count += 1;
                }
            }
            assert_eq!(count, COEFFICIENTS.iter().filter(|set| set.engine == engine).count());
        }
    }

    #[test]
    fn capacities_are_the_published_ones() {
        assert_eq!(published_kv_capacity_tokens("opt-13b", 2, 1), Ok(163_008));
        let Some(text) = shared("max_num_tokens.csv") else { return };
        let rows: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(rows.len(), CAPACITIES.len());
        for (row, (model, tp, pp, tokens)) in rows.iter().zip(CAPACITIES) {
            assert_eq!(*row, format!("facebook/{model},{tp},{pp},{tokens}"));
        }
    }

    #[test]
    fn stages_divide_all_but_their_own_millisecond() {
        let one = profile("distserve", "opt-13b", 1, 1).unwrap();
        let two = profile("distserve", "opt-13b", 1, 2).unwrap();
        let ms = |model: &Linear, shape| model.step(&shape).as_secs_f64() * 1e3;
        let prompt = StepShape::prefill(0, 512);
        let raw = 18.102_546_474_863_72
            + 0.101_912_257_269_873_8 * 512.0
            + 7.122_264_314_252_114e-6 * 512.0 * 512.0;
        assert!((ms(&one, prompt) - (raw + 1.0)).abs() < 1e-6);
        assert!((ms(&two, prompt) - (raw / 2.0 + 2.0)).abs() < 1e-6);
        let batch = StepShape::decode(10, 5_000);
        assert!((ms(&one, batch) / ms(&two, batch) - 2.0).abs() < 1e-6);
    }

    #[test]
    fn decode_changes_its_set_at_95_rows() {
        let model = profile("vllm", "opt-13b", 1, 1).unwrap();
        let step = |rows: u32| model.step(&StepShape::decode(rows, 1_000)).as_secs_f64() * 1e3;
        assert!((step(94) - (23.475_041 + 0.592_934 + 94.0 * 0.060_726_86)).abs() < 1e-3);
        assert!((step(95) - (20.206_356 + 0.490_773 + 95.0 * 0.120_003_14)).abs() < 1e-3);
    }

    #[test]
    fn what_is_not_published_is_refused_with_what_is() {
        let of_profile = |name, model, tp, pp| profile(name, model, tp, pp).unwrap_err().to_string();
        let of_capacity =
            |model, tp, pp| published_kv_capacity_tokens(model, tp, pp).unwrap_err().to_string();
        assert_eq!(
            of_profile("vllm", "llama-2-13b", 1, 1),
            "no vllm profile is published for llama-2-13b, only for opt-13b, opt-66b"
        );
        let message = of_profile("vlm", "opt-13b", 1, 1);
        assert!(message.contains("nearest first: vllm, distserve"), "{message}");
        assert_eq!(
            of_profile("vllm", "opt-13b", 8, 1),
            "no vllm profile is published for opt-13b at tp = 8, pp = 1, only at tp = 1 (pp from 1), \
             tp = 2 (pp from 1), tp = 4 (pp from 1)"
        );
        assert!(of_profile("distserve", "OPT_13B", 1, 0).contains("pp = 0, only at tp = 1 (pp from 1), "));
        assert_eq!(
            of_capacity("llama-2-7b", 1, 1),
            "no KV capacity is published for llama-2-7b, only for opt-13b, opt-66b, opt-175b"
        );
        assert_eq!(
            of_capacity("opt-66b", 1, 1),
            "no KV capacity is published for opt-66b at tp = 1, pp = 1, only at tp = 1 (pp = 2, 4, 8), \
             tp = 2 (pp = 1, 2, 4, 8), tp = 3 (pp = 1, 2, 4, 8), tp = 4 (pp = 1, 2, 4, 8), \
             tp = 6 (pp = 1, 2, 4, 8), tp = 8 (pp = 1, 2, 4, 8)"
        );
    }

    /// vLLM's OPT-66B at TP 2 has a negative quadratic term: as published within OPT's 2,048
    /// positions, and neither negative nor shrinking for any prompt, whole or in chunks.
    #[test]
    fn the_negative_quadratic_term_stays_harmless() {
        let model = profile("vllm", "opt-66b", 2, 1).unwrap();
        let terms = model.prefill;
        assert!(terms.per_square < 0.0);
        for length in [1u32, 512, 1_000, 2_048] {
            let l = f64::from(length);
            let published = terms.constant + terms.per_token * l + terms.per_square * l * l;
            let step = model.step(&StepShape::prefill(0, length));
            assert!(step.0.abs_diff(Picos::from_millis_f64(published).0) <= 1, "{length}");
        }
        let mut last = Picos::ZERO;
        for length in (0..4_000).map(|i| 1 + i * 250) {
            let step = model.step(&StepShape::prefill(0, length));
            assert!(step > last, "a prompt of {length} tokens takes {step:?}, a shorter one {last:?}");
            last = step;
            let chunk = model.step(&StepShape::prefill(length, 512));
            assert!(chunk > model.step(&StepShape::prefill(length, 256)), "a chunk behind {length} tokens");
        }
    }
}
