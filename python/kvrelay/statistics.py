"""How far a run's numbers can be trusted: intervals and verdicts, as values that print themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvrelay.checks import number
from kvrelay.errors import ConfigError


@dataclass(frozen=True)
class Interval:
    """A confidence interval.

    ``low`` and ``high`` are ``None`` when there are too few observations; ``why`` says so, and also when
    the interval is likely to be too narrow. Seconds, requests per second, or a share.

    >>> Interval("ttft", 0.2, 0.18, 0.23, 0.95, "20 batch means", 2000)
    Interval(ttft 0.2, 95 % from 0.18 to 0.23; 20 batch means of 2000)
    """

    metric: str
    #: The estimate; ``None`` when there is no observation.
    value: float | None
    low: float | None
    high: float | None
    confidence: float
    #: What it rests on.
    method: str
    #: Observations behind it.
    count: int
    why: str | None = None

    @property
    def half_width(self) -> float | None:
        """Half the distance from ``low`` to ``high``."""
        return None if self.low is None or self.high is None else 0.5 * (self.high - self.low)

    def __contains__(self, value: float) -> bool:
        return self.low is not None and self.high is not None and self.low <= value <= self.high

    def __repr__(self) -> str:
        value = "undefined" if self.value is None else f"{self.value:.4g}"
        if self.low is None or self.high is None:
            return f"Interval({self.metric} {value}, no interval: {self.why})"
        note = "" if self.why is None else f"; {self.why}"
        return (
            f"Interval({self.metric} {value}, {self.confidence * 100:g} % from {self.low:.4g} to {self.high:.4g}; "
            f"{self.method} of {self.count}{note})"
        )


@dataclass(frozen=True)
class Stationarity:
    """Whether the queue kept still while requests arrived.

    ``ok`` is ``False`` when it grew, ``None`` when there are too few arrivals to tell. ``doubtful`` is a
    run in which growth cannot be ruled out: :func:`max_goodput` calls no such rate sustained. ``sure`` is
    growth beyond what a load at the very edge does by chance, that other arrivals would show as well.
    """

    ok: bool | None
    why: str
    doubtful: bool = False
    sure: bool = False
    #: Mean number of requests that arrivals found, in the first and in the last third.
    first_third: float | None = None
    last_third: float | None = None
    #: Growth per arrival: the share of the arrivals that the system did not keep up with.
    slope: float | None = None


def checked_confidence(value: Any) -> float:
    """``value`` as a share between 0 and 1."""
    confidence = number("confidence", value)
    if not 0 < confidence < 1:
        raise ConfigError(
            f"confidence is {confidence:g}; it must be between 0 and 1, for instance 0.95",
            confidence=confidence,
        )
    return confidence


def interval_from(
    metric: str, value: float | None, told: tuple[Any, str | None], confidence: float, unit: str
) -> Interval:
    """What the compiled core told: limits, or why there are none."""
    limits, why = told
    if limits is None:
        return Interval(metric, value, None, None, confidence, f"no {unit}", 0, why)
    estimate, low, high, batches, count, correlation = limits
    # Bartlett: neighbours of independent batch means correlate by less in 95 of 100 series.
    if unit == "batch means" and correlation > 1.645 / batches**0.5:
        why = f"neighbouring batches correlate by {correlation:.2f}: take more requests"
    return Interval(
        metric, estimate if value is None else value, low, high, confidence, f"{batches} {unit}", count, why
    )


def stationarity_from(told: tuple[Any, str | None]) -> Stationarity:
    """What the compiled core told: numbers and verdicts, or why there are none."""
    grown, why = told
    if grown is None:
        return Stationarity(None, f"cannot be told: {why}")
    count, present, waiting, (long, grew, sure, doubtful) = grown
    # Where the queue proper grew faster than chance, it says most.
    first, last, slope, ratio = waiting if grew and waiting[3] > present[3] else present
    found = f"arrivals found {first:.3g} requests in the first third and {last:.3g} in the last"
    if grew:
        why = (
            f"the queue was still growing, so this rate is not sustainable: {found} "
            f"({slope:.1%} of the arrivals stayed behind)"
        )
    elif not long:
        why = f"no growth seen, but the run is too short to rule it out: it ends while the system fills up; {found}"
    elif doubtful:
        why = f"the queue may have grown, take more requests: {found}"
    else:
        why = f"the queue did not grow: {found}, over {count} arrivals (slope {ratio:.1f} standard errors)"
    return Stationarity(not grew, why, doubtful, sure, first, last, slope)
