//! What the requests that are over tell about those to come.

use std::collections::{BTreeMap, VecDeque};

use super::pace::Pace;
use crate::policy::RequestView;
use crate::record::{RequestRecord, Status};
use crate::request::ClassId;
use crate::time::{Picos, Time};

/// What the requests that are over tell about those to come.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
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

    pub(super) fn ended(&mut self, record: &RequestRecord) {
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
    pub(super) fn output_tokens(&self, request: &RequestView<'_>) -> Option<f64> {
        let (count, tokens) = self.outputs.get(&ClassId(request.class()))?;
        Some(*tokens as f64 / *count as f64)
    }

    /// What a decoding request will gain on its TPOT in the tokens that it may yet be expected to
    /// produce, in steps of `step`, by half: what is spent now, it must live long enough to earn.
    pub(super) fn gains(&self, member: &RequestView<'_>, pace: &Pace, step: Picos) -> i128 {
        let expected = self.output_tokens(member).map_or(Self::FIRST_GUESS, |mean| mean as i128);
        let remaining = (expected - i128::from(member.generated())).clamp(0, pace.remaining);
        remaining / 2 * (pace.tpot - i128::from(step.0)).max(0)
    }

    /// How long the last of `waiting` requests waits for a place in a decode batch, in seconds, if
    /// places come free as often as they did; `None` before anything is known.
    pub(super) fn wait(&self, waiting: usize, now: Time) -> Option<f64> {
        let first = self.ends.front().filter(|_| self.ends.len() == Self::ENDS)?;
        Some(now.saturating_since(*first).as_secs_f64() * waiting as f64 / Self::ENDS as f64)
    }
}
