//! `disaggregated`: first come, first served in each pool.

use super::{ClusterView, Decision, Placement, Policy, RequestView};
use crate::cluster::Role;

/// Prompts on the prefill worker with the fewest queued tokens, decode on the decode worker with
/// the fewest KV tokens, first come, first served in each; DistServe's online scheduler. Mixed
/// workers serve only where a pool is empty.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disaggregated;

impl Policy for Disaggregated {
    fn name(&self) -> String {
        "disaggregated".to_owned()
    }

    fn place(&mut self, request: &RequestView<'_>, cluster: &ClusterView<'_>) -> Decision<Option<Placement>> {
        let prompt = u64::from(request.prompt_tokens());
        let prefill = cluster.least_queued(|worker| {
            worker.is_up() && worker.role() == Role::Prefill && worker.can_ever_hold(prompt)
        });
        Ok(match prefill {
            Some(worker) => Some(worker.id().into()),
            None => super::default_place(request, cluster),
        })
    }
}
