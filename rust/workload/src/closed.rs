//! Closed loops: requests that wait for earlier ones to be over.
//!
//! *Users* are so many clients, each with one request at a time. *Sessions* are conversations: a turn
//! comes some time after the one before it is over, and its prompt is all that was said so far. What
//! is over is over, whether it finished or was refused: a client whose request failed goes on.
//!
//! Lengths and pauses are functions of (seed, request), so that only arrivals depend on the run.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::sync::Arc;

use kvrelay_core::request::{Arrival, PromptContent, Source};
use kvrelay_core::rng::{Purpose, Stream};
use kvrelay_core::time::{Nanos, Time};

use crate::arrivals::{MAX_SECONDS, Process, arrival_times};
use crate::error::{MAX_TOKENS, WorkloadError};
use crate::intensity::MAX_REQUESTS;
use crate::lengths::{LengthPair, Lengths};
use crate::record::{Class, Record};
use crate::workload::{Synthetic, Workload, made_up};

/// How long a client pauses between the end of a request and its next one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ThinkTime {
    /// In seconds, on average; at least 0.
    pub mean: f64,
    /// The coefficient of variation of gamma-distributed pauses: 0 is always the mean, 1 exponential.
    pub cv: f64,
}

impl ThinkTime {
    fn check(self) -> Result<(), WorkloadError> {
        if !(0.0..=MAX_SECONDS).contains(&self.mean) {
            let range = format!("between 0 and {MAX_SECONDS} s");
            return Err(WorkloadError::parameter("think_time", self.mean, range));
        }
        if self.cv != 0.0 && !(1e-3..=1e3).contains(&self.cv) {
            return Err(WorkloadError::parameter("think_cv", self.cv, "0, or between 0.001 and 1000"));
        }
        Ok(())
    }

    /// The pause after request `index`.
    fn draw(self, seed: u64, index: u64) -> Nanos {
        let square = self.cv * self.cv;
        let share = match square {
            0.0 => 1.0,
            _ => Stream::new(seed, Purpose::THINK_TIMES, index).gamma(1.0 / square) * square,
        };
        Nanos::from_secs_f64(self.mean * share)
    }
}

impl fmt::Display for ThinkTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.cv {
            0.0 => write!(f, "think time {} s", self.mean),
            cv => write!(f, "think time {} s (cv {cv})", self.mean),
        }
    }
}

/// What makes the arrivals of a workload come.
#[derive(Clone, Debug)]
pub(crate) enum Pace {
    /// Their times.
    Clock,
    /// So many clients take them in order, each the next one when its last is over.
    Users { concurrency: usize, think: ThinkTime },
    /// They are the turns of sessions, one session after the other.
    Turns(Arc<[Turn]>),
}

/// An arrival's place in a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The session, from 0.
    pub session: u32,
    /// The turn, from 0: the first comes at the arrival's own time.
    pub number: u32,
    /// How long after the end of the turn before it comes.
    pub think: Nanos,
    /// It comes no earlier than that.
    pub earliest: Time,
}

/// Conversations to make up.
#[derive(Clone, Debug, PartialEq)]
pub struct Sessions {
    /// How many.
    pub num_sessions: usize,
    /// New ones per second; they begin by a Poisson process, the first at 0.
    pub rate: f64,
    /// How many turns one has.
    pub turns: Lengths,
    /// What a turn adds to the conversation: the user's tokens, and the answer's.
    pub lengths: LengthPair,
    /// The pause before every turn but the first.
    pub think: ThinkTime,
    /// The class of all requests.
    pub class: Class,
    /// The seed.
    pub seed: u64,
}

impl Workload {
    /// Requests of `concurrency` clients, each of which sends its next one when its last is over and
    /// it has thought: never more than `concurrency` at once. All clients begin at 0.
    ///
    /// # Errors
    /// [`WorkloadError`], when the concurrency, the think time or the number of requests is out of
    /// range.
    pub fn closed_loop(
        concurrency: usize,
        think: ThinkTime,
        what: &Synthetic,
    ) -> Result<Workload, WorkloadError> {
        if concurrency == 0 {
            return Err(WorkloadError::parameter("concurrency", 0, "at least 1"));
        }
        if what.num_requests == 0 {
            return Err(WorkloadError::parameter("num_requests", 0, "at least 1"));
        }
        think.check()?;
        let records = made_up(&vec![Time::ZERO; what.num_requests], &what.lengths, what.seed);
        let users = if concurrency == 1 { "user" } else { "users" };
        let description =
            format!("{} requests of {concurrency} {users}, {think}, {}", what.num_requests, what.lengths);
        let workload = Workload::assemble(records, vec![what.class.clone()], description, what.seed)?;
        Ok(workload.paced(Pace::Users { concurrency, think }))
    }

    /// Conversations of several turns.
    ///
    /// A turn's prompt is the conversation so far, answers included, and the user's new tokens. Its
    /// blocks are named, so that it shares the KV of the prompt before it where prefixes are cached;
    /// of the answer only a driver that knows its tokens could keep the KV for it, and none does.
    ///
    /// # Errors
    /// [`WorkloadError`], when a parameter is out of range, or a conversation grows beyond
    /// [`MAX_TOKENS`].
    pub fn sessions(what: &Sessions) -> Result<Workload, WorkloadError> {
        let Sessions { num_sessions, rate, .. } = *what;
        if !(1..=MAX_REQUESTS).contains(&(num_sessions as u64)) {
            let range = format!("between 1 and {MAX_REQUESTS}");
            return Err(WorkloadError::parameter("num_sessions", num_sessions, range));
        }
        what.think.check()?;
        let starts = arrival_times(Process::Poisson, rate, num_sessions, what.seed)?;
        let (mut records, mut turns) = (Vec::new(), Vec::new());
        for (session, start) in starts.into_iter().enumerate() {
            let mut conversation = Conversation::new(session as u32);
            let share = Stream::new(what.seed, Purpose::TURNS, session as u64).uniform();
            let num_turns = what.turns.quantile(share);
            if num_turns > MAX_TURNS {
                let parameter = format!("turns of session {session}");
                return Err(WorkloadError::parameter(parameter, num_turns, format!("at most {MAX_TURNS}")));
            }
            for number in 0..num_turns {
                let index = (session as u64) << 32 | u64::from(number);
                let (user_tokens, output_tokens) = what.lengths.draw(what.seed, index);
                let (prompt_tokens, content) = conversation.ask(user_tokens).map_err(|tokens| {
                    let parameter = format!("prompt_tokens of session {session}, turn {number}");
                    let range = format!("at most {MAX_TOKENS}; ask for fewer turns or shorter ones");
                    WorkloadError::parameter(parameter, tokens, range)
                })?;
                conversation.answer(output_tokens.min(what.class.max_tokens.unwrap_or(u32::MAX)));
                records.push(Record {
                    at: start,
                    prompt_tokens,
                    output_tokens,
                    content,
                    ..Record::default()
                });
                let think = what.think.draw(what.seed, index);
                turns.push(Turn { session: session as u32, number, think, earliest: start });
            }
        }
        let description = format!(
            "{num_sessions} sessions, {} turns, {rate} sessions/s, {}, per turn: {}",
            records.len(),
            what.think,
            what.lengths
        );
        let workload = Workload::assemble(records, vec![what.class.clone()], description, what.seed)?;
        Ok(workload.paced(Pace::Turns(turns.into())))
    }
}

/// The most turns of a session: every turn lists the blocks of all before it.
const MAX_TURNS: u32 = 4_096;

/// Tokens that an id of a session stands for. Coarse, so that a turn of 100,000 tokens has 200 ids;
/// blocks within one are told apart by their place in it.
pub(crate) const TOKENS_PER_ID: u32 = 512;

/// A conversation as it grows: one row of tokens, of which every prompt is a beginning.
pub(crate) struct Conversation {
    session: u32,
    tokens: u64,
    /// Ids of its beginning, where something else has named it.
    given: Arc<[u64]>,
}

impl Conversation {
    pub(crate) fn new(session: u32) -> Conversation {
        Conversation { session, tokens: 0, given: Arc::from([]) }
    }

    /// One that begins with blocks already named, which others may begin with as well. Two that begin
    /// alike seem to share what follows in the last of these blocks, too.
    pub(crate) fn beginning(session: u32, given: Arc<[u64]>) -> Conversation {
        Conversation { given, ..Conversation::new(session) }
    }

    /// The user says something: the prompt's length, and its content.
    ///
    /// # Errors
    /// The length, when it is beyond [`MAX_TOKENS`].
    pub(crate) fn ask(&mut self, user_tokens: u32) -> Result<(u32, PromptContent), u64> {
        self.tokens += u64::from(user_tokens);
        if self.tokens > u64::from(MAX_TOKENS) {
            return Err(self.tokens);
        }
        let num_ids = self.tokens.div_ceil(u64::from(TOKENS_PER_ID));
        // The highest bit keeps them apart from a trace's own ids, which count from 0.
        let own = |index: u64| 1 << 63 | u64::from(self.session) << 31 | index;
        let id = |index: u64| self.given.get(index as usize).copied().unwrap_or_else(|| own(index));
        let ids = (0..num_ids).map(id).collect();
        Ok((self.tokens as u32, PromptContent::HashIds { ids, tokens_per_id: TOKENS_PER_ID }))
    }

    pub(crate) fn answer(&mut self, output_tokens: u32) {
        self.tokens += u64::from(output_tokens);
    }
}

/// The source of [`Pace::Users`].
pub(crate) struct UserSource {
    arrivals: std::vec::IntoIter<Arrival>,
    /// When clients that have stopped thinking send.
    due: BinaryHeap<Reverse<Time>>,
    /// Requests that no client has yet taken on.
    untaken: usize,
    think: ThinkTime,
    seed: u64,
}

impl UserSource {
    pub(crate) fn new(arrivals: Vec<Arrival>, concurrency: usize, think: ThinkTime, seed: u64) -> UserSource {
        let at_once = concurrency.min(arrivals.len());
        let untaken = arrivals.len() - at_once;
        let due = std::iter::repeat_n(Reverse(Time::ZERO), at_once).collect();
        UserSource { arrivals: arrivals.into_iter(), due, untaken, think, seed }
    }
}

impl Source for UserSource {
    fn next_at(&mut self) -> Option<Time> {
        self.due.peek().map(|due| due.0)
    }

    fn pull(&mut self) -> Option<Arrival> {
        let Reverse(at) = self.due.pop()?;
        self.arrivals.next().map(|arrival| Arrival { at, ..arrival })
    }

    fn completed(&mut self, index: u64, at: Time) {
        if self.untaken > 0 {
            self.untaken -= 1;
            self.due.push(Reverse(at + self.think.draw(self.seed, index)));
        }
    }
}

/// The source of [`Pace::Turns`].
pub(crate) struct TurnSource {
    arrivals: Vec<Arrival>,
    turns: Arc<[Turn]>,
    /// Turns that nothing holds back any more; of those at one instant the earlier session's first.
    due: BinaryHeap<Reverse<(Time, usize)>>,
    /// What was pulled, in that order.
    pulled: Vec<usize>,
}

impl TurnSource {
    pub(crate) fn new(arrivals: Vec<Arrival>, turns: Arc<[Turn]>) -> TurnSource {
        let first =
            |(index, turn): (usize, &Turn)| (turn.number == 0).then(|| Reverse((arrivals[index].at, index)));
        let due = turns.iter().enumerate().filter_map(first).collect();
        TurnSource { pulled: Vec::with_capacity(arrivals.len()), arrivals, turns, due }
    }
}

impl Source for TurnSource {
    fn next_at(&mut self) -> Option<Time> {
        self.due.peek().map(|due| due.0.0)
    }

    fn pull(&mut self) -> Option<Arrival> {
        let Reverse((at, index)) = self.due.pop()?;
        self.pulled.push(index);
        Some(Arrival { at, ..self.arrivals[index].clone() })
    }

    fn place(&self, index: u64) -> u64 {
        self.pulled[index as usize] as u64
    }

    fn completed(&mut self, index: u64, at: Time) {
        let next = self.pulled[index as usize] + 1;
        if let Some(turn) = self.turns.get(next).filter(|turn| turn.number > 0) {
            self.due.push(Reverse(((at + turn.think).max(turn.earliest), next)));
        }
    }
}
