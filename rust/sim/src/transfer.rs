//! What a KV transfer moves, and from when on: whole, or layer group by layer group beside the last
//! chunk of its prompt; and what laying KV out anew for another number of ranks takes.

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::latency::Link;
use kvrelay_core::step::Row;
use kvrelay_core::time::{Nanos, Time};

/// Bytes of a transfer that may leave together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Part {
    /// From then on.
    pub(crate) at: Time,
    pub(crate) bytes: f64,
}

/// KV of workers with unlike numbers of ranks is laid out anew: the heads of a rank go to several, or
/// those of several to one.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversion {
    /// Ranks that share a layer, by worker.
    pub ranks: Vec<u32>,
    /// Bytes per second at which one rank lays KV out anew, above 0; infinite where that takes no time.
    pub bandwidth: f64,
}

impl Conversion {
    /// The parts leave when they are laid out anew, one after the other, by all ranks of the end with
    /// fewer of them; as they are between workers with as many.
    pub(crate) fn delay(&self, from: WorkerId, to: WorkerId, parts: &mut [Part]) {
        let (from, to) = (self.ranks[from.index()], self.ranks[to.index()]);
        if from == to {
            return;
        }
        let bandwidth = self.bandwidth * f64::from(from.min(to));
        let mut free = Time::ZERO;
        for part in parts {
            free = free.max(part.at) + Nanos::from_secs_f64(part.bytes / bandwidth);
            part.at = free;
        }
    }
}

/// The run that still computes the last of what a transfer moves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastChunk {
    /// Bytes of the transfer that were there before it.
    pub(crate) before: f64,
    pub(crate) start: Time,
    pub(crate) end: Time,
}

impl LastChunk {
    /// Of a transfer of the last `num_blocks` blocks of what `row` computes the end of.
    pub(crate) fn of(
        row: &Row,
        num_blocks: u32,
        block_tokens: u32,
        bytes_per_token: u64,
        run: (Time, Time),
    ) -> LastChunk {
        let blocks = row.context().div_ceil(u64::from(block_tokens));
        let first = (blocks - u64::from(num_blocks)) * u64::from(block_tokens);
        let before = u64::from(row.start).saturating_sub(first) * bytes_per_token;
        LastChunk { before: before as f64, start: run.0, end: run.1 }
    }
}

/// The parts of a transfer of `bytes` that is ordered at `now`. What `chunk` computes leaves in `groups`
/// of layers, each when its share of the run is over; everything before it leaves at once.
pub(crate) fn parts(now: Time, bytes: f64, groups: u32, chunk: Option<LastChunk>) -> Vec<Part> {
    let Some(LastChunk { before, start, end }) = chunk else { return vec![Part { at: now, bytes }] };
    let computed = bytes - before;
    let lasts = u128::from((end - start).0);
    let group = |index: u32| {
        let after = lasts * u128::from(index) / u128::from(groups);
        Part { at: start + Nanos(after as u64), bytes: computed / f64::from(groups) }
    };
    let there = (before > 0.0).then_some(Part { at: now, bytes: before });
    let done_by_now = |part: Part| Part { at: part.at.max(now), ..part };
    there.into_iter().chain((1..=groups).map(group)).map(done_by_now).collect()
}

/// When the last of `parts`, in order, is there over a link that they have to themselves.
pub(crate) fn alone(link: Link, parts: &[Part]) -> Time {
    let mut free = Time::ZERO;
    for part in parts {
        free = free.max(part.at) + Nanos::from_secs_f64(part.bytes / link.bandwidth);
    }
    free + link.latency
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvrelay_core::request::RequestId;

    /// Of a transfer of 400 bytes, the last 10 of 10 blocks of 4 tokens of 10 bytes each.
    fn chunk(start: u32, len: u32) -> LastChunk {
        let row = Row { request: RequestId(0), start, len, want_logits: true, decode: false };
        LastChunk::of(&row, 10, 4, 10, (Time(1_000), Time(1_800)))
    }

    #[test]
    fn layers_leave_as_they_are_done() {
        let link = Link { bandwidth: 1e9, latency: Nanos(7) };
        let whole = parts(Time(1_800), 400.0, 4, None);
        assert_eq!((whole.len(), alone(link, &whole)), (1, Time(2_207)));
        // A wire that is faster than the layers waits for the last of them; a slower one for none.
        let early = parts(Time(1_000), 400.0, 4, Some(chunk(0, 40)));
        assert_eq!(early.iter().map(|part| part.at.0).collect::<Vec<_>>(), [1_200, 1_400, 1_600, 1_800]);
        assert_eq!(alone(link, &early), Time(1_907));
        assert_eq!(alone(Link { bandwidth: 1e8, ..link }, &early), Time(5_207));
    }

    #[test]
    fn chunks_before_the_last_leave_at_once() {
        let parts = parts(Time(1_500), 400.0, 2, Some(chunk(30, 10)));
        let expected = [(1_500, 300.0), (1_500, 50.0), (1_800, 50.0)];
        assert_eq!(parts.iter().map(|part| (part.at.0, part.bytes)).collect::<Vec<_>>(), expected);
        // What the destination has already does not travel.
        let row = Row { request: RequestId(0), start: 30, len: 10, want_logits: true, decode: false };
        assert_eq!(LastChunk::of(&row, 4, 4, 10, (Time(0), Time(1))).before, 60.0);
    }

    #[test]
    fn unlike_ranks_lay_kv_out_anew() {
        let conversion = Conversion { ranks: vec![4, 2, 4], bandwidth: 1e9 };
        let delayed = |from, to| {
            let mut parts = [Part { at: Time(10), bytes: 4e3 }, Part { at: Time(20), bytes: 2e3 }];
            conversion.delay(WorkerId(from), WorkerId(to), &mut parts);
            parts.map(|part| part.at.0)
        };
        assert_eq!(delayed(0, 2), [10, 20]);
        assert_eq!(delayed(0, 1), [2_010, 3_010]);
        assert_eq!(delayed(1, 2), [2_010, 3_010]);
    }
}
