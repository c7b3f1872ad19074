"""What the Python tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvrelay as kr

DATA = Path(__file__).parents[1] / "data"
SHARED = Path(__file__).parents[3] / "shared"


@pytest.fixture
def slo() -> kr.SLO:
    return kr.SLO(ttft=0.4, tpot=0.04)


@pytest.fixture
def cluster() -> kr.Cluster:
    return kr.Cluster("2P1D", model="opt-13b", gpu="a100-80gb", latency="vllm")


@pytest.fixture
def workload(slo: kr.SLO) -> kr.Workload:
    return kr.Workload.poisson(rate=4.0, num_requests=200, prompt_tokens=512, output_tokens=64, slo=slo)


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.exists():
        pytest.skip("the folder of public traces, ../shared, is not here")
    return SHARED
