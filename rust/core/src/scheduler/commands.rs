//! Admission and placement: asking, validating, committing. Cancellation, roles, lost workers.

use std::borrow::Cow;

use super::live::{Ending, Kv, Phase};
use super::state::State;
use super::worker::Worker;
use super::{Scheduler, is_out_of_reach, later_than};
use crate::cluster::{Role, WorkerId};
use crate::event::Action;
use crate::kv::{BlockPool, Holder};
use crate::policy::{Admission, ClusterView, Decision, Placement, PolicyFault, RequestView};
use crate::record::{FinishReason, Status};
use crate::request::RequestId;
use crate::time::Time;

fn invalid<T>(method: &'static str, message: String) -> Decision<T> {
    Err(PolicyFault::Invalid { method, message })
}

impl Scheduler {
    pub(super) fn admit_all(&mut self, actions: &mut Vec<Action>) -> Decision<()> {
        while let Some(&id) = self.state.fresh.front() {
            if let Some(reason) = self.state.why_impossible(id) {
                self.state.fresh.pop_front();
                self.state.end(id, Status::Refused, Some(reason.into()), actions);
                continue;
            }
            let view = RequestView::new(&self.state, id);
            let mut answer = self.policy.admit(&view, &ClusterView::new(&self.state))?;
            let now = self.state.now;
            if let Admission::Hold(until) = &mut answer {
                if is_out_of_reach(now, *until) {
                    return invalid(
                        "admit",
                        format!(
                            "request {} held until {until:?}, which is before {now:?} or beyond the 213 days of a run",
                            id.0
                        ),
                    );
                }
                *until = later_than(now, *until);
            }
            self.state.fresh.pop_front();
            self.state.commit_admission(id, answer, actions);
        }
        Ok(())
    }

    pub(super) fn place_all(&mut self, actions: &mut Vec<Action>) -> Decision<()> {
        if !std::mem::take(&mut self.state.place_dirty) {
            return Ok(());
        }
        let mut index = 0;
        while let Some(&id) = self.state.unplaced.get(index) {
            let view = RequestView::new(&self.state, id);
            let asked = self.policy.place(&view, &ClusterView::new(&self.state));
            let answer = asked.and_then(|answer| self.state.validate_placement(id, answer));
            // A fault leaves the request where it is, to be asked about again.
            self.state.place_dirty = answer.is_err();
            let placed = answer?.is_some_and(|placement| self.state.commit_placement(id, placement, actions));
            if placed {
                self.state.unplaced.remove(index);
            } else {
                index += 1;
            }
        }
        Ok(())
    }
}

impl State {
    /// Why no pool could ever hold the request, or it is none at all; with both numbers.
    fn why_impossible(&self, id: RequestId) -> Option<String> {
        let request = &self.requests[id].request;
        if request.prompt_tokens == 0 {
            return Some("empty prompt: 0 tokens, at least 1 is needed".to_owned());
        }
        if request.max_tokens == 0 {
            return Some("max_tokens is 0, at least 1 is needed".to_owned());
        }
        let longest = request.longest();
        if let Some(limit) = self.limits.max_model_len.filter(|limit| longest > u64::from(*limit)) {
            return Some(format!(
                "prompt of {} + max_tokens {} = {longest} tokens, but max_model_len is {limit}",
                request.prompt_tokens, request.max_tokens
            ));
        }
        let blocks = |tokens: u64| tokens.div_ceil(u64::from(self.limits.block_tokens));
        let needs = [
            (u64::from(request.prompt_tokens), self.largest_pool, "prompt"),
            (longest, self.largest_decode_pool, "prompt + max_tokens"),
        ];
        needs.into_iter().find(|(tokens, room, _)| blocks(*tokens) > u64::from(*room)).map(
            |(tokens, room, what)| {
                format!(
                    "{what} of {tokens} tokens needs {} KV blocks, but the largest pool has {room}",
                    blocks(tokens)
                )
            },
        )
    }

    fn commit_admission(&mut self, id: RequestId, answer: Admission, actions: &mut Vec<Action>) {
        let now = self.now;
        let live = &mut self.requests[id];
        match answer {
            Admission::Hold(until) => {
                live.enter(Phase::Held(until));
                self.held.insert((until, id));
                return;
            }
            Admission::Refuse { reason, numbers } => {
                let numbers: Vec<_> = numbers
                    .iter()
                    .map(|(name, value)| format!("{name}={}", (value * 1e4).round() / 1e4))
                    .collect();
                let told =
                    if numbers.is_empty() { reason } else { format!("{reason} ({})", numbers.join(", ")) };
                return self.end(id, Status::Refused, Some(told.into()), actions);
            }
            Admission::Accept => {}
            Admission::Demote => live.demoted = true,
        }
        live.record.admitted = Some(now);
        live.enter(Phase::Unplaced);
        self.unplaced.push_back(id);
        self.place_dirty = true;
    }

    /// `None` if the request is to wait, because the policy says so or a named worker is down.
    fn validate_placement(&self, id: RequestId, answer: Option<Placement>) -> Decision<Option<Placement>> {
        let Some(placement) = answer else { return Ok(None) };
        let live = &self.requests[id];
        let find = |worker: WorkerId| match self.workers.get(worker.index()) {
            Some(found) => Ok(found),
            None => {
                let count = self.workers.len();
                invalid("place", format!("worker {} of {count} workers (0 to {})", worker.0, count - 1))
            }
        };
        let holds = |worker: &Worker, tokens: u64| {
            if worker.can_ever_hold(tokens) {
                return Ok(());
            }
            let (needed, room) = (worker.pool.blocks_for(tokens), worker.pool.num_blocks());
            invalid(
                "place",
                format!("request {} needs {needed} KV blocks, worker {} has {room}", id.0, worker.id.0),
            )
        };
        let prefill = find(placement.prefill)?;
        let decode = placement.decode.map(find).transpose()?;
        let stays = prefill.role.decodes() && decode.is_none_or(|decode| decode.id == prefill.id);
        holds(prefill, if stays { live.request.longest() } else { u64::from(live.target()) })?;
        if let Some(decode) = decode {
            if !decode.role.decodes() {
                return invalid(
                    "place",
                    format!("request {} is to decode at worker {}, a prefill worker", id.0, decode.id.0),
                );
            }
            holds(decode, live.request.longest())?;
        }
        if placement.reserve && decode.is_none() {
            return invalid("place", format!("request {} is to reserve room at no worker", id.0));
        }
        let up = prefill.up && decode.is_none_or(|decode| decode.up);
        Ok(up.then_some(placement))
    }

    /// Queues the request at its worker; false if there is no room for its reservation.
    fn commit_placement(&mut self, id: RequestId, placement: Placement, actions: &mut Vec<Action>) -> bool {
        let Placement { prefill, decode, reserve } = placement;
        if let Some(decode) = decode.filter(|decode| reserve && *decode != prefill) {
            let live = &self.requests[id];
            let target = live.target();
            if !self.workers[decode.index()].has_room(live, u64::from(target), target) {
                self.cut(decode, actions);
                return false;
            }
            let kv = self.take_room(decode, id, u64::from(target), target);
            self.requests[id].incoming = Some(kv);
        }
        let live = &mut self.requests[id];
        live.decode_at = decode;
        live.enter(Phase::Waiting(prefill));
        let first = live.generated > 0;
        self.workers[prefill.index()].enqueue(&self.requests, &self.requests[id], first);
        self.touch(prefill);
        self.cut(prefill, actions);
        true
    }

    /// Takes blocks for `tokens` tokens of a request, those of `shared_tokens` from the prefix
    /// cache where it has them. The caller has asked [`Worker::has_room`].
    pub(super) fn take_room(
        &mut self,
        worker: WorkerId,
        id: RequestId,
        tokens: u64,
        shared_tokens: u32,
    ) -> Kv {
        let pool: &mut BlockPool = &mut self.workers[worker.index()].pool;
        let block_tokens = pool.block_tokens();
        let prefix = &self.requests[id].request.prefix;
        let mut table = pool.lookup(prefix, shared_tokens / block_tokens);
        pool.pin(&table, Holder::Request);
        let computed = table.len() * block_tokens;
        pool.extend(&mut table, pool.blocks_for(tokens) as u32, prefix.len() as u32, Holder::Request);
        Kv { worker, table, computed }
    }

    /// Stops a repeated run at its next border, so that something new can join.
    pub(super) fn cut(&mut self, worker: WorkerId, actions: &mut Vec<Action>) {
        let outstanding = self.workers[worker.index()].outstanding.first_mut();
        if let Some(outstanding) =
            outstanding.filter(|outstanding| outstanding.run.repeat > 1 && !outstanding.cut)
        {
            outstanding.cut = true;
            actions.push(Action::Cut { worker, seq: outstanding.seq });
        }
    }

    /// Lets go of one KV of a request.
    pub(super) fn release(&mut self, kv: Option<Kv>) {
        if let Some(kv) = kv {
            self.workers[kv.worker.index()].pool.release(&kv.table, Holder::Request);
            self.room_changed(kv.worker);
        }
    }

    /// Closes a request's record and lets go of all it holds. It must be in no list any more.
    pub(super) fn end(
        &mut self,
        id: RequestId,
        status: Status,
        reason: Option<Cow<'static, str>>,
        actions: &mut Vec<Action>,
    ) {
        let mut live = self.requests.remove(id).expect("a request ends once");
        self.log.requests.push(live.over(Ending { status, reason, at: self.now }));
        if let Some(transfer) = live.early.take() {
            self.orphan(transfer, actions);
        }
        self.release(live.kv.take());
        self.release(live.incoming.take());
        actions.push(if status == Status::Refused { Action::Refuse(id) } else { Action::Finish(id) });
    }

    /// Takes a request out of whatever list its phase keeps it in.
    fn unlist(&mut self, id: RequestId, actions: &mut Vec<Action>) {
        let live = &self.requests[id];
        match live.phase() {
            Phase::Fresh => self.fresh.retain(|other| *other != id),
            Phase::Held(until) => {
                self.held.remove(&(until, id));
                self.fresh.retain(|other| *other != id);
            }
            Phase::Unplaced => self.unplaced.retain(|other| *other != id),
            Phase::Waiting(at) => {
                self.workers[at.index()].dequeue(live);
                self.in_last_chunk.retain(|other| *other != id);
                if let Some(transfer) = self.requests[id].early.take() {
                    self.orphan(transfer, actions);
                }
                self.touch(at);
            }
            Phase::AwaitingRoom => self.awaiting_room.retain(|other| *other != id),
            Phase::Decoding(at) => {
                self.workers[at.index()].leave(live);
                self.touch(at);
            }
            Phase::Transferring(transfer) => self.orphan(transfer, actions),
            Phase::Draining => {}
        }
    }

    /// The client went away, or the driver cannot go on with the request. Blocks that a run still
    /// works on are kept until it is over.
    pub(super) fn stop(
        &mut self,
        id: RequestId,
        status: Status,
        reason: Option<Cow<'static, str>>,
        actions: &mut Vec<Action>,
    ) {
        if self.requests.get(id).is_some_and(|live| live.phase() != Phase::Draining) {
            self.give_up(id, status, reason, actions);
        }
    }

    /// Ends a live request before its time, whatever its phase.
    pub(super) fn give_up(
        &mut self,
        id: RequestId,
        status: Status,
        reason: Option<Cow<'static, str>>,
        actions: &mut Vec<Action>,
    ) {
        self.unlist(id, actions);
        if !self.requests[id].in_run {
            return self.end(id, status, reason, actions);
        }
        let at = self.now;
        let live = &mut self.requests[id];
        live.enter(Phase::Draining);
        live.ending = Some(Ending { status, reason, at });
        let worker = live.kv.as_ref().map(|kv| kv.worker).expect("a request in a run has KV");
        let incoming = live.incoming.take();
        self.release(incoming);
        self.cut(worker, actions);
    }

    /// A draining request's run is over.
    pub(super) fn drained(&mut self, id: RequestId, actions: &mut Vec<Action>) {
        let mut live = self.requests.remove(id).expect("a draining request is live");
        let ending = live.ending.take().expect("a draining request has ended");
        self.log.requests.push(live.over(ending));
        self.release(live.kv);
        actions.push(Action::Finish(id));
    }

    pub(super) fn validate_roles(&self, roles: &[(WorkerId, Role)]) -> Decision<()> {
        let mut after: Vec<Role> = self.workers.iter().map(|worker| worker.role).collect();
        for (worker, role) in roles {
            match after.get_mut(worker.index()) {
                Some(slot) => *slot = *role,
                None => {
                    return invalid("rebalance", format!("worker {} of {} workers", worker.0, after.len()));
                }
            }
        }
        if after.iter().any(|role| role.takes_prompts()) && after.iter().any(|role| role.decodes()) {
            return Ok(());
        }
        invalid("rebalance", format!("roles {after:?} leave prompts or decode without a worker"))
    }

    /// A worker has another role: it finishes what decodes there; prompts that have not started
    /// find another place if it takes prompts no more.
    pub(super) fn set_role(&mut self, worker: WorkerId, role: Role, actions: &mut Vec<Action>) {
        if self.workers[worker.index()].role == role {
            return;
        }
        self.workers[worker.index()].role = role;
        self.measure_pools();
        self.room_changed(worker);
        self.cut(worker, actions);
        actions.push(Action::SetRole { worker, role });
        if role.takes_prompts() {
            return;
        }
        let waiting: Vec<_> = self.workers[worker.index()].waiting.iter().copied().collect();
        for id in waiting.into_iter().filter(|id| self.requests[*id].kv.is_none()).collect::<Vec<_>>() {
            self.unplace(id, actions);
        }
    }

    /// Back to the list of those without a worker; one that already emitted goes first. Its KV is
    /// given up.
    pub(super) fn unplace(&mut self, id: RequestId, actions: &mut Vec<Action>) {
        self.unlist(id, actions);
        let live = &mut self.requests[id];
        live.record.preemptions += u32::from(live.computed() > 0);
        let (kv, incoming) = (live.kv.take(), live.incoming.take());
        live.decode_at = None;
        live.enter(Phase::Unplaced);
        if live.generated > 0 {
            self.unplaced.push_front(id);
        } else {
            self.unplaced.push_back(id);
        }
        self.place_dirty = true;
        self.release(kv);
        self.release(incoming);
    }

    pub(super) fn worker_up(&mut self, worker: WorkerId) {
        let entry = self.worker(worker);
        (entry.up, entry.ready) = (true, true);
        self.room_changed(worker);
    }

    /// A worker is lost: its requests resume elsewhere from the tokens delivered.
    pub(super) fn worker_down(&mut self, worker: WorkerId, steps_delivered: u32, actions: &mut Vec<Action>) {
        let now = self.now;
        let entry = self.worker(worker);
        (entry.up, entry.ready) = (false, false);
        let lost = std::mem::take(&mut entry.outstanding);
        self.rank(worker);
        let mut delivered = Vec::new();
        for row in lost.iter().flat_map(|outstanding| outstanding.run.step.rows.iter()) {
            self.requests[row.request].in_run = false;
            if let Some(ending) = &self.requests[row.request].ending {
                // The run was cut when the request ended: what was delivered, was so before.
                let until = ending.at;
                if row.decode {
                    self.emit_unseen(row.request, steps_delivered, until);
                }
                self.drained(row.request, actions);
            } else if row.decode && steps_delivered > 0 {
                delivered.push(row.request);
            }
        }
        self.lose_kv_of(worker, actions);
        for id in delivered {
            self.credit_delivered(id, steps_delivered, now, actions);
        }
        self.workers[worker.index()].pool.forget_all();
    }

    fn lose_kv_of(&mut self, worker: WorkerId, actions: &mut Vec<Action>) {
        let here = |kv: &Option<Kv>| kv.as_ref().is_some_and(|kv| kv.worker == worker);
        let ids: Vec<_> = self.requests.iter().map(super::live::Live::id).collect();
        for id in ids {
            let live = &self.requests[id];
            let queued = live.phase() == Phase::Waiting(worker);
            if here(&live.kv) || queued {
                self.unplace(id, actions);
            } else if here(&live.incoming) {
                if matches!(live.phase(), Phase::Transferring(_)) {
                    self.unlist(id, actions);
                    self.requests[id].enter(Phase::AwaitingRoom);
                    self.awaiting_room.push_back(id);
                }
                if let Some(transfer) = self.requests[id].early.take() {
                    self.orphan(transfer, actions);
                    self.in_last_chunk.push(id);
                }
                let live = &mut self.requests[id];
                live.decode_at = None;
                let incoming = live.incoming.take();
                self.release(incoming);
            }
        }
    }

    fn credit_delivered(&mut self, id: RequestId, tokens: u32, now: Time, actions: &mut Vec<Action>) {
        let live = &mut self.requests[id];
        let tokens = tokens.min(live.remaining());
        self.emit_unseen(id, tokens, now);
        if self.requests[id].remaining() == 0 {
            self.unlist(id, actions);
            self.end(id, Status::Finished, Some(FinishReason::Length.name().into()), actions);
        }
    }
}
