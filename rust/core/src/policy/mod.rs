//! Policies: who is let in, where it runs, and what a worker does next.
//!
//! A [`Policy`] implements any subset of the decisions; the others fall to the defaults: what
//! `fcfs` does on mixed workers and `disaggregated` on the others. It is given views, which borrow
//! the scheduler's state, and returns decisions, which are validated before anything is changed.

mod chunked;
mod defaults;
mod disaggregated;
mod fcfs;
mod goodput;
mod view;

use std::collections::BTreeMap;

pub use chunked::Chunked;
pub use defaults::{default_accept, default_batch, default_place, prefill_first};
pub use disaggregated::Disaggregated;
pub use fcfs::Fcfs;
pub use goodput::Goodput;
pub use view::{ClusterView, LoadMetric, RequestView, WorkerView};

use crate::cluster::{Role, WorkerId};
use crate::record::RequestRecord;
use crate::request::RequestId;
use crate::step::StepShape;
use crate::time::{Picos, Time};

/// What admission answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Admission {
    /// Let in.
    Accept,
    /// Ask again then.
    Hold(Time),
    /// Let in, behind all that are not demoted.
    Demote,
    /// Turn away, with the numbers behind it.
    Refuse {
        /// Shown to the user.
        reason: String,
        /// Named numbers, shown with it.
        numbers: BTreeMap<String, f64>,
    },
}

/// Where a request is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Computes the prompt. A mixed worker also decodes, unless `decode` names another.
    pub prefill: WorkerId,
    /// Decodes; chosen at hand-over if it is open.
    pub decode: Option<WorkerId>,
    /// Take room at `decode` now; without any there, the request waits unplaced.
    pub reserve: bool,
}

impl From<WorkerId> for Placement {
    fn from(prefill: WorkerId) -> Placement {
        Placement { prefill, decode: None, reserve: false }
    }
}

/// What a decode worker answers at hand-over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acceptance {
    /// As soon as its pool has room.
    Now,
    /// Ask again when something changed.
    Later,
    /// Another worker is to take it.
    Other(WorkerId),
}

/// What a worker does next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Prompt chunks: request and tokens (no more than it has left are taken), in order.
    pub prefill: Vec<(RequestId, u32)>,
    /// Who decodes; everybody when `None`.
    pub decode: Option<Vec<RequestId>>,
    /// Repeat a decode-only step at most so often; as often as room allows when `None`.
    pub repeat: Option<u32>,
    /// Give up the KV of these decoding requests; they are recomputed first.
    pub preempt: Vec<RequestId>,
    /// End these requests; they count as refused.
    pub drop: Vec<RequestId>,
    /// Ask again at that time even if nothing happens.
    pub wake_at: Option<Time>,
}

impl Batch {
    /// A request that it names more than once.
    pub(crate) fn named_twice(&self) -> Option<RequestId> {
        let chunks = self.prefill.iter().map(|(id, _)| *id);
        let others = self.decode.iter().flatten().chain(&self.drop).chain(&self.preempt);
        let mut named: Vec<RequestId> = chunks.chain(others.copied()).collect();
        named.sort_unstable();
        named.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
    }
}

/// What [`Policy::rebalance`] answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rebalance {
    /// New roles.
    pub roles: Vec<(WorkerId, Role)>,
    /// When to ask again; never when `None`.
    pub next: Option<Time>,
}

/// What [`Policy::observe`] is told.
#[derive(Clone, Copy, Debug)]
pub enum Outcome<'a> {
    /// A run is over: so many steps that began with this shape took so long.
    Ran {
        /// Where.
        worker: WorkerId,
        /// The first step.
        shape: &'a StepShape,
        /// Steps done.
        steps: u32,
        /// All of them together.
        duration: Picos,
    },
    /// A request is over.
    Ended(&'a RequestRecord),
}

/// A policy failed or answered what cannot be done. The scheduler has done nothing of it.
#[derive(Debug, thiserror::Error)]
pub enum PolicyFault {
    /// The policy raised this.
    #[error("policy method `{method}` failed: {source}")]
    Raised {
        /// Which method.
        method: &'static str,
        /// The very error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The answer cannot be carried out.
    #[error("policy method `{method}` answered what cannot be done: {message}")]
    Invalid {
        /// Which method.
        method: &'static str,
        /// What is wrong, with the names and numbers.
        message: String,
    },
}

/// A policy's result.
pub type Decision<T> = Result<T, PolicyFault>;

/// Decides. See DESIGN's table; every method has a default.
pub trait Policy: Send {
    /// For messages and results.
    fn name(&self) -> String;

    /// Before every run: forgets all.
    fn begin(&mut self, cluster: &ClusterView<'_>, seed: u64) -> Decision<()> {
        let _ = (cluster, seed);
        Ok(())
    }

    /// At step ends, finishes and refusals.
    fn observe(&mut self, outcome: Outcome<'_>) -> Decision<()> {
        let _ = outcome;
        Ok(())
    }

    /// Once per arrival, and again when a hold ends.
    fn admit(&mut self, request: &RequestView<'_>, cluster: &ClusterView<'_>) -> Decision<Admission> {
        let _ = (request, cluster);
        Ok(Admission::Accept)
    }

    /// When a request may start; again, when something changed, after answering `None`.
    fn place(&mut self, request: &RequestView<'_>, cluster: &ClusterView<'_>) -> Decision<Option<Placement>> {
        Ok(default_place(request, cluster))
    }

    /// At hand-over, for the worker that placement chose or the least loaded one.
    fn accept(&mut self, request: &RequestView<'_>, worker: &WorkerView<'_>) -> Decision<Acceptance> {
        Ok(default_accept(request, worker))
    }

    /// When the worker can take another run.
    fn batch(&mut self, worker: &WorkerView<'_>) -> Decision<Batch> {
        Ok(default_batch(worker))
    }

    /// At the start, and at the times it asks for.
    fn rebalance(&mut self, cluster: &ClusterView<'_>) -> Decision<Rebalance> {
        let _ = cluster;
        Ok(Rebalance::default())
    }
}

/// Names of the built-in policies.
pub const BUILT_IN: [&str; 4] = ["fcfs", "chunked", "disaggregated", "goodput"];

/// The built-in policy of that name, with its defaults.
pub fn built_in(name: &str) -> Option<Box<dyn Policy>> {
    Some(match name {
        "fcfs" => Box::new(Fcfs),
        "chunked" => Box::new(Chunked::default()),
        "disaggregated" => Box::new(Disaggregated),
        "goodput" => Box::new(Goodput::default()),
        _ => return None,
    })
}
