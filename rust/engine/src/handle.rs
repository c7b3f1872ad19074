//! A request's output, from the worker that computes it to whoever waits for it.
//!
//! A queue of its own instead of a channel: one receiver may block, poll or await, tokens that
//! nobody has fetched yet are joined into one piece, and a sender never waits.

use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvrelay_core::record::{FinishReason, RequestRecord, Status};
use kvrelay_core::request::RequestId;

use crate::driver::Message;

/// What a request gives its caller.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// The tokens since the last piece, and the text that is certain by now: it never ends inside a
    /// character, nor holds what may become a stop string.
    Token {
        /// At least one token id; an end-of-sequence token is one of them.
        ids: Vec<u32>,
        /// May be empty.
        text: String,
    },
    /// Nothing more will come.
    Finished {
        /// Its milestones, and how it ended.
        record: Box<RequestRecord>,
        /// Why it produced no more tokens; `None` unless [`Status::Finished`].
        reason: Option<FinishReason>,
    },
}

impl Output {
    /// The last piece, for a record that is closed.
    fn finished(record: RequestRecord) -> Output {
        let stopped = record.reason.as_deref() == Some(FinishReason::Stop.name());
        let reason = if stopped { FinishReason::Stop } else { FinishReason::Length };
        let reason = (record.status == Status::Finished).then_some(reason);
        Output::Finished { record: Box::new(record), reason }
    }
}

#[derive(Default)]
struct State {
    queue: VecDeque<Output>,
    /// No more tokens are wanted.
    muted: bool,
    /// Nothing will be added.
    closed: bool,
    waker: Option<Waker>,
}

/// The queue between them.
#[derive(Default)]
pub(crate) struct Stream {
    state: Mutex<State>,
    changed: Condvar,
}

impl Stream {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let waker = {
            let mut state = self.lock();
            change(&mut state);
            state.waker.take()
        };
        self.changed.notify_all();
        // Outside the lock: a waker may run code of its own.
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// A token, and the text that it makes certain.
    pub(crate) fn token(&self, id: u32, text: &str) {
        self.change(|state| {
            if state.closed || state.muted {
                return;
            }
            if let Some(Output::Token { ids, text: waiting }) = state.queue.back_mut() {
                ids.push(id);
                waiting.push_str(text);
            } else {
                state.queue.push_back(Output::Token { ids: vec![id], text: text.to_owned() });
            }
        });
    }

    fn mute(&self) {
        self.change(|state| state.muted = true);
    }
}

/// The loop's end of a stream. Without a last piece the stream still ends when this is dropped.
pub(crate) struct StreamEnd(pub(crate) Arc<Stream>);

impl StreamEnd {
    /// Sends the last piece.
    pub(crate) fn finish(self, record: RequestRecord) {
        self.0.change(|state| {
            state.queue.push_back(Output::finished(record));
            state.closed = true;
        });
    }
}

impl Drop for StreamEnd {
    fn drop(&mut self) {
        self.0.change(|state| state.closed = true);
    }
}

/// A request under way. Dropping it cancels the request.
pub struct Handle {
    id: RequestId,
    stream: Arc<Stream>,
    engine: Sender<Message>,
}

impl Handle {
    pub(crate) fn new(id: RequestId, stream: Arc<Stream>, engine: Sender<Message>) -> Handle {
        Handle { id, stream, engine }
    }

    /// Its name in records.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Waits for the next piece; `None` after [`Output::Finished`], or when the engine is gone
    /// without one.
    pub fn recv(&self) -> Option<Output> {
        let mut state = self.stream.lock();
        loop {
            if let Some(output) = state.queue.pop_front() {
                return Some(output);
            }
            if state.closed {
                return None;
            }
            state = self.stream.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// As [`recv`](Handle::recv), for at most `timeout`; `Pending` when that is over.
    pub fn recv_timeout(&self, timeout: Duration) -> Poll<Option<Output>> {
        let state = self.stream.lock();
        let waiting = |state: &mut State| state.queue.is_empty() && !state.closed;
        let waited = self.stream.changed.wait_timeout_while(state, timeout, waiting);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        take(&mut state)
    }

    /// The next piece if there is one; `Pending` if it is still to come.
    pub fn try_recv(&self) -> Poll<Option<Output>> {
        take(&mut self.stream.lock())
    }

    /// The next piece, or `cx` is woken when it is there. One waiter at a time.
    pub fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<Option<Output>> {
        let mut state = self.stream.lock();
        let taken = take(&mut state);
        if taken.is_pending() {
            state.waker = Some(cx.waker().clone());
        }
        taken
    }

    /// As [`recv`](Handle::recv), without blocking a thread; works under any executor.
    pub async fn next(&self) -> Option<Output> {
        std::future::poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// Ends the request: no more tokens come, [`Output::Finished`] does.
    pub fn cancel(&self) {
        self.stream.mute();
        // An engine that is gone has nothing to cancel.
        let _ = self.engine.send(Message::Cancel(self.id));
    }
}

fn take(state: &mut State) -> Poll<Option<Output>> {
    match state.queue.pop_front() {
        Some(output) => Poll::Ready(Some(output)),
        None if state.closed => Poll::Ready(None),
        None => Poll::Pending,
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.stream.lock().closed {
            self.cancel();
        }
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").field("id", &self.id).finish_non_exhaustive()
    }
}
