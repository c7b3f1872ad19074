"""What a run left behind, simulated or measured: one class for both."""

from __future__ import annotations

import html
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from kvrelay import _core, formats
from kvrelay.checks import MAX_U64, number, whole
from kvrelay.describe import SLO
from kvrelay.errors import ConfigError
from kvrelay.statistics import Interval, Stationarity, checked_confidence, interval_from, stationarity_from
from kvrelay.workload import Workload

#: Columns of :attr:`Result.requests`, in order.
REQUEST_COLUMNS = (
    "id", "slo_class", "status", "reason", "arrival", "prompt_tokens", "output_tokens", "prefill_worker",
    "decode_worker", "prefill_start", "first_token", "transfer_start", "transfer_end", "decode_start",
    "last_token", "ttft", "tpot", "e2e", "max_gap", "preemptions", "good", "cached_tokens", "admitted", "end",
)  # fmt: skip

PERCENTILES = (50.0, 90.0, 99.0)


class Result:
    """Records of one run and the metrics over them.

    Times are seconds since the run began. A milestone that was not reached is missing (``NA``), never
    zero. ``docs/metrics.md`` has every definition.
    """

    def __init__(
        self,
        core: _core.Result,
        *,
        title: str,
        source: str,
        num_gpus: int,
        oracle: bool = False,
        notes: tuple[str, ...] = (),
        workload: Workload | None = None,
    ) -> None:
        self._core = core
        self.title = title
        #: ``"simulated"`` or ``"measured"``.
        self.source = source
        #: GPUs (or CPU workers) that the run had.
        self.num_gpus = num_gpus
        #: Whether scheduler and policy knew the true output lengths.
        self.oracle = oracle
        #: What was left out of it, and by which rule.
        self.notes = notes
        #: What ran; ``None`` where requests were not those of a workload.
        self.workload = workload

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row a request; see :data:`REQUEST_COLUMNS`. Of a simulation of sessions also ``session``
        and ``turn``, both from 0."""
        frame = pd.DataFrame(self._core.requests())
        for column in frame:
            frame[column] = _nullable(column, frame[column])
        frame = frame[list(REQUEST_COLUMNS)]
        turns = None if self.workload is None else self.workload._core.turns()
        places = None if turns is None else self._core.places()
        if turns is not None and places is not None:
            frame = frame.assign(session=turns[0][places], turn=turns[1][places])
        return frame

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row a run of a worker: its batch, how many steps it was repeated, when, how long."""
        frame = pd.DataFrame(self._core.steps())
        frame["duration"] = frame["end"] - frame["start"]
        return frame

    def attainment(self, slo_class: str | None = None) -> float | None:
        """good / offered; ``None`` when no request has an objective."""
        good, offered, _, _ = self._core.counts(self._class(slo_class))
        return good / offered if offered else None

    def goodput(self, *, per_gpu: bool = False) -> float | None:
        """Good requests per second of makespan; in a window, per second of the window."""
        goodput = self._core.goodput
        return goodput / self.num_gpus if per_gpu and goodput is not None else goodput

    def counts(self, slo_class: str | None = None) -> dict[str, int]:
        """The counts behind :meth:`attainment`: good, offered, out of both, and of those the ones
        without any objective."""
        good, offered, out, without = self._core.counts(self._class(slo_class))
        return {"good": good, "offered": offered, "out": out, "without_slo": without}

    def throughput(self) -> dict[str, float] | None:
        """Finished requests, and their output tokens, per second of makespan, objectives or not; ``None``
        without a makespan."""
        found = self._core.throughput
        return None if found is None else dict(zip(("requests", "output_tokens"), found, strict=True))

    @property
    def objectives(self) -> dict[str, list[SLO]]:
        """The distinct objectives of each SLO class, in order of arrival."""
        found: dict[str, list[SLO]] = {}
        for name, slo in self._core.objectives():
            found.setdefault(name, []).append(slo)
        return found

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Start and end of a :meth:`window`, in seconds since the run began; ``None`` of a whole run."""
        return self._core.bounds

    @property
    def makespan(self) -> float | None:
        """Seconds from the first arrival to the last counted event; the length of a window."""
        return self._core.makespan

    def summary(self, slo_class: str | None = None) -> pd.DataFrame:
        """Count, mean and percentiles of every latency, in seconds, over the requests where it is
        defined. ``itl`` pools the gaps of all requests (not by class); ``held + queue + prefill`` make up ``ttft``;
        ``waiting_for_room``, ``transfer`` and ``decode_queue`` lie between the first token and the second."""
        stats = self._core.distributions(list(PERCENTILES), self._class(slo_class))
        order = (
            "ttft",
            "held",
            "queue",
            "prefill",
            "waiting_for_room",
            "transfer",
            "decode_queue",
            "tpot",
            "itl",
            "max_gap",
            "e2e",
        )
        rows = {name: [stats[name][0], stats[name][1], *stats[name][2]] for name in order if name in stats}
        columns = ["count", "mean", *(f"p{percent:.0f}" for percent in PERCENTILES)]
        frame = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
        frame["count"] = frame["count"].astype("int64")
        return frame.astype(dict.fromkeys(columns[1:], "float64"))

    def percentile(self, metric: str, percent: float, slo_class: str | None = None) -> float | None:
        """One percentile of ``ttft``, ``tpot``, ``e2e``, ``max_gap`` or a part of them, in seconds."""
        percent = number("percent", percent)
        if not 0 <= percent <= 100:
            raise ConfigError(f"percent is {percent}; it must be between 0 and 100", percent=percent)
        stats = self._core.distributions([float(percent)], self._class(slo_class))
        if not isinstance(metric, str) or metric not in stats:
            raise ConfigError(f"metric {metric!r}; known: {', '.join(sorted(stats))}", metric=metric)
        return stats[metric][2][0]

    def window(self, start: float | None = None, end: float | None = None) -> Result:
        """The requests that arrived in [``start``, ``end``) seconds, each with all its later milestones.

        The arrival alone decides, so a warm-up request that reaches into the window is out, and one
        that ends after it is in. Rates are per second of the window. An open start is the first
        arrival, an open end lies right after the last one. ``steps`` has the worker runs that overlap
        it; ``itl`` is pooled over whole runs, so a window has none.

        >>> import kvrelay as kr
        >>> workload = kr.Workload.poisson(4.0, 200, 512, 64, slo=kr.SLO(ttft=0.4, tpot=0.04))
        >>> cluster = kr.Cluster("1P1D", model="opt-13b", gpu="a100-80gb", latency="vllm")
        >>> main = kr.simulate(workload, cluster, progress=False).window(10.0, 40.0)
        >>> len(main), round(main.makespan, 6)
        (131, 30.0)
        """
        first, after = self._core.bounds or self._core.arrivals or (0.0, 0.0)
        start = None if start is None else number("start", start, 0.0)
        end = None if end is None else number("end", end, 0.0)
        if self._core.bounds is not None:
            # A window of a window lies within it.
            start, end = max(start or first, first), min(after if end is None else end, after)
        if start is not None and end is not None and start >= end:
            raise ConfigError(
                f"the window from {start:g} s to {end:g} s is empty: start must be below end",
                start=start,
                end=end,
            )
        core = self._core.window(start, end)
        requests = self.requests["arrival"]
        before = int((requests < core.bounds[0]).sum())
        note = (
            f"only the {len(core)} requests that arrived in [{core.bounds[0]:.6g} s, {core.bounds[1]:.6g} s): "
            f"{before} before and {len(self) - len(core) - before} after are left out; rates are per second of it"
        )
        return self._with(core, note)

    def steady(self, warmup: float | None = None, cooldown: float = 0.0) -> Result:
        """A :meth:`window` without the warm-up, and without the last ``cooldown`` seconds of arrivals.

        ``warmup`` is in seconds after the first arrival; by default the rule MSER-5 finds its end in the
        TTFT of the requests, in the order of their arrival, and the result says where. Arrivals near
        the end meet a system that empties: a ``cooldown`` of the longest request leaves them out.
        """
        arrivals = self._core.arrivals
        if arrivals is None:
            raise ConfigError("no request arrived, so there is no steady part")
        first, last = self._core.bounds or arrivals
        cooldown = number("cooldown", cooldown, 0.0)
        if warmup is not None:
            start, rule = first + number("warmup", warmup, 0.0), f"warm-up of {warmup:g} s as given"
        else:
            found = self._core.warmup()
            start, skipped, settled = (first, 0, True) if found is None else found
            rule = f"warm-up by MSER-5 over TTFT: {skipped} requests, {start - first:.3g} s"
            if not skipped:
                start = first
            if not settled:
                rule += "; no end of it in the first half: the run is too short, or its queue grows"
        end = last - cooldown if cooldown else None
        if start >= (last if end is None else end):
            raise ConfigError(
                f"a warm-up of {start - first:.6g} s and a cool-down of {cooldown:.6g} s leave nothing of "
                f"{last - first:.6g} s of arrivals",
                warmup=start - first, cooldown=cooldown, seconds=last - first,
            )  # fmt: skip
        if cooldown:
            rule += f"; cool-down of {cooldown:g} s as given"
        steady = self.window(start, end)
        return steady._with(steady._core, rule)

    def interval(
        self,
        metric: str,
        percent: float | None = None,
        *,
        confidence: float = 0.95,
        slo_class: str | None = None,
    ) -> Interval:
        """The confidence interval of ``"attainment"``, ``"goodput"``, or of a latency's mean or its
        ``percent``-th percentile, by batch means over the order of arrival.

        Requests of one run are not independent, so ten to twenty batches of consecutive ones are
        compared, not the requests themselves. With fewer than 100 requests, or a percentile too close
        to the end, there is no interval; its ``why`` says so.

        >>> import kvrelay as kr
        >>> workload = kr.Workload.poisson(8.0, 2000, 512, 64, slo=kr.SLO(ttft=0.4, tpot=0.04))
        >>> cluster = kr.Cluster("1P1D", model="opt-13b", gpu="a100-80gb", latency="vllm")
        >>> result = kr.simulate(workload, cluster, progress=False)
        >>> result.attainment() in result.interval("attainment")
        True
        """
        confidence = checked_confidence(confidence)
        if percent is not None and not 0 <= (percent := number("percent", percent)) <= 100:
            raise ConfigError(f"percent is {percent}; it must be between 0 and 100", percent=percent)
        if metric in ("attainment", "goodput"):
            if percent is not None:
                raise ConfigError(
                    f"{metric} is one number a run and has no percentile {percent:g}", metric=metric
                )
            if metric == "goodput" and slo_class is not None:
                raise ConfigError("goodput is of all classes; leave slo_class out", slo_class=slo_class)
        told = self._core.interval(metric, percent, confidence, self._class(slo_class))
        if told is None:
            known = "attainment, goodput, " + ", ".join(sorted(set(self._core.distributions([])) - {"itl"}))
            raise ConfigError(f"metric {metric!r}; known: {known}", metric=metric)
        value: float | None
        if metric == "attainment":
            value = self.attainment(slo_class)
        elif metric == "goodput":
            value = self.goodput()
        elif percent is not None:
            value = self.percentile(metric, percent, slo_class)
        else:
            value = self._core.distributions([], self._class(slo_class))[metric][1]
        name = metric if percent is None else f"{metric} p{percent:g}"
        return interval_from(name, value, told, confidence, "batch means")

    def stationary(self) -> Stationarity:
        """Whether the queue kept still while requests arrived; if it grew, the rate is not sustainable,
        however good a short run looks. The drain at the end is no part of it.

        >>> import kvrelay as kr
        >>> workload = kr.Workload.poisson(40.0, 1000, 512, 64, slo=kr.SLO(ttft=0.4, tpot=0.04))
        >>> cluster = kr.Cluster("1P1D", model="opt-13b", gpu="a100-80gb", latency="vllm")
        >>> kr.simulate(workload, cluster, progress=False).stationary().ok
        False
        """
        return stationarity_from(self._core.growth())

    def _with(self, core: _core.Result, note: str) -> Result:
        return Result(
            core,
            title=self.title,
            source=self.source,
            num_gpus=self.num_gpus,
            oracle=self.oracle,
            notes=(*self.notes, note),
            workload=self.workload,
        )

    def to_workload(self) -> Workload:
        """The requests of this run as a workload: everything as in the one that ran, shared prefixes and
        objectives too, but arrivals are those that came about. So a run replays, also one in which they
        waited for completions; of a window come those in it.

        Raises
        ------
        :class:`kvrelay.ConfigError`, when it is the result of no workload, or of a measured run of sessions,
        which does not tell which request was which turn.

        >>> import kvrelay as kr
        >>> chats = kr.Workload.sessions(5, 1.0, turns=3, user_tokens=100, output_tokens=20)
        >>> cluster = kr.Cluster("1P1D", model="opt-13b", gpu="a100-80gb", latency="vllm")
        >>> first = kr.simulate(chats, cluster, progress=False)
        >>> again = kr.simulate(first.to_workload(), cluster, progress=False)
        >>> again.requests["ttft"].equals(first.requests["ttft"])
        True
        """
        if self.workload is None:
            raise ConfigError(f"{self.title}: a result of no workload, so there is none to replay")
        places = self._core.places()
        if places is None:
            if self.workload._core.turns() is not None:
                raise ConfigError(
                    f"{self.title}: a measured run of sessions does not tell which request was which turn"
                )
            # Turns apart, requests come in the order of the list, and ids are given in that order.
            places = self.requests["id"].to_numpy(dtype=int)
        rows = self.workload.to_frame().iloc[places]
        rows = rows.assign(arrival=self.requests["arrival"].to_numpy(dtype=float))
        names = set(rows["slo_class"])
        classes = {name: slo for name, slo in self.workload.classes.items() if name in names}
        return Workload.from_records(rows, classes, seed=self.workload.seed)

    def explain(self, request_id: int) -> str:
        """One request's story."""
        request_id = whole("request_id", request_id, 0, MAX_U64)
        found = self.requests[self.requests["id"] == request_id]
        if found.empty:
            raise ConfigError(f"no request {request_id}: this run has {len(self)} (ids 0 to {len(self) - 1})")
        return _story(found.iloc[0], self._core.slo(request_id) or SLO())

    def __len__(self) -> int:
        return len(self._core)

    def _class(self, slo_class: str | None) -> str | None:
        if slo_class is not None and slo_class not in self._core.class_names:
            known = ", ".join(self._core.class_names)
            raise ConfigError(f"SLO class {slo_class!r}; this run has {known}", slo_class=slo_class)
        return slo_class

    def _lines(self) -> list[str]:
        counts = self.counts()
        lines = [f"{self.title} ({self.source})"]
        if counts["offered"]:
            lines.append(
                f"attainment {formats.percent(self.attainment() or 0.0, 1)} ({counts['good']} of {counts['offered']} requests within every "
                f"objective), goodput {'undefined' if self.goodput() is None else f'{self.goodput():.3g} req/s'}"
            )
        elif not len(self):
            lines.append("no request arrived")
        else:
            why = "on neither side of goodput" if counts["without_slo"] < len(self) else "without objectives"
            lines.append(f"{len(self)} requests {why}")
        statuses = self.requests["status"].value_counts()
        if statuses.get("finished", 0) < len(self):
            lines.append(", ".join(f"{number} {status}" for status, number in statuses.items()))
        if counts["out"] and counts["offered"]:
            lines.append(
                f"{counts['out']} on neither side, {counts['without_slo']} of them without an objective"
            )
        lines.extend(self.notes)
        stationary = self.stationary()
        if stationary.ok is False:
            lines.append(f"WARNING: {stationary.why}")
        if self.oracle:
            lines.append("scheduler and policy knew the true output lengths (oracle)")
        return lines

    def __repr__(self) -> str:
        return "\n".join([*self._lines(), self.summary().round(4).to_string(na_rep="-")])

    def _repr_html_(self) -> str:
        first, *rest = (html.escape(line) for line in self._lines())
        return f"<b>{first}</b><br>{'<br>'.join(rest)}{self.summary().round(4).to_html(na_rep='')}"


def _nullable(column: str, values: pd.Series) -> pd.Series:
    if column in ("slo_class", "status", "reason"):
        return values.astype("string")
    if column == "good":
        return pd.Series(
            pd.arrays.BooleanArray((values == 1).to_numpy(), (values < 0).to_numpy()), index=values.index
        )
    if column in ("prefill_worker", "decode_worker"):
        return pd.Series(
            pd.arrays.IntegerArray(values.to_numpy(), (values < 0).to_numpy()), index=values.index
        )
    if values.dtype.kind == "f":
        missing = np.isnan(values.to_numpy())
        return pd.Series(pd.arrays.FloatingArray(values.to_numpy(), missing), index=values.index)
    return values.astype("Int64")


def _story(row: pd.Series, slo: SLO) -> str:
    def ms(seconds: Any) -> str:
        return f"{float(seconds) * 1e3:.1f} ms"

    def known(*names: str) -> bool:
        return not any(pd.isna(row[name]) for name in names)

    lines = [
        f"request {row['id']} ({row['slo_class']}): {row['prompt_tokens']} prompt tokens, "
        f"{row['output_tokens']} output tokens, {row['status']}"
        + ("" if pd.isna(row["reason"]) else f" ({row['reason']})"),
        f"  {row['arrival']:.4f} s  arrived",
    ]
    if known("admitted") and row["admitted"] > row["arrival"]:
        lines.append(f"  {row['admitted']:.4f} s  admitted, held for {ms(row['admitted'] - row['arrival'])}")
    if known("prefill_start"):
        cached = f", {row['cached_tokens']} tokens from the prefix cache" if row["cached_tokens"] else ""
        waited = ms(row["prefill_start"] - row["admitted"])
        lines.append(
            f"  {row['prefill_start']:.4f} s  prefill at worker {row['prefill_worker']} after {waited} in the queue{cached}"
        )
    early = known("transfer_start", "first_token") and row["transfer_start"] < row["first_token"]
    moves = f"KV transfer to worker {row['decode_worker']}"
    if early:
        lines.append(f"  {row['transfer_start']:.4f} s  {moves} beside its last chunk")
    if known("first_token"):
        lines.append(
            f"  {row['first_token']:.4f} s  first token: TTFT {ms(row['ttft'])}{_against(row['ttft'], slo.ttft)}"
        )
    if known("transfer_start", "first_token") and not early:
        waited = ms(row["transfer_start"] - row["first_token"])
        lines.append(f"  {row['transfer_start']:.4f} s  {moves} after {waited} for room")
    if known("transfer_end"):
        lines.append(
            f"  {row['transfer_end']:.4f} s  KV there, {ms(row['transfer_end'] - row['transfer_start'])} on the way"
        )
    if known("decode_start"):
        lines.append(f"  {row['decode_start']:.4f} s  decode at worker {row['decode_worker']}")
    if row["preemptions"]:
        lines.append(f"  preempted {row['preemptions']} times")
    if known("last_token") and row["output_tokens"] > 1:
        gap = (
            f", longest gap {ms(row['max_gap'])}{_against(row['max_gap'], slo.max_gap)}"
            if known("max_gap")
            else ""
        )
        lines.append(
            f"  {row['last_token']:.4f} s  last token: TPOT {ms(row['tpot'])}{_against(row['tpot'], slo.tpot)}{gap}"
        )
    verdict = {True: "good", False: "a miss"}.get(
        None if pd.isna(row["good"]) else bool(row["good"]), "on neither side"
    )
    if row["status"] != "finished" and known("end"):
        lines.append(f"  {row['end']:.4f} s  over: {row['status']}")
    lines.append(f"  counts as {verdict}")
    return "\n".join(lines)


def _against(value: Any, limit: float | None) -> str:
    if limit is None:
        return ""
    return f" ({'within' if float(value) <= limit else 'over'} {limit * 1e3:.1f} ms)"
