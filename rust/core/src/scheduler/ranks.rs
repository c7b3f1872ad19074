//! Which worker has least to do, among very many.
//!
//! A few workers are scanned. Of more, an order is kept: those that take prompts by what is queued
//! there, those that decode by the context that is credited there. What a run has done since is not
//! in that order, but it only adds to the context, so a search from the least on ends as soon as no
//! other can have less.

use std::collections::BTreeSet;

use super::worker::Worker;
use crate::cluster::WorkerId;
use crate::kv::IntegrityError;

/// Up to so many workers looking at all of them is cheaper than keeping an order.
const SCAN_UP_TO: usize = 48;

/// A worker's keys: queued prompt tokens and decoding requests, and credited context.
type Keys = (Option<(u64, usize)>, Option<u64>);

/// The orders, and the keys that they hold of each worker.
#[derive(Debug, Default)]
pub(crate) struct Ranks {
    prompts: BTreeSet<(u64, usize, WorkerId)>,
    decodes: BTreeSet<(u64, WorkerId)>,
    keys: Vec<Keys>,
}

fn keys(worker: &Worker) -> Keys {
    let prompts = worker.up && worker.role.takes_prompts();
    let decodes = worker.up && worker.role.decodes();
    (
        prompts.then_some((worker.queued_tokens, worker.running.len())),
        decodes.then_some(worker.context_tokens + worker.incoming_tokens),
    )
}

impl Ranks {
    /// `None` where there are few enough workers to look at all.
    pub(crate) fn of(workers: &[Worker]) -> Option<Ranks> {
        if workers.len() <= SCAN_UP_TO {
            return None;
        }
        let mut ranks = Ranks { keys: vec![(None, None); workers.len()], ..Ranks::default() };
        for worker in workers {
            ranks.update(worker);
        }
        Some(ranks)
    }

    /// A worker's numbers may have changed.
    pub(crate) fn update(&mut self, worker: &Worker) {
        let id = worker.id;
        let now = keys(worker);
        let before = std::mem::replace(&mut self.keys[id.index()], now);
        if before.0 != now.0 {
            if let Some((queued, running)) = before.0 {
                self.prompts.remove(&(queued, running, id));
            }
            self.prompts.extend(now.0.map(|(queued, running)| (queued, running, id)));
        }
        if before.1 != now.1 {
            if let Some(context) = before.1 {
                self.decodes.remove(&(context, id));
            }
            self.decodes.extend(now.1.map(|context| (context, id)));
        }
    }

    /// Workers that take prompts, the one with the least queued (then the fewest that decode) first.
    pub(crate) fn by_prompts(&self) -> impl Iterator<Item = WorkerId> {
        self.prompts.iter().map(|(_, _, id)| *id)
    }

    /// Workers that decode and the context that is credited there, the least first.
    pub(crate) fn by_context(&self) -> impl Iterator<Item = (u64, WorkerId)> {
        self.decodes.iter().copied()
    }

    /// Whether every worker is where it belongs.
    pub(crate) fn check(&self, workers: &[Worker]) -> Result<(), IntegrityError> {
        for worker in workers {
            let agrees = u64::from(self.keys[worker.id.index()] == keys(worker));
            IntegrityError::check(format!("worker {} in its rank", worker.id.0), agrees, 1)?;
        }
        let ranked = self.keys.iter().map(|(a, b)| u64::from(a.is_some()) + u64::from(b.is_some())).sum();
        IntegrityError::check("ranks", (self.prompts.len() + self.decodes.len()) as u64, ranked)
    }
}
