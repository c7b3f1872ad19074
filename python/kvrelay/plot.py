"""Pictures of results: Axes in, Axes out.

Every function draws on ``ax``, or on a new figure's Axes if there is none, and returns the Axes, so
that everything can be changed afterwards. matplotlib comes with ``pip install kvrelay[plot]``.

Colours are Okabe and Ito's, which people with any colour vision tell apart, given out in a fixed
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvrelay.formats import percent

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from kvrelay.describe import SLO

__all__ = ["goodput_bars", "latency_cdf", "timeline"]

_PALETTE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000"]
_LINES = ["-", "--", "-.", ":"]
_MISS = "#D55E00"

#: Column, name on the axis, unit, and units in a second.
_METRICS = {
    "ttft": ("time to first token", "s", 1.0),
    "tpot": ("time per output token", "ms", 1e3),
    "e2e": ("arrival to last token", "s", 1.0),
    "max_gap": ("longest gap between tokens", "ms", 1e3),
}

#: Statuses of requests that will never reach a milestone which they have not reached.
_NEVER = ["refused", "failed", "cut_off"]

#: A curve has at most so many points: more than a screen has pixels.
_MOST_POINTS = 4_000


#: More objectives than this would be a grid, not marks.
_MOST_OBJECTIVES = 4


class _Result(Protocol):
    """What is read of a result."""

    @property
    def requests(self) -> pd.DataFrame: ...
    @property
    def objectives(self) -> dict[str, list[SLO]]: ...
    @property
    def bounds(self) -> tuple[float, float] | None: ...
    def goodput(self) -> float: ...
    def attainment(self) -> float: ...


def file_types() -> list[str]:
    """What pictures can be saved as: endings of file names, without the dot."""
    _pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    return sorted(FigureCanvasBase.get_supported_filetypes())


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'kvrelay[plot]'") from error
    return pyplot


def _axes(ax: Axes | None, **figure: Any) -> Axes:
    pyplot = _pyplot()
    if ax is None:
        return pyplot.subplots(layout="constrained", **figure)[1]
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        hint = f"; a metric is given by name: metric={ax!r}" if isinstance(ax, str) else ""
        raise TypeError(
            f"ax is {ax!r}, of type {type(ax).__name__}; it must be matplotlib Axes, or None{hint}"
        )
    return ax


def latency_cdf(
    result: _Result | Mapping[str, _Result],
    ax: Axes | None = None,
    metric: str = "ttft",
) -> Axes:
    """The share of requests (y) whose latency is at most x.

    Of one result, a curve for each SLO class; of a mapping from labels to results, a curve for each.
    Requests that were refused, failed or were cut off before the milestone count as never reaching
    it: their curve ends below 1. Requests that have no such latency (TPOT of a single token) do not
    count. Dotted lines are objectives.

    Args:
        result: A result, or labels and results.
        ax: Where to draw.
        metric: ``"ttft"``, ``"tpot"``, ``"e2e"`` or ``"max_gap"``.

    Raises:
        ValueError: If there is no such metric.
    """
    _check_results(result)
    if metric not in _METRICS:
        raise ValueError(f"unknown metric {metric!r}; known: {', '.join(_METRICS)}")
    title, unit, scale = _METRICS[metric]
    ax = _axes(ax, figsize=(6.0, 4.0))
    curves = list(_curves(result))
    for index, (label, requests) in enumerate(curves):
        values, shares = _distribution(requests, metric)
        ax.plot(
            values * scale,
            shares,
            drawstyle="steps-post",
            label=label,
            color=_PALETTE[index % len(_PALETTE)],
            linestyle=_LINES[index // len(_PALETTE) % len(_LINES)],
        )
    _mark_objectives(ax, result, metric, scale)
    ax.set_xlabel(f"{title} ({unit})")
    ax.set_ylabel("share of requests")
    ax.set_ylim(0.0, 1.02)
    ax.set_xlim(left=0.0)
    ax.grid(alpha=0.3)
    if len(curves) > 1:
        ax.legend(loc="best")
    return ax


def _check_results(given: Any) -> None:
    """Raises where something else than results is given, with what it is."""
    for label, one in given.items() if isinstance(given, Mapping) else [("", given)]:
        if not hasattr(one, "requests"):
            named = f" {label!r}" if label else ""
            raise TypeError(
                f"result{named} is of type {type(one).__name__}; give a Result, or a mapping from labels to results"
            )


def _mark_objectives(ax: Axes, result: _Result | Mapping[str, _Result], metric: str, scale: float) -> None:
    """A dotted line at every objective, with its class where there are several; none of very many."""
    results = result.values() if isinstance(result, Mapping) else [result]
    limits: dict[float, set[str]] = {}
    for one in results:
        for name, slos in one.objectives.items():
            for slo in slos:
                limit = getattr(slo, metric)
                if limit is not None:
                    limits.setdefault(limit, set()).add(name)
    if not 0 < len(limits) <= _MOST_OBJECTIVES:
        return
    ax.vlines([limit * scale for limit in limits], 0.0, 1.0, colors="0.4", linestyles=":", linewidths=1.0)
    for limit, names in limits.items():
        label = "SLO" if len(limits) == 1 else f"SLO {', '.join(sorted(names))}"
        ax.text(
            limit * scale,
            0.03,
            f" {label}",
            color="0.4",
            fontsize="small",
            rotation=90,
            va="bottom",
            ha="right",
        )


def _curves(result: _Result | Mapping[str, _Result]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Labels and the requests of each."""
    if isinstance(result, Mapping):
        yield from ((label, one.requests) for label, one in result.items())
        return
    by_class = result.requests.groupby("slo_class", sort=True, observed=True)
    yield from ((str(name), requests) for name, requests in by_class)


def _distribution(requests: pd.DataFrame, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Sorted latencies in seconds from 0 on, and the share of requests at or below each."""
    column = requests[metric]
    values = np.sort(column.dropna().to_numpy(dtype=float))
    never = int((column.isna() & requests["status"].isin(_NEVER)).sum())
    counts = np.arange(len(values) + 1)
    shares = counts / max(len(values) + never, 1)
    values = np.concatenate([[0.0], values])
    if len(values) > _MOST_POINTS:
        kept = np.linspace(0, len(values) - 1, _MOST_POINTS).round().astype(int)
        values, shares = values[kept], shares[kept]
    return values, shares


#: Phases of a request: label, from, to, colour, height of the bar.
_PHASES = [
    ("queue", "arrival", "prefill_start", "#BBBBBB", 0.8),
    ("prefill", "prefill_start", "first_token", "#0072B2", 0.8),
    ("hand-over", "first_token", "decode_start", "#F0E442", 0.8),
    ("decode", "decode_start", "last_token", "#009E73", 0.8),
    # Thinner and on top: a transfer may begin while prefill still runs.
    ("KV transfer", "transfer_start", "transfer_end", "#CC79A7", 0.3),
]


def timeline(result: _Result, ax: Axes | None = None, max_requests: int = 60) -> Axes:
    """What became of each request: one row each, by arrival, from top to bottom.

    Bars are the time in the queue, in prefill, between first token and decode, and in decode; the
    thin bar is the KV transfer. Crosses mark requests that missed an objective. The picture of a
    window begins where the window does.

    Args:
        result: A result.
        ax: Where to draw.
        max_requests: The first so many requests only; the title tells when there are more.

    Raises:
        ValueError: If ``max_requests`` is below 1.
    """
    _check_results(result)
    if max_requests < 1:
        raise ValueError(f"max_requests is {max_requests}; it must be at least 1")
    every = result.requests.sort_values("arrival", kind="stable")
    requests = every.head(max_requests)
    ax = _axes(ax, figsize=(8.0, 1.5 + 0.09 * max(len(requests), 20)))
    rows = np.arange(len(requests))
    for label, start, end, colour, height in _PHASES:
        starts = requests[start].to_numpy(dtype=float, na_value=np.nan)
        lasts = requests[end].to_numpy(dtype=float, na_value=np.nan) - starts
        seen = lasts > 0.0
        if seen.any():
            ax.barh(rows[seen], lasts[seen], left=starts[seen], height=height, color=colour, label=label)
    _mark_misses(ax, requests, rows)
    ax.set_xlabel("time since the start of the run (s)")
    ax.set_ylabel("request, by arrival")
    ax.set_ylim(max(len(requests), 1) - 0.5, -0.5)
    ax.set_xlim(left=0.0 if result.bounds is None else result.bounds[0])
    ax.yaxis.get_major_locator().set_params(integer=True)
    if len(every) > len(requests):
        ax.set_title(f"the first {len(requests)} of {len(every):,} requests", loc="left")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize="small", frameon=False)
    return ax


def _mark_misses(ax: Axes, requests: pd.DataFrame, rows: np.ndarray) -> None:
    """A cross at the last thing known of each request that missed."""
    # NA, a request on neither side, is not a miss.
    missed = requests["good"].astype("boolean").eq(False).fillna(False).to_numpy(dtype=bool)
    if not missed.any():
        return
    milestones = ["arrival", "prefill_start", "first_token", "last_token"]
    last = requests[milestones].astype("Float64").max(axis=1).to_numpy(dtype=float, na_value=np.nan)
    ax.scatter(last[missed], rows[missed], marker="x", s=18, color=_MISS, label="missed", zorder=3)


def goodput_bars(results: _Result | Mapping[str, _Result], ax: Axes | None = None) -> Axes:
    """Goodput of each result, with its attainment above the bar.

    Args:
        results: A result, or labels and results, drawn in this order.
        ax: Where to draw.

    Raises:
        ValueError: If there are no results.
    """
    _check_results(results)
    results = results if isinstance(results, Mapping) else {"": results}
    if not results:
        raise ValueError("no results to draw")
    ax = _axes(ax, figsize=(max(4.0, 1.2 * len(results)), 4.0))
    goodputs = [_number(result.goodput()) for result in results.values()]
    colours = [_PALETTE[index % len(_PALETTE)] for index in range(len(results))]
    bars = ax.bar(range(len(results)), np.nan_to_num(goodputs), color=colours, width=0.7)
    ax.bar_label(bars, [_annotation(result) for result in results.values()], padding=2, fontsize="small")
    ax.set_xticks(range(len(results)), list(results))
    ax.set_ylabel("goodput (good requests/s)")
    ax.margins(y=0.15)
    ax.set_ylim(bottom=0.0)
    return ax


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _annotation(result: _Result) -> str:
    goodput, attainment = _number(result.goodput()), _number(result.attainment())
    if np.isnan(goodput) or np.isnan(attainment):
        return "no SLO"
    return f"{goodput:.2f}\n{percent(attainment)} good"
