"""kvrelay: prefill and decode on separate workers, the KV cache relayed, goodput the measure.

Describe a workload and a cluster, simulate a policy on them, then serve a real model under the very
same policy::

    import kvrelay as kr

    slo = kr.SLO(ttft=0.4, tpot=0.04)
    workload = kr.Workload.poisson(rate=4.0, num_requests=2000, prompt_tokens=512, output_tokens=64, slo=slo)
    cluster = kr.Cluster("2P1D", model="opt-13b", gpu="a100-80gb", latency="vllm")
    kr.simulate(workload, cluster, policy="goodput").attainment()
"""

from kvrelay import datasets, errors, plot, policies
from kvrelay._core import ClusterView, RequestView, WorkerView, __version__
from kvrelay.check import PolicyReport, check_policy
from kvrelay.cluster import Cluster, Link, Network, Outage, gpus, latencies, models, random_outages
from kvrelay.describe import SLO, Lengths, empirical, lognormal, slo_presets, uniform
from kvrelay.devices import CpuDevice, CudaDevice, Devices, cuda_available, devices
from kvrelay.engine import Engine, Output, Stream, WorkerInfo
from kvrelay.errors import (
    ConfigError,
    DatasetError,
    EngineError,
    ForkError,
    IntegrityError,
    KvRelayError,
    ModelError,
    PolicyError,
    RequestError,
    StaleView,
    StalledError,
    WorkloadError,
)
from kvrelay.policies import Batch, Demote, Hold, Placement, Policy, Rebalance, Refuse
from kvrelay.profile import Fidelity, LatencyTable, Profile, fidelity
from kvrelay.replicate import Replications, replicate
from kvrelay.result import Result
from kvrelay.search import MaxGoodput, max_goodput
from kvrelay.simulation import interference, simulate
from kvrelay.statistics import Interval, Stationarity
from kvrelay.workload import Workload, presets

__all__ = [
    "SLO",
    "Batch",
    "Cluster",
    "ClusterView",
    "ConfigError",
    "CpuDevice",
    "CudaDevice",
    "DatasetError",
    "Demote",
    "Devices",
    "Engine",
    "EngineError",
    "Fidelity",
    "ForkError",
    "Hold",
    "IntegrityError",
    "Interval",
    "KvRelayError",
    "LatencyTable",
    "Lengths",
    "Link",
    "MaxGoodput",
    "ModelError",
    "Network",
    "Outage",
    "Output",
    "Placement",
    "Policy",
    "PolicyError",
    "PolicyReport",
    "Profile",
    "Rebalance",
    "Refuse",
    "Replications",
    "RequestError",
    "RequestView",
    "Result",
    "StaleView",
    "StalledError",
    "Stationarity",
    "Stream",
    "WorkerInfo",
    "WorkerView",
    "Workload",
    "WorkloadError",
    "__version__",
    "check_policy",
    "cuda_available",
    "datasets",
    "devices",
    "empirical",
    "errors",
    "fidelity",
    "gpus",
    "interference",
    "latencies",
    "lognormal",
    "max_goodput",
    "models",
    "plot",
    "policies",
    "presets",
    "random_outages",
    "replicate",
    "simulate",
    "slo_presets",
    "uniform",
]
