"""Policies: the built-in ones, and what one of your own may answer.

A policy is any object with some of the methods of :class:`Policy`, a callable for placement alone, or
a built-in's name. The very same object drives a simulation and an engine. Methods that are not there
fall to what ``fcfs`` does on mixed workers and ``disaggregated`` on the others.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from kvrelay import _core
from kvrelay.checks import whole
from kvrelay.errors import ConfigError


class Policy(Protocol):
    """What a policy may implement; any subset will do, and no base class is needed.

    Views (``kvrelay.RequestView`` and its like) belong to the call they are given to: one that is
    kept raises :class:`kvrelay.StaleView`.
    """

    def begin(self, cluster: _core.ClusterView, rng: Any) -> None:
        """Before every run: forget all. ``rng`` is a seeded ``numpy.random.Generator``."""

    def observe(self, outcome: Ran | Ended) -> None:
        """At step ends, finishes and refusals: learn."""

    def admit(self, request: _core.RequestView, cluster: _core.ClusterView) -> Hold | Demote | Refuse | None:
        """Once per arrival, and again when a hold ends. ``None`` accepts."""

    def place(
        self, request: _core.RequestView, cluster: _core.ClusterView
    ) -> Placement | _core.WorkerView | int | tuple[Any, Any] | None:
        """The worker for its prompt (with the decode worker, if you like), or ``None`` to be asked again
        when something has changed."""

    def accept(
        self, request: _core.RequestView, worker: _core.WorkerView
    ) -> bool | str | _core.WorkerView | int | None:
        """At hand-over: ``True`` (now), ``False`` (later), or another decode worker."""

    def batch(self, worker: _core.WorkerView) -> Batch | None:
        """What the worker does next; ``None`` leaves it to the default."""

    def rebalance(self, cluster: _core.ClusterView) -> Rebalance | None:
        """At the start and at the times it asked for: new roles."""


@dataclass(frozen=True)
class Hold:
    """Admission: ask again at ``until`` (seconds since the run began)."""

    until: float


@dataclass(frozen=True)
class Demote:
    """Admission: let in, behind all that are not demoted."""


@dataclass(frozen=True, init=False)
class Refuse:
    """Admission: turn away, with the numbers behind it.

    >>> Refuse("queue too long", predicted=3.2, limit=2.0)
    Refuse(reason='queue too long', numbers={'predicted': 3.2, 'limit': 2.0})
    """

    reason: str
    numbers: dict[str, float] = field(default_factory=dict)

    def __init__(self, reason: str, **numbers: float) -> None:
        object.__setattr__(self, "reason", reason)
        object.__setattr__(self, "numbers", numbers)


@dataclass(frozen=True)
class Placement:
    """Where a request runs: workers by view or index. ``reserve`` takes room at ``decode`` now."""

    prefill: Any
    decode: Any = None
    reserve: bool = False


@dataclass(frozen=True)
class Batch:
    """What a worker does next.

    Parameters
    ----------
    prefill
        ``(request, tokens)`` pairs of the worker's ``waiting``, in order; no more tokens than it has left
        are taken. A decode worker has some too: those that were preempted there are computed anew, and
        wait for ever if no batch takes them.
    decode
        Who decodes; everybody when ``None``.
    repeat
        Repeat a decode-only step at most so often.
    preempt, drop
        Give up the KV of these (they are recomputed first); end these.
    wake_at
        Ask again then (seconds) even if nothing happens.
    """

    prefill: Sequence[tuple[Any, int]] = ()
    decode: Sequence[Any] | None = None
    repeat: int | None = None
    preempt: Sequence[Any] = ()
    drop: Sequence[Any] = ()
    wake_at: float | None = None


@dataclass(frozen=True)
class Rebalance:
    """New roles by worker index, and when to ask again (seconds; never when ``None``)."""

    roles: dict[int, str] = field(default_factory=dict)
    next: float | None = None


@dataclass(frozen=True)
class Ran:
    """A run is over: ``steps`` steps that began with this batch took ``duration`` seconds."""

    worker: int
    steps: int
    duration: float
    prefill_tokens: int
    num_prefill: int
    num_decode: int
    decode_context: int


@dataclass(frozen=True)
class Ended:
    """A request is over. ``good`` is ``None`` when it counts on neither side."""

    request: int
    status: str
    slo_class: int
    prompt_tokens: int
    output_tokens: int
    ttft: float | None
    tpot: float | None
    good: bool | None


@dataclass(frozen=True)
class Fcfs:
    """First come, first served; prompts run whole and before decode."""

    def _core(self) -> _core.BuiltIn:
        return _core.BuiltIn("fcfs")


@dataclass(frozen=True)
class Chunked:
    """Every step decodes all and fills ``token_budget`` tokens with prompt chunks (Sarathi-Serve)."""

    token_budget: int = 512

    def _core(self) -> _core.BuiltIn:
        return _core.BuiltIn("chunked", token_budget=whole("token_budget", self.token_budget, 1))


@dataclass(frozen=True)
class Disaggregated:
    """First come, first served in each pool, on the least loaded worker (DistServe)."""

    def _core(self) -> _core.BuiltIn:
        return _core.BuiltIn("disaggregated")


@dataclass(frozen=True)
class Goodput:
    """Every request by its own objectives: deadline order with the certainly late last, preemption
    every ``chunk_tokens`` prompt tokens, decode batches within everybody's TPOT."""

    chunk_tokens: int = 1024

    def _core(self) -> _core.BuiltIn:
        return _core.BuiltIn("goodput", chunk_tokens=whole("chunk_tokens", self.chunk_tokens, 1))


BUILT_IN: dict[str, type[Fcfs | Chunked | Disaggregated | Goodput]] = {
    "fcfs": Fcfs,
    "chunked": Chunked,
    "disaggregated": Disaggregated,
    "goodput": Goodput,
}

#: A policy as functions take it: a name, a built-in, an object with any of the methods, a callable.
PolicyLike: TypeAlias = str | Policy | Fcfs | Chunked | Disaggregated | Goodput | Callable[..., Any] | object


#: The contract: what each method is called with.
METHODS: dict[str, tuple[str, ...]] = {
    "begin": ("cluster", "rng"),
    "observe": ("outcome",),
    "admit": ("request", "cluster"),
    "place": ("request", "cluster"),
    "accept": ("request", "worker"),
    "batch": ("worker",),
    "rebalance": ("cluster",),
}


def resolve(policy: PolicyLike) -> Any:
    """What the compiled core takes: a built-in, or the object itself, once its methods can be called."""
    if isinstance(policy, str):
        if policy not in BUILT_IN:
            raise ConfigError(f"policy {policy!r}; built in are {', '.join(BUILT_IN)}", policy=policy)
        policy = BUILT_IN[policy]()
    if isinstance(policy, (Fcfs, Chunked, Disaggregated, Goodput)):
        return policy._core()
    if isinstance(policy, type):
        raise ConfigError(f"policy {policy.__name__} is a class: give an object of it, {policy.__name__}()")
    methods = {name: getattr(policy, name) for name in METHODS if callable(getattr(policy, name, None))}
    if not methods.keys() - {"begin", "observe"}:
        if not callable(policy):
            problem = "it has none of admit, place, accept, batch, rebalance and cannot be called"
            hint = misspelt(policy)
            raise ConfigError(f"{policy!r} is no policy: {problem}{'; ' + hint if hint else ''}")
        methods["place"] = policy
    for name, method in methods.items():
        _check_signature(name, method)
    return policy


def misspelt(policy: Any) -> str:
    """What is wrong with a method that looks like one of the contract but is not called so; or nothing."""
    for name in dir(type(policy)):
        if name.startswith("_") or name in METHODS or not callable(getattr(policy, name)):
            continue
        for method in difflib.get_close_matches(name.lower(), METHODS, n=1, cutoff=0.8):
            if not hasattr(policy, method):
                return f"method {name!r} is never called; did you mean {method!r}?"
    return ""


def _check_signature(name: str, method: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        # Some callables do not tell.
        return
    try:
        signature.bind(*METHODS[name])
    except TypeError as error:
        wanted = ", ".join(METHODS[name])
        raise ConfigError(
            f"policy method {name}{signature} cannot be called as {name}({wanted}): {error}"
        ) from error


def name_of(policy: PolicyLike) -> str:
    """What tables and pictures call it."""
    if isinstance(policy, str):
        return policy
    for name, cls in BUILT_IN.items():
        if isinstance(policy, cls):
            return name if policy == cls() else repr(policy)
    return getattr(policy, "__name__", type(policy).__name__)
