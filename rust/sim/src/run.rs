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
    /// How much longer its steps take than alone.
    slowdown: f64,
    /// How often its end was planned anew.
    pub(crate) version: u32,
}

/// How steps are asked of a latency model.
#[derive(Clone, Copy)]
pub(crate) struct Asking<'a> {
    pub(crate) model: &'a dyn LatencyModel,
    /// For every step alone: the plain twin of the closed form.
    pub(crate) single_steps: bool,
}

impl Asking<'_> {
    /// `steps` repetitions of `shape`, each `slowdown` times as long as alone.
    fn stretches(&self, mut shape: StepShape, mut steps: u32, slowdown: f64) -> Vec<Stretch> {
        // Mostly one is enough.
        let mut stretches = Vec::with_capacity(1);
        while steps > 0 {
            let most = if self.single_steps { 1 } else { steps };
            let mut stretch = self.model.stretch(&shape, most);
            stretch.steps = stretch.steps.clamp(1, most);
            steps -= stretch.steps;
            shape = shape.after(u64::from(stretch.steps));
            stretches.push(scaled(stretch, slowdown));
        }
        stretches
    }
}

/// The stretch with every step `by` times as long; up to a picosecond a step, which alone no step is
/// off.
fn scaled(stretch: Stretch, by: f64) -> Stretch {
    if by == 1.0 {
        return stretch;
    }
    Stretch {
        first: Picos((stretch.first.0 as f64 * by).round() as u64),
        delta: (stretch.delta as f64 * by).round() as i64,
        ..stretch
    }
}

/// Whether some of the rows compute prompts.
pub(crate) fn has_prefill(rows: &[Row]) -> bool {
    rows.iter().any(|row| !row.decode)
}

/// The event time of an exact instant.
pub(crate) fn event_time(exact: Picos) -> Time {
    Time(exact.0.div_ceil(1_000))
}

impl SimRun {
    /// Plans `steps` repetitions of `rows`.
    pub(crate) fn plan(
        seq: Seq,
        rows: Arc<[Row]>,
        steps: u32,
        asking: Asking<'_>,
        slowdown: f64,
        start: Picos,
    ) -> SimRun {
        let stretches = asking.stretches(StepShape::of(&rows), steps, slowdown);
        SimRun { seq, rows, stretches, start, slowdown, version: 0 }
    }

    /// Its first step takes so much longer: what passes before it can begin.
    pub(crate) fn delay(&mut self, by: Picos) {
        if by == Picos::ZERO {
            return;
        }
        let first = self.stretches.first().copied().expect("a run has a step");
        let rest: Vec<Stretch> = first.skip(1).into_iter().chain(self.stretches.drain(..).skip(1)).collect();
        self.stretches = vec![Stretch::single(first.first + by)];
        self.stretches.extend(rest);
    }

    /// From `now` on every step takes `slowdown` times as long as alone; of the one in progress, what
    /// is left.
    pub(crate) fn slow_down(&mut self, now: Time, slowdown: f64, asking: Asking<'_>) {
        let (done, at) = self.steps_done(now);
        let steps = self.steps();
        if slowdown == self.slowdown || done == steps {
            return;
        }
        let current = self.step(done);
        self.truncate(done);
        let elapsed = Picos((now.0 * 1_000).saturating_sub(at.0)).0.min(current.0);
        let left = ((current.0 - elapsed) as f64 * slowdown / self.slowdown).round() as u64;
        self.stretches.push(Stretch::single(Picos(elapsed + left)));
        let shape = StepShape::of(&self.rows).after(u64::from(done) + 1);
        self.stretches.extend(asking.stretches(shape, steps - done - 1, slowdown));
        self.slowdown = slowdown;
        self.version += 1;
    }

    /// Its step passes through a pipeline's stages, equally long in each, behind the runs before it:
    /// when each stage is done with what it has (`free`) is moved on.
    pub(crate) fn pass_through(&mut self, free: &mut [Picos]) {
        let (whole, stages) = (self.busy(), free.len() as u64);
        let mut at = self.start;
        for (index, free) in (0..).zip(free) {
            // What integers leave over is the first stages'.
            let stage = Picos(whole.0 / stages + u64::from(index < whole.0 % stages));
            at = at.max(*free) + stage;
            *free = at;
        }
        self.stretches = vec![Stretch::single(Picos(at.0 - self.start.0))];
    }

    /// Duration of step `index`, from 0.
    fn step(&self, mut index: u32) -> Picos {
        for stretch in &self.stretches {
            if index < stretch.steps {
                return stretch.step(index);
            }
            index -= stretch.steps;
        }
        Picos::ZERO
    }

    pub(crate) fn steps(&self) -> u32 {
        self.stretches.iter().map(|stretch| stretch.steps).sum()
    }

    fn busy(&self) -> Picos {
        self.stretches.iter().map(|stretch| stretch.total(stretch.steps)).sum()
    }

    pub(crate) fn start(&self) -> Time {
        event_time(self.start)
    }

    pub(crate) fn end(&self) -> Time {
        event_time(self.start + self.busy())
    }

    /// Moves the worker's clock to the end of the run.
    pub(crate) fn finish(&self, clock: &mut PicoClock) {
        clock.end(self.start + self.busy());
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
        self.version += 1;
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
