//! The loop: messages in, the scheduler asked, its actions carried out.
//!
//! A turn, in five steps: wait for a message, a planned wake-up or an arrival; take all messages
//! that lie there; let in what was waiting its turn; give the events of this instant to the
//! scheduler and carry out its actions; look whether a measured run is over or nothing moves any
//! more.
//!
//! A *session* is the life of one scheduler. Serving is one session; a measured run is another, on
//! idle workers and with a cold prefix cache, after which serving begins anew. What is submitted
//! meanwhile waits.

mod carry;
mod links;
mod measured;
mod session;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};

use kvrelay_core::cluster::{Role, WorkerId};
use kvrelay_core::event::{Event, TransferId};
use kvrelay_core::kv::IntegrityError;
use kvrelay_core::policy::{Fcfs, Policy};
use kvrelay_core::record::{RequestRecord, Status};
use kvrelay_core::request::{Request, RequestId};
use kvrelay_core::step::Seq;
use kvrelay_core::time::{Nanos, Time};

pub(crate) use links::Link;
pub(crate) use measured::{RunRequest, RunShared};
use session::Session;
pub(crate) use session::Settings;

use crate::clock::Clock;
use crate::error::EngineError;
use crate::handle::StreamEnd;
use crate::prompt::PromptMaker;
use crate::record::Recording;
use crate::transfer::{Outcome, Transport};
use crate::worker::{RunReport, SharedSequence};

/// What the loop is told.
pub(crate) enum Message {
    /// A request; ids come in increasing order.
    Submit(Box<Submitted>),
    /// Its caller wants it no more.
    Cancel(RequestId),
    /// A workload.
    Run(Box<RunRequest>),
    /// The run of that number is not waited for any more.
    Interrupt(u64),
    /// Serve under another policy.
    SetPolicy { policy: Box<dyn Policy>, reply: Sender<Result<(), EngineError>> },
    /// Count the books now, or once nothing is live or under way.
    Check { idle: bool, reply: Sender<Result<(), IntegrityError>> },
    /// What was recorded so far.
    Recordings(Sender<Vec<Recording>>),
    /// A run is over.
    Done(RunReport),
    /// A worker's thread has ended in the middle of a run.
    Down { worker: WorkerId, seq: Seq, steps_delivered: u32, reason: String },
    /// A transfer has ended.
    Transfer { id: TransferId, outcome: Outcome },
    /// End all, and the loop.
    Shutdown,
}

/// A request as the loop gets it.
pub(crate) struct Submitted {
    pub(crate) request: Request,
    pub(crate) sequence: SharedSequence,
    pub(crate) end: StreamEnd,
}

/// What anybody may look at without asking the loop.
#[derive(Default)]
pub(crate) struct Public {
    pub(crate) roles: Mutex<Vec<Role>>,
    /// Faults of serving policies: how many, and the latest.
    pub(crate) faults: Mutex<(u64, Option<String>)>,
}

/// What waits until it may be let in.
enum Waiting {
    Submit(Box<Submitted>),
    Run(Box<RunRequest>),
    SetPolicy { policy: Box<dyn Policy>, reply: Sender<Result<(), EngineError>> },
    CheckIdle(Sender<Result<(), IntegrityError>>),
}

impl Waiting {
    /// Whether it needs the engine for itself.
    fn wants_idle(&self) -> bool {
        matches!(self, Waiting::Run(_) | Waiting::CheckIdle(_))
    }
}

/// So many instants with nothing but wake-ups mean that a policy wakes itself for nothing.
const MAX_IDLE_INSTANTS: u64 = 100_000;

/// Requests that nothing under way can move are given up after so long, though the policy has asked
/// to be woken later.
const STALL_AFTER: Nanos = Nanos(30_000_000_000);

/// Why requests fail that an engine's end finds alive.
const SHUT_DOWN: &str = "the engine was shut down";

/// The loop's state.
pub(crate) struct Driver {
    clock: Clock,
    settings: Settings,
    inbox: Receiver<Message>,
    workers: Vec<Link>,
    transport: Box<dyn Transport>,
    prompts: PromptMaker,
    public: Arc<Public>,
    waiting: VecDeque<Waiting>,
    checks: Vec<Sender<Result<(), IntegrityError>>>,
    session: Session,
    /// Recordings of earlier sessions.
    recordings: Vec<Recording>,
    stopping: bool,
}

impl Driver {
    /// A loop that is about to serve; an error if the policy's start fails.
    pub(crate) fn new(
        clock: Clock,
        settings: Settings,
        inbox: Receiver<Message>,
        workers: Vec<Link>,
        transport: Box<dyn Transport>,
        prompts: PromptMaker,
        public: Arc<Public>,
        policy: Box<dyn Policy>,
    ) -> Result<Driver, EngineError> {
        let (session, fault) = Session::begin(&settings, policy, Time::ZERO, clock.now(), settings.seed);
        if let Some(fault) = fault {
            return Err(EngineError::Policy(fault));
        }
        Ok(Driver {
            clock,
            settings,
            inbox,
            workers,
            transport,
            prompts,
            public,
            waiting: VecDeque::new(),
            checks: Vec::new(),
            session,
            recordings: Vec::new(),
            stopping: false,
        })
    }

    /// Runs until it is told to end.
    pub(crate) fn run(mut self) {
        while self.turn().is_continue() {}
    }

    fn turn(&mut self) -> ControlFlow<()> {
        self.receive();
        self.let_in();
        self.step();
        self.answer_checks();
        self.end_run_if_over();
        self.give_up_if_stalled();
        self.let_in();
        if self.stopping && self.session.requests.is_empty() && !self.anything_runs() {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    /// Waits for something to do, and takes all messages that are there.
    fn receive(&mut self) {
        let first = if !self.session.events.is_empty() {
            self.inbox.try_recv().ok()
        } else if let Some(deadline) = self.session.deadline() {
            match self.inbox.recv_timeout(self.clock.until(deadline)) {
                Ok(message) => Some(message),
                Err(RecvTimeoutError::Timeout) => None,
                // The workers hold senders, so this is for a loop without any.
                Err(RecvTimeoutError::Disconnected) => Some(Message::Shutdown),
            }
        } else {
            Some(self.inbox.recv().unwrap_or(Message::Shutdown))
        };
        let mut next = first;
        while let Some(message) = next {
            self.take(message);
            next = self.inbox.try_recv().ok();
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Submit(submitted) => self.wait(Waiting::Submit(submitted)),
            Message::Run(request) => self.wait(Waiting::Run(request)),
            Message::SetPolicy { policy, reply } => self.wait(Waiting::SetPolicy { policy, reply }),
            Message::Check { idle: true, reply } => self.wait(Waiting::CheckIdle(reply)),
            Message::Check { idle: false, reply } => self.checks.push(reply),
            // Callers who stopped waiting need no answer, here and below.
            Message::Recordings(reply) => {
                let all = self.recordings.iter().chain(&self.session.recording).cloned().collect();
                let _ = reply.send(all);
            }
            Message::Cancel(id) => self.cancel(id),
            Message::Interrupt(number) => self.interrupt(number),
            Message::Done(report) => self.run_done(report),
            Message::Down { worker, seq, steps_delivered, reason } => {
                self.worker_down(worker, seq, steps_delivered, reason);
            }
            Message::Transfer { id, outcome } => self.transfer_ended(id, outcome),
            Message::Shutdown => self.stop(),
        }
    }

    fn wait(&mut self, waiting: Waiting) {
        match waiting {
            waiting if !self.stopping => self.waiting.push_back(waiting),
            Waiting::Submit(submitted) => self.turn_away(*submitted, Status::Failed, Some(SHUT_DOWN)),
            // Dropped, it tells its caller that the engine has stopped.
            _ => {}
        }
    }

    /// Lets in what waits, in order: at once while serving, alone where it must be.
    fn let_in(&mut self) {
        while self.session.run.is_none() {
            let Some(next) = self.waiting.front() else { return };
            if next.wants_idle() && !self.is_idle() {
                return;
            }
            match self.waiting.pop_front() {
                Some(Waiting::Submit(submitted)) => self.session.submit(*submitted),
                Some(Waiting::Run(request)) => self.begin_run(*request),
                Some(Waiting::SetPolicy { policy, reply }) => {
                    let _ = reply.send(self.set_policy(policy));
                }
                Some(Waiting::CheckIdle(reply)) => {
                    let _ = reply.send(self.session.scheduler.check_idle());
                }
                None => return,
            }
        }
    }

    /// After the instant in which they were asked for, so that a caller sees what it did before.
    fn answer_checks(&mut self) {
        for reply in self.checks.drain(..) {
            let _ = reply.send(self.session.scheduler.check_integrity());
        }
    }

    fn anything_runs(&self) -> bool {
        self.workers.iter().any(Link::is_running)
    }

    /// Nothing lives, and nothing that was started goes on.
    fn is_idle(&self) -> bool {
        let session = &self.session;
        session.requests.is_empty()
            && session.events.is_empty()
            && session.transfers.is_empty()
            && !self.anything_runs()
    }

    fn set_policy(&mut self, policy: Box<dyn Policy>) -> Result<(), EngineError> {
        let now = self.session.time(self.clock.now());
        let scheduler = &mut self.session.scheduler;
        let before = scheduler.replace_policy(policy);
        if let Err(fault) = scheduler.begin(now, self.settings.seed) {
            scheduler.replace_policy(before);
            return Err(EngineError::Policy(fault));
        }
        self.session.policy_exchanged();
        Ok(())
    }

    fn cancel(&mut self, id: RequestId) {
        if self.session.run.is_none() && self.session.requests.contains_key(&id) {
            return self.session.events.push(Event::Cancelled(id));
        }
        let here =
            |waiting: &Waiting| matches!(waiting, Waiting::Submit(submitted) if submitted.request.id == id);
        let found = self.waiting.iter().position(here).and_then(|index| self.waiting.remove(index));
        if let Some(Waiting::Submit(submitted)) = found {
            self.turn_away(*submitted, Status::Cancelled, None);
        }
    }

    /// Ends a request that the scheduler never heard of.
    fn turn_away(&self, submitted: Submitted, status: Status, reason: Option<&'static str>) {
        let Submitted { request, end, .. } = submitted;
        let (reason, at) = (reason.map(Cow::from), Some(self.clock.now()));
        end.finish(RequestRecord { status, reason, end: at, ..RequestRecord::new(&request) });
    }

    /// Ends everything: what is live fails, what waits is told that the engine has stopped.
    fn stop(&mut self) {
        self.stopping = true;
        for waiting in std::mem::take(&mut self.waiting) {
            self.wait(waiting);
        }
        if let Some(run) = &mut self.session.run {
            run.fail(EngineError::Stopped);
        }
        self.session.give_up_all(SHUT_DOWN);
    }

    /// Requests that nothing will ever move end with an error.
    fn give_up_if_stalled(&mut self) {
        let now = self.session.time(self.clock.now());
        let lost: Vec<String> = self.workers.iter().filter_map(Link::why_down).collect();
        let more_to_come = self.session.next_arrival().is_some() && lost.is_empty();
        let session = &mut self.session;
        if !session.events.is_empty() || more_to_come || session.scheduler.first_live().is_none() {
            session.stalled_since = None;
            return;
        }
        let stalled = session.scheduler.stalled().is_some();
        let since = if stalled { *session.stalled_since.get_or_insert(now) } else { now };
        session.stalled_since = session.stalled_since.filter(|_| stalled);
        let for_good = stalled && (session.wakes.is_empty() || now.saturating_since(since) >= STALL_AFTER);
        if !for_good && session.num_idle < MAX_IDLE_INSTANTS {
            return;
        }
        session.num_idle = 0;
        let why = match &lost[..] {
            [] => "the policy left it with nothing under way".to_owned(),
            lost => format!("no worker is left that could go on with it: {}", lost.join("; ")),
        };
        session.run_cannot_go_on(if lost.is_empty() { None } else { Some(why.clone()) });
        session.give_up_all(&why);
    }

    fn fall_back(&mut self, fault: kvrelay_core::policy::PolicyFault) {
        let failed = self.session.scheduler.replace_policy(Box::new(Fcfs));
        if let Some(run) = &mut self.session.run {
            return run.policy_failed(fault, failed);
        }
        let mut faults = self.public.faults.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *faults = (faults.0 + 1, Some(fault.to_string()));
    }
}
