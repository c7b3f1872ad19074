//! What happens where a policy says nothing, and the parts that built-ins share.

use super::{Acceptance, Batch, ClusterView, Placement, RequestView, WorkerView};
use crate::cluster::Role;

/// The least loaded worker that takes prompts and could hold the request: by queued prompt tokens,
/// then by decoding requests.
pub fn default_place(request: &RequestView<'_>, cluster: &ClusterView<'_>) -> Option<Placement> {
    let holds = |worker: &WorkerView<'_>| {
        let tokens =
            if worker.role() == Role::Mixed { request.longest() } else { u64::from(request.prompt_tokens()) };
        worker.is_up() && worker.role().takes_prompts() && worker.can_ever_hold(tokens)
    };
    cluster.least_queued(holds).map(|worker| worker.id().into())
}

/// Now: room is a matter of the pool, not of taste.
pub fn default_accept(request: &RequestView<'_>, worker: &WorkerView<'_>) -> Acceptance {
    let _ = (request, worker);
    Acceptance::Now
}

/// Prompts first, whole; when none can start, everybody decodes.
pub fn default_batch(worker: &WorkerView<'_>) -> Batch {
    let prefill = prefill_first(worker, worker.waiting());
    let decode = if prefill.is_empty() { None } else { Some(Vec::new()) };
    Batch { prefill, decode, ..Batch::default() }
}

/// Takes whole prompts in the given order while the step's token and request limits and the pool
/// allow; one longer prompt goes alone. Nobody overtakes one that has no room, but for those that
/// have their blocks already.
pub fn prefill_first<'a>(
    worker: &WorkerView<'a>,
    order: impl Iterator<Item = RequestView<'a>>,
) -> Vec<(crate::request::RequestId, u32)> {
    let limits = worker.limits();
    let mut room = PrefillRoom::new(worker);
    let mut tokens = 0u32;
    let mut chosen = Vec::new();
    for request in order {
        if chosen.len() == limits.max_batch as usize {
            break;
        }
        let pending = request.pending();
        if tokens.saturating_add(pending) > limits.max_prefill_tokens && !chosen.is_empty() {
            break;
        }
        if !room.take(&request) {
            continue;
        }
        tokens = tokens.saturating_add(pending);
        chosen.push((request.id(), pending));
    }
    chosen
}

/// Keeps count of the blocks that prompts of one batch will take together.
///
/// A prompt's cached prefix is counted as if it were not shared, so the count errs on the safe
/// side when several prompts start at once. Once one finds no room, none may start behind it; those
/// that have started go on, or what they hold would never come free.
pub(super) struct PrefillRoom<'w, 'a> {
    worker: &'w WorkerView<'a>,
    taken: u64,
    blocked: bool,
}

impl<'w, 'a> PrefillRoom<'w, 'a> {
    pub(super) fn new(worker: &'w WorkerView<'a>) -> PrefillRoom<'w, 'a> {
        PrefillRoom { worker, taken: 0, blocked: false }
    }

    /// Takes room for a prompt if there is some left.
    pub(super) fn take(&mut self, request: &RequestView<'_>) -> bool {
        if request.is_started() || self.blocked {
            return request.is_started();
        }
        let target = u64::from(request.pending());
        let blocks = target.div_ceil(u64::from(self.worker.limits().block_tokens));
        let available = u64::from(self.worker.available_blocks());
        let fits = self.worker.can_start(request) && (self.taken == 0 || self.taken + blocks <= available);
        if fits {
            self.taken += blocks;
        }
        self.blocked = !fits;
        fits
    }
}
