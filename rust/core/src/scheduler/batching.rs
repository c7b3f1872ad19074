//! What a worker does next: asking for a batch, validating it, ordering the run.

use super::live::Phase;
use super::state::State;
use super::worker::{Outstanding, Worker};
use super::{Scheduler, is_out_of_reach, later_than};
use crate::cluster::WorkerId;
use crate::event::Action;
use crate::kv::Holder;
use crate::policy::{Batch, Decision, PolicyFault, WorkerView};
use crate::record::Status;
use crate::request::RequestId;
use crate::step::{Row, Run, Seq, Step, StepShape};
use crate::time::Time;

fn invalid(message: String) -> Decision<()> {
    Err(PolicyFault::Invalid { method: "batch", message })
}

impl Scheduler {
    pub(super) fn batch_all(&mut self, actions: &mut Vec<Action>) -> Decision<()> {
        if std::mem::take(&mut self.state.idle_dirty) {
            for worker in std::mem::take(&mut self.state.idle) {
                self.state.touch(worker);
            }
        }
        let mut touched = std::mem::take(&mut self.state.touched);
        while !touched.is_empty() {
            touched.sort_unstable();
            for index in 0..touched.len() {
                if let Err(fault) = self.batch(touched[index], actions) {
                    self.state.touched.extend_from_slice(&touched[index..]);
                    return Err(fault);
                }
            }
            touched.clear();
            std::mem::swap(&mut touched, &mut self.state.touched);
        }
        self.state.touched = touched;
        Ok(())
    }

    /// Asks for the worker's next run if it can take one. It is touched again when it becomes able to.
    fn batch(&mut self, worker: WorkerId, actions: &mut Vec<Action>) -> Decision<()> {
        // Asked again where the answer was only to drop or preempt: that made room.
        while self.state.workers[worker.index()].wants_batch() {
            let mut batch = self.policy.batch(&WorkerView::for_batch(&self.state, worker))?;
            self.state.validate_batch(worker, &batch)?;
            batch.wake_at = batch.wake_at.map(|at| later_than(self.state.now, at));
            self.state.worker(worker).dirty = false;
            self.state.commit_batch(worker, batch, actions);
        }
        self.state.worker(worker).dirty = false;
        Ok(())
    }
}

impl State {
    fn validate_batch(&self, worker: WorkerId, batch: &Batch) -> Decision<()> {
        let phase = |id: &RequestId| self.requests.get(*id).map(super::live::Live::phase);
        // What another run of a pipeline works on is not to be had.
        let phase = |id: &RequestId| phase(id).filter(|_| !self.requests[*id].in_run);
        let is_waiting = |id: &RequestId| phase(id) == Some(Phase::Waiting(worker));
        let is_running = |id: &RequestId| phase(id) == Some(Phase::Decoding(worker));
        for (id, tokens) in &batch.prefill {
            if !is_waiting(id) {
                return invalid(format!(
                    "prefill of request {}, which does not wait at worker {}",
                    id.0, worker.0
                ));
            }
            if *tokens == 0 {
                return invalid(format!("0 prompt tokens of request {}", id.0));
            }
        }
        for id in batch.decode.iter().flatten().chain(&batch.preempt) {
            if !is_running(id) {
                return invalid(format!(
                    "decode or preemption of request {}, which does not decode at worker {}",
                    id.0, worker.0
                ));
            }
        }
        if let Some(id) = batch.drop.iter().find(|id| !is_waiting(id) && !is_running(id)) {
            return invalid(format!("drop of request {}, which is not at worker {}", id.0, worker.0));
        }
        if let Some(twice) = batch.named_twice() {
            return invalid(format!("request {} named twice", twice.0));
        }
        if batch.repeat == Some(0) {
            return invalid("repeat of 0, at least 1 is needed".to_owned());
        }
        if let Some(at) = batch.wake_at.filter(|at| is_out_of_reach(self.now, *at)) {
            return invalid(format!(
                "wake_at {at:?}, which is not after {:?}, or beyond the 213 days of a run",
                self.now
            ));
        }
        self.validate_limits(batch)
    }

    fn validate_limits(&self, batch: &Batch) -> Decision<()> {
        let chunk = |(id, tokens): &(RequestId, u32)| u64::from((*tokens).min(self.requests[*id].pending()));
        let tokens: u64 = batch.prefill.iter().map(chunk).sum();
        if batch.prefill.len() > 1 && tokens > u64::from(self.limits.max_prefill_tokens) {
            let limit = self.limits.max_prefill_tokens;
            return invalid(format!(
                "{tokens} prompt tokens in a step, the limit is {limit} (one longer prompt may go alone)"
            ));
        }
        let rows = batch.prefill.len() + batch.decode.as_ref().map_or(0, Vec::len);
        if rows > self.limits.max_batch as usize {
            return invalid(format!("{rows} requests in a step, the limit is {}", self.limits.max_batch));
        }
        Ok(())
    }

    fn commit_batch(&mut self, worker: WorkerId, batch: Batch, actions: &mut Vec<Action>) {
        self.set_timer(worker, batch.wake_at);
        for id in batch.drop {
            self.give_up(id, Status::Refused, Some("dropped by the policy".into()), actions);
        }
        for id in batch.preempt {
            self.preempt(worker, id);
        }
        let mut rows = self.decode_rows(worker, batch.decode.as_deref(), batch.prefill.len());
        let wants_prefill = !batch.prefill.is_empty();
        if wants_prefill {
            self.reserve_repeats(worker, &rows, 1);
            self.prefill_rows(worker, batch.prefill, &mut rows);
        }
        if rows.is_empty() && wants_prefill {
            // None of the prompts found room: room only comes from those who decode.
            rows = self.decode_rows(worker, None, 0);
        }
        if rows.is_empty() {
            self.rows = rows;
            self.idle.insert(worker);
            return;
        }
        let repeat = if rows.iter().all(|row| row.decode) {
            let is_pipeline = self.workers[worker.index()].stages > 1;
            let limit =
                if is_pipeline { 1 } else { batch.repeat.unwrap_or(u32::MAX).min(self.limits.max_repeat) };
            self.reserve_repeats(worker, &rows, limit)
        } else {
            1
        };
        let step = Step { rows: rows[..].into() };
        rows.clear();
        self.rows = rows;
        self.order(worker, Run { step, repeat }, actions);
    }

    fn order(&mut self, worker: WorkerId, run: Run, actions: &mut Vec<Action>) {
        let now = self.now;
        for row in run.step.rows.iter() {
            let live = &mut self.requests[row.request];
            debug_assert!(!live.in_run, "request {} is in two runs", live.id().0);
            live.in_run = true;
            if row.decode {
                live.record.decode_start.get_or_insert(now);
            } else if live.record.prefill_start.is_none() {
                live.record.prefill_start = Some(now);
                live.record.prefill_worker = Some(worker);
                live.record.cached_tokens = row.start;
            }
            if self.early_transfers && row.want_logits && !row.decode && !self.stays(worker, row.request) {
                self.in_last_chunk.push(row.request);
                self.accept_dirty = true;
            }
        }
        let entry = self.worker(worker);
        let seq = Seq(entry.next_seq);
        entry.next_seq += 1;
        entry.ready = false;
        let begun = entry.clock.start(now);
        entry.outstanding.push(Outstanding {
            seq,
            begun,
            shape: StepShape::of(&run.step.rows),
            run: run.clone(),
            start: now,
            held_blocks: entry.pool.num_held(),
            cut: false,
        });
        actions.push(Action::Run { worker, seq, run });
    }

    /// Rows of those who decode (everybody when `None`), with a block for everybody's next token in the
    /// pool or taken. When there are too few the latest to join is preempted, so the oldest always gets on.
    fn decode_rows(
        &mut self,
        worker: WorkerId,
        chosen: Option<&[RequestId]>,
        num_prefill: usize,
    ) -> Vec<Row> {
        let share = (chosen.is_none() && self.workers[worker.index()].stages > 1)
            .then(|| self.share_of_stage(worker));
        let chosen = chosen.or(share.as_deref());
        let slots = (self.limits.max_batch as usize).saturating_sub(num_prefill);
        let running = self.workers[worker.index()].running.len();
        let count = chosen.map_or(running, <[RequestId]>::len).min(slots);
        let mut rows: Vec<Row> = std::mem::take(&mut self.rows);
        // Where everybody finds a block, blocks are taken for all steps at once.
        let scarce = (self.workers[worker.index()].pool.num_available() as usize) < count;
        for index in 0..count {
            // Only the latest are preempted, so what comes before them stays where it is.
            let next = match chosen {
                Some(chosen) => Some(chosen[index]),
                None => self.workers[worker.index()].running.get(index).copied(),
            };
            let Some(id) = next else { break };
            while scarce
                && self.requests[id].phase() == Phase::Decoding(worker)
                && !self.extend_table(worker, id, 1)
            {
                let victim = self.latest_free(worker).expect("the asking one is free");
                rows.retain(|row| row.request != victim);
                self.preempt(worker, victim);
            }
            let live = &self.requests[id];
            if live.phase() == Phase::Decoding(worker) {
                rows.push(Row {
                    request: id,
                    start: live.computed(),
                    len: 1,
                    want_logits: true,
                    decode: true,
                });
            }
        }
        rows
    }

    /// Who is to decode in a pipeline's next run where the policy names nobody: of those in no other
    /// run the first, as many as keep all stages busy.
    fn share_of_stage(&self, worker: WorkerId) -> Vec<RequestId> {
        let Worker { running, stages, .. } = &self.workers[worker.index()];
        let most = running.len().div_ceil(*stages as usize);
        running.iter().filter(|id| !self.requests[**id].in_run).take(most).copied().collect()
    }

    /// Of those that decode and are in no other run of a pipeline, the one that joined last.
    fn latest_free(&self, worker: WorkerId) -> Option<RequestId> {
        let running = &self.workers[worker.index()].running;
        running.iter().rev().find(|id| !self.requests[**id].in_run).copied()
    }

    /// Rows of prompts, as far as room allows: what does not start waits on.
    fn prefill_rows(&mut self, worker: WorkerId, chosen: Vec<(RequestId, u32)>, rows: &mut Vec<Row>) {
        let mut left = self.limits.max_chunk_tokens.unwrap_or(u32::MAX);
        for (id, tokens) in chosen {
            let live = &self.requests[id];
            // A decode row's preemption does not touch waiting requests, so this one still waits.
            if left == 0 || live.phase() != Phase::Waiting(worker) {
                continue;
            }
            if live.kv.is_none() && !self.start_prompt(worker, id) {
                continue;
            }
            let live = &self.requests[id];
            let len = tokens.min(live.pending()).min(left);
            left -= len;
            rows.push(Row {
                request: id,
                start: live.computed(),
                len,
                want_logits: len == live.pending(),
                decode: false,
            });
        }
    }

    /// Takes blocks for a whole prompt, cached ones first; false if there is no room.
    fn start_prompt(&mut self, worker: WorkerId, id: RequestId) -> bool {
        let live = &self.requests[id];
        let target = live.target();
        if !self.workers[worker.index()].can_start(live) {
            return false;
        }
        let kv = self.take_room(worker, id, u64::from(target), target - 1);
        self.worker(worker).queued_tokens -= u64::from(kv.computed);
        self.rank(worker);
        self.requests[id].kv = Some(kv);
        true
    }

    /// Makes the request's table long enough for `steps` more tokens; false if the pool is short.
    fn extend_table(&mut self, worker: WorkerId, id: RequestId, steps: u32) -> bool {
        let pool = &mut self.workers[worker.index()].pool;
        let kv = self.requests[id].kv.as_mut().expect("a decoding request has KV");
        let needed = pool.blocks_for(u64::from(kv.computed) + u64::from(steps)) as u32;
        let missing = needed.saturating_sub(kv.table.len());
        if missing == 0 {
            return true;
        }
        if missing > pool.num_available() {
            return false;
        }
        pool.extend(&mut kv.table, needed, 0, Holder::Request);
        true
    }

    /// How often the decode step may be repeated, and blocks for that: no row goes past its
    /// `max_tokens`, and half of what is available is left to those who come meanwhile.
    fn reserve_repeats(&mut self, worker: WorkerId, rows: &[Row], limit: u32) -> u32 {
        let available = u64::from(self.workers[worker.index()].pool.num_available());
        let longest = if limit > 1 { self.fewest_remaining(rows) } else { 1 };
        let (mut low, mut high) = (1, limit.min(longest).max(1));
        if high > 1 && self.missing_blocks(rows, high) <= available / 2 {
            low = high;
        }
        if low < high {
            // The first step's blocks are there, whatever is left.
            let first = self.missing_blocks(rows, 1);
            let most = first + (available - first) / 2;
            while low < high {
                let mid = high - (high - low) / 2;
                if self.missing_blocks(rows, mid) <= most {
                    low = mid;
                } else {
                    high = mid - 1;
                }
            }
        }
        for row in rows {
            let extended = self.extend_table(worker, row.request, low);
            assert!(extended, "blocks for {low} steps were counted as available");
        }
        low
    }

    fn fewest_remaining(&self, rows: &[Row]) -> u32 {
        rows.iter().map(|row| self.requests[row.request].remaining()).min().unwrap_or(1)
    }

    /// Blocks that decode rows lack for `steps` steps.
    fn missing_blocks(&self, rows: &[Row], steps: u32) -> u64 {
        let block_tokens = self.limits.block_tokens;
        let missing = |row: &Row| {
            let held = self.requests[row.request].kv.as_ref().map_or(0, |kv| kv.table.len());
            let tokens = u64::from(row.start) + u64::from(steps);
            tokens.div_ceil(u64::from(block_tokens)).saturating_sub(u64::from(held))
        };
        rows.iter().map(missing).sum()
    }

    /// The latest batch says when to ask again; what earlier ones said no longer counts.
    fn set_timer(&mut self, worker: WorkerId, at: Option<Time>) {
        let before = std::mem::replace(&mut self.worker(worker).wake_at, at);
        if let Some(before) = before {
            self.timers.remove(&(before, worker));
        }
        self.timers.extend(at.map(|at| (at, worker)));
    }

    /// Gives up the KV of a decoding request; it is recomputed here, before all others.
    fn preempt(&mut self, worker: WorkerId, id: RequestId) {
        let live = &mut self.requests[id];
        self.workers[worker.index()].leave(live);
        live.record.preemptions += 1;
        let kv = live.kv.take();
        live.enter(Phase::Waiting(worker));
        self.workers[worker.index()].enqueue(&self.requests, &self.requests[id], true);
        self.touch(worker);
        self.release(kv);
    }
}
