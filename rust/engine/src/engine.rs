//! The engine, as a program uses it: made from a model, given requests and workloads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use kvrelay_core::cluster::{Role, WorkerId};
use kvrelay_core::policy::Policy;
use kvrelay_core::record::Log;
use kvrelay_core::request::{Request, RequestId, Source};
use kvrelay_core::scheduler::{Belief, Limits, WorkerConfig};
use kvrelay_core::time::Time;
use kvrelay_core::watch::Watch;
use kvrelay_model::{Model, TextStream};

use crate::backend::{self, Backend, Input, Location, Logits, Row};
use crate::calibrate::calibrate;
use crate::clock::Clock;
use crate::config::{EngineConfig, RunOptions, Submission};
use crate::digest::BlockHasher;
use crate::driver::{Driver, Link, Message, Public, RunRequest, RunShared, Settings, Submitted};
use crate::error::EngineError;
use crate::fleet::{self, Apart, Fleet, Placed};
use crate::handle::{Handle, Stream, StreamEnd};
use crate::prompt::PromptMaker;
use crate::record::Recording;
use crate::sequence::{Reader, Sequence};
use crate::setup::{check_backends, checked_belief, core_limits, start_loop};
use crate::transfer::{Local, Reports, Transport};

/// How often a run's caller looks on.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What a measured run leaves behind. Times count from its start.
#[derive(Clone, Debug)]
pub struct EngineRun {
    /// Records.
    pub log: Log,
    /// When it was over.
    pub end: Time,
    /// The policy's name.
    pub policy: String,
}

/// A worker, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerInfo {
    /// Which.
    pub id: WorkerId,
    /// What it does now.
    pub role: Role,
    /// The device and its numeric tier.
    pub device: String,
    /// Threads that compute; 0 where a device does.
    pub threads: usize,
    /// Cores that they are kept on; empty if the system chooses.
    pub cores: Vec<usize>,
    /// KV blocks it has.
    pub kv_blocks: u32,
}

/// What callers share, so that ids grow in the order in which the loop hears of them.
struct Submitter {
    next_id: u64,
    engine: Sender<Message>,
}

/// Real workers under one scheduler. Dropping it ends what is live, and joins all threads.
pub struct Engine {
    model: Arc<Model>,
    apart: Apart,
    clock: Clock,
    settings: Settings,
    workers: Vec<WorkerInfo>,
    public: Arc<Public>,
    submitter: Mutex<Submitter>,
    next_run: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Makes the workers of `config` on the devices that it names and starts serving under `policy`.
    /// Memory is planned first, and refused with the numbers if a device has less.
    pub fn new(
        model: Arc<Model>,
        config: EngineConfig,
        policy: Box<dyn Policy>,
    ) -> Result<Engine, EngineError> {
        let limits = core_limits(&model, &config)?;
        let fleet = fleet::make(&model, &config, &limits)?;
        Engine::start(model, config, limits, fleet, policy)
    }

    /// Serves with the given backends, one a worker of `config`'s topology: for devices of one's
    /// own. Their limits must allow the steps that `config.limits` allow.
    pub fn with_backends(
        model: Arc<Model>,
        config: EngineConfig,
        backends: Vec<Box<dyn Backend>>,
        policy: Box<dyn Policy>,
    ) -> Result<Engine, EngineError> {
        let limits = core_limits(&model, &config)?;
        check_backends(&config, &limits, &backends)?;
        let threads = config.threads_per_worker.unwrap_or(1);
        let placed = vec![Placed { threads, cores: Vec::new() }; backends.len()];
        let fleet = Fleet { placed, backends, apart: Apart::unknown(config.numerics) };
        Engine::start(model, config, limits, fleet, policy)
    }

    fn start(
        model: Arc<Model>,
        config: EngineConfig,
        limits: Limits,
        fleet: Fleet,
        policy: Box<dyn Policy>,
    ) -> Result<Engine, EngineError> {
        let Fleet { mut backends, placed, apart } = fleet;
        let clock = Clock::start();
        let belief = match config.belief {
            Some(belief) => checked_belief(belief, backends.len())?,
            None => calibrate(&mut backends, clock)?,
        };
        let roles = config.topology.roles();
        let describe = |(index, Placed { threads, cores }): (usize, _)| WorkerInfo {
            id: WorkerId(index as u32),
            role: roles[index],
            device: backends[index].name().to_owned(),
            threads,
            cores,
            kv_blocks: backends[index].pool().num_blocks() as u32,
        };
        let workers: Vec<_> = placed.into_iter().enumerate().map(describe).collect();
        let (engine, inbox) = channel();
        let make = config
            .transport
            .unwrap_or_else(|| Box::new(|reports| Ok(Box::new(Local::new(reports)?) as Box<dyn Transport>)));
        let transport = make(Reports::new(engine.clone())).map_err(EngineError::Thread)?;
        // Host memory that a step writes must not be read beside it, not even where it writes the same.
        let on_devices = backends.iter().all(|backend| backend.pool().location() != Location::Host);
        let settings = Settings {
            workers: workers
                .iter()
                .map(|worker| WorkerConfig { role: worker.role, num_blocks: worker.kv_blocks, stages: 1 })
                .collect(),
            limits,
            prefix_caching: config.prefix_caching,
            early_transfers: on_devices && transport.follows_runs(),
            belief,
            seed: config.seed,
            record: config.record,
            end_ids: model.end_ids().into(),
        };
        let public = Arc::new(Public::default());
        *lock(&public.roles) = settings.roles();
        let links = backends.into_iter().enumerate().map(|(index, backend)| {
            Link::start(WorkerId(index as u32), backend, clock, engine.clone()).map_err(EngineError::Thread)
        });
        let links: Vec<Link> = links.collect::<Result<_, _>>()?;
        let prompts = PromptMaker::new(&model);
        let (started, start) = channel();
        let body = {
            let (settings, public) = (settings.clone(), public.clone());
            move || match Driver::new(clock, settings, inbox, links, transport, prompts, public, policy) {
                Ok(driver) => {
                    // Whoever made the engine waits for this.
                    let _ = started.send(Ok(()));
                    driver.run();
                }
                Err(error) => {
                    let _ = started.send(Err(error));
                }
            }
        };
        let thread = start_loop(config.around_loop, Box::new(body))?;
        let engine = Engine {
            model,
            apart,
            clock,
            settings,
            workers,
            public,
            submitter: Mutex::new(Submitter { next_id: 0, engine }),
            next_run: AtomicU64::new(0),
            thread: Some(thread),
        };
        start.recv().map_err(|_| EngineError::Stopped)??;
        Ok(engine)
    }

    /// Starts a request. What is wrong with it is an error for it alone; what the scheduler refuses
    /// (more KV than any worker has, a policy's admission) comes as its last output.
    pub fn submit(&self, submission: Submission) -> Result<Handle, EngineError> {
        self.check(&submission)?;
        let Submission { prompt, max_tokens, sampling, stop, ignore_eos, slo, class, priority } = submission;
        let mut hasher =
            self.settings.prefix_caching.then(|| BlockHasher::new(self.settings.limits.block_tokens));
        let prefix = hasher.as_mut().map_or(Arc::default(), |hasher| hasher.extend(&prompt).into());
        let prompt_tokens = prompt.len() as u32;
        let stream = Arc::new(Stream::default());
        let text = TextStream::new(self.model.tokenizer().clone(), &stop);
        let reader = Reader { text, stream: stream.clone() };
        let ends = if ignore_eos { Arc::default() } else { self.settings.end_ids.clone() };
        let sequence = Sequence::new(prompt, max_tokens, sampling, ends, Some(reader), hasher);
        let sequence = Arc::new(Mutex::new(sequence));
        let end = StreamEnd(stream.clone());
        let mut submitter = lock(&self.submitter);
        let id = RequestId(submitter.next_id);
        let arrival = self.clock.now();
        let request = Request { id, arrival, prompt_tokens, max_tokens, priority, slo, class, prefix };
        let submitted = Box::new(Submitted { request, sequence, end });
        submitter.engine.send(Message::Submit(submitted)).map_err(|_| EngineError::Stopped)?;
        submitter.next_id += 1;
        Ok(Handle::new(id, stream, submitter.engine.clone()))
    }

    fn check(&self, submission: &Submission) -> Result<(), EngineError> {
        let refuse =
            |field, expected: String, found: String| Err(EngineError::Request { field, expected, found });
        submission.sampling.validate()?;
        if submission.prompt.is_empty() {
            return refuse("prompt", "at least 1 token".into(), "0 tokens".into());
        }
        let vocab = self.model.config().vocab_size;
        if let Some(id) = submission.prompt.iter().find(|id| **id as usize >= vocab) {
            return refuse("prompt", format!("token ids below {vocab}"), id.to_string());
        }
        if submission.max_tokens == 0 {
            return refuse("max_tokens", "at least 1".into(), "0".into());
        }
        let limit = u64::from(self.max_model_len());
        let (prompt, max_tokens) = (submission.prompt.len() as u64, u64::from(submission.max_tokens));
        if prompt + max_tokens > limit {
            let found = format!("{prompt} + {max_tokens} = {}", prompt + max_tokens);
            return refuse("prompt + max_tokens", format!("at most {limit} tokens (max_model_len)"), found);
        }
        Ok(())
    }

    /// Runs a workload open-loop: its arrivals come at their scheduled times, whatever is live, with
    /// seeded token ids and exactly their output lengths. Under `policy`, or the serving one. Waits
    /// until requests that were submitted before are over; what is submitted meanwhile waits.
    /// An interrupted run is cancelled, and the engine goes on serving.
    pub fn run(
        &self,
        source: Box<dyn Source + Send>,
        policy: Option<Box<dyn Policy>>,
        options: RunOptions,
        watch: &mut dyn Watch,
    ) -> Result<EngineRun, EngineError> {
        options.sampling.validate()?;
        let number = self.next_run.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::new(RunShared::default());
        let (reply, outcome) = channel();
        let request = RunRequest { number, source, policy, options, shared: shared.clone(), reply };
        self.send(Message::Run(Box::new(request)))?;
        loop {
            match outcome.recv_timeout(LOOK_EVERY) {
                Ok(outcome) => return outcome,
                Err(RecvTimeoutError::Disconnected) => return Err(EngineError::Stopped),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
            let (arrived, over) = (count(&shared.arrived), count(&shared.over));
            if watch.look(arrived, over, Time(count(&shared.now))).is_break() {
                self.send(Message::Interrupt(number))?;
                return Err(EngineError::Interrupted);
            }
        }
    }

    /// Serves under another policy from now on. It begins anew; requests that are live go on under
    /// it. If its start fails the one before stays.
    pub fn set_policy(&self, policy: Box<dyn Policy>) -> Result<(), EngineError> {
        self.ask(|reply| Message::SetPolicy { policy, reply })?
    }

    /// The workers, with their present roles.
    pub fn workers(&self) -> Vec<WorkerInfo> {
        let roles = lock(&self.public.roles);
        let now = |(worker, role): (&WorkerInfo, &Role)| WorkerInfo { role: *role, ..worker.clone() };
        self.workers.iter().zip(roles.iter()).map(now).collect()
    }

    /// Counts the scheduler's books anew: every block is free, cached, held or in quarantine.
    pub fn check_integrity(&self) -> Result<(), EngineError> {
        Ok(self.ask(|reply| Message::Check { idle: false, reply })??)
    }

    /// Waits until nothing is live or under way; then every block must be free or cached.
    pub fn check_idle(&self) -> Result<(), EngineError> {
        Ok(self.ask(|reply| Message::Check { idle: true, reply })??)
    }

    /// How often a serving policy failed, so that `fcfs` took over, and the latest reason.
    pub fn policy_faults(&self) -> (u64, Option<String>) {
        lock(&self.public.faults).clone()
    }

    /// What was recorded so far, one recording a session; empty without
    /// [`EngineConfig::record`].
    pub fn recordings(&self) -> Result<Vec<Recording>, EngineError> {
        self.ask(Message::Recordings)
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// What policies predict with: measured, or as given.
    pub fn belief(&self) -> &Belief {
        &self.settings.belief
    }

    /// Limits on batches, as they are in force.
    pub fn limits(&self) -> &Limits {
        &self.settings.limits
    }

    /// The longest prompt and output together, in tokens.
    pub fn max_model_len(&self) -> u32 {
        self.settings.limits.max_model_len.unwrap_or(self.model.config().context_length as u32)
    }

    /// The logits after each of `tokens`, computed beside the workers: one vector of the vocabulary
    /// a position.
    pub fn logits(&self, tokens: &[u32]) -> Result<Vec<Vec<f32>>, EngineError> {
        const CHUNK: usize = 64;
        let positions = tokens.len().max(1);
        let chunk = CHUNK.min(positions);
        let limits = backend::Limits {
            max_rows: 1,
            max_tokens: chunk,
            max_logits: chunk,
            max_positions: positions,
            max_slots: 1,
        };
        let block_size = self.settings.limits.block_tokens as usize;
        let mut backend = self.apart.backend(&self.model, limits, block_size)?;
        let num_blocks = backend.pool().num_blocks();
        let blocks: Vec<u32> = (0..num_blocks as u32).collect();
        let mut logits = Vec::with_capacity(tokens.len());
        for (index, ids) in tokens.chunks(CHUNK).enumerate() {
            let row = Row {
                slot: 0,
                input: Input::Tokens(ids),
                start: (index * CHUNK) as u32,
                blocks: &blocks,
                sample: None,
                logits: Logits::All,
            };
            let vocab = backend.vocab_size();
            let ticket = backend.enqueue(&[row])?;
            logits.extend(backend.wait(ticket)?.logits.chunks(vocab).map(<[f32]>::to_vec));
        }
        Ok(logits)
    }

    /// Ends what is live, and all calls in progress, with an error; whatever comes later is an error
    /// too. Does not wait for it: dropping the engine does.
    pub fn shut_down(&self) {
        // A loop that has ended already needs no telling.
        let _ = self.send(Message::Shutdown);
    }

    /// Whether this is the thread that asks the policy: what it waited for here would never come.
    pub fn is_own_loop(&self) -> bool {
        let id = std::thread::current().id();
        self.thread.as_ref().is_some_and(|thread| thread.thread().id() == id)
    }

    fn send(&self, message: Message) -> Result<(), EngineError> {
        lock(&self.submitter).engine.send(message).map_err(|_| EngineError::Stopped)
    }

    fn ask<T>(&self, message: impl FnOnce(Sender<T>) -> Message) -> Result<T, EngineError> {
        let (reply, answer): (Sender<T>, Receiver<T>) = channel();
        self.send(message(reply))?;
        answer.recv().map_err(|_| EngineError::Stopped)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shut_down();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("model", &self.model.name()).field("workers", &self.workers).finish()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
