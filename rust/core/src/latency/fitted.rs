//! The *fitted* model: the linear form, with coefficients from measured steps.
//!
//! Prefill and decode are fitted apart, each by least squares of the *relative* error, so that a
//! step of 2 ms counts as much as one of 2 s, and with coefficients that are not negative, so that
//! more work is never predicted to take less time.

use super::least_squares::{Equation, over};
use super::linear::{DecodeTerms, Linear, PrefillTerms};
use crate::step::StepShape;
use crate::time::Picos;

/// A measured step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// What it computed.
    pub shape: StepShape,
    /// How long it took.
    pub duration: Picos,
}

/// Terms of each part: a constant and two that vary.
const TERMS: usize = 3;

/// One sample's terms and its milliseconds.
type Measured = ([f64; TERMS], f64);

/// Fits a linear model. Steps that hold both prompt chunks and decode rows, and steps of no time,
/// are left out; `None` if either part has no sample left.
pub fn fit(samples: &[Sample]) -> Option<Linear> {
    let measured = samples.iter().filter(|sample| sample.duration > Picos::ZERO);
    let milliseconds = |sample: &Sample| sample.duration.0 as f64 * 1e-9;
    let prefill: Vec<Measured> = measured
        .clone()
        .filter(|sample| sample.shape.num_prefill > 0 && sample.shape.num_decode == 0)
        .map(|sample| {
            let shape = &sample.shape;
            ([1.0, shape.prefill_tokens as f64, shape.prefill_square as f64], milliseconds(sample))
        })
        .collect();
    let decode: Vec<Measured> = measured
        .filter(|sample| sample.shape.num_prefill == 0 && sample.shape.num_decode > 0)
        .map(|sample| {
            let shape = &sample.shape;
            ([1.0, shape.decode_context as f64, f64::from(shape.num_decode)], milliseconds(sample))
        })
        .collect();
    let [constant, per_token, per_square] = non_negative_least_squares(&prefill)?;
    let prefill = PrefillTerms { constant, per_token, per_square };
    let [constant, per_context, per_row] = non_negative_least_squares(&decode)?;
    let decode = DecodeTerms { constant, per_context, per_row };
    Some(Linear { prefill, decode_small: decode, decode_large: decode, large_from: u32::MAX })
}

/// The non-negative coefficients with the least sum of squared relative errors: of terms divided by
/// what was measured, which relative to itself is 1.
///
/// Where some are zero, the others are the plain least-squares solution without them; so with three
/// terms it is enough to try the seven choices of which are not zero. A choice needs more different
/// shapes than it has terms (one term is always allowed): through as few points as it has terms
/// every choice goes exactly, also the absurd ones.
fn non_negative_least_squares(measured: &[Measured]) -> Option<[f64; TERMS]> {
    let mut shapes: Vec<[f64; TERMS]> = measured.iter().map(|(terms, _)| *terms).collect();
    shapes.sort_by(|a, b| a.partial_cmp(b).expect("counts are numbers"));
    shapes.dedup();
    let relative = |(terms, milliseconds): &Measured| Equation {
        terms: terms.iter().map(|term| term / milliseconds).collect(),
        value: 1.0,
    };
    let equations: Vec<Equation> = measured.iter().map(relative).collect();
    let chosen = |bits: u32| (0..TERMS).filter(|term| bits >> term & 1 == 1).collect::<Vec<_>>();
    let choices = (1..1u32 << TERMS).map(chosen);
    let allowed = choices.filter(|terms| terms.len() == 1 || terms.len() < shapes.len());
    let solutions = allowed.filter_map(|terms| <[f64; TERMS]>::try_from(over(&equations, &terms)?).ok());
    let feasible = solutions.filter(|x| x.iter().all(|value| value.is_finite() && *value >= 0.0));
    feasible.min_by(|a, b| error(&equations, a).total_cmp(&error(&equations, b)))
}

/// Sum of squared errors.
fn error(equations: &[Equation], x: &[f64; TERMS]) -> f64 {
    let off = |equation: &Equation| {
        let predicted: f64 = equation.terms.iter().zip(x).map(|(term, value)| term * value).sum();
        predicted - equation.value
    };
    equations.iter().map(off).map(|error| error * error).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::latency::LatencyModel;
    use proptest::prelude::*;

    fn shapes() -> Vec<StepShape> {
        let mut shapes: Vec<_> = [16, 64, 200, 512].map(|chunk| StepShape::prefill(0, chunk)).to_vec();
        shapes.push(StepShape::prefill(512, 128));
        for (rows, context) in [(1, 16), (1, 900), (4, 100), (8, 3_000), (16, 500)] {
            shapes.push(StepShape::decode(rows, context));
        }
        shapes
    }

    fn sampled(truth: &Linear) -> Vec<Sample> {
        let sample = |shape: StepShape| Sample { shape, duration: truth.step(&shape) };
        shapes().into_iter().map(sample).collect()
    }

    proptest! {
        /// What is linear is found again, zero coefficients included.
        #[test]
        fn a_linear_truth_is_found(
            p in (0.0f64..20.0, 0.01f64..1.0, 0.0f64..1e-3),
            d in (0.01f64..20.0, 0.0f64..1e-2, 0.0f64..1.0),
            zero in 0u8..4,
        ) {
            let keep = |bit: u8, value: f64| if zero >> bit & 1 == 1 { 0.0 } else { value };
            let decode = DecodeTerms { constant: d.0, per_context: keep(0, d.1), per_row: keep(1, d.2) };
            let truth = Linear {
                prefill: PrefillTerms { constant: keep(0, p.0), per_token: p.1, per_square: keep(1, p.2) },
                decode_small: decode,
                decode_large: decode,
                large_from: u32::MAX,
            };
            let found = fit(&sampled(&truth)).unwrap();
            for shape in shapes() {
                let (a, b) = (found.step(&shape).0 as f64, truth.step(&shape).0 as f64);
                prop_assert!((a - b).abs() <= 1e-3 * b, "{shape:?}: {a} against {b}");
            }
        }

        /// Whatever was measured, nothing is predicted to take less time than less work.
        #[test]
        fn more_work_never_takes_less(durations in prop::collection::vec(1u64..1_000_000_000_000, 10)) {
            let samples = shapes().into_iter().zip(durations);
            let samples: Vec<_> = samples.map(|(shape, ps)| Sample { shape, duration: Picos(ps) }).collect();
            let found = fit(&samples).unwrap();
            let less = found.step(&StepShape::prefill(0, 100));
            prop_assert!(less <= found.step(&StepShape::prefill(0, 101)));
            let less = found.step(&StepShape::decode(3, 100));
            prop_assert!(less <= found.step(&StepShape::decode(4, 130)));
        }
    }

    /// Two prompts and two decode steps say how one term goes, and no more.
    #[test]
    fn few_samples_give_a_plain_model() {
        let sample = |shape, ms| Sample { shape, duration: Picos::from_millis_f64(ms) };
        let samples = [
            sample(StepShape::prefill(0, 16), 10.0),
            sample(StepShape::prefill(0, 64), 40.0),
            sample(StepShape::decode(1, 16), 8.0),
            sample(StepShape::decode(8, 128), 9.0),
        ];
        let found = fit(&samples).unwrap();
        let prefill = found.step(&StepShape::prefill(0, 512)).as_secs_f64();
        assert!((0.25..0.4).contains(&prefill), "{prefill}");
        let decode = found.step(&StepShape::decode(4, 64)).as_secs_f64();
        assert!((0.007..0.01).contains(&decode), "{decode}");
    }

    #[test]
    fn without_one_of_the_parts_there_is_no_model() {
        let prefill = Sample { shape: StepShape::prefill(0, 8), duration: Picos(5) };
        assert_eq!(fit(&[prefill]), None);
        assert_eq!(fit(&[]), None);
    }
}
