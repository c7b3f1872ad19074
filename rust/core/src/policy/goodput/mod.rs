//! `goodput`: every request by its own objectives.
//!
//! Why these rules (the experiments behind them are in the project's design notes): under overload
//! an order that spends time on hopeless prompts loses nearly all goodput, so prompts run in
//! deadline order with the certainly late last; most of what remains is preemption granularity,
//! so a prompt can be preempted at every chunk border; and a decode batch is only joined while
//! everybody in it keeps a TPOT that can still be met. One who has missed an objective has no say.

mod pace;
mod prompts;
mod seen;

use super::defaults::default_place;
use super::{Acceptance, Batch, ClusterView, Decision, Outcome, Placement, Policy, RequestView, WorkerView};
use crate::cluster::Role;
use crate::step::StepShape;
use crate::time::{Nanos, Picos};
use pace::{joins_without_harm, keep_harmless};
use prompts::Prompt;
use seen::Seen;

/// Deadline order, preemption at chunk borders, TPOT-guarded batches.
#[derive(Clone, Debug)]
pub struct Goodput {
    chunk_tokens: u32,
    seen: Seen,
}

impl Goodput {
    /// Prompt tokens per step, hence the distance of preemption borders: 1,024 by default, about
    /// 130 ms of a 13B model on an A100, a constant part of 15 %.
    pub const CHUNK_TOKENS: u32 = 1024;

    /// With so many prompt tokens per step; at least 1.
    pub fn new(chunk_tokens: u32) -> Goodput {
        Goodput { chunk_tokens: chunk_tokens.max(1), seen: Seen::default() }
    }
}

impl Default for Goodput {
    fn default() -> Goodput {
        Goodput::new(Goodput::CHUNK_TOKENS)
    }
}

/// Decode steps after which those who wait for room are looked at again.
const RETHINK_AFTER: u32 = 16;

impl Policy for Goodput {
    fn name(&self) -> String {
        "goodput".to_owned()
    }

    fn begin(&mut self, _: &ClusterView<'_>, _: u64) -> Decision<()> {
        self.seen = Seen::default();
        Ok(())
    }

    fn observe(&mut self, outcome: Outcome<'_>) -> Decision<()> {
        if let Outcome::Ended(record) = outcome {
            self.seen.ended(record);
        }
        Ok(())
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
        let mut order = self.deadline_order(worker);
        if worker.role() == Role::Prefill && decode_is_saturated(worker) {
            self.hold_back(&mut order, worker);
        }
        if worker.num_running() > 0 {
            keep_harmless(&mut order, worker);
        }
        if order.is_empty() {
            // Whether someone who waits for room may join depends on the slack that steps leave.
            let repeat = (worker.cluster().num_awaiting_room() > 0).then_some(RETHINK_AFTER);
            return Ok(Batch { repeat, ..Batch::default() });
        }
        if worker.num_running() == 0 {
            return Ok(Batch { prefill: self.prompts_on_time(worker, &order), ..Batch::default() });
        }
        // Slack for a chunk may come with the next step, so the step is not repeated.
        let (prefill, decode) = self.chunks_within_slack(worker, &order);
        let decode = if decode { None } else { Some(Vec::new()) };
        Ok(Batch { prefill, decode, repeat: Some(1), ..Batch::default() })
    }
}

impl Goodput {
    /// Takes out of `order` the prompts that, were they computed now, would lose their TPOT while they
    /// wait for a decode worker: all that their tokens could make up for is less than the wait that is
    /// to be expected.
    fn hold_back(&self, order: &mut Vec<Prompt<'_>>, worker: &WorkerView<'_>) {
        let cluster = worker.cluster();
        // Before anything is known: as long as the first of them has waited.
        let so_far = cluster.awaiting_room().find_map(|first| first.first_token());
        let so_far = so_far.map_or(0.0, |first| worker.now().saturating_since(first).as_secs_f64());
        let wait = self.seen.wait(cluster.num_awaiting_room() + 1, worker.now()).unwrap_or(so_far);
        let step = token_time(worker).as_secs_f64();
        let seconds = |nanos: Option<Nanos>| nanos.map_or(f64::INFINITY, Nanos::as_secs_f64);
        order.retain(|Prompt { request, .. }| {
            let slo = request.slo();
            if request.is_started() || (slo.tpot.is_none() && slo.max_gap.is_none()) {
                return true;
            }
            let output = self.seen.output_tokens(request).unwrap_or_else(|| f64::from(request.max_tokens()));
            let spare = (seconds(slo.tpot) - step) * (output - 1.0).max(0.0);
            spare.min(seconds(slo.max_gap)) >= wait
        });
    }
}

/// Requests per decode worker that may wait for one before prompts are held back. With fewer, prefill
/// workers stand still over a passing peak.
const AWAITING_PER_DECODE_WORKER: usize = 8;

/// Whether so many requests wait for a decode worker that prompts which could not stand the wait are
/// held back. Computed when there is room for it, one of them may still be good.
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

/// From one token to the next where a request that is prefilled at `worker` will decode, with it.
fn token_time(worker: &WorkerView<'_>) -> Picos {
    let time = |at: WorkerView<'_>| at.predict_step(&(at.decode_shape() + StepShape::decode(1, 1)));
    if worker.role().decodes() {
        return time(*worker);
    }
    let others = worker.cluster().workers().filter(|other| other.is_up() && other.role().decodes());
    others.map(time).min().unwrap_or(Picos::ZERO)
}
