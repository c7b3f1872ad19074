"""What users describe of requests: objectives and lengths."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import pandas as pd

from kvrelay.checks import MAX_TOKENS, number, text, whole
from kvrelay.errors import ConfigError, WorkloadError
from kvrelay.objectives import PUBLISHED

#: Objectives above so many seconds are rather milliseconds. Three times and more what is published, where
#: TTFTs end at 30 s and TPOTs begin at 15 ms.
_LIKELY_SECONDS = {"ttft": 100.0, "tpot": 10.0, "e2e": 3600.0, "max_gap": 60.0}


@dataclass(frozen=True)
class SLO:
    """Service-level objectives of a request, in seconds; each may be ``None``.

    A request is *good* when it finishes within all of them; equality meets an objective. One so large
    that milliseconds may have been meant is taken as it is, with a ``UserWarning``.

    Parameters
    ----------
    ttft
        Time to first token.
    tpot
        Mean time per output token after the first.
    e2e
        Arrival to last token.
    max_gap
        The longest gap between two consecutive tokens.
    token_deadlines
        Also hold token *i* to arrival + ``ttft`` + *i* · ``tpot``.

    >>> SLO(ttft=0.4, tpot=0.04)
    SLO(ttft=0.4, tpot=0.04)
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    max_gap: float | None = None
    token_deadlines: bool = False

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2e", "max_gap"):
            value = getattr(self, name)
            if value is None:
                continue
            if not 0 < number(f"SLO {name}", value) < float("inf"):
                raise ConfigError(
                    f"SLO {name} is {value} s; it must be above 0 and finite, or None", value=value
                )
            if value > _LIKELY_SECONDS[name]:
                warnings.warn(
                    f"SLO {name} is {value} s: objectives are in seconds, and one above {_LIKELY_SECONDS[name]:g} s "
                    f"seldom binds; if milliseconds were meant, give {name}={value / 1e3:g}",
                    stacklevel=3,
                )
        if self.token_deadlines and (self.ttft is None or self.tpot is None):
            raise ConfigError("token_deadlines needs both ttft and tpot")

    @classmethod
    def preset(cls, name: str) -> SLO:
        """The published objectives called ``name``: see :func:`kvrelay.slo_presets`.

        ``"chat"``, ``"code"`` and ``"summarization"`` are those of table 1 of DistServe (Zhong et al.,
        OSDI'24), names that begin with ``mlperf-`` the server limits of MLPerf Inference.

        Raises
        ------
        :class:`kvrelay.ConfigError`, with the names there are, when there is none of this name.

        >>> SLO.preset("chat"), SLO.preset("mlperf-llama2-70b-interactive")
        (SLO(ttft=0.25, tpot=0.1), SLO(ttft=0.45, tpot=0.04))
        """
        text("SLO preset", name)
        wanted = "-".join(name.lower().replace("_", "-").split())
        if wanted not in PUBLISHED:
            near = get_close_matches(wanted, PUBLISHED, n=len(PUBLISHED), cutoff=0.0)
            raise ConfigError(
                f"unknown SLO preset {name!r}; known, nearest first: {', '.join(near)}", value=name
            )
        found = PUBLISHED[wanted]
        return cls(ttft=found.ttft, tpot=found.tpot)

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> SLO:
        """From the compiled core, which was given it by a user: checked and warned of already."""
        slo = object.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(slo, name, value)
        return slo

    def __repr__(self) -> str:
        given = [
            f"{name}={getattr(self, name)}"
            for name in ("ttft", "tpot", "e2e", "max_gap")
            if getattr(self, name) is not None
        ]
        if self.token_deadlines:
            given.append("token_deadlines=True")
        return f"SLO({', '.join(given)})"


def slo_presets() -> pd.DataFrame:
    """The published objectives that :meth:`SLO.preset` knows, by name: ``ttft`` and ``tpot`` in seconds,
    the ``share`` of requests that the source asks to meet them, and the ``source``.

    >>> slo_presets().loc["summarization", ["ttft", "tpot", "share"]].tolist()
    [15.0, 0.15, 0.9]
    """
    return pd.DataFrame.from_dict(
        {name: published._asdict() for name, published in PUBLISHED.items()}, orient="index"
    ).rename_axis("name")


@dataclass(frozen=True)
class Lengths:
    """A law of token lengths; made by :func:`lognormal`, :func:`uniform` or :func:`empirical`."""

    law: str
    parameters: tuple[float, ...]

    def _spec(self) -> tuple[str, list[float]]:
        return self.law, [float(value) for value in self.parameters]

    def __repr__(self) -> str:
        if self.law == "empirical":
            return f"empirical({len(self.parameters)} quantiles)"
        return f"{self.law}({', '.join(f'{value:g}' for value in self.parameters)})"


def lognormal(mean: float, std: float) -> Lengths:
    """Log-normal lengths with this mean and standard deviation, in tokens.

    >>> lognormal(700, 900)
    lognormal(700, 900)
    """
    mean, std = (
        number("lognormal mean", mean, error=WorkloadError),
        number("lognormal std", std, 0.0, WorkloadError),
    )
    if not 0 < mean < float("inf") or std == float("inf"):
        raise WorkloadError(f"lognormal({mean:g}, {std:g}): the mean must be above 0, and both finite")
    return Lengths("lognormal", (mean, std))


def uniform(low: int, high: int) -> Lengths:
    """Lengths from ``low`` to ``high`` tokens, both included, all equally likely."""
    low = whole("uniform low", low, 1, MAX_TOKENS, WorkloadError)
    high = whole("uniform high", high, 1, MAX_TOKENS, WorkloadError)
    if low > high:
        raise WorkloadError(f"uniform({low}, {high}): low is above high", low=low, high=high)
    return Lengths("uniform", (low, high))


def empirical(quantiles: Any) -> Lengths:
    """Lengths by their quantiles: evenly spaced from the 0th to the last, interpolated linearly."""
    return Lengths("empirical", tuple(float(value) for value in quantiles))
