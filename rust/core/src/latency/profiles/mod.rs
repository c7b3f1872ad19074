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
    /// The profile does not cover this model at this parallelism.
    #[error("nothing is published under {profile:?} for {model} at tp = {tp}, pp = {pp}; published: {}", known.join(", "))]
    NotPublished {
        /// The profile, or the table of capacities.
        profile: String,
        /// The model.
        model: String,
        /// GPUs that share a layer.
        tp: u32,
        /// Pipeline stages.
        pp: u32,
        /// What is published: models and their parallelism.
        known: Vec<String>,
    },
}

/// The coefficients published under `name` for `model` on A100-80GB with `tp` GPUs a layer and `pp`
/// pipeline stages (any number: one stage's time is computed from the whole's).
///
/// # Errors
/// [`ProfileError`], with the combinations that are published.
pub fn profile(name: &str, model: &str, tp: u32, pp: u32) -> Result<Linear, ProfileError> {
    let engine = canonical(name);
    if !PROFILE_NAMES.contains(&engine.as_str()) {
        return Err(UnknownName::new("latency profile", name, PROFILE_NAMES).into());
    }
    let wanted = canonical(model);
    let found = COEFFICIENTS.iter().find(|set| set.engine == engine && set.model == wanted && set.tp == tp);
    let (Some(set), true) = (found, pp > 0) else {
        let sets = COEFFICIENTS.iter().filter(|set| set.engine == engine);
        let known = sets.map(|set| format!("{} at tp = {}", set.model, set.tp)).collect();
        return Err(ProfileError::NotPublished { profile: engine, model: model.to_owned(), tp, pp, known });
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
/// [`ProfileError`], with the combinations of this model that are published (or all).
pub fn published_kv_capacity_tokens(model: &str, tp: u32, pp: u32) -> Result<u64, ProfileError> {
    let wanted = canonical(model);
    let found = CAPACITIES.iter().find(|row| (row.0, row.1, row.2) == (wanted.as_str(), tp, pp));
    if let Some(row) = found {
        return Ok(row.3);
    }
    let of_model = |row: &&(&str, u32, u32, u64)| row.0 == wanted;
    let any = CAPACITIES.iter().any(|row| of_model(&row));
    let rows = CAPACITIES.iter().filter(|row| !any || of_model(row));
    let known = rows.map(|row| format!("{} at tp = {}, pp = {}", row.0, row.1, row.2)).collect();
    let profile = "KV capacity".to_owned();
    Err(ProfileError::NotPublished { profile, model: model.to_owned(), tp, pp, known })
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
        let message = profile("vllm", "llama-2-13b", 1, 1).unwrap_err().to_string();
        assert!(
            message.contains("llama-2-13b at tp = 1") && message.contains("opt-66b at tp = 3"),
            "{message}"
        );
        let message = profile("vlm", "opt-13b", 1, 1).unwrap_err().to_string();
        assert!(message.contains("nearest first: vllm, distserve"), "{message}");
        assert!(profile("vllm", "opt-13b", 8, 1).is_err() && profile("vllm", "opt-13b", 1, 0).is_err());
        let message = published_kv_capacity_tokens("opt-66b", 1, 1).unwrap_err().to_string();
        assert!(message.contains("opt-66b at tp = 2, pp = 1") && !message.contains("opt-13b"), "{message}");
        assert!(
            published_kv_capacity_tokens("llama-2-7b", 1, 1).unwrap_err().to_string().contains("opt-175b")
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
