"""Latency models from measurements: tables of step times, profiles of engines, and how true they are."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvrelay import _core
from kvrelay.checks import number, text, whole
from kvrelay.cluster import Cluster
from kvrelay.errors import ConfigError
from kvrelay.policies import Batch, PolicyLike, name_of
from kvrelay.progress import bar
from kvrelay.result import Result
from kvrelay.simulation import simulate
from kvrelay.workload import Workload

#: What a step's time is a function of: chunks and their tokens, Σ(prefix + chunk), Σ((prefix + chunk)² less
#: prefix²), decode rows, and the context tokens that these attend to.
STEP_COLUMNS = (
    "num_prefill", "prefill_tokens", "prefill_context", "prefill_square", "num_decode", "decode_context",
)  # fmt: skip


class LatencyTable:
    """Step times read off measurements, for ``Cluster(latency=...)``.

    A step costs what its tokens cost in the linear layers, read off a table by their number and
    interpolated, plus attention and per-row work that are linear in :data:`STEP_COLUMNS`. The fit is by
    least squares of the relative error, and no coefficient is negative.
    """

    def __init__(self, core: _core.LatencyTable) -> None:
        self._core = core

    @classmethod
    def from_steps(cls, steps: pd.DataFrame) -> LatencyTable:
        """Fits a table to measured steps.

        Parameters
        ----------
        steps
            One row a step: :data:`STEP_COLUMNS` (those left out are 0; for prompts without a prefix
            ``prefill_square`` is worked out from ``prefill_tokens`` and ``num_prefill``) and ``seconds``.
        """
        sums, seconds = _sums(steps), _column(steps, "seconds")
        return cls(_core.LatencyTable.fit(sums, seconds.tolist()))

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> LatencyTable:
        """As :meth:`from_steps`, from a file with these columns."""
        try:
            return cls.from_steps(pd.read_csv(path))
        except (OSError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
            raise ConfigError(f"latency table {os.fspath(path)!r}: {error}") from error

    def predict(self, steps: pd.DataFrame) -> np.ndarray:
        """Seconds that each step takes, by the columns of :meth:`from_steps`."""
        return np.array(self._core.predict(_sums(steps)))

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON; milliseconds."""
        nodes, per_row, per_square, per_context, most_context = self._core.terms
        return {
            "tokens_ms": [list(node) for node in nodes], "per_row_ms": per_row, "per_square_ms": per_square,
            "per_context_ms": per_context, "most_context": most_context,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, terms: dict[str, Any]) -> LatencyTable:
        """From what :meth:`to_dict` gave."""
        try:
            nodes = [(int(tokens), float(ms)) for tokens, ms in terms["tokens_ms"]]
            rest = [float(terms[name]) for name in ("per_row_ms", "per_square_ms", "per_context_ms")]
            return cls(_core.LatencyTable(nodes, *rest, int(terms["most_context"])))
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"latency table: {type(error).__name__} {error}") from error

    def __repr__(self) -> str:
        nodes, *_ = self._core.terms
        return f"LatencyTable({nodes[0][0]} to {nodes[-1][0]} tokens, {nodes[0][1]:.3g} to {nodes[-1][1]:.3g} ms)"


def _column(frame: pd.DataFrame, name: str) -> np.ndarray:
    if name not in frame:
        raise ConfigError(f"steps have no column {name!r}; they have {', '.join(map(str, frame.columns))}")
    values = pd.to_numeric(frame[name], errors="coerce").to_numpy(dtype=float)
    wrong = np.flatnonzero(~(values >= 0) | ~np.isfinite(values))
    if len(wrong):
        raise ConfigError(
            f"steps: {name} of row {wrong[0]} is {frame[name].iloc[wrong[0]]!r}; it must be a number of at least 0"
        )
    return values


def _counts(steps: pd.DataFrame, name: str) -> np.ndarray:
    """A column of whole numbers: a chunk or a token that is there in part is a mistake of the caller's."""
    values = _column(steps, name)
    wrong = np.flatnonzero(values != np.floor(values))
    if len(wrong):
        raise ConfigError(
            f"steps: {name} of row {wrong[0]} is {steps[name].iloc[wrong[0]]!r}; it must be a whole number"
        )
    return values


def _sums(steps: pd.DataFrame) -> list[tuple[int, ...]]:
    """Each step's sums, as the compiled core takes them."""
    columns = {name: _counts(steps, name) if name in steps else np.zeros(len(steps)) for name in STEP_COLUMNS}
    if not any(name in steps for name in ("prefill_tokens", "num_decode")):
        raise ConfigError("steps need prefill_tokens or num_decode")
    tokens = columns["prefill_tokens"]
    if "num_prefill" not in steps:
        columns["num_prefill"] = (tokens > 0).astype(float)
    if "prefill_square" not in steps:
        # Prompts of equal length, without a prefix.
        columns["prefill_square"] = np.divide(
            tokens**2, columns["num_prefill"], out=np.zeros(len(steps)), where=tokens > 0
        )
    if "prefill_context" not in steps:
        columns["prefill_context"] = tokens
    return list(zip(*(values.astype(np.int64).tolist() for values in columns.values()), strict=True))


@dataclass(frozen=True)
class Profile:
    """What an engine measured of itself: its steps as a :class:`LatencyTable`, its KV transfers as a link,
    and what it is, so that :meth:`cluster` gives one like it to simulate.

    Workers of one machine share its memory and, with hyper-threads, its cores: ``slowdowns`` says how much
    longer a step with prompts, and one that only decodes, takes while one other worker computes (0.5 is
    half as long again). ``samples`` holds every measured run: its sums per step, ``seconds``, ``overlap``
    (the share of its time in which others computed, summed over them), ``predicted`` and ``error``
    (relative).
    """

    table: LatencyTable
    slowdowns: tuple[float, float]
    bandwidth: float
    latency: float
    engine: dict[str, Any]
    samples: pd.DataFrame

    def cluster(self, topology: str | None = None) -> Cluster:
        """A cluster like the engine, or of another topology of such workers."""
        return Cluster._measured(topology or self.engine["topology"], self)

    def residuals(self) -> pd.DataFrame:
        """How far the fit is from what was measured: per kind of step, the relative error's median and
        90th percentile (absolute), and its mean (signed)."""
        kinds = np.select(
            [self.samples["num_decode"] == 0, self.samples["num_prefill"] == 0],
            ["prefill", "decode"],
            "mixed",
        )
        groups = self.samples.assign(kind=kinds).groupby("kind")["error"]
        return groups.agg(
            steps="count",
            bias="mean",
            median=lambda error: error.abs().median(),
            p90=lambda error: error.abs().quantile(0.9),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as JSON."""
        data = {
            "kvrelay_profile": 1, "engine": self.engine, "table": self.table.to_dict(),
            "slowdowns": list(self.slowdowns),
            "link": {"bandwidth": self.bandwidth, "latency": self.latency},
            "samples": self.samples.to_dict("list"),
        }  # fmt: skip
        Path(path).write_text(json.dumps(data, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads what :meth:`save` wrote."""
        where = f"profile {os.fspath(path)!r}"
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            version = data["kvrelay_profile"]
            if version != 1:
                raise ConfigError(f"{where} has version {version}, this kvrelay reads 1")
            table, link = LatencyTable.from_dict(data["table"]), data["link"]
            prefill, decode = (number("slowdown", value, 0.0) for value in data["slowdowns"])
            _check_facts(data["engine"])
            samples = pd.DataFrame(data["samples"])
            bandwidth, latency = (
                number("bandwidth", link["bandwidth"], 1.0),
                number("latency", link["latency"], 0.0),
            )
            if not {*STEP_COLUMNS, "seconds", "error"} <= set(samples.columns):
                raise ConfigError(f"samples have {', '.join(map(str, samples.columns)) or 'no columns'}")
            return cls(table, (prefill, decode), bandwidth, latency, data["engine"], samples)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{where}: {type(error).__name__} {error}") from error

    def __repr__(self) -> str:
        error = self.samples["error"].abs()
        return (
            f"Profile of {self.engine['model']} on {self.engine['topology']}: {self.table!r}, KV at "
            f"{self.bandwidth / 1e9:.3g} GB/s; {len(self.samples)} runs, off by {error.median():.1%} (median), "
            f"{error.quantile(0.9):.1%} (90th percentile)"
        )

    def _repr_html_(self) -> str:
        return f"{html.escape(repr(self))}{self.residuals().to_html(float_format='{:.1%}'.format)}"


def _check_facts(facts: Any) -> None:
    """What a profile says of its engine: all there, and possible."""
    text("engine model", facts["model"])
    text("engine topology", facts["topology"])
    for name in (
        "kv_bytes_per_token",
        "kv_blocks",
        "max_model_len",
        "block_tokens",
        "max_batch",
        "max_prefill_tokens",
    ):
        whole(f"engine {name}", facts[name], 1)
    if not isinstance(facts["prefix_caching"], bool):
        raise ConfigError(f"engine prefix_caching is {facts['prefix_caching']!r}; it must be true or false")


class _OnePrompt:
    """Prompts one at a time, whole; the rest by default."""

    def batch(self, worker: _core.WorkerView) -> Batch | None:
        if worker.role == "decode" or not worker.num_waiting:
            return None
        ready = next((request for request in worker.waiting if worker.can_start(request)), None)
        if ready is None:
            return None
        return Batch(prefill=[(ready, ready.pending)], decode=[])


def measure(engine: Any, *, seed: int = 0, progress: bool = True) -> Profile:
    """See :meth:`kvrelay.Engine.profile`."""
    kv_bytes, max_model_len = engine._core.capacity()
    limits, workers = engine.limits, engine.workers
    longest = min(
        limits["max_prefill_tokens"], max_model_len - 2, workers[0].kv_blocks * limits["block_tokens"] - 2
    )
    facts = {
        "model": engine._core.model_name, "topology": engine.topology, "kv_bytes_per_token": kv_bytes,
        "kv_blocks": workers[0].kv_blocks, "max_model_len": max_model_len, **limits,
    }  # fmt: skip
    plans = [
        *_prompt_plans(longest),
        *_decode_plans(limits["max_batch"], longest),
        _loaded_plan(longest, seed),
    ]
    runs, transfers = [], []
    for workload, policy in bar(plans, "profile", "run", progress):
        result = engine.run(workload, policy, seed=seed, progress=False)
        runs.append(_per_step(result.steps))
        moved = result.requests.dropna(subset=["transfer_end"])
        blocks = np.ceil(moved["prompt_tokens"].to_numpy(float) / limits["block_tokens"])
        took = (moved["transfer_end"] - moved["transfer_start"]).to_numpy(float)
        transfers += list(zip(blocks * limits["block_tokens"] * kv_bytes, took, strict=True))
    samples = pd.concat(runs, ignore_index=True)
    table, slowdowns = _fit_steps(samples)
    return Profile(table, slowdowns, *_fit_link(transfers), facts, samples)


def _fit_steps(samples: pd.DataFrame) -> tuple[LatencyTable, tuple[float, float]]:
    """A table of what steps take alone, and how much longer beside others: by turns, until both settle.
    Adds ``predicted`` and ``error`` to the samples."""
    prefill = (samples["num_prefill"] > 0).to_numpy()
    overlap = samples["overlap"].to_numpy()
    slowdowns = [0.0, 0.0]
    for _ in range(8):
        factor = 1.0 + overlap * np.where(prefill, *slowdowns)
        table = LatencyTable.from_steps(samples.assign(seconds=samples["seconds"] / factor))
        alone = table.predict(samples)
        for kind, of_kind in enumerate((prefill, ~prefill)):
            beside = of_kind & (overlap > 0.05)
            if beside.any():
                # Least squares through the origin of what is longer, relative to alone.
                longer = samples["seconds"].to_numpy()[beside] / alone[beside] - 1.0
                slope = float((longer * overlap[beside]).sum() / (overlap[beside] ** 2).sum())
                slowdowns[kind] = max(slope, 0.0)
    samples["predicted"] = alone * (1.0 + overlap * np.where(prefill, *slowdowns))
    samples["error"] = samples["predicted"] / samples["seconds"] - 1.0
    return table, (slowdowns[0], slowdowns[1])


def _prompt_plans(longest: int) -> list[tuple[Workload, PolicyLike]]:
    """Prompts of many lengths, alone and one after the other."""
    lengths = sorted(
        {min(2**power, longest) for power in range(11)} | {min(3 * 2**power, longest) for power in range(9)}
    )
    records = [
        {"arrival": 0.0, "prompt_tokens": length, "output_tokens": 1}
        for length in [lengths[-1], *lengths, *lengths]
    ]
    return [(Workload.from_records(records), _OnePrompt())]


def _decode_plans(max_batch: int, longest: int) -> list[tuple[Workload, PolicyLike]]:
    """Decode batches of many sizes, with short and long contexts."""
    plans: list[tuple[Workload, PolicyLike]] = []
    for rows in (1, 2, 4, 8, 16, 32):
        for prompt in (16, min(256, longest)):
            if rows <= max_batch and rows * prompt <= 4096:
                records = [{"arrival": 0.0, "prompt_tokens": prompt, "output_tokens": 8}] * rows
                plans.append((Workload.from_records(records), "fcfs"))
    return plans


def _loaded_plan(longest: int, seed: int) -> tuple[Workload, PolicyLike]:
    """All workers at once, as they are when it matters: they share the memory's bandwidth."""
    rng = np.random.default_rng(seed)
    prompts = np.minimum(rng.lognormal(4.3, 0.8, 32).astype(int) + 1, longest)
    outputs = rng.integers(4, 40, 32)
    records = [
        {"arrival": 0.25 * index, "prompt_tokens": int(prompt), "output_tokens": int(output)}
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    return Workload.from_records(records), "chunked"


def _per_step(steps: pd.DataFrame) -> pd.DataFrame:
    """Runs as their mean step: a repeated run's context grows by a token a row and step."""
    frame = steps[list(STEP_COLUMNS)].copy()
    frame["decode_context"] += (steps["num_decode"] * (steps["steps"] - 1)) // 2
    frame["seconds"] = (steps["end"] - steps["start"]) / steps["steps"]
    frame["overlap"] = _overlap(steps)
    return frame[frame["seconds"] > 0]


def _overlap(steps: pd.DataFrame) -> np.ndarray:
    """Of each run's time, the share in which another worker computed; summed over the others."""
    start, end = steps["start"].to_numpy(float), steps["end"].to_numpy(float)
    together = np.zeros(len(steps))
    for worker in steps["worker"].unique():
        mine = (steps["worker"] == worker).to_numpy()
        order = np.argsort(start[mine])
        starts, ends = start[mine][order], end[mine][order]
        # Busy time before an instant; a worker's runs do not overlap.
        busy = np.concatenate([[0.0], np.cumsum(ends - starts)])

        def before(at: np.ndarray, starts=starts, ends=ends, busy=busy) -> np.ndarray:
            index = np.searchsorted(starts, at, side="right")
            last = np.maximum(index - 1, 0)
            over = np.clip(ends[last] - at, 0.0, None)
            return np.where(index > 0, busy[index] - over, 0.0)

        together[~mine] += before(end[~mine]) - before(start[~mine])
    return together / np.maximum(end - start, 1e-12)


def _fit_link(transfers: list[tuple[float, float]]) -> tuple[float, float]:
    """Bandwidth (bytes/s) and latency (s) by least squares; infinite and 0 where nothing was moved."""
    if not transfers:
        return float("inf"), 0.0
    size, seconds = np.array(transfers).T
    per_byte = np.cov(size, seconds, bias=True)[0, 1] / size.var() if size.var() > 0 else 0.0
    per_byte = max(per_byte, 0.0)
    latency = max(float(np.median(seconds - per_byte * size)), 0.0)
    return (1.0 / per_byte if per_byte > 0 else float("inf")), latency


#: What :func:`fidelity` compares, and how a row is called.
_COMPARED: tuple[tuple[str, Callable[[Result], float | None]], ...] = (
    *(
        (f"{metric.upper()} p{percent}", lambda result, m=metric, p=percent: result.percentile(m, p))
        for metric in ("ttft", "tpot", "e2e")
        for percent in (50, 90, 99)
    ),
    ("attainment", lambda result: result.attainment()),
    ("goodput", lambda result: result.goodput()),
    ("makespan", lambda result: result.makespan),
)


@dataclass(frozen=True)
class Fidelity:
    """A workload measured on an engine and simulated on a cluster like it.

    ``table`` has a row for every metric: ``measured`` (the mean of the runs), ``simulated``, ``error``
    (simulated / measured - 1; for attainment the difference), and, of several runs, ``low`` and ``high``:
    the error against the largest and the smallest measured value.
    """

    table: pd.DataFrame
    measured: list[Result]
    simulated: Result
    title: str

    def worst(self) -> float:
        """The largest absolute error, in percent of the measured value or points of attainment."""
        return float(self.table["error"].abs().max())

    def plot(self, ax: Any = None) -> Any:
        """Measured and simulated TTFT and TPOT, one above the other."""
        from kvrelay import plot

        pyplot = plot._pyplot()
        axes = ax if ax is not None else pyplot.subplots(1, 2, figsize=(11.0, 4.0), layout="constrained")[1]
        curves = {"measured": self.measured[0], "simulated": self.simulated}
        for one, metric in zip(axes, ("ttft", "tpot"), strict=True):
            plot.latency_cdf(curves, ax=one, metric=metric)
        return axes

    def __repr__(self) -> str:
        return f"{self.title}\n{self.table.to_string(float_format='{:.4f}'.format)}"

    def _repr_html_(self) -> str:
        return f"<b>{html.escape(self.title)}</b>{self.table.to_html(float_format='{:.4f}'.format)}"


def fidelity(
    engine: Any,
    workload: Workload,
    policy: PolicyLike | None = None,
    *,
    profile: Profile | None = None,
    runs: int = 1,
    seed: int = 0,
    progress: bool = True,
) -> Fidelity:
    """Runs a workload for real and simulated, and says how far the simulation is off.

    Parameters
    ----------
    policy
        The engine's own by default; the very same object decides both times.
    profile
        The engine's, if you have it already; measured otherwise.
    runs
        Real runs: with several, ``low`` and ``high`` tell how much of the error the machine itself is.
    """
    profile = profile or engine.profile(progress=progress)
    used = engine.policy if policy is None else policy
    measured = [engine.run(workload, policy, seed=seed, progress=progress) for _ in range(max(1, runs))]
    simulated = simulate(workload, profile.cluster(), used, seed=seed, progress=progress)
    rows = {}
    for name, value in _COMPARED:
        real, sim = [value(result) for result in measured], value(simulated)
        if sim is None or any(one is None for one in real):
            continue
        mean = float(np.mean(real))
        off = (
            (lambda of, s=sim: s - of)
            if name == "attainment"
            else (lambda of, s=sim: s / of - 1.0 if of else np.nan)
        )
        rows[name] = [mean, sim, off(mean), off(max(real)), off(min(real))]
    table = pd.DataFrame.from_dict(
        rows, orient="index", columns=["measured", "simulated", "error", "low", "high"]
    )
    title = f"{engine.topology}, {name_of(used)}: {len(workload)} requests, measured {len(measured)} times"
    return Fidelity(table, measured, simulated, title)
