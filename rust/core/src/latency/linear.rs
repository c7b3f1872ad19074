//! The *linear* model: step times that are linear in the batch's sums, with published
//! coefficients.
//!
//! A step of chunks and decodes costs
//! `max(a_p, a_d) + b_p·Σchunk + c_p·Σ((prefix + chunk)² − prefix²) + b_d·Σcontext + c_d·B`,
//! the terms of a kind counting only when the step holds rows of that kind. For pure steps this is
//! DistServe's model (OSDI'24, appendix A, in the form of its simulator).
//!
//! A fitted `c_p` may be negative, and would make long prompts cheaper than short ones. It is
//! believed only up to where it has taken a quarter off the price of a token; beyond, cost grows
//! linearly. So no chunk costs less than ¾·b_p a token, and a prompt's time grows with its length
//! (see [`PrefillTerms::varying`]).

use super::LatencyModel;
use crate::step::{StepShape, Stretch};
use crate::time::Picos;

/// Coefficients of the prefill part, in milliseconds (per token, per token²).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillTerms {
    /// Constant.
    pub constant: f64,
    /// Per prompt token.
    pub per_token: f64,
    /// Per token², over (prefix + chunk)² − prefix².
    pub per_square: f64,
}

impl PrefillTerms {
    /// Milliseconds beyond the constant, for chunks of `tokens` together whose
    /// Σ((prefix + chunk)² − prefix²) is `square`.
    ///
    /// A negative quadratic term counts `square` up to b / 4|c| a token. One prompt of `l` tokens
    /// has `l` a token, so its slope is b/2 or more below that length and ¾·b above it.
    pub fn varying(&self, tokens: u64, square: u64) -> f64 {
        let (tokens, square) = (tokens as f64, square as f64);
        let linear = self.per_token * tokens;
        if self.per_square >= 0.0 {
            return linear + self.per_square * square;
        }
        linear + (self.per_square * square).max(-0.25 * linear)
    }
}

/// Coefficients of the decode part, in milliseconds (per token of context, per row).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeTerms {
    /// Constant.
    pub constant: f64,
    /// Per token of context.
    pub per_context: f64,
    /// Per row.
    pub per_row: f64,
}

/// The linear model. Decode has a set of terms for small batches and one from `large_from` rows on.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// Terms of prompt chunks.
    pub prefill: PrefillTerms,
    /// Terms of decode below `large_from` rows.
    pub decode_small: DecodeTerms,
    /// Terms of decode from `large_from` rows on.
    pub decode_large: DecodeTerms,
    /// Rows from which `decode_large` holds.
    pub large_from: u32,
}

impl Linear {
    fn decode_terms(&self, num_decode: u32) -> &DecodeTerms {
        if num_decode < self.large_from { &self.decode_small } else { &self.decode_large }
    }
}

/// Picoseconds per context token as an integer, so that runs of steps are exact progressions.
fn picos_per_unit(milliseconds: f64) -> u64 {
    Picos::from_millis_f64(milliseconds).0
}

impl LatencyModel for Linear {
    fn stretch(&self, shape: &StepShape, max_steps: u32) -> Stretch {
        let decode = self.decode_terms(shape.num_decode);
        let per_context = picos_per_unit(decode.per_context);
        let mut constant: f64 = 0.0;
        let mut first = 0u64;
        if shape.num_decode > 0 {
            constant = constant.max(decode.constant);
            first += picos_per_unit(decode.per_row) * u64::from(shape.num_decode);
            first += per_context * shape.decode_context;
        }
        if shape.num_prefill > 0 {
            constant = constant.max(self.prefill.constant);
            let varying = self.prefill.varying(shape.prefill_tokens, shape.prefill_square);
            first += Picos::from_millis_f64(varying).0;
        }
        let first = Picos(first) + Picos::from_millis_f64(constant);
        if shape.num_prefill > 0 {
            return Stretch::single(first);
        }
        let delta = per_context * u64::from(shape.num_decode);
        Stretch { first, delta: i64::try_from(delta).unwrap_or(i64::MAX), steps: max_steps.max(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mixed_step_shares_the_constant() {
        let terms = DecodeTerms { constant: 20.0, per_context: 0.001, per_row: 0.05 };
        let model = Linear {
            prefill: PrefillTerms { constant: 18.0, per_token: 0.1, per_square: 1e-5 },
            decode_small: terms,
            decode_large: terms,
            large_from: 95,
        };
        let mut shape = StepShape::prefill(0, 100);
        assert_eq!(model.step(&shape), Picos::from_millis_f64(18.0 + 10.0 + 0.1));
        shape.num_decode = 2;
        shape.decode_context = 1_000;
        assert_eq!(model.step(&shape), Picos::from_millis_f64(20.0 + 10.0 + 0.1 + 0.1 + 1.0));
        let run = model.stretch(&StepShape::decode(2, 1_000), 9);
        assert_eq!((run.steps, run.delta), (9, 2_000_000));
        assert_eq!(run.step(3), model.step(&StepShape::decode(2, 1_006)));
    }
}
