//! The engine, as `kvrelay.Engine` wraps it: requests in, pieces out, workloads run.

use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use kvrelay_core::scheduler::Limits;
use kvrelay_core::time::Time;
use kvrelay_engine::{EngineConfig, EngineError, Numerics, Output, RunOptions, Submission};
use kvrelay_model::{ChatMessage, Model, ModelError, SamplingParams};
use numpy::PyArray2;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::door::{Doorkeeper, LOOK_EVERY};
use crate::objectives::slo_from;
use crate::policy::policy_from;
use crate::result::Result;
use crate::workload::Workload;
use crate::{door, error};

/// A model on workers of this machine.
#[pyclass(frozen, module = "kvrelay._core")]
pub(crate) struct Engine {
    /// `None` once closed.
    engine: Mutex<Option<Arc<kvrelay_engine::Engine>>>,
    model: Arc<Model>,
    process: door::Process,
}

/// A request under way.
#[pyclass(frozen, module = "kvrelay._core")]
pub(crate) struct Handle {
    handle: ManuallyDrop<Arc<kvrelay_engine::Handle>>,
    process: door::Process,
}

/// What a request gives: token ids and text, and at the end its record as a one-row result.
#[pyclass(frozen, get_all, module = "kvrelay._core")]
pub(crate) struct Piece {
    /// Token ids since the last piece.
    ids: Vec<u32>,
    /// Text that is certain by now.
    text: String,
    /// Whether nothing more will come.
    finished: bool,
    /// At the end: `"stop"` or `"length"`, or how it ended otherwise.
    reason: Option<String>,
    /// At the end: how it ended.
    status: Option<&'static str>,
    /// At the end: its milestones.
    record: Option<Py<Result>>,
}

impl Piece {
    fn new(py: Python<'_>, output: Output) -> PyResult<Piece> {
        Ok(match output {
            Output::Token { ids, text } => {
                Piece { ids, text, finished: false, reason: None, status: None, record: None }
            }
            Output::Finished { record, reason } => Piece {
                ids: Vec::new(),
                text: String::new(),
                finished: true,
                reason: reason
                    .map(|reason| reason.name().to_owned())
                    .or_else(|| record.reason.as_deref().map(str::to_owned)),
                status: Some(record.status.name()),
                record: Some(Py::new(py, Result::of_one(*record))?),
            },
        })
    }
}

/// Role, device, threads, cores, KV blocks.
type WorkerRow = (&'static str, String, usize, Vec<usize>, u32);

fn model_error(py: Python<'_>, error: &ModelError) -> PyErr {
    error::raise(py, "ModelError", error)
}

fn engine_error(py: Python<'_>, fault: EngineError) -> PyErr {
    match fault {
        EngineError::Policy(fault) => error::policy(py, fault),
        EngineError::Model(fault) => model_error(py, &fault),
        EngineError::Config { .. } | EngineError::NoCuda { .. } => error::config(py, fault),
        EngineError::Request { .. } => error::raise(py, "RequestError", fault),
        EngineError::DeviceMemory { ref device, needed, free, .. } => {
            let numbers = PyDict::new(py);
            let filled = numbers
                .set_item("device", device)
                .and_then(|()| numbers.set_item("needed", needed))
                .and_then(|()| numbers.set_item("free", free));
            match filled {
                Ok(()) => error::raise_with(py, "EngineError", fault, &numbers),
                Err(error) => error,
            }
        }
        EngineError::Stalled { .. } => error::raise(py, "StalledError", fault),
        EngineError::Integrity(_) => error::raise(py, "IntegrityError", fault),
        fault => error::raise(py, "EngineError", fault),
    }
}

#[pymethods]
impl Engine {
    /// Loads a model and starts its workers.
    #[new]
    #[pyo3(signature = (path, topology, policy, device, numerics, threads_per_worker, pin, kv_blocks, kv_memory, block_tokens, max_batch, max_prefill_tokens, max_model_len, prefix_caching, seed))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        topology: &str,
        policy: &Bound<'_, PyAny>,
        device: &str,
        numerics: &str,
        threads_per_worker: Option<usize>,
        pin: bool,
        kv_blocks: Option<u32>,
        kv_memory: Option<u64>,
        block_tokens: u32,
        max_batch: u32,
        max_prefill_tokens: u32,
        max_model_len: Option<u32>,
        prefix_caching: bool,
        seed: u64,
    ) -> PyResult<Engine> {
        let mut config = EngineConfig::new(topology.parse().map_err(|error| error::config(py, error))?);
        config.numerics = match numerics {
            "fast" => Numerics::Fast,
            "invariant" => Numerics::Invariant,
            _ => return Err(error::config(py, format!("numerics {numerics:?}; known: fast, invariant"))),
        };
        config.device = device.parse().map_err(|error| engine_error(py, error))?;
        config.threads_per_worker = threads_per_worker;
        config.pin = pin;
        config.kv_blocks = kv_blocks;
        config.kv_memory = kv_memory;
        config.limits =
            Limits { block_tokens, max_batch, max_prefill_tokens, max_model_len, ..config.limits };
        config.prefix_caching = prefix_caching;
        config.seed = seed;
        // The loop keeps a thread state, so that a policy's call costs no new one.
        config.around_loop = Some(Box::new(|body| Python::attach(|py| py.detach(body))));
        let policy = policy_from(policy)?;
        let model = py.detach(|| Model::load(&path)).map_err(|error| model_error(py, &error))?;
        let model = Arc::new(model);
        let made = py.detach(|| kvrelay_engine::Engine::new(Arc::clone(&model), config, policy));
        let engine = made.map_err(|error| engine_error(py, error))?;
        Ok(Engine { engine: Mutex::new(Some(Arc::new(engine))), model, process: door::Process::this() })
    }

    /// The model's name.
    #[getter]
    fn model_name(&self) -> &str {
        self.model.name()
    }

    /// Token ids of a text.
    #[pyo3(signature = (text, add_special=true))]
    fn tokenize(&self, py: Python<'_>, text: &str, add_special: bool) -> PyResult<Vec<u32>> {
        self.process.check(py)?;
        self.model.tokenizer().encode(text, add_special).map_err(|error| model_error(py, &error))
    }

    /// The text of token ids.
    fn detokenize(&self, py: Python<'_>, ids: Vec<u32>) -> PyResult<String> {
        self.process.check(py)?;
        let vocab = self.model.config().vocab_size;
        if let Some(index) = ids.iter().position(|id| *id as usize >= vocab) {
            let message = format!("token_ids[{index}] is {}; it must be below {vocab}", ids[index]);
            return Err(error::raise(py, "RequestError", message));
        }
        Ok(self.model.tokenizer().decode(&ids))
    }

    /// Token ids of a chat, given as (role, content) pairs, up to where the assistant answers.
    fn chat_ids(&self, py: Python<'_>, messages: Vec<(String, String)>) -> PyResult<Vec<u32>> {
        self.process.check(py)?;
        let messages: Vec<_> =
            messages.into_iter().map(|(role, content)| ChatMessage::new(role, content)).collect();
        self.model.chat_ids(&messages).map_err(|error| model_error(py, &error))
    }

    /// Hands in one request.
    #[pyo3(signature = (prompt, max_tokens, temperature, top_k, top_p, seed, stop, ignore_eos, slo, priority))]
    fn submit(
        &self,
        py: Python<'_>,
        prompt: Vec<u32>,
        max_tokens: u32,
        temperature: f32,
        top_k: i64,
        top_p: f32,
        seed: u64,
        stop: Vec<String>,
        ignore_eos: bool,
        slo: Option<Bound<'_, PyAny>>,
        priority: i32,
    ) -> PyResult<Handle> {
        let engine = self.open(py)?;
        let submission = Submission {
            prompt,
            max_tokens,
            sampling: SamplingParams { temperature, top_k, top_p, seed },
            stop,
            ignore_eos,
            slo: slo_from(slo.as_ref())?,
            priority,
            ..Submission::default()
        };
        let handle = py.detach(|| engine.submit(submission)).map_err(|error| match error {
            // A sampling parameter or a length: this request's own fault.
            EngineError::Model(error) => error::raise(py, "RequestError", error),
            error => engine_error(py, error),
        })?;
        Ok(Handle { handle: ManuallyDrop::new(Arc::new(handle)), process: self.process })
    }

    /// Runs a workload in real time.
    #[pyo3(signature = (workload, policy, seed, until, progress))]
    fn run(
        &self,
        py: Python<'_>,
        workload: &Workload,
        policy: Option<&Bound<'_, PyAny>>,
        seed: u64,
        until: Option<f64>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Result> {
        let engine = self.open(py)?;
        let policy = policy.map(policy_from).transpose()?;
        let options = RunOptions { seed, until: until.map(Time::from_secs_f64), ..RunOptions::default() };
        let source = workload.0.source();
        let mut doorkeeper = Doorkeeper::new(progress);
        let ended = py.detach(|| engine.run(source, policy, options, &mut doorkeeper));
        match (ended, doorkeeper.raised) {
            (Err(EngineError::Interrupted), Some(raised)) => Err(raised),
            (Err(error), _) => Err(engine_error(py, error)),
            (Ok(run), _) => Ok(Result::new(run.log, workload.0.class_names.clone())),
        }
    }

    /// Logits after every token of a sequence, computed apart from all requests: float32
    /// `[len(ids), vocabulary]`.
    fn logits<'py>(&self, py: Python<'py>, ids: Vec<u32>) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let engine = self.open(py)?;
        let logits = py.detach(|| engine.logits(&ids)).map_err(|error| engine_error(py, error))?;
        Ok(PyArray2::from_vec2(py, &logits)?)
    }

    /// Per worker: role, device, threads, cores, KV blocks.
    fn workers(&self, py: Python<'_>) -> PyResult<Vec<WorkerRow>> {
        let engine = self.open(py)?;
        let workers = py.detach(|| engine.workers());
        Ok(workers
            .into_iter()
            .map(|worker| (worker.role.name(), worker.device, worker.threads, worker.cores, worker.kv_blocks))
            .collect())
    }

    /// Bytes of KV that a token takes, and the longest prompt and output together, in tokens.
    fn capacity(&self, py: Python<'_>) -> PyResult<(u64, u32)> {
        let engine = self.open(py)?;
        Ok((engine.belief().kv_bytes_per_token, engine.max_model_len()))
    }

    /// Raises when the books of KV blocks do not balance.
    fn check_integrity(&self, py: Python<'_>) -> PyResult<()> {
        let engine = self.open(py)?;
        py.detach(|| engine.check_integrity()).map_err(|error| engine_error(py, error))
    }

    /// Times that a policy failed while serving, and `fcfs` decided instead.
    fn num_policy_faults(&self, py: Python<'_>) -> PyResult<u64> {
        let engine = self.open(py)?;
        Ok(py.detach(|| engine.policy_faults()).0)
    }

    /// Stops the workers; what is live ends with an error.
    fn close(&self, py: Python<'_>) {
        if self.process.is_this() {
            let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
            py.detach(|| {
                // Calls in progress own it too: they are to end now, and the last one joins it.
                if let Some(engine) = &engine {
                    engine.shut_down();
                }
                drop(engine);
            });
        }
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}

/// The engine during a call. Where it was closed meanwhile this is its last owner, and joins its
/// loop, which may need the interpreter's lock for its policy: so it lets go of that lock first.
struct Open(Option<Arc<kvrelay_engine::Engine>>);

impl std::ops::Deref for Open {
    type Target = kvrelay_engine::Engine;

    fn deref(&self) -> &kvrelay_engine::Engine {
        self.0.as_deref().expect("taken when it is dropped, not before")
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let engine = self.0.take();
        Python::attach(|py| py.detach(|| drop(engine)));
    }
}

impl Engine {
    fn open(&self, py: Python<'_>) -> PyResult<Open> {
        self.process.check(py)?;
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let engine = engine.ok_or_else(|| error::raise(py, "EngineError", "the engine is closed"))?;
        if engine.is_own_loop() {
            let message = "a policy called the engine that asks it: it would wait for itself";
            return Err(error::raise(py, "EngineError", message));
        }
        Ok(Open(Some(engine)))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let engine = self.engine.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if !self.process.is_this() {
            // A forked child has none of the threads that this would wait for.
            std::mem::forget(engine);
        } else if engine.is_some() {
            // Joining the loop while holding the lock that its policy needs would never end.
            Python::attach(|py| py.detach(|| drop(engine)));
        }
    }
}

#[pymethods]
impl Handle {
    /// Its number.
    #[getter]
    fn id(&self) -> u64 {
        self.handle.id().0
    }

    /// Waits for the next piece; `None` after the last.
    fn next(&self, py: Python<'_>) -> PyResult<Option<Piece>> {
        self.process.check(py)?;
        loop {
            match py.detach(|| self.handle.recv_timeout(LOOK_EVERY)) {
                Poll::Ready(Some(output)) => return Piece::new(py, output).map(Some),
                Poll::Ready(None) => return Ok(None),
                Poll::Pending => py.check_signals()?,
            }
        }
    }

    /// The same as an awaitable, for any running event loop.
    fn next_async<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.process.check(py)?;
        door::check_awaits(py)?;
        let handle = Arc::clone(&*self.handle);
        pyo3_async_runtimes::tokio::future_into_py(py, async move {
            let output = handle.next().await;
            Python::attach(|py| output.map(|output| Piece::new(py, output)).transpose())
        })
    }

    /// Ends the request.
    fn cancel(&self) {
        if self.process.is_this() {
            self.handle.cancel();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // A forked child has nobody to tell that the request is not wanted any more.
        if self.process.is_this() {
            // SAFETY: dropped here alone, and never used after.
            unsafe { ManuallyDrop::drop(&mut self.handle) }
        }
    }
}
