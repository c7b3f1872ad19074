"""A real model on workers of this machine."""

from __future__ import annotations

import html
import os
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import pandas as pd

from kvrelay import _core
from kvrelay.checks import MAX_U32, MAX_U64, number, optional_whole, text, whole
from kvrelay.describe import SLO
from kvrelay.errors import ConfigError, EngineError, RequestError
from kvrelay.hub import find_model
from kvrelay.policies import PolicyLike, name_of, resolve
from kvrelay.progress import request_bar
from kvrelay.result import Result
from kvrelay.workload import Workload

if TYPE_CHECKING:
    from kvrelay.profile import Profile

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Output:
    """What a request produced.

    ``finish_reason`` is ``"stop"`` (end of sequence or a stop string) or ``"length"``.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_token_ids: list[int]
    _core: _core.Result = field(repr=False, compare=False)

    @cached_property
    def record(self) -> pd.Series:
        """Its milestones: a row of :attr:`kvrelay.Result.requests`."""
        return Result(self._core, title="request", source="measured", num_gpus=1).requests.iloc[0]

    def __repr__(self) -> str:
        return f"Output({self.text!r}, {len(self.token_ids)} tokens, {self.finish_reason})"

    def _repr_html_(self) -> str:
        ttft = float(self.record["ttft"]) * 1e3
        tpot = "" if pd.isna(self.record["tpot"]) else f", TPOT {float(self.record['tpot']) * 1e3:.1f} ms"
        numbers = f"{len(self.token_ids)} tokens, {self.finish_reason}, TTFT {ttft:.1f} ms{tpot}"
        return f"<pre style='white-space:pre-wrap'>{html.escape(self.text)}</pre><small>{numbers}</small>"


@dataclass(frozen=True)
class WorkerInfo:
    """A worker of an engine: its role, where it computes, and the KV blocks it has."""

    role: str
    device: str
    threads: int
    cores: tuple[int, ...]
    kv_blocks: int
    pid: int


class Stream:
    """The pieces of text of one request as they come: an async iterator, and a plain one.

    ``output`` is the whole :class:`Output` once the stream has ended. Leaving early cancels the request;
    one reader at a time.
    """

    def __init__(self, handle: _core.Handle, prompt: list[int]) -> None:
        self._handle = handle
        self._prompt = prompt
        self._ids: list[int] = []
        self._text: list[str] = []
        self._is_read = False
        self.output: Output | None = None

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces_async()

    def _begin_reading(self) -> None:
        if self._is_read:
            raise RequestError(
                f"the stream of request {self._handle.id} is being read already, or was left early"
            )
        self._is_read = not self.output

    async def _pieces_async(self) -> AsyncIterator[str]:
        self._begin_reading()
        try:
            while not self.output:
                piece = self._take(await self._handle.next_async())
                if piece:
                    yield piece
        finally:
            self.cancel()

    def __iter__(self) -> Iterator[str]:
        self._begin_reading()
        try:
            while not self.output:
                piece = self._take(self._handle.next())
                if piece:
                    yield piece
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends the request if it has not ended."""
        if not self.output:
            self._handle.cancel()

    def _take(self, piece: _core.Piece | None) -> str:
        if piece is None:
            raise EngineError("the engine stopped before the request was finished")
        if not piece.finished:
            self._ids += piece.ids
            self._text.append(piece.text)
            return piece.text
        if piece.status == "refused":
            raise RequestError(piece.reason or "refused")
        if piece.status != "finished":
            raise EngineError(
                f"the request ended as {piece.status}" + (f": {piece.reason}" if piece.reason else "")
            )
        self.output = Output(
            "".join(self._text), self._ids, piece.reason or "length", self._prompt, piece.record
        )
        return ""

    def __repr__(self) -> str:
        return (
            repr(self.output)
            if self.output
            else f"Stream(request {self._handle.id}, {len(self._ids)} tokens so far)"
        )


class Engine:
    """A model served by workers of this machine, under a policy.

    Parameters
    ----------
    model
        ``"smollm2-135m"`` (the demo model), a GGUF file, a folder with safetensors, or a Hugging Face
        repo id where ``huggingface_hub`` is installed.
    topology
        ``"1P1D"``, ``"2M"``, ``"1P1D1M"``, …: every worker has a KV pool of its own, and on the CPU a
        group of threads, on CUDA a stream.
    policy
        As for :func:`kvrelay.simulate`; the very same object will do.
    device
        ``"cpu"``; ``"cuda:0"``; ``"cuda"``, all CUDA devices, to which workers are dealt round; or
        ``"auto"``, CUDA where it is usable and its kernels are made for the model, else the CPU.
        :func:`kvrelay.devices` says what is usable and why the rest is not.
    numerics
        ``"fast"``, or ``"invariant"``: every token is, bit for bit, that of its request alone, whatever
        else runs.
    threads_per_worker
        Of the CPU. The machine's cores, shared evenly, by default; at most all of them. ``pin`` keeps
        each worker's threads on cores of its own, where there are enough for all.
    kv_tokens
        KV capacity of every worker. By default on the CPU 512 MiB, on CUDA what is free on the device,
        less a tenth, the weights and the buffers.
    max_batch, max_prefill_tokens, block_tokens, max_model_len, prefix_caching
        As for :class:`kvrelay.Cluster`; longer prompts are chunked.

    >>> engine = Engine("smollm2-135m", topology="1P1D")  # doctest: +SKIP
    >>> engine.generate("The capital of France is", max_tokens=8).text  # doctest: +SKIP
    ' Paris.\\n\\nThe answer is: '
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        topology: str = "1P1D",
        *,
        policy: PolicyLike = "disaggregated",
        device: str = "auto",
        numerics: str = "fast",
        threads_per_worker: int | None = None,
        pin: bool = True,
        kv_tokens: int | None = None,
        block_tokens: int = 16,
        max_batch: int = 64,
        max_prefill_tokens: int = 2048,
        max_model_len: int | None = None,
        prefix_caching: bool = True,
        seed: int = 0,
    ) -> None:
        block_tokens = whole("block_tokens", block_tokens, 1)
        kv_tokens = optional_whole("kv_tokens", kv_tokens, block_tokens, MAX_U32 * block_tokens)
        self.topology = topology
        self.policy = policy
        #: Limits on batches, as given.
        self.limits = {
            "block_tokens": block_tokens,
            "max_batch": whole("max_batch", max_batch, 1),
            "max_prefill_tokens": whole("max_prefill_tokens", max_prefill_tokens, 1),
            "prefix_caching": bool(prefix_caching),
        }
        if not isinstance(model, (str, os.PathLike)):
            raise ConfigError(f"model is {model!r}; it must be a name or a path", value=model)
        self.path = find_model(model)
        self._name = os.fspath(model)
        self._core = _core.Engine(
            self.path,
            text("topology", topology),
            resolve(policy),
            text("device", device),
            text("numerics", numerics),
            _threads(threads_per_worker),
            bool(pin),
            None if kv_tokens is None else kv_tokens // block_tokens,
            None,
            block_tokens,
            self.limits["max_batch"],
            self.limits["max_prefill_tokens"],
            optional_whole("max_model_len", max_model_len, 1),
            self.limits["prefix_caching"],
            whole("seed", seed, 0, MAX_U64),
        )
        # Also when the interpreter ends: a worker must not outlive what its policy needs.
        self._finalizer = weakref.finalize(self, self._core.close)

    @overload
    def generate(self, prompt: str, max_tokens: int = ..., **options: Any) -> Output: ...
    @overload
    def generate(self, prompt: Sequence[Any], max_tokens: int = ..., **options: Any) -> Any: ...

    def generate(self, prompt: Any, max_tokens: int = 64, **options: Any) -> Any:
        """Text for a prompt; for a list of prompts a list, served together.

        A prompt is text or token ids; a flat list of ints is one prompt. Options: ``temperature`` (0, the default, is
        greedy), ``top_k``, ``top_p``, ``seed``, ``stop`` (one string or several), ``ignore_eos``, ``slo``,
        ``priority``.

        Raises :class:`kvrelay.RequestError` for a request that cannot be served, with the numbers.
        """
        _check_prompt("prompt", prompt)
        many = not isinstance(prompt, str) and not _is_ids(prompt)
        prompts = list(prompt) if many else [prompt]
        for index, one in enumerate(prompts):
            _check_prompt(f"prompt[{index}]" if many else "prompt", one)
        streams: list[Stream] = []
        try:
            streams.extend(self._submit(one, max_tokens, options) for one in prompts)
            for stream in streams:
                for _ in stream:
                    pass
        finally:
            for stream in streams:
                stream.cancel()
        outputs = [stream.output for stream in streams]
        return outputs if many else outputs[0]

    def stream(self, prompt: Prompt, max_tokens: int = 64, **options: Any) -> Stream:
        """The pieces of text as they come, never cutting a character::

            async for piece in engine.stream("Once upon a time"):
                print(piece, end="")

        A plain ``for`` works as well. Options as for :meth:`generate`.
        """
        _check_prompt("prompt", prompt)
        return self._submit(prompt, max_tokens, options)

    def chat(
        self, messages: str | Sequence[Mapping[str, str]], max_tokens: int = 256, **options: Any
    ) -> Output:
        """The assistant's answer to a chat: messages with ``role`` and ``content``, or the user's text.
        The model's own template makes the prompt."""
        return self.generate(self.chat_ids(messages), max_tokens, **options)

    def chat_ids(self, messages: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat, up to where the assistant answers."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if isinstance(messages, Mapping):
            messages = [messages]
        if not isinstance(messages, Sequence):
            raise RequestError(
                f"messages are {messages!r}; they must be text, or dicts with role and content"
            )
        if not messages:
            raise RequestError("a chat needs at least one message, found 0")
        pairs = []
        for index, message in enumerate(messages):
            try:
                pairs.append((str(message["role"]), str(message["content"])))
            except (KeyError, TypeError) as error:
                raise RequestError(f"messages[{index}] must have role and content", index=index) from error
        return self._core.chat_ids(pairs)

    def run(
        self,
        workload: Workload,
        policy: PolicyLike | None = None,
        *,
        seed: int = 0,
        until: float | None = None,
        progress: bool = True,
    ) -> Result:
        """Runs a workload in real time: the same :class:`Result` as :func:`kvrelay.simulate`, measured.

        Prompts are made-up token ids (sharing prefixes where the workload says so); end of sequence is
        ignored and every request produces exactly its length. ``policy`` is the engine's own by default.
        """
        if not isinstance(workload, Workload):
            raise ConfigError(f"run takes a Workload, not {type(workload).__name__}")
        used = self.policy if policy is None else policy
        seed, until = whole("seed", seed, 0, MAX_U64), None if until is None else number("until", until, 0.0)
        with request_bar(len(workload), "run", progress) as tell:
            core = self._core.run(
                workload._core, None if policy is None else resolve(policy), seed, until, tell
            )
        title = f"{self.topology}, {name_of(used)}: {workload._core.description}"
        return Result(core, title=title, source="measured", num_gpus=len(self.workers), workload=workload)

    def profile(self, *, seed: int = 0, progress: bool = True) -> Profile:
        """Measures this engine's steps and transfers, and fits a latency model: see
        :class:`kvrelay.Profile`. Takes about a minute of the demo model on two cores."""
        from kvrelay.profile import measure

        return measure(self, seed=seed, progress=progress)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, as :meth:`generate` makes them."""
        if not isinstance(text, str):
            raise RequestError(f"text is {text!r}; it must be a string")
        try:
            return self._core.tokenize(text)
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text has half a surrogate pair, {text[error.start]!r}, at character {error.start}: no UTF-8"
            ) from error

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self._core.detokenize(_checked_ids(token_ids))

    def logits(self, token_ids: Sequence[int]) -> Any:
        """Logits after every token of a sequence: a float32 array ``[len(token_ids), vocabulary]``."""
        return self._core.logits(_checked_ids(token_ids))

    @property
    def workers(self) -> list[WorkerInfo]:
        """The workers, in order."""
        pid = os.getpid()
        return [
            WorkerInfo(role, device, threads, tuple(cores), blocks, pid)
            for role, device, threads, cores, blocks in self._core.workers()
        ]

    @property
    def num_policy_faults(self) -> int:
        """How often the engine's policy failed while serving; from the first time on ``fcfs`` decides."""
        return self._core.num_policy_faults()

    def check_integrity(self) -> None:
        """Raises :class:`kvrelay.IntegrityError` when a KV block is lost."""
        self._core.check_integrity()

    def close(self) -> None:
        """Stops the workers. What is live ends with an error; the engine cannot be used any more.

        An engine is closed when nothing refers to it any more, but not one that its own policy refers to:
        close that one, or use ``with``."""
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, prompt: Prompt, max_tokens: int, options: Mapping[str, Any]) -> Stream:
        given = dict(options)
        stop = given.pop("stop", None) or ()
        sampling = (
            number("temperature", given.pop("temperature", 0.0), error=RequestError),
            whole("top_k", given.pop("top_k", 0), -(2**63), 2**63 - 1, RequestError),
            number("top_p", given.pop("top_p", 1.0), error=RequestError),
            whole("seed", given.pop("seed", 0), 0, MAX_U64, RequestError),
        )
        ignore_eos, slo = given.pop("ignore_eos", False), given.pop("slo", None)
        priority = whole("priority", given.pop("priority", 0), -(2**31), 2**31 - 1, RequestError)
        if given:
            known = "temperature, top_k, top_p, seed, stop, ignore_eos, slo, priority"
            raise RequestError(f"option {next(iter(given))!r}; known: {known}")
        if slo is not None and not isinstance(slo, SLO):
            raise RequestError(f"slo is {slo!r}; it must be a kvrelay.SLO or None")
        max_tokens = whole("max_tokens", max_tokens, 1, MAX_U32, RequestError)
        stops = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, Iterable) else [stop]
        if not all(isinstance(one, str) for one in stops):
            raise RequestError(f"stop is {stop!r}; it must be a string or strings", value=stop)
        ids = self.tokenize(prompt) if isinstance(prompt, str) else _checked_ids(prompt)
        handle = self._core.submit(ids, max_tokens, *sampling, stops, bool(ignore_eos), slo, priority)
        return Stream(handle, ids)

    def __repr__(self) -> str:
        if self._core.closed:
            return f"Engine({self._name!r}, closed)"
        return f"Engine({self._name!r}, {self.topology!r}, policy={name_of(self.policy)!r})"

    def _repr_html_(self) -> str:
        if self._core.closed:
            return html.escape(repr(self))
        rows = "".join(
            f"<tr><td>{index}</td><td>{worker.role}</td><td>{html.escape(worker.device)}</td><td>{worker.threads}</td>"
            f"<td>{worker.kv_blocks}</td></tr>"
            for index, worker in enumerate(self.workers)
        )
        head = "<tr><th>worker</th><th>role</th><th>device</th><th>threads</th><th>KV blocks</th></tr>"
        return f"<b>{html.escape(self._name)}</b> ({html.escape(self._core.model_name)}), {self.topology}, policy {html.escape(name_of(self.policy))}<table>{head}{rows}</table>"


def _threads(given: Any) -> int | None:
    """Threads of a worker, at most the cores there are: more of them only wait for each other, in every step."""
    threads = optional_whole("threads_per_worker", given, 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads is not None and threads > cores:
        raise ConfigError(
            f"threads_per_worker is {threads}; this process may run on {cores} cores, and more threads than that "
            "only wait for each other",
            threads_per_worker=threads,
            cores=cores,
        )
    return threads


def _check_prompt(name: str, prompt: Any) -> None:
    is_text = isinstance(prompt, str)
    if is_text or (isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray, memoryview))):
        return
    if not getattr(prompt, "ndim", 0):
        raise RequestError(f"{name} is {prompt!r}; it must be text, token ids, or a list of these")


def _is_ids(prompt: Any) -> bool:
    return len(prompt) == 0 or all(
        hasattr(item, "__index__") and not hasattr(item, "__len__") for item in prompt
    )


def _checked_ids(prompt: Any) -> list[int]:
    return [whole(f"prompt[{index}]", item, 0, MAX_U32, RequestError) for index, item in enumerate(prompt)]
