//! A step through the stages of a pipeline, each with an equal part of the layers.

use std::sync::Arc;

use super::{LatencyModel, Link};
use crate::step::{StepShape, Stretch};
use crate::time::{Nanos, Picos};

/// The model of a worker whose layers are spread over stages: what a step takes through all of them.
#[derive(Clone)]
pub struct Pipeline {
    part: Arc<dyn LatencyModel>,
    /// So often is a step as long as `part` says.
    times: u32,
    /// From one stage to the next, beyond the bytes: for all of them.
    latency: Picos,
    /// Picoseconds a token of all of them. Whole, so that a run of decode steps is an exact progression.
    per_token: u64,
}

impl Pipeline {
    /// Of a model that tells the time of one stage.
    pub fn of_stage(stage: Arc<dyn LatencyModel>, stages: u32) -> Pipeline {
        Pipeline { part: stage, times: stages.max(1), latency: Picos::ZERO, per_token: 0 }
    }

    /// Of a model that tells the time of all layers on the GPUs of one stage. Between stages each token's
    /// `bytes_per_token` of activations pass over `link`.
    pub fn of_whole(whole: Arc<dyn LatencyModel>, stages: u32, link: Link, bytes_per_token: u64) -> Pipeline {
        let hops = f64::from(stages.saturating_sub(1));
        let per_token = bytes_per_token as f64 / link.bandwidth;
        Pipeline {
            part: whole,
            times: 1,
            latency: Picos::from(Nanos(link.latency.0 * u64::from(stages.saturating_sub(1)))),
            per_token: Picos::from_secs_f64(hops * per_token).0,
        }
    }
}

impl LatencyModel for Pipeline {
    fn stretch(&self, shape: &StepShape, max_steps: u32) -> Stretch {
        let part = self.part.stretch(shape, max_steps);
        let hops = self.latency + Picos(self.per_token.saturating_mul(shape.num_tokens()));
        Stretch {
            first: Picos(part.first.0.saturating_mul(u64::from(self.times))) + hops,
            delta: part.delta.saturating_mul(i64::from(self.times)),
            steps: part.steps,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::hardware::gpu;
    use super::super::models::model;
    use super::super::profiles::profile;
    use super::super::roofline::{Efficiencies, Roofline};
    use super::*;

    #[test]
    fn a_request_passes_every_stage() {
        let stage = profile("distserve", "opt-66b", 2, 2).unwrap();
        let pipeline = Pipeline::of_stage(Arc::new(stage.clone()), 2);
        for shape in [StepShape::prefill(0, 512), StepShape::decode(8, 4_096)] {
            assert_eq!(pipeline.step(&shape).0, 2 * stage.step(&shape).0);
        }
        let run = pipeline.stretch(&StepShape::decode(8, 4_096), 5);
        assert_eq!((run.steps, run.step(3)), (5, pipeline.step(&StepShape::decode(8, 4_120))));
    }

    #[test]
    fn activations_pass_from_stage_to_stage() {
        let spec = model("llama-2-70b").unwrap();
        let whole = Arc::new(Roofline::new(spec, &gpu("h100").unwrap(), 2, Efficiencies::default()).unwrap());
        let link = Link { bandwidth: 1e9, latency: Nanos(10_000) };
        let pipeline = Pipeline::of_whole(Arc::clone(&whole) as Arc<dyn LatencyModel>, 3, link, 16_384);
        let shape = StepShape::decode(4, 4_000);
        // Two hops of 10 us, and of 4 tokens' 16,384 bytes at a byte a nanosecond.
        let expected = whole.step(&shape).0 + 2 * 10_000_000 + 2 * 4 * 16_384_000;
        assert_eq!(pipeline.step(&shape), Picos(expected));
        let run = pipeline.stretch(&shape, 7);
        assert_eq!(run.step(1), pipeline.step(&shape.after(1)));
        let alone = Pipeline::of_whole(Arc::clone(&whole) as Arc<dyn LatencyModel>, 1, link, 16_384);
        assert_eq!(alone.step(&shape), whole.step(&shape));
    }
}
