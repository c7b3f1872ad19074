//! The virtual-time driver: the same scheduler as on real workers, under a clock that jumps.
//!
//! The loop, in six steps: find the next instant (an arrival or something planned); collect all
//! events of it; give them to the scheduler; carry out its actions, which plan more; let the
//! watcher look; until nothing is left.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvrelay_core::cluster::WorkerId;
use kvrelay_core::event::{Action, Done, EndedRow, Event, Progress, TransferId};
use kvrelay_core::latency::LatencyModel;
use kvrelay_core::policy::{Policy, PolicyFault};
use kvrelay_core::record::{Detail, FinishReason, Log};
use kvrelay_core::request::{Request, RequestId, Source};
use kvrelay_core::scheduler::Scheduler;
use kvrelay_core::step::{Run, Seq};
use kvrelay_core::time::{PicoClock, Picos, Time};
use kvrelay_core::watch::Watch;

use crate::cluster::{Neighbours, SimCluster, SimWorker};
use crate::queue::{Planned, Queue};
use crate::run::{Asking, SimRun, event_time, has_prefill};
use crate::transfer::{LastChunk, parts};
use crate::wires::Wires;

/// Something that goes wrong on purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Injection {
    /// The client of the `n`-th arrival (from 0) goes away.
    Cancel(u64),
    /// A worker is lost.
    WorkerDown(WorkerId),
    /// A worker is back.
    WorkerUp(WorkerId),
    /// The transfers under way fail; `quiesced` is whether their writers have stopped by then.
    FailTransfers {
        /// See [`Event::Failed`].
        quiesced: bool,
    },
}

/// How to simulate.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Seed of the policy's random numbers.
    pub seed: u64,
    /// Tell scheduler and policy the true output lengths (as `max_tokens`).
    pub oracle: bool,
    /// Ask the latency model for every step alone and name every KV block: slower, the same records.
    pub single_steps: bool,
    /// End there and cut off what is live; drain when `None`.
    pub until: Option<Time>,
    /// Faults, at their times.
    pub injections: Vec<(Time, Injection)>,
    /// What to log beside the requests.
    pub detail: Detail,
    /// Count the scheduler's books anew after every instant.
    pub check_integrity: bool,
}

/// Why a simulation has no result.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// The policy failed or answered what cannot be done.
    #[error(transparent)]
    Policy(#[from] PolicyFault),
    /// Requests are left that nothing will ever move.
    #[error(
        "the policy left {num_live} requests with nothing under way at {at:.3} s; the first is request {first}",
        at = .at.as_secs_f64()
    )]
    Stalled {
        /// Requests that are left.
        num_live: usize,
        /// The first of them.
        first: u64,
        /// When the last thing happened.
        at: Time,
    },
    /// It goes on for longer than its clock can count.
    #[error("the run goes on beyond {limit:.0} s (213 days), with {num_live} requests left: it is far too slow for its load", limit = Time::LONGEST.as_secs_f64())]
    TooLong {
        /// Requests that are left.
        num_live: usize,
    },
    /// The watcher ended it.
    #[error("interrupted")]
    Interrupted,
    /// The scheduler's books do not balance.
    #[error(transparent)]
    Integrity(#[from] kvrelay_core::kv::IntegrityError),
}

/// What a simulation leaves behind.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// Records.
    pub log: Log,
    /// When the last thing happened.
    pub end: Time,
    /// Instants at which something happened.
    pub num_instants: u64,
}

/// Instants between two looks of the watcher.
const LOOK_EVERY: u64 = 512;

/// So many instants with nothing but wake-ups mean that a policy wakes itself for nothing.
const MAX_IDLE_INSTANTS: u64 = 100_000;

/// Runs in progress, by worker: the driver's, and what policies look at.
#[derive(Clone, Default)]
struct Runs(Arc<Mutex<Vec<Vec<SimRun>>>>);

impl Runs {
    fn lock(&self) -> MutexGuard<'_, Vec<Vec<SimRun>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn run_named(runs: &mut [SimRun], seq: Seq) -> Option<&mut SimRun> {
    runs.iter_mut().find(|run| run.seq == seq)
}

impl Progress for Runs {
    fn steps_done(&self, worker: WorkerId, seq: Seq, now: Time) -> u32 {
        let mut runs = self.lock();
        run_named(&mut runs[worker.index()], seq).map_or(0, |run| run.steps_done(now).0)
    }
}

fn run_ends(worker: WorkerId, run: &SimRun) -> Planned {
    Planned::RunEnds { worker, seq: run.seq, version: run.version }
}

struct Worker {
    latency: Arc<dyn LatencyModel>,
    clock: PicoClock,
    /// When each stage of a pipeline is done with what it has; empty where there is one.
    stages_free: Vec<Picos>,
    /// Its new role is ready then.
    ready_at: Time,
}

struct Driver<'a> {
    cluster: &'a SimCluster,
    options: &'a Options,
    source: &'a mut dyn Source,
    queue: Queue,
    workers: Vec<Worker>,
    runs: Runs,
    wires: Wires,
    /// Per arrival: true output length, tokens produced.
    outputs: Vec<(u32, u32)>,
    over: u64,
}

/// Runs `source` through `cluster` under `policy` until all is done.
pub fn simulate(
    cluster: &SimCluster,
    source: &mut dyn Source,
    policy: Box<dyn Policy>,
    options: &Options,
    watch: &mut dyn Watch,
) -> Result<Simulation, SimError> {
    let mut scheduler = Scheduler::new(cluster.setup(options.single_steps), policy);
    scheduler.begin(Time::ZERO, options.seed)?;
    let mut driver = Driver::new(cluster, source, options);
    scheduler.watch_progress(Box::new(driver.runs.clone()));
    scheduler.log_detail(options.detail);
    let (mut events, mut actions) = (Vec::new(), Vec::new());
    let (mut now, mut num_instants, mut num_idle) = (Time::ZERO, 0u64, 0u64);
    while let Some(next) =
        driver.next_instant().filter(|next| options.until.is_none_or(|until| *next <= until))
    {
        if next > Time::LONGEST {
            return Err(SimError::TooLong { num_live: scheduler.num_live() });
        }
        driver.collect(next, &mut events);
        if events.is_empty() {
            // The planned end of a run that was cut since.
            continue;
        }
        now = next;
        let woken_only = events.iter().all(|event| matches!(event, Event::Wake));
        num_idle = if woken_only { num_idle + 1 } else { 0 };
        scheduler.handle(now, &events, &mut actions)?;
        events.clear();
        for action in actions.drain(..) {
            driver.carry_out(now, action);
        }
        if options.check_integrity {
            scheduler.check_integrity()?;
        }
        num_instants += 1;
        if num_idle == MAX_IDLE_INSTANTS
            && let Some(first) = scheduler.first_live()
        {
            return Err(SimError::Stalled { num_live: scheduler.num_live(), first: first.0, at: now });
        }
        if num_instants.is_multiple_of(LOOK_EVERY)
            && watch.look(driver.outputs.len() as u64, driver.over, now).is_break()
        {
            return Err(SimError::Interrupted);
        }
    }
    if options.until.is_none()
        && let Some(first) = scheduler.stalled()
    {
        return Err(SimError::Stalled { num_live: scheduler.num_live(), first: first.0, at: now });
    }
    if options.check_integrity && options.until.is_none() {
        scheduler.check_idle()?;
    }
    let end = options.until.unwrap_or(now);
    let under_way = driver.under_way(end);
    Ok(Simulation { log: scheduler.into_log(end, &under_way), end, num_instants })
}

impl<'a> Driver<'a> {
    fn new(cluster: &'a SimCluster, source: &'a mut dyn Source, options: &'a Options) -> Driver<'a> {
        let mut queue = Queue::default();
        // The policy is asked for roles before the first arrival.
        queue.push(Time::ZERO, Planned::Wake);
        for (at, injection) in &options.injections {
            queue.push(*at, Planned::Inject(injection.clone()));
        }
        let worker = |worker: &SimWorker| Worker {
            latency: Arc::clone(&worker.latency),
            clock: PicoClock::default(),
            stages_free: vec![Picos::ZERO; if worker.stages > 1 { worker.stages as usize } else { 0 }],
            ready_at: Time::ZERO,
        };
        Driver {
            cluster,
            options,
            source,
            queue,
            workers: cluster.workers.iter().map(worker).collect(),
            runs: Runs(Arc::new(Mutex::new(vec![Vec::new(); cluster.workers.len()]))),
            wires: Wires::new(&cluster.links),
            outputs: Vec::new(),
            over: 0,
        }
    }

    /// When the next thing happens; `None` once all is over, even if a policy wants to be woken on.
    fn next_instant(&mut self) -> Option<Time> {
        let all_over = self.over == self.outputs.len() as u64 && self.source.next_at().is_none();
        if all_over && self.queue.only_idle() {
            return None;
        }
        [self.source.next_at(), self.queue.next_at()].into_iter().flatten().min()
    }

    fn collect(&mut self, now: Time, events: &mut Vec<Event>) {
        while let Some(planned) = self.queue.pop_due(now) {
            match planned {
                Planned::RunEnds { worker, seq, version } => self.run_ends(now, worker, seq, version, events),
                Planned::StageFree { worker, seq } => events.push(Event::Ready { worker, seq }),
                Planned::TransferEnds { id } if self.wires.remove(id) => {
                    events.push(Event::Transferred { id })
                }
                Planned::TransferEnds { .. } => {}
                Planned::Flows => {
                    let ended = self.wires.take_ended(now, &mut self.queue);
                    events.extend(ended.into_iter().map(|id| Event::Transferred { id }));
                }
                Planned::TransferFails { id, quiesced } => events.push(Event::Failed { id, quiesced }),
                Planned::Wake => events.push(Event::Wake),
                Planned::Inject(injection) => self.inject(now, injection, events),
            }
        }
        while self.source.next_at().is_some_and(|at| at <= now) {
            self.arrive(events);
        }
    }

    fn arrive(&mut self, events: &mut Vec<Event>) {
        let arrival = self.source.pull().expect("an arrival that is due");
        let id = RequestId(self.outputs.len() as u64);
        let most = if self.options.oracle { arrival.output_tokens } else { arrival.max_tokens };
        self.outputs.push((arrival.output_tokens.min(most), 0));
        let block_tokens = self.cluster.limits.block_tokens;
        events.push(Event::Arrived(Request {
            id,
            arrival: arrival.at,
            prompt_tokens: arrival.prompt_tokens,
            max_tokens: most,
            priority: arrival.priority,
            slo: arrival.slo,
            class: arrival.class,
            prefix: arrival.content.block_hashes(arrival.prompt_tokens, block_tokens),
        }));
    }

    fn run_ends(&mut self, now: Time, id: WorkerId, seq: Seq, version: u32, events: &mut Vec<Event>) {
        let run = {
            let runs = &mut self.runs.lock()[id.index()];
            let ended = runs.iter().position(|run| run.seq == seq && run.version == version);
            ended.map(|index| runs.remove(index))
        };
        let Some(run) = run else { return };
        events.push(Event::Done(self.done(id, run)));
        if self.workers[id.index()].stages_free.is_empty() {
            events.push(Event::Ready { worker: id, seq });
        }
        self.neighbours_change(now, id);
    }

    /// What a run has yielded, now that it is over.
    fn done(&mut self, id: WorkerId, run: SimRun) -> Done {
        run.finish(&mut self.workers[id.index()].clock);
        let steps = run.steps();
        let mut emitted = Vec::with_capacity(run.rows.len());
        let mut ended = Vec::with_capacity(1);
        for (index, row) in run.rows.iter().enumerate() {
            let count = if row.decode { steps } else { u32::from(row.want_logits) };
            let (output, produced) = &mut self.outputs[row.request.0 as usize];
            *produced += count;
            if *produced >= *output && count > 0 {
                // A workload's length is where the model would have stopped.
                ended.push(EndedRow {
                    row: index as u32,
                    reason: FinishReason::Length,
                    content: Arc::default(),
                });
            }
            emitted.push(count);
        }
        Done { worker: id, seq: run.seq, stretches: run.stretches, emitted, ended }
    }

    /// The steps that ended at or before `at` of the runs still in progress then.
    fn under_way(&mut self, at: Time) -> Vec<Done> {
        let runs = std::mem::take(&mut *self.runs.lock());
        let of_worker = |(index, runs): (usize, Vec<SimRun>)| {
            runs.into_iter().map(move |run| (WorkerId(index as u32), run))
        };
        let started = |(id, run): (WorkerId, SimRun)| Some(self.done(id, run.up_to(at)?));
        runs.into_iter().enumerate().flat_map(of_worker).filter_map(started).collect()
    }

    fn inject(&mut self, now: Time, injection: Injection, events: &mut Vec<Event>) {
        match injection {
            Injection::Cancel(index) if index < self.outputs.len() as u64 => {
                events.push(Event::Cancelled(RequestId(index)));
            }
            Injection::Cancel(_) => {}
            Injection::WorkerUp(worker) => events.push(Event::WorkerUp { worker }),
            Injection::WorkerDown(id) => {
                self.workers[id.index()].stages_free.fill(Picos::ZERO);
                let lost = std::mem::take(&mut self.runs.lock()[id.index()]);
                // Only a run that is alone has several steps.
                let steps_delivered =
                    lost.first().map_or(0, |run| run.steps_done(now).0.min(run.steps() - 1));
                for row in lost.iter().flat_map(|run| run.rows.iter()).filter(|row| row.decode) {
                    self.outputs[row.request.0 as usize].1 += steps_delivered;
                }
                events.push(Event::WorkerDown { worker: id, steps_delivered });
                self.neighbours_change(now, id);
            }
            Injection::FailTransfers { quiesced } => {
                for id in self.wires.under_way() {
                    self.wires.stop(now, id, &mut self.queue);
                    events.push(Event::Failed { id, quiesced });
                }
            }
        }
    }

    fn carry_out(&mut self, now: Time, action: Action) {
        match action {
            Action::Run { worker, seq, run } => self.start_run(now, worker, seq, run),
            Action::Cut { worker: id, seq } => {
                if let Some(run) = run_named(&mut self.runs.lock()[id.index()], seq) {
                    run.cut(now);
                    self.queue.push(run.end(), run_ends(id, run));
                }
            }
            Action::Transfer { id, request, from, to, num_blocks, during, .. } => {
                let chunk = during.map(|seq| self.last_chunk(from, seq, request, num_blocks));
                self.start_transfer(now, id, (from, to), num_blocks, chunk);
            }
            Action::Abort { id } => {
                // One that has failed already confirms that its writer has stopped.
                self.wires.stop(now, id, &mut self.queue);
                self.queue.push(now, Planned::TransferFails { id, quiesced: true });
            }
            Action::WakeAt(at) => self.queue.push(at, Planned::Wake),
            Action::Finish(id) | Action::Refuse(id) => {
                self.over += 1;
                self.source.completed(id.0, now);
            }
            Action::SetRole { worker, .. } => {
                self.workers[worker.index()].ready_at = now + self.cluster.delays.role_switch;
            }
        }
    }

    fn last_chunk(&self, worker: WorkerId, seq: Seq, request: RequestId, num_blocks: u32) -> LastChunk {
        let mut runs = self.runs.lock();
        let run = run_named(&mut runs[worker.index()], seq).expect("the run that computes a prompt is known");
        let row = run.rows.iter().find(|row| row.request == request).expect("and holds it");
        let SimCluster { limits, kv_bytes_per_token, .. } = self.cluster;
        LastChunk::of(row, num_blocks, limits.block_tokens, *kv_bytes_per_token, (run.start(), run.end()))
    }

    fn start_transfer(
        &mut self,
        now: Time,
        id: TransferId,
        (from, to): (WorkerId, WorkerId),
        num_blocks: u32,
        chunk: Option<LastChunk>,
    ) {
        let SimCluster { limits, kv_bytes_per_token, layer_groups, conversion, .. } = self.cluster;
        let bytes = u64::from(num_blocks) * u64::from(limits.block_tokens) * kv_bytes_per_token;
        let mut parts = parts(now, bytes as f64, *layer_groups, chunk);
        if let Some(conversion) = conversion {
            conversion.delay(from, to, &mut parts);
        }
        self.wires.begin(now, id, (from, to), parts, &mut self.queue);
    }

    fn start_run(&mut self, now: Time, id: WorkerId, seq: Seq, run: Run) {
        let rows = run.step.rows;
        let left = |request: RequestId| {
            let (output, produced) = self.outputs[request.0 as usize];
            output.saturating_sub(produced).max(1)
        };
        let decodes = rows.iter().filter(|row| row.decode).map(|row| left(row.request)).min();
        let steps = decodes.map_or(1, |decodes| decodes.min(run.repeat));
        let slowdown = self.cluster.neighbours.as_ref().map_or(1.0, |neighbours| {
            let others = self.num_busy(neighbours, neighbours.machines[id.index()]);
            neighbours.slowdown(has_prefill(&rows), others)
        });
        let worker = &mut self.workers[id.index()];
        let asking = Asking { model: worker.latency.as_ref(), single_steps: self.options.single_steps };
        let mut planned = SimRun::plan(seq, rows, steps, asking, slowdown, worker.clock.start(now));
        let not_ready = worker.ready_at.saturating_since(now);
        planned.delay(Picos::from(self.cluster.delays.decision) + Picos::from(not_ready));
        if !worker.stages_free.is_empty() {
            planned.pass_through(&mut worker.stages_free);
            self.queue.push(event_time(worker.stages_free[0]), Planned::StageFree { worker: id, seq });
        }
        self.queue.push(planned.end(), run_ends(id, &planned));
        self.runs.lock()[id.index()].push(planned);
        self.neighbours_change(now, id);
    }

    /// Workers of a machine that compute.
    fn num_busy(&self, neighbours: &Neighbours, machine: u32) -> u32 {
        let runs = self.runs.lock();
        let there = neighbours.machines.iter().zip(runs.iter()).filter(|(on, _)| **on == machine);
        there.filter(|(_, runs)| !runs.is_empty()).count() as u32
    }

    /// A worker has begun or ended a run: those beside it are slower or faster from now on.
    fn neighbours_change(&mut self, now: Time, id: WorkerId) {
        let cluster = self.cluster;
        let Some(neighbours) = &cluster.neighbours else { return };
        let machine = neighbours.machines[id.index()];
        let busy = self.num_busy(neighbours, machine);
        for index in (0..self.workers.len()).filter(|index| *index != id.index()) {
            if neighbours.machines[index] != machine {
                continue;
            }
            let other = WorkerId(index as u32);
            let mut runs = self.runs.lock();
            let worker = &self.workers[index];
            let asking = Asking { model: worker.latency.as_ref(), single_steps: self.options.single_steps };
            for run in &mut runs[index] {
                run.slow_down(now, neighbours.slowdown(has_prefill(&run.rows), busy - 1), asking);
                self.queue.push(run.end(), run_ends(other, run));
            }
        }
    }
}
