//! `goodput`: every request by its own objectives.
//!
//! Why these rules (the experiments behind them are in the project's design notes): under overload
//! an order that spends time on hopeless prompts loses nearly all goodput, so prompts run in
//! deadline order with the certainly late last; most of what remains is preemption granularity,
//! so a prompt can be preempted at every chunk border; and a decode batch is only joined while
//! everybody in it keeps a TPOT that can still be met.

use super::defaults::{PrefillRoom, default_place, prefill_first};
use super::{Acceptance, Batch, ClusterView, Decision, Placement, Policy, RequestView, WorkerView, chunked};
use crate::cluster::Role;
use crate::request::RequestId;
use crate::step::{Row, StepShape};
use crate::time::Picos;

/// Deadline order, preemption at chunk borders, TPOT-guarded batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Goodput {
    /// Prompt tokens per step, hence the distance of preemption borders.
    pub chunk_tokens: u32,
}

impl Default for Goodput {
    /// 1,024 tokens: about 130 ms of a 13B model on an A100, a constant part of 15 %.
    fn default() -> Goodput {
        Goodput { chunk_tokens: 1024 }
    }
}

/// Decode steps after which those who wait for room are looked at again.
const RETHINK_AFTER: u32 = 16;

/// Where a decoding request stands against its TPOT, in picoseconds.
#[derive(Clone, Copy)]
struct Pace {
    /// Until its next token is due if all tokens were evenly spaced; negative when behind.
    slack: i128,
    /// Its TPOT objective.
    tpot: i128,
    /// Tokens it may still have to produce.
    remaining: i128,
}

impl Pace {
    /// `None` without a TPOT objective. `delay` is what passes before its next step can start.
    fn of(request: &RequestView<'_>, delay: Picos) -> Option<Pace> {
        let tpot = i128::from(request.slo().tpot?.0) * 1_000;
        let first = i128::from(request.first_token()?.0) * 1_000;
        let now = i128::from(request.now().0) * 1_000 + i128::from(delay.0);
        let generated = i128::from(request.generated());
        let remaining = i128::from(request.max_tokens()) - generated;
        Some(Pace { slack: first + tpot * generated - now, tpot, remaining })
    }

    /// Whether its mean TPOT holds to its longest end when every step from now on takes `step`.
    fn holds(&self, step: Picos) -> bool {
        let step = i128::from(step.0);
        self.slack - step + (self.remaining - 1).max(0) * (self.tpot - step) >= 0
    }

    /// Whether it is behind and steps of `step` will not bring it back.
    fn is_lost(&self, step: Picos) -> bool {
        let step = i128::from(step.0);
        self.slack < step && self.tpot < step
    }
}

impl Policy for Goodput {
    fn name(&self) -> String {
        "goodput".to_owned()
    }

    /// Where its prompt is predicted to be done first.
    fn place(&mut self, request: &RequestView<'_>, cluster: &ClusterView<'_>) -> Decision<Option<Placement>> {
        let holds = |worker: &WorkerView<'_>| {
            let tokens = if worker.role() == Role::Mixed {
                request.longest()
            } else {
                u64::from(request.prompt_tokens())
            };
            worker.is_up() && worker.role().takes_prompts() && worker.can_ever_hold(tokens)
        };
        let best = cluster.workers().filter(holds).min_by_key(|worker| predicted_finish(request, worker));
        Ok(best.map_or_else(|| default_place(request, cluster), |worker| Some(worker.id().into())))
    }

    fn accept(&mut self, request: &RequestView<'_>, worker: &WorkerView<'_>) -> Decision<Acceptance> {
        let cluster = worker.cluster();
        let mut candidates: Vec<_> = cluster
            .workers()
            .filter(|other| other.is_up() && other.role().decodes() && other.can_ever_hold(request.longest()))
            .collect();
        // The asked-for worker first among equals: moving on is only worth it for less load.
        candidates.sort_by_key(|other| (other.context_tokens(), other.id() != worker.id(), other.id()));
        let pressed = request.kv_worker().and_then(|id| cluster.worker(id)).is_some_and(|source| {
            // Waiting KV blocks the prefill worker: below a quarter of its pool that costs TTFTs.
            u64::from(source.available_blocks()) * 4 < u64::from(source.num_blocks())
        });
        let fitting =
            candidates.iter().find(|other| other.can_accept(request) && joins_without_harm(request, other));
        let chosen = fitting.or_else(|| candidates.first().filter(|_| pressed));
        Ok(match chosen {
            Some(other) if other.id() == worker.id() => Acceptance::Now,
            Some(other) => Acceptance::Other(other.id()),
            None => Acceptance::Later,
        })
    }

    fn batch(&mut self, worker: &WorkerView<'_>) -> Decision<Batch> {
        if worker.role() == Role::Prefill && decode_is_saturated(worker) {
            return Ok(Batch::default());
        }
        let order = deadline_order(worker);
        if order.is_empty() {
            // Whether someone who waits for room may join depends on the slack that steps leave.
            let repeat = (worker.cluster().num_awaiting_room() > 0).then_some(RETHINK_AFTER);
            return Ok(Batch { repeat, ..Batch::default() });
        }
        if order[0].generated() > 0 {
            // A preempted decode re-enters before anything else happens.
            let prefill = prefill_first(worker, order.into_iter());
            let decode = if prefill.is_empty() { None } else { Some(Vec::new()) };
            return Ok(Batch { prefill, decode, ..Batch::default() });
        }
        let budget = self.chunk_tokens.min(worker.limits().max_prefill_tokens).max(1);
        if worker.num_running() == 0 {
            return Ok(Batch { prefill: prompts_on_time(worker, &order, budget), ..Batch::default() });
        }
        let prefill = chunks_within_slack(worker, &order, budget);
        // Slack for a chunk may come with the next step, so the step is not repeated.
        Ok(Batch { prefill, repeat: Some(1), ..Batch::default() })
    }
}

/// Requests per decode worker that may wait for one before prompts are held back. With fewer, prefill
/// workers stand still over a passing peak; with more, those who wait lose their TPOT waiting.
const AWAITING_PER_DECODE_WORKER: usize = 8;

/// Whether so many requests wait for a decode worker that prompts are held back.
///
/// Another prompt computed now would only wait too, and lose its TPOT while it does; computed when
/// there is room for it, it may still be the one with the nearest deadline that can be met.
fn decode_is_saturated(worker: &WorkerView<'_>) -> bool {
    let cluster = worker.cluster();
    let num_decode = cluster.workers().filter(|other| other.is_up() && other.role().decodes()).count();
    cluster.num_awaiting_room() >= AWAITING_PER_DECODE_WORKER * num_decode.max(1)
}

/// Predicted time until the prompt is done behind all that is queued there.
fn predicted_finish(request: &RequestView<'_>, worker: &WorkerView<'_>) -> Picos {
    let hit = worker.prefix_hit(request);
    let own = StepShape::prefill(hit, request.pending() - hit);
    let queued = worker.queued_tokens();
    let mut shape = worker.decode_shape();
    shape.num_prefill = 1 + worker.num_waiting() as u32;
    shape.prefill_tokens = queued + own.prefill_tokens;
    shape.prefill_context = queued + own.prefill_context;
    shape.prefill_square = queued * queued / (worker.num_waiting() as u64).max(1) + own.prefill_square;
    worker.predict_step(&shape)
}

/// Whether the request's TPOT can be kept at `worker` and costs nobody there theirs.
///
/// One who has lost already has no say. A newcomer who cannot be saved even alone is let in only
/// where nobody is harmed: it has to end some day.
fn joins_without_harm(request: &RequestView<'_>, worker: &WorkerView<'_>) -> bool {
    let newcomer = StepShape::decode(1, u64::from(request.computed()) + 1);
    let mut shape = worker.decode_shape();
    let before = worker.predict_step(&shape);
    shape.num_decode += worker.num_incoming() + 1;
    shape.decode_context =
        worker.context_tokens() + u64::from(shape.num_decode) + u64::from(request.computed());
    let after = worker.predict_step(&shape);
    let members_hold = worker
        .running()
        .filter_map(|member| Pace::of(&member, Picos::ZERO))
        .all(|pace| pace.holds(after) || !pace.holds(before));
    let transfer = Picos::from(worker.cluster().predict_transfer(u64::from(request.computed())));
    let saved = |step| Pace::of(request, transfer).is_none_or(|pace| pace.holds(step));
    members_hold && (saved(after) || !saved(worker.predict_step(&newcomer)))
}

/// Waiting requests as they should run: preempted ones, those that can be on time by deadline,
/// the rest; then by priority and arrival.
fn deadline_order<'a>(worker: &WorkerView<'a>) -> Vec<RequestView<'a>> {
    let mut order: Vec<_> = worker.waiting().collect();
    order.sort_by_cached_key(|request| {
        let late = request.generated() == 0 && is_certainly_late(request, worker, Picos::ZERO);
        let due = request.deadline().map_or(u64::MAX, |deadline| deadline.0);
        let rank = (request.generated() == 0, late, request.is_demoted());
        (rank, due, std::cmp::Reverse(request.priority()), request.arrival(), request.id())
    });
    order
}

/// Whether the first token would miss its deadline even if nothing else ran, `delay` from now.
fn is_certainly_late(request: &RequestView<'_>, worker: &WorkerView<'_>, delay: Picos) -> bool {
    let Some(deadline) = request.deadline() else { return false };
    let known = if request.is_started() { request.computed() } else { worker.prefix_hit(request) };
    let prefill = worker.predict_prefill(request.computed() + request.pending() - known, known);
    Picos(request.now().0 * 1_000) + delay + prefill > Picos(deadline.0.saturating_mul(1_000))
}

/// The first of `order`, and those behind it as long as everybody chosen stays on time who was.
fn prompts_on_time(worker: &WorkerView<'_>, order: &[RequestView<'_>], budget: u32) -> Vec<(RequestId, u32)> {
    let mut room = PrefillRoom::new(worker);
    let mut shape = StepShape::default();
    let mut earliest = Picos(u64::MAX);
    let mut chosen: Vec<(RequestId, u32)> = Vec::new();
    let mut left = budget;
    for request in order {
        if chosen.len() == worker.limits().max_batch as usize {
            break;
        }
        if left == 0 {
            break;
        }
        if !room.take(request) {
            continue;
        }
        let chunk = request.pending().min(left);
        let mut grown = shape;
        grown.add(&chunk_row(request, chunk));
        let until = |at: u64| Picos(at.saturating_mul(1_000).saturating_sub(request.now().0 * 1_000));
        if !chosen.is_empty() && worker.predict_step(&grown) > earliest {
            break;
        }
        if let Some(deadline) =
            request.deadline().filter(|_| !is_certainly_late(request, worker, Picos::ZERO))
        {
            earliest = earliest.min(until(deadline.0));
        }
        shape = grown;
        left -= chunk;
        chosen.push((request.id(), chunk));
    }
    chosen
}

/// Chunks beside a decode batch: as many tokens as everybody's slack allows, none if too few.
fn chunks_within_slack(
    worker: &WorkerView<'_>,
    order: &[RequestView<'_>],
    budget: u32,
) -> Vec<(RequestId, u32)> {
    let decode = worker.decode_shape();
    let alone = worker.predict_step(&decode);
    let slack = worker
        .running()
        .filter_map(|member| Pace::of(&member, Picos::ZERO))
        .filter(|pace| !pace.is_lost(alone))
        .map(|pace| pace.slack)
        .min();
    let fits = |tokens: u32| -> Option<Vec<(RequestId, u32)>> {
        let chunks = chunked::fill(worker, order.iter().copied(), tokens);
        let mut shape = decode;
        for (id, chunk) in &chunks {
            let request = order.iter().find(|request| request.id() == *id)?;
            shape.add(&chunk_row(request, *chunk));
        }
        let step = i128::from(worker.predict_step(&shape).0);
        slack.is_none_or(|slack| step <= slack).then_some(chunks)
    };
    // Halving finds a fitting size within a factor of two; smaller chunks than this waste steps.
    const SMALLEST_CHUNK: u32 = 32;
    std::iter::successors(Some(budget), |tokens| Some(tokens / 2).filter(|half| *half >= SMALLEST_CHUNK))
        .find_map(fits)
        .unwrap_or_default()
}

fn chunk_row(request: &RequestView<'_>, chunk: u32) -> Row {
    Row { request: request.id(), start: request.computed(), len: chunk, want_logits: true, decode: false }
}
