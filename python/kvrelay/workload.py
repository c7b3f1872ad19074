"""Workloads: requests made up, recorded or given, at times of their own or in closed loops."""

from __future__ import annotations

import html
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from kvrelay import _core
from kvrelay.checks import MAX_U32, MAX_U64, number, text, whole
from kvrelay.describe import SLO, Lengths
from kvrelay.errors import WorkloadError
from kvrelay.specs import (
    ClassSpec,
    PairSpec,
    checked_seed,
    class_spec,
    count,
    lengths_spec,
    pair_spec,
    real,
    record_rows,
    think_spec,
)


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
            "poisson", rate, None, num_requests, pair_spec(prompt_tokens, output_tokens, spearman),
            class_spec(slo_class, slo, priority, max_tokens), seed,
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
            "gamma", rate, cv, num_requests, pair_spec(prompt_tokens, output_tokens, spearman),
            class_spec(slo_class, slo, priority, max_tokens), seed,
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
            "fixed", rate, None, num_requests, pair_spec(prompt_tokens, output_tokens, spearman),
            class_spec(slo_class, slo, priority, max_tokens), seed,
        )  # fmt: skip

    @classmethod
    def _synthetic(
        cls,
        process: str,
        rate: float,
        cv: float | None,
        num_requests: int,
        lengths: PairSpec,
        spec: ClassSpec,
        seed: int,
    ) -> Workload:
        rate = real("rate", rate)
        num_requests = count("num_requests", num_requests)
        return cls(
            _core.Workload.synthetic(process, rate, cv, num_requests, lengths, spec, checked_seed(seed))
        )

    @classmethod
    def ramp(
        cls,
        rate_from: float,
        rate_to: float,
        *,
        prompt_tokens: int | Lengths,
        output_tokens: int | Lengths,
        num_requests: int | None = None,
        duration: float | None = None,
        slo: SLO | None = None,
        seed: int = 0,
        slo_class: str = "default",
        priority: int = 0,
        max_tokens: int | None = None,
        spearman: float | None = None,
    ) -> Workload:
        """Poisson arrivals at a rate that rises or falls on a straight line: what a system holds out,
        found in one run.

        Arrivals of a changing rate are those of a unit Poisson process taken back through the rate's
        integral, exactly. The rate begins at time 0; the first request comes when the process says so.

        Parameters
        ----------
        rate_from, rate_to
            Requests per second at the start and at the end, at least 0 and not both 0.
        num_requests
            Exactly so many; the ramp lasts as long as its mean rate takes for them.
        duration
            Or so many seconds, with as many requests as chance has it.

        Raises
        ------
        :class:`kvrelay.WorkloadError`, naming the parameter, when one is out of range, or not one of
        ``num_requests`` and ``duration`` is given. The other parameters are as in :meth:`poisson`.

        >>> rising = Workload.ramp(1.0, 9.0, num_requests=500, prompt_tokens=512, output_tokens=64)
        >>> len(rising), round(rising.to_frame()["arrival"].max())
        (500, 100)
        """
        rates = {"rate_from": rate_from, "rate_to": rate_to}
        return cls._varying(
            "ramp", rates, num_requests, duration, pair_spec(prompt_tokens, output_tokens, spearman),
            class_spec(slo_class, slo, priority, max_tokens), seed,
        )  # fmt: skip

    @classmethod
    def sinusoid(
        cls,
        rate: float,
        amplitude: float,
        period: float,
        *,
        prompt_tokens: int | Lengths,
        output_tokens: int | Lengths,
        num_requests: int | None = None,
        duration: float | None = None,
        slo: SLO | None = None,
        seed: int = 0,
        slo_class: str = "default",
        priority: int = 0,
        max_tokens: int | None = None,
        spearman: float | None = None,
    ) -> Workload:
        """Poisson arrivals at ``rate + amplitude · sin(2π · t / period)``: a day's tides.

        Parameters
        ----------
        rate, amplitude
            Requests per second; the amplitude is between 0 and the rate.
        period
            Seconds of a whole wave.
        num_requests, duration
            Where it ends: after so many requests, or after so many seconds. One of the two.

        The rest, and what is raised, as in :meth:`ramp`.
        """
        rates = {"rate": rate, "amplitude": amplitude, "period": period}
        return cls._varying(
            "sinusoid", rates, num_requests, duration, pair_spec(prompt_tokens, output_tokens, spearman),
            class_spec(slo_class, slo, priority, max_tokens), seed,
        )  # fmt: skip

    @classmethod
    def on_off(
        cls,
        rate_on: float,
        rate_off: float,
        mean_on: float,
        mean_off: float,
        *,
        prompt_tokens: int | Lengths,
        output_tokens: int | Lengths,
        num_requests: int | None = None,
        duration: float | None = None,
        slo: SLO | None = None,
        seed: int = 0,
        slo_class: str = "default",
        priority: int = 0,
        max_tokens: int | None = None,
        spearman: float | None = None,
    ) -> Workload:
        """Bursts: Poisson arrivals at one of two rates in turn, ``rate_on`` first, each for an
        exponentially distributed time (a Markov-modulated Poisson process of two states).

        Parameters
        ----------
        rate_on, rate_off
            Requests per second in a burst (above 0) and between bursts (at least 0).
        mean_on, mean_off
            Mean length of bursts and of the times between them, in seconds.
        num_requests, duration
            Where it ends: after so many requests, or after so many seconds. One of the two.

        The rest, and what is raised, as in :meth:`ramp`.
        """
        rates = {"rate_on": rate_on, "rate_off": rate_off, "mean_on": mean_on, "mean_off": mean_off}
        return cls._varying(
            "on_off", rates, num_requests, duration, pair_spec(prompt_tokens, output_tokens, spearman),
            class_spec(slo_class, slo, priority, max_tokens), seed,
        )  # fmt: skip

    @classmethod
    def _varying(
        cls,
        law: str,
        rates: dict[str, float],
        num_requests: int | None,
        duration: float | None,
        lengths: PairSpec,
        spec: ClassSpec,
        seed: int,
    ) -> Workload:
        if (num_requests is None) == (duration is None):
            raise WorkloadError(
                f"num_requests is {num_requests!r} and duration is {duration!r}; give one of the two"
            )
        if num_requests is not None:
            num_requests = count("num_requests", num_requests)
        else:
            duration = real("duration", duration)
        parameters = [real(name, value) for name, value in rates.items()]
        return cls(
            _core.Workload.varying(law, parameters, num_requests, duration, lengths, spec, checked_seed(seed))
        )

    @classmethod
    def closed_loop(
        cls,
        concurrency: int,
        num_requests: int,
        prompt_tokens: int | Lengths,
        output_tokens: int | Lengths,
        slo: SLO | None = None,
        *,
        think_time: float = 0.0,
        think_cv: float = 0.0,
        seed: int = 0,
        slo_class: str = "default",
        priority: int = 0,
        max_tokens: int | None = None,
        spearman: float | None = None,
    ) -> Workload:
        """Requests of ``concurrency`` users, each of whom sends the next one when the last is over:
        never more than ``concurrency`` are live, however slow the system.

        When a request arrives depends on the run, so such a workload has no rate, and
        :meth:`at_rate` and :meth:`merge` refuse it. A slow system is asked for less, which flatters
        it: compare systems under arrivals of their own, such as :meth:`poisson`.

        Parameters
        ----------
        concurrency
            Users. All of them begin at 0.
        num_requests
            Requests of all users together.
        think_time
            Seconds between the end of a request, whichever way it ended, and the user's next one.
        think_cv
            Coefficient of variation of gamma-distributed think times: 0 is always ``think_time``, 1
            exponential.

        Raises
        ------
        :class:`kvrelay.WorkloadError`, naming the parameter, when one is out of range. The other
        parameters are as in :meth:`poisson`.

        >>> Workload.closed_loop(8, 100, prompt_tokens=512, output_tokens=64, think_time=1.5)
        Workload(100 requests of 8 users, think time 1.5 s, prompts 512, outputs 64)
        """
        return cls(
            _core.Workload.closed_loop(
                whole("concurrency", concurrency, 1, MAX_U32, WorkloadError),
                count("num_requests", num_requests),
                think_spec(think_time, think_cv),
                pair_spec(prompt_tokens, output_tokens, spearman),
                class_spec(slo_class, slo, priority, max_tokens),
                checked_seed(seed),
            )
        )

    @classmethod
    def sessions(
        cls,
        num_sessions: int,
        rate: float,
        turns: int | Lengths,
        user_tokens: int | Lengths,
        output_tokens: int | Lengths,
        slo: SLO | None = None,
        *,
        think_time: float = 0.0,
        think_cv: float = 0.0,
        seed: int = 0,
        slo_class: str = "default",
        priority: int = 0,
        max_tokens: int | None = None,
        spearman: float | None = None,
    ) -> Workload:
        """Conversations: a turn comes when the one before it is over and the user has thought, and its
        prompt is the whole conversation so far and ``user_tokens`` new ones.

        Where prefixes are cached a turn reuses the KV of the prompt before it, not of the answer: of
        that no driver keeps the KV under a name that a later prompt would have. A closed loop, like
        :meth:`closed_loop`: no rate of requests, no :meth:`at_rate`, no :meth:`merge`.

        Parameters
        ----------
        num_sessions
            Conversations.
        rate
            New ones per second; they begin by a Poisson process, the first at 0.
        turns
            How many turns one has: a number, or a law such as :func:`kvrelay.uniform`.
        user_tokens, output_tokens
            What a turn adds to the conversation: a number of tokens, or a law.
        think_time, think_cv
            As in :meth:`closed_loop`.

        Raises
        ------
        :class:`kvrelay.WorkloadError`, naming the parameter, when one is out of range or a
        conversation grows beyond 2**24 tokens. The other parameters are as in :meth:`poisson`.

        >>> chats = Workload.sessions(10, 2.0, turns=3, user_tokens=100, output_tokens=50)
        >>> chats.to_frame()["prompt_tokens"].head(4).tolist()
        [100, 250, 400, 100]
        """
        return cls(
            _core.Workload.sessions(
                whole("num_sessions", num_sessions, 1, MAX_U32, WorkloadError),
                real("rate", rate),
                lengths_spec(turns, "turns"),
                think_spec(think_time, think_cv),
                pair_spec(user_tokens, output_tokens, spearman, "user_tokens"),
                class_spec(slo_class, slo, priority, max_tokens),
                checked_seed(seed),
            )
        )

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
        spec = class_spec(slo_class, slo, priority, max_tokens)
        text("preset", name, WorkloadError)
        if rate is not None:
            rate = number("rate", rate, error=WorkloadError)
        return cls(
            _core.Workload.preset(name, rate, count("num_requests", num_requests), spec, checked_seed(seed))
        )

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
        """The requests of a trace file, its first arrival at 0; packed with gzip or not.

        Known are Mooncake, AIPerf's form of it, Qwen-Bailian, LLMServingSim (JSON lines), Azure of 2023
        and 2024, BurstGPT, Vidur, splitwise-sim and lists of lengths (CSV). Where AIPerf's rows belong
        to sessions the workload is a closed loop: a row comes its ``delay`` after the one before it is
        over, with the conversation so far as its prompt.

        Parameters
        ----------
        limit
            Only the first so many requests; of sessions, one session after the other.
        rate
            Rescale the arrivals to this rate, in requests per second; rows without times need it, and
            then come (sessions: begin) by a Poisson process.
        format
            Recognised by content if not given: ``"mooncake"``, ``"aiperf"``, ``"azure"``, ….
        unit
            Unit of the arrivals (``"s"``, ``"ms"``, ``"us"``, ``"ns"``) if not the format's own.
        slot
            Spread arrivals that were rounded down to multiples of so many seconds evenly over them
            (Mooncake's conversation trace: 3).

        Raises
        ------
        :class:`kvrelay.WorkloadError`, with the file and, where a row is wrong, its line, field and value.
        """
        spec = class_spec(slo_class, slo, priority, max_tokens)
        if limit is not None:
            limit = whole("limit", limit, 1, MAX_U64, WorkloadError)
        if slot is not None:
            slot = number("slot", slot, 0.0, WorkloadError)
        if rate is not None:
            rate = real("rate", rate)
        for name, value in (("format", format), ("unit", unit)):
            if value is not None:
                text(name, value, WorkloadError)
        return cls(
            _core.Workload.from_trace(
                os.fspath(path), format, unit, limit, slot, rate, spec, checked_seed(seed)
            )
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
            ``tokens_per_id``. A workload's :meth:`to_frame` will do, and a finished :class:`Result`'s
            ``.requests``, which do not know of shared prefixes: :meth:`Result.to_workload` does.
        slo
            One for all, or one per class.

        >>> Workload.from_records([{"arrival": 0.0, "prompt_tokens": 8, "output_tokens": 2}])
        Workload(1 requests given)
        """
        rows, names = record_rows(records)
        per_class = dict(slo) if isinstance(slo, Mapping) else dict.fromkeys(names, slo)
        unknown = sorted(set(per_class) - set(names))
        if unknown:
            raise WorkloadError(
                f"an SLO for class {unknown[0]!r}, which no record has; they have {', '.join(names)}"
            )
        classes = [class_spec(name, per_class.get(name), 0, None) for name in names]
        return cls(
            _core.Workload.from_records(rows, classes or [("default", None, 0, None)], checked_seed(seed))
        )

    @classmethod
    def merge(cls, *workloads: Workload) -> Workload:
        """All workloads at once, from one start; classes that are alike become one. Closed loops, whose
        arrivals are not known beforehand, are refused."""
        for index, workload in enumerate(workloads):
            if not isinstance(workload, Workload):
                raise WorkloadError(f"workloads[{index}] is {workload!r}; merge(a, b, …) takes workloads")
        return cls(_core.Workload.merge([workload._core for workload in workloads]))

    def at_rate(self, rate: float) -> Workload:
        """The same arrivals, rescaled to ``rate`` requests per second. A closed loop has no rate to
        change, and is refused."""
        return Workload(self._core.at_rate(real("rate", rate)))

    def scaled_lengths(self, divide: int) -> Workload:
        """The same arrivals with all lengths divided by ``divide``, rounded, at least 1."""
        return Workload(self._core.scaled_lengths(whole("divide", divide, 0, MAX_U32, WorkloadError)))

    @property
    def rate(self) -> float | None:
        """Arrivals per second; ``None`` when all arrive at one instant, and for a closed loop."""
        return self._core.rate

    @property
    def is_closed_loop(self) -> bool:
        """Whether arrivals wait for completions, so that only a run tells when they come."""
        return self._core.is_closed_loop

    @property
    def seed(self) -> int:
        """The seed of everything made up in it."""
        return self._core.seed

    @property
    def classes(self) -> dict[str, SLO | None]:
        """Objectives by class."""
        return {name: slo if slo != SLO() else None for name, slo, _ in self._core.classes}

    def to_frame(self) -> pd.DataFrame:
        """One row a request: arrival (s; missing where it waits for a completion), prompt_tokens,
        output_tokens, max_tokens, slo_class, priority; of sessions also session and turn, from 0; where
        prompts share prefixes also hash_ids and tokens_per_id, missing where a prompt is like no other."""
        frame = pd.DataFrame(self._core.columns())
        if "tokens_per_id" in frame:
            given = frame["tokens_per_id"].astype("Int64")
            frame["tokens_per_id"] = given.mask(given == 0)
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


def presets() -> list[str]:
    """Names of the published workloads that :meth:`Workload.preset` knows.

    >>> "azure-conv-2023" in presets()
    True
    """
    return _core.preset_names()
