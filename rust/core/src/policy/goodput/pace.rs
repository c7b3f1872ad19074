//! Who decodes: where each stands against its objectives, and who may join without harm.

use super::prompts::Prompt;
use crate::policy::{RequestView, WorkerView};
use crate::step::StepShape;
use crate::time::Picos;

/// Where a decoding request stands against its TPOT and its longest gap, in picoseconds.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// Until its next token is due if all tokens were evenly spaced; negative when behind.
    ahead: i128,
    /// Its TPOT objective.
    pub(super) tpot: i128,
    /// Tokens it may still have to produce.
    pub(super) remaining: i128,
    /// Until its next token comes too late after the one before.
    gap: i128,
    /// The longest gap it may have.
    max_gap: i128,
}

impl Pace {
    /// An objective that it does not have. Times the longest output this is no overflow.
    pub(super) const FAR: i128 = 1 << 80;

    /// `None` for one with no objective of that kind, or with none left to lose. `delay` is what
    /// passes before its next step can start.
    pub(super) fn of(request: &RequestView<'_>, delay: Picos) -> Option<Pace> {
        let slo = request.slo();
        if (slo.tpot.is_none() && slo.max_gap.is_none()) || request.has_missed() {
            return None;
        }
        let picos = |nanos: u64| i128::from(nanos) * 1_000;
        let now = picos(request.now().0) + i128::from(delay.0);
        let generated = i128::from(request.generated());
        let first = picos(request.first_token()?.0);
        let last = picos(request.last_token()?.0);
        let tpot = slo.tpot.map(|tpot| picos(tpot.0));
        let max_gap = slo.max_gap.map(|gap| picos(gap.0));
        Some(Pace {
            ahead: tpot.map_or(Pace::FAR, |tpot| first + tpot * generated - now),
            tpot: tpot.unwrap_or(Pace::FAR),
            remaining: i128::from(request.max_tokens()) - generated,
            gap: max_gap.map_or(Pace::FAR, |gap| last + gap - now),
            max_gap: max_gap.unwrap_or(Pace::FAR),
        })
    }

    /// How long its next step may take, if it can make up for `later` afterwards.
    pub(super) fn slack(&self, later: i128) -> i128 {
        (self.ahead + later).min(self.gap)
    }

    /// The longest step that, taken from now on, keeps its objectives to its longest end.
    fn longest_step(&self) -> i128 {
        let remaining = self.remaining.max(1);
        let evenly = (self.ahead + (remaining - 1) * self.tpot) / remaining;
        evenly.min(self.gap).min(self.max_gap)
    }

    /// Whether it is behind and steps of `step` will not bring it back.
    pub(super) fn is_lost(&self, step: Picos) -> bool {
        let step = i128::from(step.0);
        self.gap < step || (self.ahead < step && self.tpot < step)
    }
}

/// A worker's decode batch with those whose KV is on its way.
fn coming_batch(worker: &WorkerView<'_>) -> StepShape {
    let num_decode = worker.num_running() as u32 + worker.num_incoming();
    StepShape::decode(num_decode, worker.context_tokens() + u64::from(num_decode))
}

/// The longest step that costs no member of the worker's batch the TPOT or the gap that it keeps as
/// things are. One who has lost already has no say.
fn longest_step(worker: &WorkerView<'_>) -> i128 {
    let now = i128::from(worker.predict_step(&worker.decode_shape()).0);
    let paces = worker.running().filter_map(|member| Pace::of(&member, Picos::ZERO));
    paces.map(|pace| pace.longest_step()).filter(|longest| *longest >= now).min().unwrap_or(Pace::FAR)
}

/// Whether the request's TPOT can be kept at `worker` and costs nobody there theirs.
///
/// A newcomer who cannot be saved even alone is let in only where nobody is harmed: it has to end
/// some day.
pub(super) fn joins_without_harm(request: &RequestView<'_>, worker: &WorkerView<'_>) -> bool {
    let batch = coming_batch(worker);
    if batch.num_decode >= worker.limits().max_batch {
        return false;
    }
    let row = StepShape::decode(1, u64::from(request.computed()) + 1);
    let step = |shape: StepShape| i128::from(worker.predict_step(&shape).0);
    let after = step(batch + row);
    let transfer = Picos::from(worker.cluster().predict_transfer(u64::from(request.computed())));
    let own = Pace::of(request, transfer).map_or(Pace::FAR, |pace| pace.longest_step());
    (after <= own || step(row) > own) && after <= longest_step(worker)
}

/// Takes out of `order` the prompts that would cost somebody who decodes at this mixed worker the
/// TPOT once they decode too, or could not keep their own.
pub(super) fn keep_harmless(order: &mut Vec<Prompt<'_>>, worker: &WorkerView<'_>) {
    let step = |shape: StepShape| i128::from(worker.predict_step(&shape).0);
    let (mut batch, longest) = (coming_batch(worker), longest_step(worker));
    let full = i128::from(worker.limits().max_batch);
    let mut harm = false;
    order.retain(|prompt| {
        let request = &prompt.request;
        if request.is_started() || harm {
            return request.is_started();
        }
        let slo = request.slo();
        let own = slo.tpot.into_iter().chain(slo.max_gap).min();
        let own = own.map_or(Pace::FAR, |own| i128::from(Picos::from(own).0));
        let rounds = i128::from(batch.num_decode) / full;
        if rounds > 0 {
            // It decodes when those before it have ended.
            let in_turn = slo.max_gap.is_none() && prompt.presses();
            return own == Pace::FAR || (in_turn && step(batch) * (rounds + 1) <= own);
        }
        let row = StepShape::decode(1, u64::from(request.prompt_tokens()) + 1);
        let after = step(batch + row);
        harm = after > longest;
        let joins = !harm && (after <= own || request.has_missed() || step(row) > own);
        if joins {
            batch = batch + row;
        }
        joins
    });
}
