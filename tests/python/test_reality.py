"""Simulations held against published measurements, with bounds: see benches/reality.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import kvrelay as kr

SOURCE = Path(__file__).parents[2] / "benches/reality.py"
spec = importlib.util.spec_from_file_location("reality", SOURCE)
reality = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reality)


@pytest.fixture(scope="module", autouse=True)
def measured(shared):
    """Skips where the measured data is not there."""


@pytest.mark.parametrize("name", reality.VLLM_RUNS)
def test_half_of_a_real_vllm_run_predicts_the_other(name):
    table = reality.vllm_halves(name)
    means = table["mean"].loc["predicted"].abs()
    assert means["ttft"] < 0.04 and means["tpot"] < 0.04 and means["e2e"] < 0.03
    assert table["p50"].loc["predicted"].abs().max() < 0.06
    assert table["each"].loc["predicted"].max() < 0.08


def test_too_much_kv_makes_first_tokens_come_too_early():
    """Others measured -20.7 % of TTFT with 31 % too much."""
    found = reality.kv_capacity_matters()
    assert abs(found[1.0]) < 0.03 and -0.30 < found[1.31] < -0.14


def test_steps_of_one_kind_predict_steps_of_both():
    assert reality.sarathi_hybrid_batches()["error"].abs().max() < 0.02


def test_the_interference_that_is_quoted():
    slowdown = reality.interference()["slowdown"]
    assert slowdown[128] == pytest.approx(1.8, abs=0.1)
    assert slowdown[1024] < 12.0 < slowdown[2048]
    assert slowdown.is_monotonic_increasing
    with pytest.raises(kr.ConfigError, match=r"prompt_tokens\[1\] is 0"):
        kr.interference(kr.Cluster("1M", model="opt-13b", gpu="a100-80gb"), [1, 0])


def test_the_published_gain_on_sharegpt():
    """2.0 times is published for OPT-13B; lengths by another tokenizer and no queueing tricks: 1.5 to 2.3."""
    assert 1.5 < reality.distserve_gain()["gain"].iloc[1] < 2.3
    # The published gain of OPT-66B is there only where KV is not counted.
    assert 0.7 < reality.distserve_gain_66b()["gain"].iloc[1] < 1.1
    assert 1.7 < reality.distserve_gain_66b(10**6)["gain"].iloc[1] < 2.4


def test_there_are_cases_for_mixed_workers():
    per_gpu = reality.do_not_disaggregate()["per_gpu"]
    assert per_gpu["2M chunked"] > 1.5 * per_gpu["1P1D disaggregated"]
