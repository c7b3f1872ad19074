//! A run is over: tokens are credited, and requests move on.

use std::borrow::Cow;

use super::live::Phase;
use super::state::State;
use crate::cluster::WorkerId;
use crate::event::{Action, Done, EndedRow};
use crate::kv::Holder;
use crate::record::{Detail, GapRun, Status, StepRecord};
use crate::request::RequestId;
use crate::step::{Row, StepShape, Stretch};
use crate::time::{Picos, Time};

/// A run as `Policy::observe` is told of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ran {
    pub(super) worker: WorkerId,
    pub(super) shape: StepShape,
    pub(super) steps: u32,
    pub(super) duration: Picos,
}

/// When the tokens of a run were emitted. What is asked for every row is reckoned once.
struct TokenTimes<'a> {
    start: Picos,
    stretches: Cow<'a, [Stretch]>,
    busy: Picos,
    /// When the first of them was, exactly and as an event.
    first: (Picos, Time),
    /// When the last of them was.
    last: (Picos, Time),
    longest_interior: Option<Picos>,
}

impl<'a> TokenTimes<'a> {
    fn new(start: Picos, stretches: impl Into<Cow<'a, [Stretch]>>) -> TokenTimes<'a> {
        let stretches = stretches.into();
        let busy = stretches.iter().map(|stretch| stretch.total(stretch.steps)).sum();
        let timed = |exact: Picos| (exact, event_time(exact));
        let first = start + stretches.first().map_or(Picos::ZERO, |stretch| stretch.first);
        let mut times = TokenTimes {
            start,
            stretches,
            busy,
            first: timed(first),
            last: timed(start + busy),
            longest_interior: None,
        };
        times.longest_interior = times.interior().map(|stretch| stretch.longest()).max();
        times
    }

    /// The stretches without the first step: each step a gap.
    fn interior(&self) -> impl Iterator<Item = Stretch> {
        let first = self.stretches.first().and_then(|stretch| stretch.skip(1));
        first.into_iter().chain(self.stretches.iter().skip(1).copied())
    }

    /// Those of the first `steps` steps, at least one.
    fn first(&self, mut steps: u32) -> TokenTimes<'static> {
        let mut stretches = self.stretches.to_vec();
        stretches.retain_mut(|stretch| {
            stretch.steps = stretch.steps.min(steps);
            steps -= stretch.steps;
            stretch.steps > 0
        });
        TokenTimes::new(self.start, stretches)
    }

    fn ends(&self) -> impl Iterator<Item = Picos> {
        let steps =
            self.stretches.iter().flat_map(|stretch| (0..stretch.steps).map(|index| stretch.step(index)));
        steps.scan(self.start, |at, step| {
            *at += step;
            Some(*at)
        })
    }
}

/// The event time of an exact instant.
fn event_time(exact: Picos) -> Time {
    Time(exact.0.div_ceil(1_000))
}

impl State {
    /// Credits a run. A run that is not the worker's present one belongs to a life before it was
    /// lost, and counts for nothing.
    pub(super) fn run_done(&mut self, done: &Done, actions: &mut Vec<Action>) -> Option<Ran> {
        let worker = self.worker(done.worker);
        let at = worker.outstanding.iter().position(|outstanding| outstanding.seq == done.seq)?;
        let outstanding = worker.outstanding.remove(at);
        let rows = &outstanding.run.step.rows;
        assert_eq!(done.emitted.len(), rows.len(), "rows of worker {} run {}", done.worker.0, done.seq.0);
        let times = TokenTimes::new(outstanding.begun, &done.stretches[..]);
        let end = worker.clock.end(times.last.0);
        self.accept_dirty |= worker.role.decodes();
        self.touch(done.worker);
        let record = StepRecord {
            worker: done.worker,
            seq: done.seq,
            start: outstanding.start,
            end,
            steps: done.steps(),
            shape: outstanding.shape,
            emitted: done.emitted.iter().map(|count| u64::from(*count)).sum(),
            held_blocks: outstanding.held_blocks,
        };
        if self.detail == Detail::All {
            self.log.steps.push(record);
        }
        if self.detail == Detail::All {
            let draining = |row: &Row| self.requests[row.request].phase() == Phase::Draining;
            let goes_on = |(row, emitted): &(&Row, &u32)| row.decode && **emitted > 1 && !draining(row);
            let streams = rows.iter().zip(&done.emitted).filter(goes_on).count();
            self.log_interior_gaps(&times, streams as u32);
        }
        let mut room_came = false;
        let mut ended = done.ended.iter().peekable();
        for (index, (row, emitted)) in rows.iter().zip(&done.emitted).enumerate() {
            let end = ended.next_if(|end| end.row as usize == index);
            room_came |= self.credit(done.worker, row, *emitted, end, &times, actions);
        }
        if room_came {
            self.room_changed(done.worker);
        }
        assert!(
            ended.next().is_none(),
            "ended rows of worker {} are rows of its run, in order",
            done.worker.0
        );
        self.rank(done.worker);
        Some(Ran { worker: done.worker, shape: outstanding.shape, steps: done.steps(), duration: times.busy })
    }

    /// The gaps between the tokens of a run, of so many streams that emitted all of them.
    fn log_interior_gaps(&mut self, times: &TokenTimes<'_>, streams: u32) {
        if streams > 0 && self.detail == Detail::All {
            let gaps = times.interior().map(|stretch| GapRun {
                first: stretch.first,
                delta: stretch.delta,
                count: stretch.steps,
                weight: streams,
            });
            self.log.gaps.extend(gaps);
        }
    }

    /// Credits a row; whether blocks of its worker came free (the caller says so, once for all rows).
    fn credit(
        &mut self,
        worker: WorkerId,
        row: &Row,
        emitted: u32,
        end: Option<&EndedRow>,
        times: &TokenTimes<'_>,
        actions: &mut Vec<Action>,
    ) -> bool {
        let id = row.request;
        let live = &mut self.requests[id];
        live.in_run = false;
        if live.phase() == Phase::Draining {
            self.emit_before_ending(id, emitted, times);
            self.drained(id, actions);
            return false;
        }
        let mut room_came = false;
        if row.decode {
            room_came = self.credit_decode(worker, id, emitted);
        } else {
            self.credit_prefill(worker, id, row.len);
        }
        if emitted > 0 {
            self.emit(id, emitted, times);
        }
        if row.want_logits && !row.decode {
            self.prompt_done(worker, id, end.is_some());
        }
        if let Some(end) = end {
            self.finish(worker, id, end, actions);
        }
        room_came
    }

    /// Whether blocks came free: what the run had reserved beyond the steps it did.
    fn credit_decode(&mut self, worker: WorkerId, id: RequestId, emitted: u32) -> bool {
        let live = &mut self.requests[id];
        let kv = live.kv.as_mut().expect("a decoding request has KV");
        kv.computed += emitted;
        let target = &mut self.workers[worker.index()];
        target.context_tokens += u64::from(emitted);
        let keep = target.pool.blocks_for(u64::from(kv.computed)) as u32;
        keep < kv.table.len() && target.pool.shrink(&mut kv.table, keep, Holder::Request) > 0
    }

    fn credit_prefill(&mut self, worker: WorkerId, id: RequestId, tokens: u32) {
        let live = &mut self.requests[id];
        let kv = live.kv.as_mut().expect("a started request has KV");
        let target = &mut self.workers[worker.index()];
        target.queued_tokens -= u64::from(tokens);
        let block_tokens = target.pool.block_tokens();
        let before = (kv.computed / block_tokens) as usize;
        kv.computed += tokens;
        let full = ((kv.computed / block_tokens) as usize).min(live.request.prefix.len());
        if before < full {
            target.pool.index(&kv.table.named()[before..full], &live.request.prefix[before..full]);
        }
    }

    /// Of the tokens of a run that a draining request was in, those emitted before it ended count.
    fn emit_before_ending(&mut self, id: RequestId, emitted: u32, times: &TokenTimes<'_>) {
        let ended = self.requests[id].ending.as_ref().expect("a draining request has ended").at;
        let in_time = times.ends().take(emitted as usize).take_while(|end| event_time(*end) <= ended);
        let count = in_time.count() as u32;
        if count > 0 {
            let times = times.first(count);
            self.log_interior_gaps(&times, 1);
            self.emit(id, count, &times);
        }
    }

    /// Tokens that a lost worker had delivered by `until`. It took their times with it, so they are
    /// spread evenly since the token before them.
    pub(super) fn emit_unseen(&mut self, id: RequestId, count: u32, until: Time) {
        let last = self.requests[id].last_emit.expect("a decoding request has emitted a token");
        let Some(gap) = until.as_picos().0.saturating_sub(last.0).checked_div(u64::from(count)) else {
            return;
        };
        let times = TokenTimes::new(last, vec![Stretch { first: Picos(gap), delta: 0, steps: count }]);
        self.log_interior_gaps(&times, 1);
        self.emit(id, count, &times);
    }

    /// Records the times of `count` tokens, one a step.
    fn emit(&mut self, id: RequestId, count: u32, times: &TokenTimes<'_>) {
        let live = &mut self.requests[id];
        let record = &mut live.record;
        if let Some(last) = live.last_emit {
            let gap = Picos(times.first.0.0.saturating_sub(last.0));
            let longest = times.longest_interior.filter(|_| count > 1).unwrap_or(gap).max(gap);
            record.max_gap = Some(record.max_gap.map_or(longest, |before| before.max(longest)));
            // Streams that went on together share their gap: one entry for all of them.
            match self.log.gaps.last_mut() {
                _ if self.detail == Detail::RequestsOnly => {}
                Some(run) if run.first == gap && run.count == 1 => run.weight += 1,
                _ => self.log.gaps.push(GapRun { first: gap, delta: 0, count: 1, weight: 1 }),
            }
        }
        if record.slo.token_deadlines {
            let due = |index| record.slo.token_deadline(record.arrival, index).map_or(u64::MAX, |due| due.0);
            record.late_token |= (live.generated..)
                .zip(times.ends().take(count as usize))
                .any(|(index, at)| event_time(at).0 > due(index));
        }
        record.first_token.get_or_insert(times.first.1);
        record.last_token = Some(times.last.1);
        live.last_emit = Some(times.last.0);
        live.generated += count;
        record.output_tokens = live.generated;
    }

    /// The prompt is computed: the request decodes here, or its KV waits for room elsewhere.
    fn prompt_done(&mut self, worker: WorkerId, id: RequestId, ended: bool) {
        let target = &mut self.workers[worker.index()];
        let live = &mut self.requests[id];
        // Its emitted token raised what is pending by one, which the queue never counted.
        target.queued_tokens += u64::from(live.pending());
        target.dequeue(live);
        self.in_last_chunk.retain(|other| *other != id);
        let stays = self.stays(worker, id);
        let (target, live) = (&mut self.workers[worker.index()], &mut self.requests[id]);
        if stays || ended {
            live.enter(Phase::Decoding(worker));
            if !ended {
                live.record.decode_worker.get_or_insert(worker);
            }
            target.join(live);
        } else if let Some(transfer) = live.early.take() {
            live.enter(Phase::Transferring(transfer));
        } else {
            live.enter(Phase::AwaitingRoom);
            self.awaiting_room.push_back(id);
            self.accept_dirty = true;
        }
    }

    /// Whether a request whose prompt runs at `worker` decodes there too.
    pub(super) fn stays(&self, worker: WorkerId, id: RequestId) -> bool {
        let decode_at = self.requests[id].decode_at;
        self.workers[worker.index()].role.decodes() && decode_at.is_none_or(|at| at == worker)
    }

    fn finish(&mut self, worker: WorkerId, id: RequestId, end: &EndedRow, actions: &mut Vec<Action>) {
        let live = &self.requests[id];
        let kv = live.kv.as_ref().expect("a request that ends in a run has KV");
        let full = ((kv.computed / self.limits.block_tokens) as usize).min(end.content.len());
        let target = &mut self.workers[worker.index()];
        target.pool.index(&kv.table.named()[..full], &end.content[..full]);
        target.leave(live);
        self.end(id, Status::Finished, Some(end.reason.name().into()), actions);
    }
}
