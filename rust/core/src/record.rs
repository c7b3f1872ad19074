//! What happened, written down once. Every metric is computed from these records.
//!
//! A milestone that was not reached is `None`: never zero, never subtracted.

use std::borrow::Cow;

use crate::cluster::WorkerId;
use crate::request::{ClassId, Request, RequestId};
use crate::slo::Slo;
use crate::step::{Seq, StepShape};
use crate::time::{Nanos, Picos, Time};

/// How a request stands or ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Not over.
    Live,
    /// All its tokens were produced.
    Finished,
    /// Turned away or dropped by the policy, with a reason.
    Refused,
    /// Something broke.
    Failed,
    /// Its client went away.
    Cancelled,
    /// The run ended first.
    CutOff,
}

impl Status {
    /// The name used in tables and in Python.
    pub fn name(self) -> &'static str {
        match self {
            Status::Live => "live",
            Status::Finished => "finished",
            Status::Refused => "refused",
            Status::Failed => "failed",
            Status::Cancelled => "cancelled",
            Status::CutOff => "cut_off",
        }
    }
}

/// Why a finished request produced no more tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// End of sequence or a stop string.
    Stop,
    /// `max_tokens`, or the length that the workload asked for.
    Length,
}

impl FinishReason {
    /// The name used in tables and in Python.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// One request's milestones.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestRecord {
    /// Whose.
    pub id: RequestId,
    /// Its SLO class.
    pub class: ClassId,
    /// Its objectives.
    pub slo: Slo,
    /// How it stands.
    pub status: Status,
    /// Why it ended so.
    pub reason: Option<Cow<'static, str>>,
    /// Scheduled arrival.
    pub arrival: Time,
    /// Prompt length.
    pub prompt_tokens: u32,
    /// The most it might have produced.
    pub max_tokens: u32,
    /// Tokens produced.
    pub output_tokens: u32,
    /// Prompt tokens found in the prefix cache when its prefill started; at most prompt − 1.
    pub cached_tokens: u32,
    /// Where its prompt ran.
    pub prefill_worker: Option<WorkerId>,
    /// Where it decoded.
    pub decode_worker: Option<WorkerId>,
    /// Admission let it in.
    pub admitted: Option<Time>,
    /// Its first prompt chunk started.
    pub prefill_start: Option<Time>,
    /// Its first token was emitted.
    pub first_token: Option<Time>,
    /// Its first KV transfer started.
    pub transfer_start: Option<Time>,
    /// It ended, or the one that took its place when its destination was lost.
    pub transfer_end: Option<Time>,
    /// The first step that decoded it started.
    pub decode_start: Option<Time>,
    /// Its latest token was emitted.
    pub last_token: Option<Time>,
    /// It was over.
    pub end: Option<Time>,
    /// The longest gap between two consecutive tokens.
    pub max_gap: Option<Picos>,
    /// How often its KV was given up and recomputed.
    pub preemptions: u32,
    /// A token missed its deadline (only looked at under `token_deadlines`).
    pub late_token: bool,
}

/// How a request counts in attainment and goodput.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Finished and within every objective.
    Good,
    /// Offered, and not good.
    Miss,
    /// On neither side: no objective, or its end says nothing.
    Out,
}

/// From one milestone to a later one; missing where a lost worker made the later one come first.
fn in_order(earlier: Time, later: Time) -> Option<Nanos> {
    (earlier <= later).then(|| later - earlier)
}

impl RequestRecord {
    /// The record of a request that has just arrived.
    pub fn new(request: &Request) -> RequestRecord {
        RequestRecord {
            id: request.id,
            class: request.class,
            slo: request.slo,
            status: Status::Live,
            reason: None,
            arrival: request.arrival,
            prompt_tokens: request.prompt_tokens,
            max_tokens: request.max_tokens,
            output_tokens: 0,
            cached_tokens: 0,
            prefill_worker: None,
            decode_worker: None,
            admitted: None,
            prefill_start: None,
            first_token: None,
            transfer_start: None,
            transfer_end: None,
            decode_start: None,
            last_token: None,
            end: None,
            max_gap: None,
            preemptions: 0,
            late_token: false,
        }
    }

    /// First token − arrival.
    pub fn ttft(&self) -> Option<Nanos> {
        Some(self.first_token?.saturating_since(self.arrival))
    }

    /// (last token − first token) / (n − 1) in seconds; undefined for fewer than two tokens.
    pub fn tpot(&self) -> Option<f64> {
        let gaps = self.output_tokens.checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some((self.last_token? - self.first_token?).as_secs_f64() / f64::from(gaps))
    }

    /// Last token − arrival, of a finished request.
    pub fn e2e(&self) -> Option<Nanos> {
        (self.status == Status::Finished).then_some(())?;
        Some(self.last_token?.saturating_since(self.arrival))
    }

    /// Arrival to admission.
    pub fn held(&self) -> Option<Nanos> {
        Some(self.admitted?.saturating_since(self.arrival))
    }

    /// Admission to the start of prefill. With [`held`](Self::held) and
    /// [`prefill`](Self::prefill) it makes up the TTFT exactly.
    pub fn queue(&self) -> Option<Nanos> {
        Some(self.prefill_start? - self.admitted?)
    }

    /// Start of prefill to the first token.
    pub fn prefill(&self) -> Option<Nanos> {
        Some(self.first_token? - self.prefill_start?)
    }

    /// First token to the start of its KV transfer: waiting for room at a decode worker; nothing where
    /// the transfer began beside the prompt. Missing where it decodes at the worker that prefilled it.
    pub fn awaiting_room(&self) -> Option<Nanos> {
        Some(self.transfer_start?.saturating_since(self.first_token?))
    }

    /// Start of its KV transfer, or its first token if that came later, to the transfer's end: what of it
    /// lies behind the first token.
    pub fn transfer(&self) -> Option<Nanos> {
        in_order(self.transfer_start?.max(self.first_token?), self.transfer_end?)
    }

    /// End of its KV transfer (its first token, where there is none) to the first step that decodes
    /// it. With [`awaiting_room`](Self::awaiting_room) and [`transfer`](Self::transfer) it makes up
    /// the time from the first token to the start of decode exactly.
    pub fn decode_queue(&self) -> Option<Nanos> {
        let since = if self.transfer_start.is_some() { self.transfer_end? } else { self.first_token? };
        in_order(since, self.decode_start?)
    }

    /// Whether the objectives that tokens so far decide were missed, seen from `at`: a later
    /// finish cannot mend any of these.
    fn missed_by(&self, at: Time) -> bool {
        let over = |limit: Option<Nanos>, since: Time, until: Time| {
            limit.is_some_and(|limit| until.saturating_since(since) > limit)
        };
        let first = self.first_token.unwrap_or(at);
        let gap_open = self.last_token.is_some_and(|last| {
            let limit = self.slo.max_gap;
            self.status != Status::Finished && over(limit, last, at)
        });
        let gap_closed = match (self.slo.max_gap, self.max_gap) {
            (Some(limit), Some(gap)) => gap > Picos::from(limit),
            _ => false,
        };
        over(self.slo.ttft, self.arrival, first)
            || over(
                self.slo.e2e,
                self.arrival,
                self.last_token.filter(|_| self.status == Status::Finished).unwrap_or(at),
            )
            || gap_open
            || gap_closed
            || self.late_token
            || self.next_token_late(at)
    }

    /// Whether a token that is still to come was due before `at`.
    fn next_token_late(&self, at: Time) -> bool {
        let to_come = self.status != Status::Finished && self.output_tokens < self.max_tokens;
        to_come && self.slo.token_deadline(self.arrival, self.output_tokens).is_some_and(|due| at > due)
    }

    /// Mean TPOT within its objective; true when it is undefined. Compared in whole nanoseconds
    /// times tokens, so that equality meets it.
    fn tpot_met(&self) -> bool {
        let (Some(limit), Some(first), Some(last)) = (self.slo.tpot, self.first_token, self.last_token)
        else {
            return true;
        };
        let gaps = u128::from(self.output_tokens.saturating_sub(1));
        u128::from((last - first).0) <= u128::from(limit.0) * gaps || gaps == 0
    }

    /// Whether a mean TPOT cut off at `at` could still have been met: with all of `max_tokens`
    /// still to come in no time at all.
    fn tpot_possible(&self, at: Time) -> bool {
        let (Some(limit), Some(first)) = (self.slo.tpot, self.first_token) else {
            return true;
        };
        let gaps = u128::from(self.max_tokens.saturating_sub(1));
        u128::from(at.saturating_since(first).0) <= u128::from(limit.0) * gaps || gaps == 0
    }

    /// How the request counts. The rule is DESIGN's: failed and refused requests are misses; one
    /// that the end of the run or its client cut off is out unless something was already missed.
    pub fn verdict(&self) -> Verdict {
        if !self.slo.is_some() {
            return Verdict::Out;
        }
        let end = self.end.or(self.last_token).unwrap_or(self.arrival);
        match self.status {
            Status::Finished if !self.missed_by(end) && self.tpot_met() => Verdict::Good,
            Status::Finished | Status::Refused | Status::Failed => Verdict::Miss,
            Status::Live | Status::Cancelled | Status::CutOff => {
                if self.missed_by(end) || !self.tpot_possible(end) { Verdict::Miss } else { Verdict::Out }
            }
        }
    }
}

/// One run of a worker, as it went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRecord {
    /// Whose.
    pub worker: WorkerId,
    /// Which.
    pub seq: Seq,
    /// When it was ordered.
    pub start: Time,
    /// When its last step ended.
    pub end: Time,
    /// Steps done.
    pub steps: u32,
    /// Rows of its first step, in sums.
    pub shape: StepShape,
    /// Tokens emitted over all rows and steps.
    pub emitted: u64,
    /// Blocks held at the worker when the run was ordered.
    pub held_blocks: u32,
}

/// `weight` streams each saw gaps of `first`, `first + delta`, … between their tokens: `count` of
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GapRun {
    /// The first gap.
    pub first: Picos,
    /// What each is longer than the one before it, in picoseconds.
    pub delta: i64,
    /// Gaps per stream.
    pub count: u32,
    /// Streams.
    pub weight: u32,
}

/// What is logged beside the requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Detail {
    /// Every run of every worker, and every gap between tokens.
    #[default]
    All,
    /// Nothing: a million requests then need little more memory than their records.
    RequestsOnly,
}

/// All that a run leaves behind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Log {
    /// Requests that are over, in the order of their ends.
    pub requests: Vec<RequestRecord>,
    /// Runs of the workers, in the order of their ends.
    pub steps: Vec<StepRecord>,
    /// Gaps between tokens, pooled over requests.
    pub gaps: Vec<GapRun>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn record(slo: Slo) -> RequestRecord {
        RequestRecord::new(&Request {
            id: RequestId(0),
            arrival: Time(100),
            prompt_tokens: 8,
            max_tokens: 4,
            priority: 0,
            slo,
            class: ClassId(0),
            prefix: Arc::default(),
        })
    }

    fn finished(slo: Slo, first: u64, last: u64, tokens: u32) -> RequestRecord {
        let mut record = record(slo);
        record.status = Status::Finished;
        (record.first_token, record.last_token) = (Some(Time(first)), Some(Time(last)));
        (record.end, record.output_tokens) = (record.last_token, tokens);
        record
    }

    fn slo(ttft: u64, tpot: u64) -> Slo {
        Slo { ttft: Some(Nanos(ttft)), tpot: Some(Nanos(tpot)), ..Slo::default() }
    }

    #[test]
    fn equality_meets_and_one_nanosecond_more_misses() {
        assert_eq!(finished(slo(50, 10), 150, 180, 4).verdict(), Verdict::Good);
        assert_eq!(finished(slo(49, 10), 150, 180, 4).verdict(), Verdict::Miss);
        assert_eq!(finished(slo(50, 10), 150, 181, 4).verdict(), Verdict::Miss);
    }

    #[test]
    fn without_two_tokens_there_is_no_tpot_to_miss() {
        let one = finished(slo(50, 1), 150, 150, 1);
        assert_eq!((one.tpot(), one.verdict()), (None, Verdict::Good));
    }

    #[test]
    fn who_counts() {
        assert_eq!(finished(Slo::default(), 1_000, 2_000, 2).verdict(), Verdict::Out, "no objective");
        for status in [Status::Failed, Status::Refused] {
            let failed = RequestRecord { status, end: Some(Time(101)), ..record(slo(50, 10)) };
            assert_eq!(failed.verdict(), Verdict::Miss);
        }
        for status in [Status::CutOff, Status::Cancelled] {
            let early = RequestRecord { status, end: Some(Time(150)), ..record(slo(50, 10)) };
            assert_eq!(early.verdict(), Verdict::Out, "every objective could still be met");
            let late = RequestRecord { end: Some(Time(151)), ..early };
            assert_eq!(late.verdict(), Verdict::Miss, "its first token was already late");
        }
        let stalled = RequestRecord {
            status: Status::CutOff,
            first_token: Some(Time(110)),
            end: Some(Time(141)),
            ..record(slo(50, 10))
        };
        assert_eq!(stalled.verdict(), Verdict::Miss, "three gaps of 10 cannot end at 141");
    }

    #[test]
    fn a_token_that_is_overdue_at_the_end_was_missed() {
        // Token i is due at 150 + 10 i. Two came in time; the third is not there yet.
        let slo = Slo { token_deadlines: true, ..slo(50, 10) };
        let cut = |end| RequestRecord {
            status: Status::CutOff,
            output_tokens: 2,
            first_token: Some(Time(145)),
            last_token: Some(Time(155)),
            end: Some(Time(end)),
            ..record(slo)
        };
        assert_eq!([170, 171].map(|end| cut(end).verdict()), [Verdict::Out, Verdict::Miss]);
        let complete = RequestRecord { max_tokens: 2, ..cut(155) };
        assert_eq!(complete.verdict(), Verdict::Out, "no third one was to come");
    }

    #[test]
    fn a_milestone_not_reached_is_missing() {
        let fresh = RequestRecord { status: Status::Cancelled, end: Some(Time(120)), ..record(slo(50, 10)) };
        assert_eq!((fresh.ttft(), fresh.tpot(), fresh.e2e()), (None, None, None));
        assert_eq!((fresh.held(), fresh.queue(), fresh.prefill()), (None, None, None));
    }
}
