//! The relay: KV from the worker that prefilled to the one that decodes.
//!
//! A block belongs to its request *and* to the transfer until both let go, so a cancelled request
//! or a slow writer never shares a block with someone else.

use super::live::Phase;
use super::state::State;
use super::worker::Outstanding;
use super::{RequestId, Scheduler};
use crate::cluster::WorkerId;
use crate::event::{Action, TransferId};
use crate::kv::{Holder, Table};
use crate::policy::{Acceptance, ClusterView, Decision, PolicyFault, RequestView, WorkerView};
use crate::record::Status;
use crate::step::Seq;

/// A transfer under way.
#[derive(Clone, Debug)]
pub(crate) struct Transfer {
    /// Whose KV; `None` once nobody wants it any more.
    pub(crate) request: Option<RequestId>,
    pub(crate) from: WorkerId,
    pub(crate) to: WorkerId,
    pub(crate) sources: Table,
    pub(crate) destinations: Table,
    /// Tokens counted as incoming at the destination.
    tokens: u32,
}

impl Scheduler {
    pub(super) fn accept_all(&mut self, actions: &mut Vec<Action>) -> Decision<()> {
        if !std::mem::take(&mut self.state.accept_dirty) {
            return Ok(());
        }
        // A worker without room for one takes nobody behind it: large requests are not starved.
        let mut full: Vec<WorkerId> = Vec::new();
        let mut index = 0;
        while let Some(&id) = self.state.awaiting_room.get(index) {
            if self.accept(id, &mut full, actions)? {
                self.state.awaiting_room.remove(index);
            } else {
                index += 1;
            }
        }
        let mut index = 0;
        while let Some(&id) = self.state.in_last_chunk.get(index) {
            if self.accept(id, &mut full, actions)? {
                self.state.in_last_chunk.remove(index);
            } else {
                index += 1;
            }
        }
        Ok(())
    }

    /// Starts the transfer of a request if a worker takes it that is not among the `full` ones.
    fn accept(
        &mut self,
        id: RequestId,
        full: &mut Vec<WorkerId>,
        actions: &mut Vec<Action>,
    ) -> Decision<bool> {
        let chosen = self.ask_accept(id).inspect_err(|_| self.state.accept_dirty = true)?;
        let Some(to) = chosen.filter(|to| !full.contains(to)) else { return Ok(false) };
        let live = &mut self.state.requests[id];
        if live.in_run && live.kv.as_ref().is_some_and(|kv| kv.worker == to) {
            // It decodes where its prompt is being computed.
            live.decode_at = Some(to);
            let reserved = live.incoming.take();
            self.state.release(reserved);
            return Ok(true);
        }
        if self.state.has_handoff_room(id, to) {
            self.state.start_transfer(id, to, actions);
            return Ok(true);
        }
        // The blocks that its run has reserved may be enough.
        self.state.cut(to, actions);
        full.push(to);
        Ok(false)
    }

    /// Workers whose pools are full of KV that waits for room at each other, or reserved for prompts
    /// that wait for that room, would wait for ever. So when nothing moves, the latest gives up its
    /// reservation, then its KV (it is recomputed), until someone can go on.
    pub(super) fn break_deadlock(&mut self, actions: &mut Vec<Action>) -> Decision<()> {
        let mut broken = false;
        while !self.state.anything_moves() && self.state.give_way(actions) {
            broken = true;
            self.accept_all(actions)?;
            self.batch_all(actions)?;
        }
        if broken {
            self.place_all(actions)?;
            self.batch_all(actions)?;
        }
        Ok(())
    }

    /// The worker that takes the request now, if any.
    fn ask_accept(&mut self, id: RequestId) -> Decision<Option<WorkerId>> {
        let Some(candidate) = self.state.decode_candidate(id) else { return Ok(None) };
        let request = RequestView::new(&self.state, id);
        let worker = WorkerView::new(&self.state, candidate);
        let to = match self.policy.accept(&request, &worker)? {
            Acceptance::Now => candidate,
            Acceptance::Later => return Ok(None),
            Acceptance::Other(other) => other,
        };
        let problem = match self.state.workers.get(to.index()) {
            None => Some(format!("worker {} of {} workers", to.0, self.state.workers.len())),
            Some(worker) if !worker.role.decodes() => Some(format!("worker {} is a prefill worker", to.0)),
            Some(worker) if !worker.can_ever_hold(request.longest()) => {
                let (needed, room) = (worker.pool.blocks_for(request.longest()), worker.pool.num_blocks());
                Some(format!("request {} needs {needed} KV blocks, worker {} has {room}", id.0, to.0))
            }
            Some(worker) => return Ok(worker.up.then_some(to)),
        };
        let message = problem.expect("every other case has returned");
        Err(PolicyFault::Invalid { method: "accept", message })
    }
}

impl State {
    /// Frees what the latest request holds while it waits; false if nobody else's is in the way.
    fn give_way(&mut self, actions: &mut Vec<Action>) -> bool {
        let waits = |phase| matches!(phase, Phase::Waiting(_) | Phase::AwaitingRoom);
        let reserved = self.requests.iter().filter(|live| live.incoming.is_some() && waits(live.phase()));
        if let Some(id) = reserved.map(super::live::Live::id).last() {
            let reservation = self.requests[id].incoming.take();
            self.release(reservation);
            return true;
        }
        // One that no worker could take now waits for a worker, not for room.
        let waits_for_room = |id: &&RequestId| self.decode_candidate(**id).is_some();
        let waiting: Vec<RequestId> = self.awaiting_room.iter().filter(waits_for_room).copied().collect();
        let latest = waiting.iter().max().copied().filter(|_| waiting.len() > 1);
        if let Some(id) = latest {
            self.unplace(id, actions);
        }
        latest.is_some()
    }

    /// Where placement wants the request to decode, otherwise the decode worker with the fewest KV
    /// tokens that could hold it; `None` while no such worker is up.
    fn decode_candidate(&self, id: RequestId) -> Option<WorkerId> {
        let live = &self.requests[id];
        let longest = live.request.longest();
        let eligible = |worker: &WorkerView<'_>| {
            worker.is_up() && worker.role().decodes() && worker.can_ever_hold(longest)
        };
        let cluster = ClusterView::new(self);
        let named = live.decode_at.and_then(|at| cluster.worker(at)).filter(eligible);
        let chosen = named.or_else(|| cluster.least_context(eligible));
        chosen.map(|worker| worker.id())
    }

    fn has_handoff_room(&self, id: RequestId, to: WorkerId) -> bool {
        let live = &self.requests[id];
        let reserved = live.incoming.as_ref().is_some_and(|kv| kv.worker == to);
        let tokens = live.handed_over();
        reserved || self.workers[to.index()].has_room(live, u64::from(tokens), tokens)
    }

    fn start_transfer(&mut self, id: RequestId, to: WorkerId, actions: &mut Vec<Action>) {
        let reserved = self.requests[id].incoming.take();
        let tokens = self.requests[id].handed_over();
        let incoming = match reserved {
            Some(kv) if kv.worker == to => kv,
            elsewhere => {
                self.release(elsewhere);
                self.take_room(to, id, u64::from(tokens), tokens)
            }
        };
        let transfer = TransferId(self.next_transfer);
        self.next_transfer += 1;
        self.idle_dirty = true;
        let live = &mut self.requests[id];
        let kv = live.kv.as_ref().expect("a request that is handed over has KV");
        let from = kv.worker;
        let cached = incoming.computed / self.limits.block_tokens;
        let (sources, destinations) = (kv.table.skip(cached), incoming.table.skip(cached));
        let num_blocks = sources.len();
        let named = sources.named().iter().copied().zip(destinations.named().iter().copied());
        let blocks = named.collect();
        live.incoming = Some(incoming);
        live.decode_at = Some(to);
        live.record.decode_worker = Some(to);
        live.record.transfer_start.get_or_insert(self.now);
        let is_early = live.in_run;
        if is_early {
            live.early = Some(transfer);
        } else {
            live.enter(Phase::Transferring(transfer));
        }
        self.workers[from.index()].pool.pin(&sources, Holder::Transfer);
        let target = self.worker(to);
        target.pool.pin(&destinations, Holder::Transfer);
        target.incoming_tokens += u64::from(tokens);
        target.num_incoming += 1;
        self.rank(to);
        let entry = Transfer { request: Some(id), from, to, sources, destinations, tokens };
        self.transfers.insert(transfer, entry);
        let during = is_early.then(|| self.run_of(from, id));
        actions.push(Action::Transfer { id: transfer, request: id, from, to, num_blocks, blocks, during });
    }

    /// The run of `worker` that works on a request.
    fn run_of(&self, worker: WorkerId, id: RequestId) -> Seq {
        let runs = &self.workers[worker.index()].outstanding;
        let holds = |run: &&Outstanding| run.run.step.rows.iter().any(|row| row.request == id);
        runs.iter().find(holds).expect("a request in a run has one").seq
    }

    /// Its request does not want it any more.
    pub(super) fn orphan(&mut self, id: TransferId, actions: &mut Vec<Action>) {
        let transfer = self.transfers.get_mut(&id).expect("a transferring request has a transfer");
        transfer.request = None;
        actions.push(Action::Abort { id });
    }

    /// Ends the transfer's own hold on both ends; `quiesced` is whether its writer has stopped.
    fn settle(&mut self, id: TransferId, quiesced: bool) -> Option<Transfer> {
        let transfer = self.transfers.remove(&id)?;
        self.worker(transfer.from).pool.release(&transfer.sources, Holder::Transfer);
        let target = self.worker(transfer.to);
        target.incoming_tokens -= u64::from(transfer.tokens);
        target.num_incoming -= 1;
        if !quiesced {
            target.pool.pin(&transfer.destinations, Holder::Quarantine);
        }
        target.pool.release(&transfer.destinations, Holder::Transfer);
        if !quiesced {
            self.quarantine.insert(id, (transfer.to, transfer.destinations.clone()));
        }
        // Ranks both.
        self.room_changed(transfer.from);
        self.room_changed(transfer.to);
        Some(transfer)
    }

    /// A transfer is complete: the request decodes at its destination.
    pub(super) fn transferred(&mut self, id: TransferId, actions: &mut Vec<Action>) {
        let Some(transfer) = self.settle(id, true) else { return };
        let Some(request) = transfer.request else { return };
        let live = &mut self.requests[request];
        assert!(live.early.is_none(), "the KV of request {} is there before it is computed", request.0);
        live.record.transfer_end.get_or_insert(self.now);
        let source = live.kv.take();
        let computed = source.as_ref().map_or(0, |kv| kv.computed);
        let mut kv = live.incoming.take().expect("a transferring request has a destination");
        kv.computed = computed;
        let full = (computed / self.limits.block_tokens) as usize;
        let target = &mut self.workers[transfer.to.index()];
        let full = full.min(live.request.prefix.len());
        target.pool.index(&kv.table.named()[..full], &live.request.prefix);
        live.kv = Some(kv);
        live.enter(Phase::Decoding(transfer.to));
        target.join(live);
        self.touch(transfer.to);
        self.release(source);
        self.cut(transfer.to, actions);
    }

    /// A transfer failed, was aborted, or what was left of a failed one has stopped.
    pub(super) fn transfer_failed(&mut self, id: TransferId, quiesced: bool, actions: &mut Vec<Action>) {
        if quiesced && let Some((worker, blocks)) = self.quarantine.remove(&id) {
            self.worker(worker).pool.release(&blocks, Holder::Quarantine);
            return self.room_changed(worker);
        }
        let Some(transfer) = self.settle(id, quiesced) else { return };
        if !quiesced {
            actions.push(Action::Abort { id });
        }
        if let Some(request) = transfer.request {
            let reason =
                format!("KV transfer from worker {} to worker {} failed", transfer.from.0, transfer.to.0);
            if self.requests[request].early.take().is_some() {
                return self.give_up(request, Status::Failed, Some(reason.into()), actions);
            }
            self.end(request, Status::Failed, Some(reason.into()), actions);
        }
    }
}
