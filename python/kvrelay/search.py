"""The search for the largest rate, with the interval that its runs leave for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay import _core
from kvrelay.checks import number
from kvrelay.cluster import MAX_SECONDS, Cluster
from kvrelay.errors import ConfigError
from kvrelay.policies import PolicyLike
from kvrelay.progress import bar
from kvrelay.result import Result
from kvrelay.simulation import simulate
from kvrelay.statistics import checked_confidence
from kvrelay.workload import Workload

#: The ends of the interval are found this closely at least: they are further apart than that anyway.
_ENDS = 0.02


@dataclass(frozen=True)
class MaxGoodput:
    """The largest rate that attains a target, in requests per second.

    ``rate`` is the estimate: the largest rate, it and every lower one tried, at which the attainment
    reaches the target and the queue does not grow. ``low`` is the largest rate that is *sustained*:
    the lower confidence limit reaches the target and growth is ruled out (zero if no rate is).
    ``high`` is the smallest rate that is not even possible: the upper limit stays below the target, or
    the queue surely grows (infinite if every rate is possible). ``tried`` maps every rate to its attainment.
    """

    rate: float
    high: float
    attainment: float
    num_gpus: int
    tried: dict[float, float]
    low: float = 0.0
    #: Of the limits; ``None`` when there are none, and ``low`` and ``high`` only bracket the search.
    confidence: float | None = None
    #: Rates at which the queue was still growing.
    growing: tuple[float, ...] = ()
    #: What keeps the interval from being one, or from being narrow.
    why: str | None = None

    @property
    def per_gpu(self) -> float:
        """``rate`` per GPU."""
        return self.rate / self.num_gpus

    def __repr__(self) -> str:
        limits = "searched" if self.confidence is None else f"{self.confidence * 100:g} %"
        note = "" if self.why is None else f"; {self.why}"
        return (
            f"MaxGoodput({self.rate:.3g} req/s ({limits} from {self.low:.3g} to {self.high:.3g}) with at least "
            f"{self.attainment * 100:g}% of requests good, {self.per_gpu:.3g} per GPU; {len(self.tried)} rates tried{note})"
        )


def max_goodput(
    workload: Workload,
    cluster: Cluster,
    policy: PolicyLike = "disaggregated",
    *,
    attainment: float = 0.9,
    belief: str | None = None,
    seed: int = 0,
    tolerance: float = 0.01,
    progress: bool = True,
    criterion: Callable[[Result], float] | None = None,
    confidence: float = 0.95,
) -> MaxGoodput:
    """The largest rate at which at least ``attainment`` of the requests are good and the queue does not
    grow, by bisection over the same arrivals rescaled, with an interval.

    All rates see the same requests in the same order, so that they differ by the rate alone. How far
    the answer depends on just these requests is what the interval says: take more of them to narrow it.

    Parameters
    ----------
    criterion
        What is held against ``attainment``; by default ``Result.attainment``. With one of your own there
        are no confidence limits, and ``low`` and ``high`` only bracket the search.
    tolerance
        Width of the final bracket, relative to the rate.
    confidence
        Of the limits of each run's attainment.

    >>> import kvrelay as kr
    >>> workload = kr.Workload.poisson(4.0, 1000, 512, 64, slo=kr.SLO(ttft=0.4, tpot=0.04))
    >>> cluster = kr.Cluster("2P1D", model="opt-13b", gpu="a100-80gb", latency="vllm")
    >>> found = kr.max_goodput(workload, cluster, progress=False)
    >>> found.low <= found.rate <= found.high
    True
    """
    attainment, tolerance = number("attainment", attainment), number("tolerance", tolerance)
    confidence = checked_confidence(confidence)
    if not 0 < attainment <= 1 and criterion is None:
        raise ConfigError(
            f"attainment is {attainment}; it must be above 0 and at most 1", attainment=attainment
        )
    if not 0 < tolerance < 1:
        raise ConfigError(f"tolerance is {tolerance}; it must be between 0 and 1", tolerance=tolerance)
    start = workload.rate or 1.0
    # Below it requests never meet each other, and a run would last too long.
    lowest = max(start * 1e-4, 2 * len(workload) / MAX_SECONDS)
    tried: dict[float, float] = {}
    growing: list[float] = []
    without_limits: list[str] = []
    if criterion is not None:
        without_limits.append("a criterion of your own has no confidence limits")
    shown = bar(None, "max_goodput", "rate", progress)

    def judge(rate: float) -> tuple[bool, bool, bool]:
        if rate <= lowest:
            return without_load()
        return judged(rate)

    @functools.cache
    def without_load() -> tuple[bool, bool, bool]:
        return judged(lowest)

    def judged(rate: float) -> tuple[bool, bool, bool]:
        result = simulate(workload.at_rate(rate), cluster, policy, belief=belief, seed=seed, progress=False)
        value = _measured(result, criterion, rate)
        tried[rate] = value
        queue = result.stationary()
        if value < attainment and rate <= lowest:
            raise ConfigError(
                f"no rate attains {attainment * 100:g}%: at {rate:.2g} req/s it is {value:.1%}, so it is missed without "
                "load as well",
                rate=rate, value=value,
            )  # fmt: skip
        shown.update()
        shown.set_postfix_str(f"{rate:.3g} req/s: {value:.1%}", refresh=False)
        if queue.ok is False:
            growing.append(rate)
        if queue.sure:
            return False, False, False
        attained = value >= attainment and queue.ok is not False
        limits = None if criterion is not None else result.interval("attainment", confidence=confidence)
        if limits is None or limits.low is None or limits.high is None:
            if limits is not None:
                without_limits.append(f"no confidence limits: {limits.why}")
            return attained, attained, attained
        return (
            attained and limits.low >= attainment and not queue.doubtful,
            attained,
            limits.high >= attainment,
        )

    needed = None if criterion is not None else _core.requests_for_attainment(attainment, confidence)
    reachable = criterion is not None or (needed is not None and needed <= len(workload))
    with shown:
        rate, above, low, high = _core.search_rate(judge, start, tolerance, max(tolerance, _ENDS), reachable)
    why = None
    if without_limits:
        low, high, why = rate, above, without_limits[0]
    elif not reachable:
        more = "no number of requests does" if needed is None else f"it takes {needed}"
        why = f"{len(workload)} requests, even if all are good, do not confirm {attainment:.4g}: {more}"
    return MaxGoodput(
        rate=rate,
        high=high,
        attainment=attainment,
        num_gpus=cluster.num_gpus,
        tried=dict(sorted(tried.items())),
        low=low,
        confidence=None if without_limits else confidence,
        growing=tuple(sorted(growing)),
        why=why,
    )


def _measured(result: Result, criterion: Callable[[Result], float] | None, rate: float) -> float:
    if criterion is None:
        attained = result.attainment()
        if attained is None:
            raise ConfigError(
                "no request has an objective, so no rate attains or misses a target: give an SLO"
            )
        return attained
    what = f"criterion {getattr(criterion, '__name__', repr(criterion))}(result) at {rate:.6g} req/s"
    value = number(what, criterion(result))
    if value != value:
        raise ConfigError(f"{what} is nan; it must be a number", rate=rate)
    return value
