//! `goodput`: every request by its own objectives.
//!
//! Why these rules (the experiments behind them are in the project's design notes): under overload
//! an order that spends time on hopeless prompts loses nearly all goodput, so prompts run in
//! deadline order with the certainly late last; most of what remains is preemption granularity,
//! so a prompt can be preempted at every chunk border; and a decode batch is only joined while
//! everybody in it keeps a TPOT that can still be met.

use std::collections::{BTreeMap, VecDeque};

use super::defaults::{PrefillRoom, default_place};
use super::{
    Acceptance, Batch, ClusterView, Decision, Outcome, Placement, Policy, RequestView, WorkerView, chunked,
};
use crate::cluster::Role;
use crate::record::{RequestRecord, Status};
use crate::request::{ClassId, RequestId};
use crate::step::StepShape;
use crate::time::{Nanos, Picos, Time};

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

/// What the requests that are over tell about those to come.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// Per SLO class: requests that finished, and their output tokens.
    outputs: BTreeMap<ClassId, (u64, u64)>,
    /// When the latest ones that decoded ended.
    ends: VecDeque<Time>,
}

impl Seen {
    /// Ends that the rate is taken over.
    const ENDS: usize = 32;
    /// Output tokens of a class none of which has finished: conversations have some 200 at the median.
    const FIRST_GUESS: i128 = 128;

    fn ended(&mut self, record: &RequestRecord) {
        if record.status == Status::Finished {
            let (count, tokens) = self.outputs.entry(record.class).or_default();
            *count += 1;
            *tokens += u64::from(record.output_tokens);
        }
        if let Some(end) = record.end.filter(|_| record.decode_start.is_some()) {
            if self.ends.len() == Self::ENDS {
                self.ends.pop_front();
            }
            self.ends.push_back(end);
        }
    }

    /// The mean output of the request's class; `None` as long as none has finished.
    fn output_tokens(&self, request: &RequestView<'_>) -> Option<f64> {
        let (count, tokens) = self.outputs.get(&ClassId(request.class()))?;
        Some(*tokens as f64 / *count as f64)
    }

    /// What a decoding request will gain on its TPOT in the tokens that it may yet be expected to
    /// produce, in steps of `step`, by half: what is spent now, it must live long enough to earn.
    fn gains(&self, member: &RequestView<'_>, pace: &Pace, step: Picos) -> i128 {
        let expected = self.output_tokens(member).map_or(Self::FIRST_GUESS, |mean| mean as i128);
        let remaining = (expected - i128::from(member.generated())).clamp(0, pace.remaining);
        remaining / 2 * (pace.tpot - i128::from(step.0)).max(0)
    }

    /// How long the last of `waiting` requests waits for a place in a decode batch, in seconds, if
    /// places come free as often as they did; `None` before anything is known.
    fn wait(&self, waiting: usize, now: Time) -> Option<f64> {
        let first = self.ends.front().filter(|_| self.ends.len() == Self::ENDS)?;
        Some(now.saturating_since(*first).as_secs_f64() * waiting as f64 / Self::ENDS as f64)
    }
}

/// A request that waits for its prompt to be computed.
#[derive(Clone, Copy)]
struct Prompt<'a> {
    request: RequestView<'a>,
    /// When its first token is due.
    due: Option<Time>,
    /// It will be too late even if nothing else runs.
    late: bool,
}

impl Prompt<'_> {
    /// Whether its TTFT is at stake: what decodes has none to lose any more.
    fn presses(&self) -> bool {
        self.request.slo().ttft.is_some() && !self.late
    }
}

/// Decode steps after which those who wait for room are looked at again.
const RETHINK_AFTER: u32 = 16;

/// Where a decoding request stands against its TPOT and its longest gap, in picoseconds.
#[derive(Clone, Copy)]
struct Pace {
    /// Until its next token is due if all tokens were evenly spaced; negative when behind.
    ahead: i128,
    /// Its TPOT objective.
    tpot: i128,
    /// Tokens it may still have to produce.
    remaining: i128,
    /// Until its next token comes too late after the one before.
    gap: i128,
    /// The longest gap it may have.
    max_gap: i128,
}

impl Pace {
    /// An objective that it does not have. Times the longest output this is no overflow.
    const FAR: i128 = 1 << 80;

    /// `None` for one with no objective of that kind, or with none left to lose. `delay` is what
    /// passes before its next step can start.
    fn of(request: &RequestView<'_>, delay: Picos) -> Option<Pace> {
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
    fn slack(&self, later: i128) -> i128 {
        (self.ahead + later).min(self.gap)
    }

    /// The longest step that, taken from now on, keeps its objectives to its longest end.
    fn longest_step(&self) -> i128 {
        let remaining = self.remaining.max(1);
        let evenly = (self.ahead + (remaining - 1) * self.tpot) / remaining;
        evenly.min(self.gap).min(self.max_gap)
    }

    /// Whether it is behind and steps of `step` will not bring it back.
    fn is_lost(&self, step: Picos) -> bool {
        let step = i128::from(step.0);
        self.gap < step || (self.ahead < step && self.tpot < step)
    }
}

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
            order.retain(|Prompt { request, .. }| {
                request.is_started() || !self.would_wait_in_vain(request, worker)
            });
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
    /// Chunks beside a decode batch, as many tokens as everybody's slack allows, none if too few; and
    /// whether the batch decodes with them: where it leaves no row free, it stands aside for a step.
    fn chunks_within_slack(
        &self,
        worker: &WorkerView<'_>,
        order: &[Prompt<'_>],
    ) -> (Vec<(RequestId, u32)>, bool) {
        let limits = worker.limits();
        let max_batch = limits.max_batch as usize;
        let alone = worker.predict_step(&worker.decode_shape());
        let presses = order.first().is_some_and(Prompt::presses);
        // Those behind a full batch wait for a place in it, not for the step.
        let slack = worker
            .running()
            .take(max_batch)
            .filter_map(|member| {
                let pace = Pace::of(&member, Picos::ZERO).filter(|pace| !pace.is_lost(alone))?;
                Some(pace.slack(if presses { self.seen.gains(&member, &pace, alone) } else { 0 }))
            })
            .min();
        // A first token that would be late beside the batch may be in time without it.
        let saved_alone = order.first().filter(|first| first.presses()).is_some_and(|first| {
            let prompt = StepShape::prefill(first.request.computed(), first.request.pending());
            let time = |shape| worker.predict_step(&shape);
            let left = first.due.map_or(Picos(u64::MAX), |due| until(&first.request, due));
            let aside = i128::from((time(prompt) + alone).0);
            time(worker.decode_shape() + prompt) > left && slack.is_none_or(|slack| aside <= slack)
        });
        let beside = worker.num_running() < max_batch && !saved_alone;
        let (decode, slots, after) = if beside {
            (worker.decode_shape(), max_batch - worker.num_running(), Picos::ZERO)
        } else {
            (StepShape::default(), max_batch, alone)
        };
        let fits = |tokens: u32| -> Option<Vec<(RequestId, u32)>> {
            let together = tokens.min(limits.max_prefill_tokens);
            let chunks =
                chunked::fill(worker, order.iter().map(|prompt| prompt.request), tokens, together, slots);
            let mut shape = decode;
            for (id, chunk) in &chunks {
                let prompt = order.iter().find(|prompt| prompt.request.id() == *id)?;
                shape = shape + StepShape::prefill(prompt.request.computed(), *chunk);
            }
            let step = worker.predict_step(&shape) + after;
            slack.is_none_or(|slack| i128::from(step.0) <= slack).then_some(chunks)
        };
        // Halving finds a fitting size within a factor of two; smaller chunks than this waste steps.
        const SMALLEST_CHUNK: u32 = 32;
        let most = order
            .first()
            .map_or(0, |first| first_chunk(&first.request, first.due, worker, decode, self.chunk_tokens))
            .max(self.chunk_tokens);
        let chunks = std::iter::successors(Some(most), |tokens| {
            Some(tokens / 2).filter(|half| *half >= SMALLEST_CHUNK)
        })
        .find_map(fits)
        .unwrap_or_default();
        let decode = beside || chunks.is_empty();
        (chunks, decode)
    }

    /// Waiting requests as they should run: preempted ones, those that can be on time by deadline,
    /// the rest in their queue's order; higher priority first among equals.
    fn deadline_order<'a>(&self, worker: &WorkerView<'a>) -> Vec<Prompt<'a>> {
        let token_time = token_time(worker);
        let prompt = |request: RequestView<'a>| {
            let due = self.due(&request, token_time);
            Prompt { request, due, late: is_late(&request, worker, due) }
        };
        let mut order: Vec<_> = worker.waiting().map(prompt).collect();
        order.sort_by_key(|Prompt { request, due, late }| {
            let rank = (request.generated() == 0, *late, request.is_demoted());
            (rank, due.filter(|_| !late).unwrap_or(Time::LONGEST), std::cmp::Reverse(request.priority()))
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
    fn prompts_on_time(&self, worker: &WorkerView<'_>, order: &[Prompt<'_>]) -> Vec<(RequestId, u32)> {
        let mut room = PrefillRoom::new(worker);
        let mut shape = StepShape::default();
        let mut earliest = Picos(u64::MAX);
        let mut chosen: Vec<(RequestId, u32)> = Vec::new();
        let together = u64::from(self.chunk_tokens.min(worker.limits().max_prefill_tokens));
        for Prompt { request, due, late } in order {
            let left = together.saturating_sub(shape.prefill_tokens) as u32;
            if chosen.len() == worker.limits().max_batch as usize || (left == 0 && !chosen.is_empty()) {
                break;
            }
            if !room.take(request) {
                continue;
            }
            // The step's limit is for several prompts: one may go alone.
            let chunk = if chosen.is_empty() {
                first_chunk(request, *due, worker, shape, self.chunk_tokens)
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

    /// Whether the prompt, were it computed now, would lose its TPOT while it waits for a decode
    /// worker: all that its tokens could make up for is less than the wait that is to be expected.
    fn would_wait_in_vain(&self, request: &RequestView<'_>, worker: &WorkerView<'_>) -> bool {
        let slo = request.slo();
        if slo.tpot.is_none() && slo.max_gap.is_none() {
            return false;
        }
        let cluster = worker.cluster();
        // Before anything is known: as long as the first of them has waited.
        let so_far = cluster.awaiting_room().find_map(|first| first.first_token());
        let so_far = so_far.map_or(0.0, |first| worker.now().saturating_since(first).as_secs_f64());
        let wait = self.seen.wait(cluster.num_awaiting_room() + 1, worker.now()).unwrap_or(so_far);
        let output = self.seen.output_tokens(request).unwrap_or_else(|| f64::from(request.max_tokens()));
        let seconds = |nanos: Option<Nanos>| nanos.map_or(f64::INFINITY, Nanos::as_secs_f64);
        let spare = (seconds(slo.tpot) - token_time(worker).as_secs_f64()) * (output - 1.0).max(0.0);
        spare.min(seconds(slo.max_gap)) < wait
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
fn joins_without_harm(request: &RequestView<'_>, worker: &WorkerView<'_>) -> bool {
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
fn keep_harmless(order: &mut Vec<Prompt<'_>>, worker: &WorkerView<'_>) {
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

/// From one token to the next where a request that is prefilled at `worker` will decode, with it.
fn token_time(worker: &WorkerView<'_>) -> Picos {
    let time = |at: WorkerView<'_>| at.predict_step(&(at.decode_shape() + StepShape::decode(1, 1)));
    if worker.role().decodes() {
        return time(*worker);
    }
    let others = worker.cluster().workers().filter(|other| other.is_up() && other.role().decodes());
    others.map(time).min().unwrap_or(Picos::ZERO)
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

/// Prompt tokens that the first prompt of a step gets beside `decode`: a chunk, or all that is left
/// where its deadline allows for no border on the way.
fn first_chunk(
    request: &RequestView<'_>,
    due: Option<Time>,
    worker: &WorkerView<'_>,
    decode: StepShape,
    chunk_tokens: u32,
) -> u32 {
    let pending = request.pending();
    let Some(due) = due.filter(|_| pending > chunk_tokens) else {
        return pending.min(chunk_tokens);
    };
    let time = |chunk: u32| -> Picos {
        let starts = (0..pending).step_by(chunk as usize);
        let steps = starts.map(|start| {
            let row = StepShape::prefill(request.computed() + start, chunk.min(pending - start));
            worker.predict_step(&(decode + row))
        });
        steps.fold(Picos::ZERO, |sum, step| sum + step)
    };
    let left = until(request, due);
    if time(chunk_tokens) > left && time(pending) <= left { pending } else { chunk_tokens }
}

/// From now to `due`; zero if it is past.
fn until(request: &RequestView<'_>, due: Time) -> Picos {
    Picos::from(due.saturating_since(request.now()))
}
