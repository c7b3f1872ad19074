"""Tries a policy against the contract before it meets a workload that matters."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.cluster import Cluster
from kvrelay.describe import SLO, uniform
from kvrelay.errors import KvRelayError, PolicyError
from kvrelay.policies import METHODS, PolicyLike, misspelt, name_of
from kvrelay.simulation import simulate
from kvrelay.workload import Workload


@dataclass(frozen=True)
class PolicyReport:
    """What :func:`check_policy` found: the methods that the policy has, and the trials it passed."""

    policy: str
    methods: tuple[str, ...]
    trials: tuple[str, ...]

    def __repr__(self) -> str:
        return (
            f"{self.policy} keeps the contract: {', '.join(self.methods)}; tried on {', '.join(self.trials)}"
        )


def check_policy(policy: PolicyLike) -> PolicyReport:
    """Tries a policy on small clusters with tight memory, mixed roles and bursts.

    Checks that every answer can be carried out, that no request is left for good, that the books of KV
    blocks balance, and that the same seed gives the same run: what is left over from an earlier run is
    the usual reason why it does not (``begin`` is to forget it).

    Raises :class:`kvrelay.PolicyError` that says what is wrong, or what the policy itself raises.

    >>> check_policy("goodput").methods
    ('built in',)
    """
    methods = tuple(name for name in METHODS if callable(getattr(policy, name, None)))
    wrong = "" if isinstance(policy, str) or callable(policy) else misspelt(policy)
    if wrong:
        raise PolicyError(f"{name_of(policy)}: {wrong}")
    if isinstance(policy, str) or hasattr(policy, "_core"):
        methods = ("built in",)
    elif not methods:
        methods = ("a callable for placement",)
    trials = []
    # A prime number of requests: a counter that is left over does not come out even.
    workload = Workload.gamma(
        rate=30.0, cv=3.0, num_requests=113, prompt_tokens=uniform(1, 900), output_tokens=uniform(1, 60),
        slo=SLO(ttft=0.5, tpot=0.05), seed=7,
    )  # fmt: skip
    for topology, kv_tokens in (("2P2D", 4000), ("2M", 2000), ("1P1D1M", 1600)):
        cluster = Cluster(
            topology, model="opt-13b", gpu="a100-80gb", latency="distserve", kv_tokens=kv_tokens
        )
        try:
            first = simulate(workload, cluster, policy, seed=3, progress=False)
            second = simulate(workload, cluster, policy, seed=3, progress=False)
        except KvRelayError as error:
            error.add_note(f"in the trial on {topology} with {kv_tokens} KV tokens a worker") if hasattr(
                error, "add_note"
            ) else None
            raise
        if not first.requests.equals(second.requests):
            where = first.requests.ne(second.requests).any(axis=1).idxmax()
            raise PolicyError(
                f"{name_of(policy)} on {topology}: two runs with the same seed differ, first in request {where}; "
                "reset all state in begin(cluster, rng) and draw random numbers from its rng alone",
                request=int(where),
            )
        trials.append(topology)
    return PolicyReport(name_of(policy), methods, tuple(trials))
