//! The CPU's own sampler.

use kvrelay_model::SamplingParams;
use kvrelay_model::sampling::Sampler;

/// The token; `-1 - id` where logit `id` is the first that is not finite.
pub(crate) fn sample(logits: &[f32], params: &SamplingParams, position: u64) -> i32 {
    match logits.iter().position(|logit| !logit.is_finite()) {
        Some(id) => -1 - id as i32,
        None => Sampler::new(logits.len()).sample(logits, params, position).unwrap() as i32,
    }
}
