"""Independent replications: the same question asked of many seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pandas as pd

from kvrelay import _core
from kvrelay.checks import MAX_U64, whole
from kvrelay.cluster import Cluster
from kvrelay.errors import ConfigError
from kvrelay.policies import PolicyLike, name_of
from kvrelay.progress import bar
from kvrelay.result import Result
from kvrelay.simulation import simulate
from kvrelay.statistics import Interval, checked_confidence, interval_from
from kvrelay.workload import Workload


@dataclass(frozen=True)
class Replications:
    """Results of independent runs, by seed."""

    results: dict[int, Result]
    title: str

    def values(self, metric: str, percent: float | None = None, *, slo_class: str | None = None) -> pd.Series:
        """One value a run, by seed: of ``"attainment"``, ``"goodput"``, or a latency's mean or percentile;
        missing where a run has none."""
        found = {
            seed: result.interval(metric, percent, slo_class=slo_class).value
            for seed, result in self.results.items()
        }
        return pd.Series(found, dtype="float64", name=metric if percent is None else f"{metric} p{percent:g}")

    def interval(
        self,
        metric: str,
        percent: float | None = None,
        *,
        confidence: float = 0.95,
        slo_class: str | None = None,
    ) -> Interval:
        """The confidence interval of the mean over runs, by Student's t. Runs are independent, so it needs
        no batches: it is the one to trust when :meth:`Result.interval` says that it is too narrow."""
        confidence = checked_confidence(confidence)
        values = self.values(metric, percent, slo_class=slo_class)
        known = values.dropna()
        told = _core.replication_interval(list(known), confidence)
        value = None if known.empty else float(known.mean())
        return interval_from(str(values.name), value, told, confidence, "replications")

    def __len__(self) -> int:
        return len(self.results)

    def __repr__(self) -> str:
        grew = [seed for seed, result in self.results.items() if result.stationary().ok is False]
        lines = [f"{len(self)} replications of {self.title}"]
        lines += [f"  {self.interval(metric)!r}" for metric in ("attainment", "goodput", "ttft", "tpot")]
        if grew:
            lines.append(
                f"WARNING: the queue was still growing in {len(grew)} of {len(self)} runs (seed {grew[0]} first): "
                "this rate is not sustainable"
            )
        return "\n".join(lines)


def replicate(
    workload: Callable[[int], Workload],
    cluster: Cluster,
    policy: PolicyLike = "disaggregated",
    n: int = 10,
    *,
    seeds: Iterable[int] | None = None,
    belief: str | None = None,
    oracle: bool = False,
    until: float | None = None,
    progress: bool = True,
) -> Replications:
    """Simulates ``workload(seed)`` for ``n`` seeds, 0 to n - 1, or for the ``seeds`` given; the seed is
    the policy's too.

    >>> import kvrelay as kr
    >>> def workload(seed):
    ...     return kr.Workload.poisson(4.0, 200, 512, 64, slo=kr.SLO(ttft=0.4, tpot=0.04), seed=seed)
    >>> cluster = kr.Cluster("1P1D", model="opt-13b", gpu="a100-80gb", latency="vllm")
    >>> runs = kr.replicate(workload, cluster, n=4, progress=False)
    >>> len(runs), runs.interval("attainment").method
    (4, '4 replications')
    """
    if not callable(workload):
        raise ConfigError(
            f"workload is a {type(workload).__name__}; it must be a function of a seed, such as "
            "lambda seed: Workload.poisson(…, seed=seed): replications of one workload are all the same"
        )
    numbers = (
        range(whole("n", n, 2)) if seeds is None else [whole("seed", seed, 0, MAX_U64) for seed in seeds]
    )
    if len(numbers) < 2 or len(set(numbers)) < len(numbers):
        raise ConfigError(f"seeds are {list(numbers)}; they must be two or more, no two alike")
    results: dict[int, Result] = {}
    seen: dict[tuple[bytes, ...], int] = {}
    title = ""
    for seed in bar(numbers, "replicate", "run", progress):
        made = workload(seed)
        if not isinstance(made, Workload):
            raise ConfigError(f"workload({seed}) is a {type(made).__name__}; it must be a Workload")
        frame = made.to_frame()
        content = tuple(
            frame[name].to_numpy().tobytes() for name in ("arrival", "prompt_tokens", "output_tokens")
        )
        same = seen.setdefault(content, seed)
        if same != seed:
            raise ConfigError(
                f"workload({seed}) and workload({same}) are the same requests, so they are no independent replications: "
                "give the seed to the workload",
                seed=seed,
            )
        title = title or f"{cluster.topology}, {name_of(policy)}: {made._core.description}"
        results[seed] = simulate(
            made, cluster, policy, belief=belief, seed=seed, oracle=oracle, until=until, progress=False
        )
    return Replications(results, title)
