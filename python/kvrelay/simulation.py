"""Simulations, and what prompts do to the decode steps beside them."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from kvrelay import _core
from kvrelay.checks import MAX_TOKENS, MAX_U64, number, text, whole
from kvrelay.cluster import Cluster, Outage
from kvrelay.errors import ConfigError
from kvrelay.policies import PolicyLike, name_of, resolve
from kvrelay.progress import request_bar
from kvrelay.result import Result
from kvrelay.workload import Workload


def simulate(
    workload: Workload,
    cluster: Cluster,
    policy: PolicyLike = "disaggregated",
    *,
    belief: str | None = None,
    seed: int = 0,
    oracle: bool = False,
    until: float | None = None,
    progress: bool = True,
    single_steps: bool = False,
    outages: Sequence[Outage] = (),
) -> Result:
    """Runs a workload through a simulated cluster.

    The scheduler and the policy are those that drive real workers; only time is virtual. The same
    arguments give the same result, bit for bit.

    Parameters
    ----------
    policy
        A built-in's name or object, an object with any of the methods of
        :class:`kvrelay.policies.Policy`, or a callable for placement.
    belief
        The latency model that the policy predicts with; the truth by default.
    oracle
        Tell scheduler and policy the true output lengths.
    until
        Cut the run off at so many seconds; drain by default.
    single_steps
        Take every step alone: slower, the same records.
    outages
        Workers that are lost for a while: see :class:`kvrelay.Outage` and :func:`kvrelay.random_outages`.

    Raises
    ------
    Whatever the policy raises, as it is; :class:`kvrelay.PolicyError` when it answers what cannot be
    done; :class:`kvrelay.StalledError` when it leaves requests for good.

    >>> import kvrelay as kr
    >>> workload = kr.Workload.poisson(4.0, 200, 512, 64, slo=kr.SLO(ttft=0.4, tpot=0.04))
    >>> cluster = kr.Cluster("1P1D", model="opt-13b", gpu="a100-80gb", latency="vllm")
    >>> kr.simulate(workload, cluster, progress=False).attainment()
    0.99
    """
    if not isinstance(workload, Workload) or not isinstance(cluster, Cluster):
        raise ConfigError(
            f"simulate takes a Workload and a Cluster, not {type(workload).__name__} and {type(cluster).__name__}"
        )
    seed, until = whole("seed", seed, 0, MAX_U64), None if until is None else number("until", until, 0.0)
    if belief is not None:
        text("belief", belief)
    faults = []
    num_workers = len(cluster.kv_tokens)
    for index, outage in enumerate(outages):
        if not isinstance(outage, Outage) or outage.worker >= num_workers:
            raise ConfigError(
                f"outages[{index}] is {outage!r}; it must be a kvrelay.Outage of a worker below {num_workers}"
            )
        faults.append((outage.worker, float(outage.at), outage.until))
    title = f"{cluster.topology}, {name_of(policy)}: {workload._core.description}"
    with request_bar(len(workload), "simulate", progress) as tell:
        core = _core.simulate(
            workload._core,
            cluster._core,
            resolve(policy),
            belief,
            seed,
            oracle,
            until,
            single_steps,
            faults,
            tell,
        )
    cluster._warn_if_extrapolated()
    return Result(
        core,
        title=title,
        source="simulated",
        num_gpus=cluster.num_gpus,
        oracle=oracle,
        workload=workload,
    )


def interference(
    cluster: Cluster,
    prompt_tokens: Sequence[int] = (128, 256, 512, 1024, 2048, 4096),
    *,
    num_decode: int = 1,
    context_tokens: int = 512,
) -> pd.DataFrame:
    """What a prompt in the same batch does to a decode step, which is why prefill and decode are kept
    apart.

    Parameters
    ----------
    num_decode, context_tokens
        Requests that decode, and the context of each.

    Returns
    -------
    Per prompt length: seconds of the decode step ``alone``, of the ``prefill`` alone and of both in one
    step (``together``), and ``slowdown``, together over alone.

    >>> cluster = Cluster("1M", model="opt-13b", gpu="a100-80gb", latency="vllm")
    >>> interference(cluster, [128, 1024, 2048])["slowdown"].round(1).to_dict()
    {128: 1.8, 1024: 7.4, 2048: 14.5}
    """
    role = cluster._role("mixed") if "M" in cluster._core.topology else cluster._role("decode")
    num_decode = whole("num_decode", num_decode, 1)
    context = num_decode * whole("context_tokens", context_tokens, 1)
    rows = {}
    for index, given in enumerate(prompt_tokens):
        tokens = whole(f"prompt_tokens[{index}]", given, 1, MAX_TOKENS)

        def step(prefill: int, decode: int, tokens: int = tokens) -> float:
            sums = (
                prefill,
                prefill * tokens,
                prefill * tokens,
                prefill * tokens**2,
                decode,
                context if decode else 0,
            )
            return cluster._core.step_time(sums, role)

        alone, together = step(0, num_decode), step(1, num_decode)
        rows[tokens] = {
            "alone": alone,
            "prefill": step(1, 0),
            "together": together,
            "slowdown": together / alone,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("prompt_tokens")
