//! A run in virtual time: planned in closed form, cut at a border.

use std::sync::Arc;

use kvrelay_core::latency::LatencyModel;
use kvrelay_core::step::{Row, Seq, StepShape, Stretch};
use kvrelay_core::time::{PicoClock, Picos, Time};

/// A worker's run in progress.
#[derive(Clone, Debug)]
pub(crate) struct SimRun {
    pub(crate) seq: Seq,
    pub(crate) rows: Arc<[Row]>,
    pub(crate) stretches: Vec<Stretch>,
    /// When it started, exactly.
    start: Picos,
}

/// The event time of an exact instant.
fn event_time(exact: Picos) -> Time {
    Time(exact.0.div_ceil(1_000))
}

impl SimRun {
    /// Plans `steps` repetitions of `rows`. `single_steps` asks the model for every step alone:
    /// the plain twin of the closed form.
    pub(crate) fn plan(
        seq: Seq,
        rows: Arc<[Row]>,
        steps: u32,
        model: &dyn LatencyModel,
        clock: &mut PicoClock,
        now: Time,
        single_steps: bool,
    ) -> SimRun {
        let mut shape = StepShape::of(&rows);
        let mut stretches = Vec::new();
        let mut left = steps;
        while left > 0 {
            let most = if single_steps { 1 } else { left };
            let mut stretch = model.stretch(&shape, most);
            stretch.steps = stretch.steps.clamp(1, most);
            left -= stretch.steps;
            shape = shape.after(u64::from(stretch.steps));
            stretches.push(stretch);
        }
        SimRun { seq, rows, stretches, start: clock.start(now) }
    }

    pub(crate) fn steps(&self) -> u32 {
        self.stretches.iter().map(|stretch| stretch.steps).sum()
    }

    fn busy(&self) -> Picos {
        self.stretches.iter().map(|stretch| stretch.total(stretch.steps)).sum()
    }

    pub(crate) fn end(&self) -> Time {
        event_time(self.start + self.busy())
    }

    /// Moves the worker's clock to the end of the run.
    pub(crate) fn finish(&self, clock: &mut PicoClock) {
        clock.advance(self.busy());
    }

    /// Steps whose end is at or before `now`, and when the last of them ended.
    pub(crate) fn steps_done(&self, now: Time) -> (u32, Picos) {
        let elapsed = Picos((now.0 * 1_000).saturating_sub(self.start.0));
        let (mut done, mut spent) = (0, Picos::ZERO);
        for stretch in &self.stretches {
            let within = stretch.steps_within(Picos(elapsed.0.saturating_sub(spent.0)));
            done += within;
            spent += stretch.total(within);
            if within < stretch.steps {
                break;
            }
        }
        (done, self.start + spent)
    }

    /// Stops at the next step border: at `now` if one is there, else at the end of the step in
    /// progress.
    pub(crate) fn cut(&mut self, now: Time) {
        let (done, at) = self.steps_done(now);
        let at_border = done > 0 && event_time(at) == now;
        self.truncate(if at_border { done } else { done + 1 });
    }

    /// The part whose steps ended at or before `at`, if there is any.
    pub(crate) fn up_to(mut self, at: Time) -> Option<SimRun> {
        let (done, _) = self.steps_done(at);
        self.truncate(done);
        (done > 0).then_some(self)
    }

    fn truncate(&mut self, mut steps: u32) {
        self.stretches.retain_mut(|stretch| {
            stretch.steps = stretch.steps.min(steps);
            steps -= stretch.steps;
            stretch.steps > 0
        });
    }
}
