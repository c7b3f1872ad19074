//! Which prompts a step computes, and how much of each.

use std::cmp::Reverse;

use super::pace::Pace;
use super::{Goodput, token_time};
use crate::policy::defaults::PrefillRoom;
use crate::policy::{RequestView, WorkerView, chunked};
use crate::request::RequestId;
use crate::step::StepShape;
use crate::time::{Nanos, Picos, Time};

/// A request that waits for its prompt to be computed.
#[derive(Clone, Copy)]
pub(super) struct Prompt<'a> {
    pub(super) request: RequestView<'a>,
    /// When its first token is due.
    due: Option<Time>,
    /// It will be too late even if nothing else runs.
    late: bool,
}

impl Prompt<'_> {
    /// Whether its TTFT is at stake: what decodes has none to lose any more.
    pub(super) fn presses(&self) -> bool {
        self.request.slo().ttft.is_some() && !self.late
    }

    /// Whether its first token would be late beside the worker's batch and is not without it, and
    /// the batch has the slack to wait.
    fn is_saved_by_standing_aside(&self, worker: &WorkerView<'_>, slack: i128) -> bool {
        let Some(due) = self.due else { return false };
        let prompt = StepShape::prefill(self.request.computed(), self.request.pending());
        let time = |shape| worker.predict_step(&shape);
        let batch = worker.decode_shape();
        time(batch + prompt) > until(&self.request, due)
            && i128::from((time(prompt) + time(batch)).0) <= slack
    }

    /// Prompt tokens it gets as the first of a step beside `batch`: a chunk, or all that is left
    /// where its deadline allows for no border on the way.
    fn first_chunk(&self, worker: &WorkerView<'_>, batch: StepShape, chunk_tokens: u32) -> u32 {
        let (computed, pending) = (self.request.computed(), self.request.pending());
        let Some(due) = self.due.filter(|_| pending > chunk_tokens) else {
            return pending.min(chunk_tokens);
        };
        let time = |chunk: u32| -> Picos {
            let starts = (0..pending).step_by(chunk as usize);
            let row = |start| StepShape::prefill(computed + start, chunk.min(pending - start));
            let steps = starts.map(|start| worker.predict_step(&(batch + row(start))));
            steps.fold(Picos::ZERO, |sum, step| sum + step)
        };
        let left = until(&self.request, due);
        if time(chunk_tokens) > left && time(pending) <= left { pending } else { chunk_tokens }
    }
}

impl Goodput {
    /// Waiting requests as they should run: preempted ones, those that can be on time by deadline,
    /// the rest in their queue's order; higher priority first among equals.
    pub(super) fn deadline_order<'a>(&self, worker: &WorkerView<'a>) -> Vec<Prompt<'a>> {
        let token_time = token_time(worker);
        let prompt = |request: RequestView<'a>| {
            let due = self.due(&request, token_time);
            Prompt { request, due, late: is_late(&request, worker, due) }
        };
        let mut order: Vec<_> = worker.waiting().map(prompt).collect();
        order.sort_by_cached_key(|Prompt { request, due, late }| {
            let rank = (request.generated() == 0, *late, request.is_demoted());
            (rank, due.filter(|_| !late).unwrap_or(Time::LONGEST), Reverse(request.priority()))
        });
        order
    }

    /// When its first token is due, so that the tokens expected after it come in time as well.
    fn due(&self, request: &RequestView<'_>, token_time: Picos) -> Option<Time> {
        let slo = request.slo();
        let Some(e2e) = slo.e2e else { return request.deadline() };
        let decode = self.seen.output_tokens(request).unwrap_or(1.0) - 1.0;
        let decode = Nanos::from_secs_f64(decode * token_time.as_secs_f64());
        let whole = request.arrival() + Nanos(e2e.0.saturating_sub(decode.0));
        request.deadline().map(|deadline| deadline.min(whole))
    }

    /// The first of `order`, and those behind it as long as everybody chosen stays on time who was.
    pub(super) fn prompts_on_time(
        &self,
        worker: &WorkerView<'_>,
        order: &[Prompt<'_>],
    ) -> Vec<(RequestId, u32)> {
        let mut room = PrefillRoom::new(worker);
        let mut shape = StepShape::default();
        let mut earliest = Picos(u64::MAX);
        let mut chosen: Vec<(RequestId, u32)> = Vec::new();
        let together = u64::from(self.chunk_tokens.min(worker.limits().max_prefill_tokens));
        for prompt @ Prompt { request, due, late } in order {
            let left = together.saturating_sub(shape.prefill_tokens) as u32;
            if chosen.len() == worker.limits().max_batch as usize || (left == 0 && !chosen.is_empty()) {
                break;
            }
            if !room.take(request) {
                continue;
            }
            // The step's limit is for several prompts: one may go alone.
            let chunk = if chosen.is_empty() {
                prompt.first_chunk(worker, shape, self.chunk_tokens)
            } else {
                request.pending().min(left)
            };
            let grown = shape + StepShape::prefill(request.computed(), chunk);
            if !chosen.is_empty() && worker.predict_step(&grown) > earliest {
                break;
            }
            if let Some(due) = due.filter(|_| !late) {
                earliest = earliest.min(until(request, due));
            }
            shape = grown;
            chosen.push((request.id(), chunk));
        }
        chosen
    }

    /// Chunks beside a decode batch, as many tokens as everybody's slack allows, none if too few; and
    /// whether the batch decodes with them: where it leaves no row free, or a first token would be
    /// late beside it, it stands aside for a step.
    pub(super) fn chunks_within_slack(
        &self,
        worker: &WorkerView<'_>,
        order: &[Prompt<'_>],
    ) -> (Vec<(RequestId, u32)>, bool) {
        let max_batch = worker.limits().max_batch as usize;
        let batch = worker.decode_shape();
        let alone = worker.predict_step(&batch);
        let presses = order.first().is_some_and(Prompt::presses);
        // Those behind a full batch wait for a place in it, not for the step.
        let paces = worker.running().take(max_batch).filter_map(|member| {
            let pace = Pace::of(&member, Picos::ZERO).filter(|pace| !pace.is_lost(alone))?;
            Some(pace.slack(if presses { self.seen.gains(&member, &pace, alone) } else { 0 }))
        });
        let slack = paces.min().unwrap_or(Pace::FAR);
        let aside = presses && order[0].is_saved_by_standing_aside(worker, slack);
        let beside = worker.num_running() < max_batch && !aside;
        let (batch, slots, after) = if beside {
            (batch, max_batch - worker.num_running(), Picos::ZERO)
        } else {
            (StepShape::default(), max_batch, alone)
        };
        let fits = |tokens: u32| -> Option<Vec<(RequestId, u32)>> {
            let together = tokens.min(worker.limits().max_prefill_tokens);
            let prompts = order.iter().map(|prompt| prompt.request);
            let chunks = chunked::fill(worker, prompts, tokens, together, slots);
            let mut shape = batch;
            for (id, chunk) in &chunks {
                shape = shape + StepShape::prefill(worker.cluster().request(*id)?.computed(), *chunk);
            }
            let step = worker.predict_step(&shape) + after;
            (i128::from(step.0) <= slack).then_some(chunks)
        };
        // Halving finds a fitting size within a factor of two; smaller chunks than this waste steps.
        const SMALLEST_CHUNK: u32 = 32;
        let half = |tokens: &u32| Some(tokens / 2).filter(|half| *half >= SMALLEST_CHUNK);
        let most = order.first().map_or(0, |first| first.first_chunk(worker, batch, self.chunk_tokens));
        let sizes = std::iter::successors(Some(most.max(self.chunk_tokens)), half);
        let chunks = { sizes }.find_map(fits).unwrap_or_default();
        let decodes = beside || chunks.is_empty();
        (chunks, decodes)
    }
}

/// Whether the first token would miss `due` even if nothing else ran.
fn is_late(request: &RequestView<'_>, worker: &WorkerView<'_>, due: Option<Time>) -> bool {
    let Some(due) = due else { return false };
    if due < request.now() {
        return true;
    }
    let known = if request.is_started() { request.computed() } else { worker.prefix_hit(request) };
    let prefill = worker.predict_prefill(request.computed() + request.pending() - known, known);
    prefill > until(request, due)
}

/// From now to `due`; zero if it is past.
fn until(request: &RequestView<'_>, due: Time) -> Picos {
    Picos::from(due.saturating_since(request.now()))
}
