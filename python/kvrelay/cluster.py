"""Clusters to simulate: workers, what they are connected by, and when they are lost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrelay import _core
from kvrelay.checks import MAX_U64, number, optional_whole, text, whole
from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from kvrelay.profile import LatencyTable, Profile


@dataclass(frozen=True)
class Link:
    """What KV is transferred over: bytes per second in one direction, and seconds before the first.

    >>> Link(bandwidth=25e9)
    Link(bandwidth=25000000000.0, latency=0.0)
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        number("link bandwidth", self.bandwidth)
        number("link latency", self.latency, 0.0)


@dataclass(frozen=True)
class Network:
    """Links that transfers share: what is under way at one time divides them fairly (max-min), anew
    whenever a transfer begins or ends.

    Parameters
    ----------
    nodes
        How many workers, in their order, are in each node: a number, or one per node such as ``[2, 1]``.
        All in one by default.
    local
        What a GPU has to the others of its node, and as much from them: ``"nvlink"``, ``"pcie"`` or a
        :class:`Link`; NVLink where the GPU has it.
    node_bandwidth
        Bytes per second that all transfers inside a node have together, such as a PCIe switch's; the
        ports alone limit them by default.
    remote
        A network card, between nodes: ``"network"`` (the GPU table's) or a :class:`Link`.
    nics_per_node
        Cards that the workers of a node share, in turn; a card for every GPU by default.

    >>> Network(nodes=1, nics_per_node=1)
    Network(nodes=1, local=None, node_bandwidth=inf, remote='network', nics_per_node=1)
    """

    nodes: int | Sequence[int] | None = None
    local: str | Link | None = None
    node_bandwidth: float = math.inf
    remote: str | Link = "network"
    nics_per_node: int | None = None

    def _spec(self, num_workers: int) -> SimpleNamespace:
        if self.nodes is None or isinstance(self.nodes, int):
            size = whole("network nodes", num_workers if self.nodes is None else self.nodes, 1)
            sizes = [size] * -(-num_workers // size)
        else:
            sizes = [whole(f"network nodes[{index}]", size, 1) for index, size in enumerate(self.nodes)]
            if sum(sizes) != num_workers:
                raise ConfigError(
                    f"network nodes {sizes} have {sum(sizes)} workers, the cluster has {num_workers}"
                )
        of_worker = [node for node, size in enumerate(sizes) for _ in range(size)][:num_workers]
        return SimpleNamespace(
            nodes=of_worker,
            nics_per_node=optional_whole("network nics_per_node", self.nics_per_node, 1),
            local=_link_spec("network local", self.local),
            remote=_link_spec("network remote", self.remote),
            node_bandwidth=number("network node_bandwidth", self.node_bandwidth),
        )


def _latency_spec(latency: Any) -> Any:
    """What the compiled core takes: a name, a table, or a callable."""
    if isinstance(latency, str) or callable(latency):
        return latency
    if hasattr(latency, "predict"):
        return latency._core
    raise ConfigError(f"latency is {latency!r}; it must be a name, a kvrelay.LatencyTable or a callable")


def _delay(name: str, seconds: Any) -> float:
    seconds = number(name, seconds, 0.0)
    if seconds > 86_400.0:
        raise ConfigError(f"{name} is {seconds:g} s; it must be at most a day, 86400 s")
    return seconds


def _link_spec(name: str, link: str | Link | None) -> tuple[str | None, float | None, float]:
    if isinstance(link, Link):
        return None, float(link.bandwidth), float(link.latency)
    return None if link is None else text(name, link), None, 0.0


#: As long as a run may last: 200 of the 213 days that its clock counts.
MAX_SECONDS = 200 * 86_400.0


@dataclass(frozen=True)
class Outage:
    """A worker that is lost at ``at`` with all its KV, and back, empty, at ``until`` (seconds since the run
    began; never when ``None``). From 0 on, it is a replica that starts up.

    >>> Outage(worker=1, at=10.0, until=12.5)
    Outage(worker=1, at=10.0, until=12.5)
    """

    worker: int
    at: float
    until: float | None = None

    def __post_init__(self) -> None:
        whole("outage worker", self.worker, 0)
        for name, seconds in (("at", self.at), ("until", self.until)):
            if seconds is not None and not number(f"outage {name}", seconds, 0.0) <= MAX_SECONDS:
                raise ConfigError(f"outage {name} is {seconds:g} s; a run lasts at most {MAX_SECONDS:g} s")
        if self.until is not None and not self.until > self.at:
            raise ConfigError(f"outage of worker {self.worker}: until {self.until} is not after at {self.at}")


def random_outages(
    num_workers: int, *, duration: float, mean_time_between: float, mean_time_to_repair: float, seed: int = 0
) -> list[Outage]:
    """Outages of every worker over ``duration`` seconds: exponential times between the end of one and the
    start of the next, and until it is over.

    >>> random_outages(2, duration=100.0, mean_time_between=60.0, mean_time_to_repair=5.0, seed=3)[0].worker
    0
    """
    for name, value in (
        ("mean_time_between", mean_time_between),
        ("mean_time_to_repair", mean_time_to_repair),
    ):
        if not number(name, value, 0.0) > 0.0:
            raise ConfigError(f"{name} is {value}; it must be above 0")
    rng = np.random.default_rng(whole("seed", seed, 0, MAX_U64))
    outages = []
    for worker in range(whole("num_workers", num_workers, 1)):
        at = rng.exponential(mean_time_between)
        while at < number("duration", duration, 0.0):
            # Times count in nanoseconds.
            until = at + max(rng.exponential(mean_time_to_repair), 1e-9 + at * 1e-12)
            outages.append(Outage(worker, float(at), float(until)))
            at = until + rng.exponential(mean_time_between)
    return outages


class Cluster:
    """A cluster to simulate.

    Parameters
    ----------
    topology
        ``"2P1D"`` is two prefill and one decode worker, ``"3M"`` three mixed ones, ``"1P1D1M"`` any
        mix.
    model, gpu
        By name: see :func:`kvrelay.models` and :func:`kvrelay.gpus`.
    latency
        ``"roofline"``, a published coefficient set (see :func:`kvrelay.latencies`), a
        :class:`kvrelay.LatencyTable` of measured steps, or a callable that is given a step's
        ``num_prefill, prefill_tokens, prefill_context, prefill_square, num_decode, decode_context`` and
        answers its seconds (slow: it is asked for every single step).
    tp, pp
        GPUs that share a layer, and pipeline stages, of every worker: a number, or one per role such as
        ``{"prefill": 2, "decode": 1}``. A pipeline has a run in every stage, each of other requests;
        where a policy names nobody to decode, each takes its part of them. A latency that is a table or
        a callable tells the time through all stages.
    link
        ``"nvlink"``, ``"pcie"``, ``"network"``, ``"instant"`` or a :class:`Link`; NVLink where the GPU
        has it. Every transfer has the link to itself.
    network
        Instead of ``link``: a :class:`Network` that transfers share.
    layer_groups
        Groups of layers in which KV leaves, each as soon as it is computed, beside the last chunk of its
        prompt; the chunks before it leave at once. Room is then asked for when that chunk begins. With 1,
        KV leaves after the prompt.
    conversion_bandwidth
        Bytes per second at which a GPU lays KV out anew where a transfer's ends have unlike ``tp``; what
        its memory can read and write by default, ``math.inf`` for nothing.
    kv_tokens
        KV capacity of every worker, in tokens; by default what memory leaves, or the published
        capacity of a profile.
    block_tokens, max_batch, max_prefill_tokens
        Tokens in a KV block; requests in a step; prompt tokens in a step (one longer prompt goes
        alone).
    max_model_len
        Prompt and output at their longest; no limit when ``None``.
    prefix_caching
        Whether prompts share the KV of equal prefixes.
    decision_time, role_switch_time
        Seconds before every run that a scheduler takes to decide, and before the first run after a change
        of role; part of the first step's time.

    >>> Cluster("2P1D", model="opt-13b", gpu="a100-80gb", latency="vllm")
    Cluster('2P1D', model='opt-13b', gpu='a100-80gb', latency='vllm')
    """

    def __init__(
        self,
        topology: str,
        *,
        model: str,
        gpu: str,
        latency: str | LatencyTable | Callable[..., float] = "roofline",
        tp: int | Mapping[str, int] = 1,
        pp: int | Mapping[str, int] = 1,
        link: str | Link | None = None,
        network: Network | None = None,
        layer_groups: int = 1,
        conversion_bandwidth: float | None = None,
        kv_tokens: int | None = None,
        block_tokens: int = 16,
        max_batch: int = 256,
        max_prefill_tokens: int = 8192,
        max_model_len: int | None = None,
        prefix_caching: bool = True,
        decision_time: float = 0.0,
        role_switch_time: float = 0.0,
    ) -> None:
        self.topology = topology
        self.model = model
        self.gpu = gpu
        self.latency = latency
        self.tp, self.pp = tp, pp
        self.link = link
        self.network = network
        if (
            conversion_bandwidth is not None
            and not number("conversion_bandwidth", conversion_bandwidth) > 0.0
        ):
            raise ConfigError(f"conversion_bandwidth is {conversion_bandwidth} bytes/s; it must be above 0")
        if network is not None and (link is not None or not isinstance(network, Network)):
            raise ConfigError(
                f"network is {network!r} and link {link!r}; give a kvrelay.Network, or a link alone"
            )
        num_workers = _core.num_workers(text("topology", topology))
        self._core = _core.Cluster(
            text("topology", topology),
            text("model", model),
            text("gpu", gpu),
            _latency_spec(latency),
            list(zip(_per_role("tp", tp), _per_role("pp", pp), strict=True)),
            *_link_spec("link", link),
            None if network is None else network._spec(num_workers),
            (whole("layer_groups", layer_groups, 1), conversion_bandwidth),
            (_delay("decision_time", decision_time), _delay("role_switch_time", role_switch_time)),
            optional_whole("kv_tokens", kv_tokens, 1, MAX_U64),
            whole("block_tokens", block_tokens, 1),
            whole("max_batch", max_batch, 1),
            whole("max_prefill_tokens", max_prefill_tokens, 1),
            optional_whole("max_model_len", max_model_len, 1),
            bool(prefix_caching),
        )

    @classmethod
    def _measured(cls, topology: str, profile: Profile) -> Cluster:
        """A cluster like a profiled engine."""
        facts = profile.engine
        self = cls.__new__(cls)
        self.topology, self.model, self.gpu = topology, facts["model"], "this machine"
        self.latency, self.tp, self.pp, self.link, self.network = profile.table, 1, 1, None, None
        self._core = _core.Cluster.measured(
            text("topology", topology), profile.table._core, (profile.bandwidth, profile.latency), profile.slowdowns,
            facts["kv_bytes_per_token"], facts["kv_blocks"], facts["block_tokens"], facts["max_batch"],
            facts["max_prefill_tokens"], facts["max_model_len"], facts["prefix_caching"],
        )  # fmt: skip
        return self

    @property
    def num_gpus(self) -> int:
        """GPUs over all workers."""
        return self._core.num_gpus

    @property
    def kv_tokens(self) -> list[int]:
        """KV capacity of each worker, in tokens."""
        return self._core.kv_tokens

    def prefill_time(self, prompt_tokens: int, role: str | None = None) -> float:
        """Seconds that a prompt takes, alone and unloaded."""
        prompt_tokens = whole("prompt_tokens", prompt_tokens, 1, 2**24)
        return self._core.prefill_time(prompt_tokens, role or self._role("prefill"))

    def decode_time(self, num_decode: int, context_tokens: int, role: str | None = None) -> float:
        """Seconds of a decode step of ``num_decode`` requests with ``context_tokens`` together."""
        num_decode = whole("num_decode", num_decode, 1, 2**20)
        context_tokens = whole("context_tokens", context_tokens, 1, 2**40)
        return self._core.decode_time(num_decode, context_tokens, role or self._role("decode"))

    def _warn_if_extrapolated(self) -> None:
        tokens, context = self._core.farthest
        if not tokens and not context:
            return
        terms = self.latency.to_dict()
        asked = [
            f"{found} {what}, {most} were measured"
            for found, what, most in (
                (tokens, "tokens", terms["tokens_ms"][-1][0]),
                (context, "tokens of decode context", terms["most_context"]),
            )
            if found
        ]
        warnings.warn(
            f"the latency table was asked for steps of up to {' and of up to '.join(asked)}: extrapolated",
            stacklevel=3,
        )

    def _role(self, wanted: str) -> str:
        return wanted if wanted[0].upper() in self._core.topology else "mixed"

    def __repr__(self) -> str:
        extra = "".join(
            f", {name}={value!r}" for name, value in (("tp", self.tp), ("pp", self.pp)) if value != 1
        )
        return (
            f"Cluster({self._core.topology!r}, model={self.model!r}, gpu={self.gpu!r}, "
            f"latency={self.latency!r}{extra})"
        )


def _per_role(name: str, given: int | Mapping[str, int]) -> list[int]:
    given = (
        dict(given) if isinstance(given, Mapping) else dict.fromkeys(("prefill", "decode", "mixed"), given)
    )
    for role, count in given.items():
        if role not in ("prefill", "decode", "mixed"):
            raise ConfigError(f"{name} of role {role!r}; roles are prefill, decode, mixed")
        whole(name, count, 1, 1024)
    return [given.get(role, 1) for role in ("prefill", "decode", "mixed")]


def gpus() -> list[str]:
    """Names of the GPU table.

    >>> "h100" in gpus()
    True
    """
    return _core.gpu_names()


def models() -> list[str]:
    """Names of the model table.

    >>> "llama-3.1-8b" in models()
    True
    """
    return _core.model_names()


def latencies() -> list[str]:
    """Names of the latency models that :class:`Cluster` knows.

    >>> latencies()
    ['roofline', 'distserve', 'vllm']
    """
    return ["roofline", *_core.profile_names()]
