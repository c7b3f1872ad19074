"""Workloads: arrivals in time order, made up, recorded or given."""

from __future__ import annotations

import html
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from kvrelay import _core
from kvrelay.checks import MAX_TOKENS, MAX_U32, MAX_U64, number, text, whole
from kvrelay.describe import SLO, Lengths, _lengths_spec
from kvrelay.errors import WorkloadError

ClassSpec = tuple[str, SLO | None, int, int | None]


class Workload:
    """Requests with their arrivals, lengths and objectives. It is never changed: methods like
    :meth:`at_rate` give another one.

    >>> chat = Workload.poisson(rate=4.0, num_requests=100, prompt_tokens=512, output_tokens=64)
    >>> len(chat), round(chat.at_rate(8.0).rate, 6)
    (100, 8.0)
    """

    def __init__(self, core: _core.Workload) -> None:
        self._core = core
        for warning in core.warnings:
            warnings.warn(warning, stacklevel=3)

    @classmethod
    def poisson(
        cls,
        rate: float,
        num_requests: int,
        prompt_tokens: int | Lengths,
        output_tokens: int | Lengths,
        slo: SLO | None = None,
        *,
        seed: int = 0,
        slo_class: str = "default",
        priority: int = 0,
        max_tokens: int | None = None,
        spearman: float | None = None,
    ) -> Workload:
        """Requests with exponential gaps.

        Parameters
        ----------
        rate
            Requests per second.
        prompt_tokens, output_tokens
            A number of tokens, or a law such as :func:`kvrelay.lognormal`.
        max_tokens
            All that scheduler and policies know of a length; the largest output by default.
        spearman
            Rank correlation between prompt and output lengths.
        """
        return cls._synthetic(
            "poisson", rate, None, num_requests, prompt_tokens, output_tokens, spearman,
            _spec(slo_class, slo, priority, max_tokens), seed,
        )  # fmt: skip

    @classmethod
    def gamma(
        cls,
        rate: float,
        cv: float,
        num_requests: int,
        prompt_tokens: int | Lengths,
        output_tokens: int | Lengths,
        slo: SLO | None = None,
        *,
        seed: int = 0,
        slo_class: str = "default",
        priority: int = 0,
        max_tokens: int | None = None,
        spearman: float | None = None,
    ) -> Workload:
        """Requests with gamma-distributed gaps of coefficient of variation ``cv``: 1 is Poisson, more
        is burstier. The rest as in :meth:`poisson`."""
        return cls._synthetic(
            "gamma", rate, cv, num_requests, prompt_tokens, output_tokens, spearman,
            _spec(slo_class, slo, priority, max_tokens), seed,
        )  # fmt: skip

    @classmethod
    def fixed(
        cls,
        rate: float,
        num_requests: int,
        prompt_tokens: int | Lengths,
        output_tokens: int | Lengths,
        slo: SLO | None = None,
        *,
        seed: int = 0,
        slo_class: str = "default",
        priority: int = 0,
        max_tokens: int | None = None,
        spearman: float | None = None,
    ) -> Workload:
        """Evenly spaced requests. The rest as in :meth:`poisson`."""
        return cls._synthetic(
            "fixed", rate, None, num_requests, prompt_tokens, output_tokens, spearman,
            _spec(slo_class, slo, priority, max_tokens), seed,
        )  # fmt: skip

    @classmethod
    def _synthetic(
        cls,
        process: str,
        rate: float,
        cv: float | None,
        num_requests: int,
        prompt_tokens: int | Lengths,
        output_tokens: int | Lengths,
        spearman: float | None,
        spec: ClassSpec,
        seed: int,
    ) -> Workload:
        rate = number("rate", rate, error=WorkloadError)
        return cls(
            _core.Workload.synthetic(
                process, rate, cv, _count("num_requests", num_requests), _lengths_spec(prompt_tokens),
                _lengths_spec(output_tokens), spearman, spec, _seed(seed),
            )
        )  # fmt: skip

    @classmethod
    def preset(
        cls,
        name: str,
        num_requests: int,
        slo: SLO | None = None,
        *,
        rate: float | None = None,
        seed: int = 0,
        slo_class: str = "default",
        priority: int = 0,
        max_tokens: int | None = None,
    ) -> Workload:
        """Requests like those of a published trace: its length quantiles, their rank correlation, its
        rate and burstiness. See :func:`kvrelay.presets`; one without a published rate asks for
        ``rate``."""
        spec = _spec(slo_class, slo, priority, max_tokens)
        text("preset", name, WorkloadError)
        if rate is not None:
            rate = number("rate", rate, error=WorkloadError)
        return cls(_core.Workload.preset(name, rate, _count("num_requests", num_requests), spec, _seed(seed)))

    @classmethod
    def from_trace(
        cls,
        path: str | os.PathLike[str],
        slo: SLO | None = None,
        *,
        limit: int | None = None,
        rate: float | None = None,
        format: str | None = None,
        unit: str | None = None,
        slot: float | None = None,
        seed: int = 0,
        slo_class: str = "default",
        priority: int = 0,
        max_tokens: int | None = None,
    ) -> Workload:
        """The requests of a trace file, its first arrival at 0.

        Parameters
        ----------
        limit
            Only the first so many requests.
        rate
            Rescale the arrivals to this rate.
        format
            Recognised by content if not given: Mooncake, Azure, Vidur, ….
        unit
            Unit of the arrivals (``"s"``, ``"ms"``, ``"us"``, ``"ns"``) if not the format's own.
        slot
            Spread arrivals that were rounded down to multiples of so many seconds evenly over them
            (Mooncake's conversation trace: 3).
        """
        spec = _spec(slo_class, slo, priority, max_tokens)
        if limit is not None:
            limit = whole("limit", limit, 1, MAX_U64, WorkloadError)
        if slot is not None:
            slot = number("slot", slot, 0.0, WorkloadError)
        if rate is not None:
            rate = number("rate", rate, error=WorkloadError)
        for name, value in (("format", format), ("unit", unit)):
            if value is not None:
                text(name, value, WorkloadError)
        return cls(
            _core.Workload.from_trace(os.fspath(path), format, unit, limit, slot, rate, spec, _seed(seed))
        )

    @classmethod
    def from_records(
        cls,
        records: Iterable[Mapping[str, Any]] | pd.DataFrame,
        slo: SLO | Mapping[str, SLO | None] | None = None,
        *,
        seed: int = 0,
    ) -> Workload:
        """The requests of a list.

        Parameters
        ----------
        records
            Mappings, or a frame, with ``arrival`` (seconds), ``prompt_tokens``, ``output_tokens`` and,
            where wanted, ``slo_class``, ``max_tokens``, ``priority``, ``hash_ids`` with
            ``tokens_per_id``. A finished :class:`Result`'s ``.requests`` will do.
        slo
            One for all, or one per class.

        >>> Workload.from_records([{"arrival": 0.0, "prompt_tokens": 8, "output_tokens": 2}])
        Workload(1 requests given)
        """
        if isinstance(records, pd.DataFrame):
            records = records.to_dict("records")
        names: list[str] = []
        rows = []
        for index, record in enumerate(records):
            name = str(_field(record, "slo_class", "default"))
            if name not in names:
                names.append(name)
            missing = [
                key for key in ("arrival", "prompt_tokens", "output_tokens") if _field(record, key) is None
            ]
            if missing:
                raise WorkloadError(f"records[{index}] has no {missing[0]}", index=index)
            ids = _field(record, "hash_ids")
            try:
                rows.append(
                    (
                        float(record["arrival"]),
                        int(record["prompt_tokens"]),
                        int(record["output_tokens"]),
                        names.index(name),
                        _field(record, "max_tokens"),
                        _field(record, "priority"),
                        None if ids is None else (list(ids), int(_field(record, "tokens_per_id", 512))),
                    )
                )
            except (TypeError, ValueError, OverflowError) as error:
                raise WorkloadError(f"records[{index}]: {error}", index=index) from error
        per_class = dict(slo) if isinstance(slo, Mapping) else dict.fromkeys(names, slo)
        unknown = sorted(set(per_class) - set(names))
        if unknown:
            raise WorkloadError(
                f"an SLO for class {unknown[0]!r}, which no record has; they have {', '.join(names)}"
            )
        classes = [_spec(name, per_class.get(name), 0, None) for name in names]
        return cls(_core.Workload.from_records(rows, classes or [("default", None, 0, None)], _seed(seed)))

    @classmethod
    def merge(cls, *workloads: Workload) -> Workload:
        """All workloads at once, from one start; classes that are alike become one."""
        for index, workload in enumerate(workloads):
            if not isinstance(workload, Workload):
                raise WorkloadError(f"workloads[{index}] is {workload!r}; merge(a, b, …) takes workloads")
        return cls(_core.Workload.merge([workload._core for workload in workloads]))

    def at_rate(self, rate: float) -> Workload:
        """The same arrivals, rescaled to ``rate`` requests per second."""
        return Workload(self._core.at_rate(number("rate", rate, error=WorkloadError)))

    def scaled_lengths(self, divide: int) -> Workload:
        """The same arrivals with all lengths divided by ``divide``, rounded, at least 1."""
        return Workload(self._core.scaled_lengths(whole("divide", divide, 0, MAX_U32, WorkloadError)))

    @property
    def rate(self) -> float | None:
        """Arrivals per second; ``None`` when all arrive at one instant."""
        return self._core.rate

    @property
    def seed(self) -> int:
        """The seed of everything made up in it."""
        return self._core.seed

    @property
    def classes(self) -> dict[str, SLO | None]:
        """Objectives by class."""
        return {name: slo if slo != SLO() else None for name, slo, _ in self._core.classes}

    def to_frame(self) -> pd.DataFrame:
        """One row a request: arrival (s), prompt_tokens, output_tokens, max_tokens, slo_class,
        priority."""
        frame = pd.DataFrame(self._core.columns())
        names = pd.Series([name for name, _, _ in self._core.classes], dtype="string")
        frame["slo_class"] = names.take(frame["slo_class"]).to_numpy()
        return frame

    def __len__(self) -> int:
        return len(self._core)

    def __repr__(self) -> str:
        return f"Workload({self._core.description})"

    def _repr_html_(self) -> str:
        frame = self.to_frame()
        lengths = frame[["prompt_tokens", "output_tokens"]].describe(percentiles=[0.5, 0.9, 0.99])
        table = lengths.drop(index=["count", "std"]).round(1).to_html()
        classes = "".join(
            f"<li>{html.escape(name)}: {html.escape(repr(slo))}</li>" for name, slo in self.classes.items()
        )
        rate = "" if self.rate is None else f", {self.rate:.3g} req/s over {self._core.span:.3g} s"
        return f"<b>{html.escape(self._core.description)}</b>{rate}<ul>{classes}</ul>{table}"


def _field(record: Mapping[str, Any], key: str, default: Any = None) -> Any:
    value = record.get(key, default)
    missing = value is None or (
        not isinstance(value, (list, tuple, str)) and pd.api.types.is_scalar(value) and pd.isna(value)
    )
    return default if missing else value


def _spec(name: Any, slo: Any, priority: Any, max_tokens: Any) -> ClassSpec:
    if slo is not None and not isinstance(slo, SLO):
        raise WorkloadError(f"slo of class {name!r} is {slo!r}; it must be a kvrelay.SLO or None")
    if max_tokens is not None:
        max_tokens = whole("max_tokens", max_tokens, 1, MAX_TOKENS, WorkloadError)
    priority = whole("priority", priority, -(2**31), 2**31 - 1, WorkloadError)
    return text("slo_class", name, WorkloadError), slo, priority, max_tokens


def _count(name: str, value: Any) -> int:
    return whole(name, value, 0, MAX_U32, WorkloadError)


def _seed(seed: Any) -> int:
    return whole("seed", seed, 0, MAX_U64, WorkloadError)


def presets() -> list[str]:
    """Names of the published workloads that :meth:`Workload.preset` knows.

    >>> "azure-conv-2023" in presets()
    True
    """
    return _core.preset_names()
