"""
The compiled part of kvrelay. Use the `kvrelay` package, not this module.
"""

from _typeshed import Incomplete, SupportsGetItem, SupportsLenAndGetItem
from os import PathLike
from typing import Any, SupportsFloat, SupportsIndex, final

@final
class BuiltIn:
    """
    A built-in policy with its parameters; `kvrelay.policies` gives these their names.
    """
    def __new__(cls, /, name: str, token_budget: SupportsIndex | None = None, chunk_tokens: SupportsIndex | None = None) -> BuiltIn:
        """
        The built-in called `name`. `token_budget` is `chunked`'s, `chunk_tokens` `goodput`'s.
        """
    @property
    def name(self, /) -> str:
        """
        Its name.
        """

@final
class Cluster:
    """
    Workers of a topology, with their latency, KV capacity and link.
    """
    def __new__(cls, /, topology: str, model: str, gpu: str, latency_spec: str | LatencyTable | Any, parallel: SupportsLenAndGetItem[tuple[SupportsIndex, SupportsIndex]], link_name: str | None, link_bandwidth: SupportsFloat | SupportsIndex | None, link_latency: SupportsFloat | SupportsIndex, network: Incomplete | None, hand_over: tuple[SupportsIndex, SupportsFloat | SupportsIndex | None], delays: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex], kv_tokens: SupportsIndex | None, block_tokens: SupportsIndex, max_batch: SupportsIndex, max_prefill_tokens: SupportsIndex, max_model_len: SupportsIndex | None, prefix_caching: bool) -> Cluster:
        """
        `parallel` is per role: prefill, decode, mixed. `kv_tokens` replaces the capacity of every worker.
        """
    def decode_time(self, /, num_decode: SupportsIndex, context_tokens: SupportsIndex, role: str) -> float:
        """
        Seconds that a decode step takes on a worker of `role`.
        """
    @property
    def farthest(self, /) -> tuple[int, int]:
        """
        The largest step that simulations asked the table for beyond what was measured: tokens, and
        tokens of context; zero where none was.
        """
    @property
    def kv_tokens(self, /) -> list[int]:
        """
        KV capacity of each worker, in tokens.
        """
    @property
    def link_bandwidth(self, /) -> float:
        """
        Bytes per second that a KV transfer has at least, while it is alone.
        """
    @staticmethod
    def measured(topology: str, table: LatencyTable, link: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex], slowdowns: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex], kv_bytes_per_token: SupportsIndex, kv_blocks: SupportsIndex, block_tokens: SupportsIndex, max_batch: SupportsIndex, max_prefill_tokens: SupportsIndex, max_model_len: SupportsIndex, prefix_caching: bool) -> Cluster:
        """
        A cluster like an engine: every step by `table`, KV over a measured link (bandwidth, latency),
        all workers on one machine, where each slows the others down (prefill, decode).
        """
    @property
    def num_gpus(self, /) -> int:
        """
        GPUs over all workers.
        """
    def prefill_time(self, /, tokens: SupportsIndex, role: str) -> float:
        """
        Seconds that `tokens` prompt tokens take on a worker of `role`, alone and unloaded.
        """
    def step_time(self, /, sums: tuple[SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex], role: str) -> float:
        """
        Seconds that a step with these sums takes on a worker of `role`, alone.
        """
    @property
    def topology(self, /) -> str:
        """
        The topology, as it is written.
        """

@final
class ClusterView:
    """
    The whole cluster, as a policy sees it. Times are seconds since the run began.
    """
    def __repr__(self, /) -> str: ...
    def column(self, /, metric: str) -> Incomplete:
        """
        One of the load metrics for every worker, in order: an array of int64 `[num_workers]`.
        """
    def least_loaded(self, /, metric: str = "queued_tokens", roles: SupportsGetItem[int, str] | None = None) -> WorkerView | None:
        """
        The worker with the least of `metric` among those that are up and have one of `roles`
        (default: those that take prompts); `None` if there is none. Ties go to the first.
        """
    @property
    def now(self, /) -> float:
        """
        The instant of the decision.
        """
    @property
    def num_awaiting_room(self, /) -> int:
        """
        Requests whose KV waits for room at a decode worker.
        """
    @property
    def num_unplaced(self, /) -> int:
        """
        Admitted requests without a worker.
        """
    @property
    def num_workers(self, /) -> int:
        """
        How many workers there are.
        """
    def predict_transfer(self, /, tokens: SupportsIndex) -> float:
        """
        Seconds that moving the KV of `tokens` tokens is believed to take.
        """
    def prefix_hits(self, /, request: RequestView) -> list[int]:
        """
        Per worker, in order: prompt tokens of the request that its prefix cache holds.
        """
    def worker(self, /, index: SupportsIndex) -> WorkerView:
        """
        Worker number `index`.
        """
    @property
    def workers(self, /) -> list[WorkerView]:
        """
        All workers, in order.
        """

@final
class Engine:
    """
    A model on workers of this machine.
    """
    def __new__(cls, /, path: str | PathLike[str], topology: str, policy: Any, device: str, numerics: str, threads_per_worker: SupportsIndex | None, pin: bool, kv_blocks: SupportsIndex | None, kv_memory: SupportsIndex | None, block_tokens: SupportsIndex, max_batch: SupportsIndex, max_prefill_tokens: SupportsIndex, max_model_len: SupportsIndex | None, prefix_caching: bool, seed: SupportsIndex) -> Engine:
        """
        Loads a model and starts its workers.
        """
    def capacity(self, /) -> tuple[int, int]:
        """
        Bytes of KV that a token takes, and the longest prompt and output together, in tokens.
        """
    def chat_ids(self, /, messages: SupportsGetItem[int, tuple[str, str]]) -> list[int]:
        """
        Token ids of a chat, given as (role, content) pairs, up to where the assistant answers.
        """
    def check_integrity(self, /) -> None:
        """
        Raises when the books of KV blocks do not balance.
        """
    def close(self, /) -> None:
        """
        Stops the workers; what is live ends with an error.
        """
    @property
    def closed(self, /) -> bool:
        """
        Whether it was closed.
        """
    def detokenize(self, /, ids: SupportsGetItem[int, SupportsIndex]) -> str:
        """
        The text of token ids.
        """
    def logits(self, /, ids: SupportsGetItem[int, SupportsIndex]) -> Incomplete:
        """
        Logits after every token of a sequence, computed apart from all requests: float32
        `[len(ids), vocabulary]`.
        """
    @property
    def model_name(self, /) -> str:
        """
        The model's name.
        """
    def num_policy_faults(self, /) -> int:
        """
        Times that a policy failed while serving, and `fcfs` decided instead.
        """
    def run(self, /, workload: Workload, policy: Any | None, seed: SupportsIndex, until: SupportsFloat | SupportsIndex | None, progress: Any | None) -> Result:
        """
        Runs a workload in real time.
        """
    def submit(self, /, prompt: SupportsGetItem[int, SupportsIndex], max_tokens: SupportsIndex, temperature: SupportsFloat | SupportsIndex, top_k: SupportsIndex, top_p: SupportsFloat | SupportsIndex, seed: SupportsIndex, stop: SupportsGetItem[int, str], ignore_eos: bool, slo: Any | None, priority: SupportsIndex) -> Handle:
        """
        Hands in one request.
        """
    def tokenize(self, /, text: str, add_special: bool = True) -> list[int]:
        """
        Token ids of a text.
        """
    def workers(self, /) -> list[tuple[str, str, int, list[int], int]]:
        """
        Per worker: role, device, threads, cores, KV blocks.
        """

@final
class Handle:
    """
    A request under way.
    """
    def cancel(self, /) -> None:
        """
        Ends the request.
        """
    @property
    def id(self, /) -> int:
        """
        Its number.
        """
    def next(self, /) -> Piece | None:
        """
        Waits for the next piece; `None` after the last.
        """
    def next_async(self, /) -> Any:
        """
        The same as an awaitable, for any running event loop.
        """

@final
class LatencyTable:
    """
    Step times read off measurements; `kvrelay.LatencyTable` wraps it.
    """
    def __new__(cls, /, nodes: SupportsGetItem[int, tuple[SupportsIndex, SupportsFloat | SupportsIndex]], per_row: SupportsFloat | SupportsIndex, per_square: SupportsFloat | SupportsIndex, per_context: SupportsFloat | SupportsIndex, most_context: SupportsIndex) -> LatencyTable:
        """
        Nodes as (tokens, milliseconds), and milliseconds per row, token² and token of context.
        """
    @staticmethod
    def fit(steps: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex]], seconds: SupportsGetItem[int, SupportsFloat | SupportsIndex]) -> LatencyTable:
        """
        Fits a table to steps and their seconds.
        """
    def predict(self, /, steps: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex]]) -> list[float]:
        """
        Seconds that each step takes.
        """
    @property
    def terms(self, /) -> tuple[list[tuple[int, float]], float, float, float, int]:
        """
        Nodes, and milliseconds per row, token² and token of context, and the most context measured.
        """

@final
class Piece:
    """
    What a request gives: token ids and text, and at the end its record as a one-row result.
    """
    @property
    def finished(self, /) -> bool:
        """
        Whether nothing more will come.
        """
    @property
    def ids(self, /) -> list[int]:
        """
        Token ids since the last piece.
        """
    @property
    def reason(self, /) -> str | None:
        """
        At the end: `"stop"` or `"length"`, or how it ended otherwise.
        """
    @property
    def record(self, /) -> Result | None:
        """
        At the end: its milestones.
        """
    @property
    def status(self, /) -> str | None:
        """
        At the end: how it ended.
        """
    @property
    def text(self, /) -> str:
        """
        Text that is certain by now.
        """

@final
class RequestView:
    """
    One request, as a policy sees it: what it has produced is known, what it will produce is not.
    """
    def __repr__(self, /) -> str: ...
    @property
    def arrival(self, /) -> float:
        """
        Scheduled arrival.
        """
    @property
    def computed(self, /) -> int:
        """
        Tokens whose KV exists.
        """
    @property
    def deadline(self, /) -> float | None:
        """
        When its first token is due; `None` without a TTFT objective.
        """
    @property
    def first_token(self, /) -> float | None:
        """
        When its first token was emitted.
        """
    @property
    def generated(self, /) -> int:
        """
        Tokens emitted so far.
        """
    @property
    def id(self, /) -> int:
        """
        Its number in the run.
        """
    @property
    def is_demoted(self, /) -> bool:
        """
        Whether admission put it behind the others.
        """
    @property
    def is_started(self, /) -> bool:
        """
        Whether its KV blocks are allocated.
        """
    @property
    def max_tokens(self, /) -> int:
        """
        The most it may produce.
        """
    @property
    def pending(self, /) -> int:
        """
        Tokens to compute before the next one is emitted.
        """
    @property
    def priority(self, /) -> int:
        """
        Higher is more important.
        """
    @property
    def prompt_tokens(self, /) -> int:
        """
        Prompt length.
        """
    @property
    def slo(self, /) -> Any:
        """
        Its objectives: a `kvrelay.SLO`.
        """
    @property
    def slo_class(self, /) -> int:
        """
        The number of its SLO class, in the workload's order.
        """

@final
class Result:
    """
    Records of one run, simulated or measured, or of a window of it.
    """
    def __len__(self, /) -> int: ...
    @property
    def arrivals(self, /) -> tuple[float, float] | None:
        """
        First and last arrival in seconds.
        """
    @property
    def bounds(self, /) -> tuple[float, float] | None:
        """
        Start and end of the window in seconds; `None` of a whole run.
        """
    @property
    def class_names(self, /) -> list[str]:
        """
        Names of the SLO classes.
        """
    def counts(self, /, class_name: str | None = None) -> tuple[int, int, int, int]:
        """
        Good, offered, out, and out for want of an SLO; of one class or of all.
        """
    def distributions(self, /, percents: SupportsGetItem[int, SupportsFloat | SupportsIndex], class_name: str | None = None) -> dict[str, tuple[int, float | None, list[float | None]]]:
        """
        Per metric (ttft, held, queue, prefill, tpot, e2e, max_gap, itl): count, mean and the asked
        percentiles of the values that are defined, in seconds.
        """
    @property
    def goodput(self, /) -> float | None:
        """
        Good requests per second of makespan.
        """
    def growth(self, /) -> tuple[tuple[int, tuple[float, float, float, float], tuple[float, float, float, float], tuple[bool, bool, bool, bool]] | None, str | None]:
        """
        What arrivals found in the system: how many looked; of all requests, mean of the first and of
        the last third, growth per arrival, its ratio to its standard error; the same of the waiting ones;
        whether the run is long enough, the queue grew, would grow again, may have grown; or why that cannot be told.
        """
    def interval(self, /, metric: str, percent: SupportsFloat | SupportsIndex | None, confidence: SupportsFloat | SupportsIndex, class_name: str | None = None) -> tuple[tuple[float, float, float, int, int, float] | None, str | None] | None:
        """
        The confidence interval of `attainment`, `goodput`, or of a latency's mean or percentile; or why
        there is none. `None` when there is no such metric.
        """
    @property
    def makespan(self, /) -> float | None:
        """
        Seconds from the first arrival to the last counted event; of a window, its length.
        """
    def objectives(self, /) -> list[tuple[str, Any]]:
        """
        The distinct pairs of class name and objectives, in order of arrival.
        """
    def places(self, /) -> Incomplete | None:
        """
        Where in its workload's list each request stands, in the order of ids; `None` where that is not
        known.
        """
    def requests(self, /) -> dict:
        """
        One column a field of the requests' records, in the order of their ids. Seconds; missing
        floats are NaN, missing workers −1, a verdict on neither side −1.
        """
    def slo(self, /, id: SupportsIndex) -> Any | None:
        """
        The objectives of request `id`; `None` if there is no such request.
        """
    def steps(self, /) -> dict:
        """
        One column a field of the runs' records, in the order of their ends. Seconds.
        """
    @property
    def throughput(self, /) -> tuple[float, float] | None:
        """
        Finished requests and their output tokens per second of makespan.
        """
    def warmup(self, /) -> tuple[float, int, bool] | None:
        """
        MSER-5 over TTFT in the order of arrival: when the first request that stays arrived, how many
        with a TTFT came before it, and whether the first half of the run had an end of the warm-up.
        """
    def window(self, /, start: SupportsFloat | SupportsIndex | None = None, end: SupportsFloat | SupportsIndex | None = None) -> Result:
        """
        The requests that arrived in [start, end) seconds, with the worker runs that overlap it. An open
        start is the first arrival, an open end lies right after the last one. Gaps are pooled over the
        whole run, so a window has none.
        """

@final
class WorkerView:
    """
    One worker, as a policy sees it.
    """
    def __repr__(self, /) -> str: ...
    @property
    def available_blocks(self, /) -> int:
        """
        KV blocks that can be allocated.
        """
    @property
    def block_tokens(self, /) -> int:
        """
        Tokens a KV block holds.
        """
    def can_accept(self, /, request: RequestView) -> bool:
        """
        Whether there is room now for the KV of a request that comes to decode here.
        """
    def can_ever_hold(self, /, tokens: SupportsIndex) -> bool:
        """
        Whether its pool could hold `tokens` tokens, were they alone.
        """
    def can_start(self, /, request: RequestView) -> bool:
        """
        Whether there is room now to start the prompt of a waiting request.
        """
    @property
    def cluster(self, /) -> ClusterView:
        """
        The whole cluster.
        """
    @property
    def context_tokens(self, /) -> int:
        """
        KV tokens of decoding requests and of those on their way.
        """
    @property
    def held_blocks(self, /) -> int:
        """
        KV blocks that somebody holds.
        """
    @property
    def id(self, /) -> int:
        """
        Its index in the cluster.
        """
    @property
    def is_busy(self, /) -> bool:
        """
        Whether a run of it is in progress.
        """
    @property
    def is_up(self, /) -> bool:
        """
        Whether it is there.
        """
    @property
    def max_batch(self, /) -> int:
        """
        Requests that a step may hold.
        """
    @property
    def max_prefill_tokens(self, /) -> int:
        """
        Prompt tokens that a step may hold; one longer prompt may go alone.
        """
    @property
    def now(self, /) -> float:
        """
        The instant of the decision.
        """
    @property
    def num_blocks(self, /) -> int:
        """
        KV blocks in all.
        """
    @property
    def num_incoming(self, /) -> int:
        """
        Requests whose KV is on its way here.
        """
    @property
    def num_running(self, /) -> int:
        """
        Requests that decode.
        """
    @property
    def num_waiting(self, /) -> int:
        """
        Requests with prompt tokens to compute.
        """
    def predict_decode(self, /, num_decode: SupportsIndex | None = None, context_tokens: SupportsIndex | None = None) -> float:
        """
        Seconds that a step of `num_decode` decode rows with `context_tokens` of context together
        is believed to take here; by default the step of all that decode here now.
        """
    def predict_prefill(self, /, tokens: SupportsIndex, prefix: SupportsIndex = 0) -> float:
        """
        Seconds that `tokens` prompt tokens behind `prefix` cached ones are believed to take here,
        alone and in one step.
        """
    def prefix_hit(self, /, request: RequestView) -> int:
        """
        Prompt tokens of the request that its prefix cache holds; at most all but one.
        """
    @property
    def queued_tokens(self, /) -> int:
        """
        Prompt tokens still to compute.
        """
    @property
    def role(self, /) -> str:
        """
        `"prefill"`, `"decode"` or `"mixed"`.
        """
    @property
    def running(self, /) -> list[RequestView]:
        """
        Requests that decode, in the order in which they joined.
        """
    @property
    def waiting(self, /) -> list[RequestView]:
        """
        Requests with prompt tokens to compute, in queue order.
        """

@final
class Workload:
    """
    Arrivals, with their SLO classes.
    """
    def __len__(self, /) -> int: ...
    def at_rate(self, /, rate: SupportsFloat | SupportsIndex) -> Workload:
        """
        The same arrivals at another rate.
        """
    @property
    def classes(self, /) -> list[tuple[str, Any, int]]:
        """
        Per class: name, SLO, priority.
        """
    @staticmethod
    def closed_loop(concurrency: SupportsIndex, num_requests: SupportsIndex, think: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex], lengths: tuple[SupportsIndex | tuple[str, SupportsGetItem[int, SupportsFloat | SupportsIndex]], SupportsIndex | tuple[str, SupportsGetItem[int, SupportsFloat | SupportsIndex]], SupportsFloat | SupportsIndex | None], class_spec: tuple[str, Any | None, SupportsIndex, SupportsIndex | None], seed: SupportsIndex) -> Workload:
        """
        Requests of so many clients, each with one at a time; `think` is (mean seconds, cv).
        """
    def columns(self, /) -> dict:
        """
        Columns of equal length: arrival (s; NaN where it waits for a completion), prompt_tokens,
        output_tokens, max_tokens, slo_class (an index), priority; of sessions also session and turn; where
        prompts share prefixes hash_ids (arrays, or `None`) and tokens_per_id (0 where there are none).
        """
    @property
    def description(self, /) -> str:
        """
        What it is, in a line.
        """
    @staticmethod
    def from_records(records: SupportsGetItem[int, tuple[SupportsFloat | SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex | None, SupportsIndex | None, tuple[SupportsGetItem[int, SupportsIndex], SupportsIndex] | None]], classes: SupportsGetItem[int, tuple[str, Any | None, SupportsIndex, SupportsIndex | None]], seed: SupportsIndex) -> Workload:
        """
        The requests of a list, with the classes they name by index.
        """
    @staticmethod
    def from_trace(path: str | PathLike[str], format: str | None, unit: str | None, limit: SupportsIndex | None, slot: SupportsFloat | SupportsIndex | None, rate: SupportsFloat | SupportsIndex | None, class_spec: tuple[str, Any | None, SupportsIndex, SupportsIndex | None], seed: SupportsIndex) -> Workload:
        """
        The requests of a trace file.
        """
    @property
    def is_closed_loop(self, /) -> bool:
        """
        Whether arrivals wait for completions.
        """
    @staticmethod
    def merge(workloads: SupportsGetItem[int, Workload]) -> Workload:
        """
        All of them at once.
        """
    @staticmethod
    def preset(name: str, rate: SupportsFloat | SupportsIndex | None, num_requests: SupportsIndex, class_spec: tuple[str, Any | None, SupportsIndex, SupportsIndex | None], seed: SupportsIndex) -> Workload:
        """
        Requests like those of a published workload.
        """
    @property
    def rate(self, /) -> float | None:
        """
        Arrivals per second; `None` when all arrive at once, and for a closed loop.
        """
    def scaled_lengths(self, /, divide: SupportsIndex) -> Workload:
        """
        The same arrivals with lengths divided.
        """
    @property
    def seed(self, /) -> int:
        """
        The seed of everything made up in it.
        """
    @staticmethod
    def sessions(num_sessions: SupportsIndex, rate: SupportsFloat | SupportsIndex, turns: SupportsIndex | tuple[str, SupportsGetItem[int, SupportsFloat | SupportsIndex]], think: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex], lengths: tuple[SupportsIndex | tuple[str, SupportsGetItem[int, SupportsFloat | SupportsIndex]], SupportsIndex | tuple[str, SupportsGetItem[int, SupportsFloat | SupportsIndex]], SupportsFloat | SupportsIndex | None], class_spec: tuple[str, Any | None, SupportsIndex, SupportsIndex | None], seed: SupportsIndex) -> Workload:
        """
        Conversations of several turns; `lengths` is what a turn adds.
        """
    @property
    def span(self, /) -> float:
        """
        From first to last arrival, in seconds.
        """
    @staticmethod
    def synthetic(process: str, rate: SupportsFloat | SupportsIndex, cv: SupportsFloat | SupportsIndex | None, num_requests: SupportsIndex, lengths: tuple[SupportsIndex | tuple[str, SupportsGetItem[int, SupportsFloat | SupportsIndex]], SupportsIndex | tuple[str, SupportsGetItem[int, SupportsFloat | SupportsIndex]], SupportsFloat | SupportsIndex | None], class_spec: tuple[str, Any | None, SupportsIndex, SupportsIndex | None], seed: SupportsIndex) -> Workload:
        """
        Requests that arrive by a process: `"poisson"`, `"gamma"` (with `cv`) or `"fixed"`.
        """
    def turns(self, /) -> tuple[Incomplete, Incomplete] | None:
        """
        Of sessions: which session each request belongs to, and which of its turns it is, from 0.
        """
    @staticmethod
    def varying(law: str, parameters: SupportsGetItem[int, SupportsFloat | SupportsIndex], num_requests: SupportsIndex | None, duration: SupportsFloat | SupportsIndex | None, lengths: tuple[SupportsIndex | tuple[str, SupportsGetItem[int, SupportsFloat | SupportsIndex]], SupportsIndex | tuple[str, SupportsGetItem[int, SupportsFloat | SupportsIndex]], SupportsFloat | SupportsIndex | None], class_spec: tuple[str, Any | None, SupportsIndex, SupportsIndex | None], seed: SupportsIndex) -> Workload:
        """
        Requests at a rate that changes: `"ramp"` (from, to), `"sinusoid"` (rate, amplitude, period) or
        `"on_off"` (rates, then mean times), until so many requests or so many seconds.
        """
    @property
    def warnings(self, /) -> list[str]:
        """
        What was noticed and put right, or may surprise.
        """

def cpu() -> tuple[int, str | None]:
    """
    The cores this process may use, and the widest vector instructions that kernels use on them.
    """

def cuda() -> tuple[list[tuple[str, int, tuple[int, int], tuple[int, int]]], str | None]:
    """
    The CUDA devices that the driver lists, and why they cannot be used, if so.
    """

def gpu_names() -> list[str]:
    """
    Names of the GPU table.
    """

def model_names() -> list[str]:
    """
    Names of the model table.
    """

def num_workers(topology: str) -> int:
    """
    Workers of a topology.
    """

def preset_names() -> list[str]:
    """
    Names of the published workloads.
    """

def profile_names() -> list[str]:
    """
    Names of the published latency profiles.
    """

def replication_interval(values: SupportsGetItem[int, SupportsFloat | SupportsIndex], confidence: SupportsFloat | SupportsIndex) -> tuple[tuple[float, float, float, int, int, float] | None, str | None]:
    """
    The interval of the mean of independent replications' values, or why there is none.
    """

def requests_for_attainment(target: SupportsFloat | SupportsIndex, confidence: SupportsFloat | SupportsIndex) -> int | None:
    """
    How many requests, all of them good, the lower confidence limit of attainment needs to reach
    `target`; `None` when no number is enough.
    """

def search_rate(judge: Any, start: SupportsFloat | SupportsIndex, tolerance: SupportsFloat | SupportsIndex, ends: SupportsFloat | SupportsIndex, low: bool) -> tuple[float, float, float, float]:
    """
    Bisects for the largest rate that attains, and for the ends of its interval. `judge(rate)` says
    whether it is sustained, attained, possible. Returns the largest tried rate that attains, the
    smallest that does not, and the lower (looked for if `low`) and the upper end.
    """

def simulate(workload: Workload, cluster: Cluster, policy_object: Any, belief: str | None, seed: SupportsIndex, oracle: bool, until: SupportsFloat | SupportsIndex | None, single_steps: bool, faults: SupportsGetItem[int, tuple[SupportsIndex, SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex | None]], progress: Any | None) -> Result:
    """
    Runs a workload through a simulated cluster. The loop stays on the calling thread, without the
    GIL but for a Python policy's calls; `progress(arrived, over, seconds)` is called now and then.
    """

def __getattr__(name: str) -> Incomplete: ...
