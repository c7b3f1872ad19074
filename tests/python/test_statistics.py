"""Windows, intervals, verdicts and the interval of max_goodput."""

from __future__ import annotations

import numpy as np
import pytest

import kvrelay as kr

QUIET = {"progress": False}
SLO = kr.SLO(ttft=0.4, tpot=0.04)
LENGTHS = {"prompt_tokens": kr.lognormal(500, 400), "output_tokens": kr.uniform(20, 120)}


def simulated(
    rate: float, num_requests: int, seed: int = 0, slo: kr.SLO | None = SLO, topology: str = "2P1D"
):
    workload = kr.Workload.poisson(rate, num_requests, **LENGTHS, slo=slo, seed=seed)
    cluster = kr.Cluster(topology, model="opt-13b", gpu="a100-80gb", latency="vllm")
    return kr.simulate(workload, cluster, **QUIET)


def test_a_window_counts_by_arrival_and_keeps_later_milestones(cluster):
    """10 s of warm-up, 30 s of main phase, requests of about 5 s, seven around the borders."""
    arrivals = [3.0, 7.0, 9.999_999_999, 10.0, 25.0, 39.999_999_999, 40.0]
    records = [{"arrival": at, "prompt_tokens": 512, "output_tokens": 190} for at in arrivals]
    workload = kr.Workload.from_records(records)
    whole = kr.simulate(workload, cluster, **QUIET)
    assert whole.requests["e2e"].between(4.5, 5.5).all()
    main = whole.window(10.0, 40.0)
    assert list(main.requests["id"]) == [3, 4, 5]
    assert (main.requests["end"] > 40.0).tolist() == [False, False, True]
    assert main.makespan == 30.0
    assert main.throughput()["requests"] == pytest.approx(3 / 30)
    assert main.throughput()["output_tokens"] == pytest.approx(3 * 190 / 30)
    assert "only the 3 requests that arrived in [10 s, 40 s): 3 before and 1 after" in repr(main)
    assert "itl" not in main.summary().index


def test_windows_of_windows_and_bad_ones():
    result = simulated(4.0, 300)
    inner = result.window(10.0, 60.0).window(20.0, 100.0)
    assert inner.requests["arrival"].between(20.0, 60.0, inclusive="left").all() and inner.makespan == 40.0
    assert len(result.window()) == len(result)
    with pytest.raises(kr.ConfigError, match="from 40 s to 10 s is empty"):
        result.window(40.0, 10.0)
    with pytest.raises(kr.ConfigError, match=r"start is -1.0; it must be at least 0"):
        result.window(-1.0)
    with pytest.raises(kr.ConfigError, match=r"warm-up of 1000 s .* leave nothing of"):
        result.steady(1000.0)


def test_the_warm_up_is_found_and_stated():
    """A backlog of 60 requests at the start of an otherwise light load is the warm-up."""
    light = kr.Workload.poisson(3.0, 400, **LENGTHS, slo=SLO, seed=1).to_frame()
    burst = [{"arrival": 0.0, "prompt_tokens": 2000, "output_tokens": 20} for _ in range(60)]
    rest = light[["arrival", "prompt_tokens", "output_tokens"]].to_dict("records")
    cluster = kr.Cluster("2P1D", model="opt-13b", gpu="a100-80gb", latency="vllm")
    result = kr.simulate(kr.Workload.from_records([*burst, *rest]), cluster, **QUIET)
    steady = result.steady()
    assert 60 <= len(result) - len(steady) <= 120
    assert steady.percentile("ttft", 99) < 1.5 < result.percentile("ttft", 99)
    assert "warm-up by MSER-5 over TTFT: " in repr(steady)
    given = result.steady(warmup=20.0, cooldown=10.0)
    assert given.requests["arrival"].min() >= 20.0 + result.requests["arrival"].min()
    assert given.requests["arrival"].max() < result.requests["arrival"].max() - 10.0 + 1e-9
    assert "warm-up of 20 s as given; cool-down of 10 s as given" in repr(given)


def test_intervals_enclose_their_estimates_and_say_why_there_is_none():
    result = simulated(11.0, 2000)
    for metric, percent in (
        ("ttft", None),
        ("ttft", 90),
        ("tpot", 50),
        ("attainment", None),
        ("goodput", None),
    ):
        found = result.interval(metric, percent)
        assert (
            found.low < found.value < found.high and found.value in found and found.method == "20 batch means"
        )
        wider = result.interval(metric, percent, confidence=0.99)
        assert wider.low <= found.low and found.high <= wider.high and wider.half_width > found.half_width
    assert result.interval("goodput").value == pytest.approx(result.goodput())
    few = simulated(8.0, 60).interval("ttft", 90)
    assert few.low is None and few.high is None and few.half_width is None and few.value is not None
    assert "60 of them are too few: batch means need at least 100" in repr(few)
    extreme = result.interval("ttft", 99.99)
    assert extreme.low is None and "do not enclose the 99.99th percentile" in extreme.why
    with pytest.raises(kr.ConfigError, match=r"metric 'speed'; known: attainment, goodput, .*ttft"):
        result.interval("speed")
    with pytest.raises(kr.ConfigError, match="confidence is 95; it must be between 0 and 1"):
        result.interval("ttft", confidence=95)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """The truth is the mean over all runs; 95 of 100 intervals should hold it."""
    runs = [simulated(9.0, 1000, seed) for seed in range(100)]
    for metric, percent in (("ttft", None), ("attainment", None), ("ttft", 90)):
        found = [run.interval(metric, percent) for run in runs]
        truth = np.mean([one.value for one in found])
        assert 88 <= sum(truth in one for one in found) <= 100, metric


def test_replications_are_independent_and_agree_with_batch_means(cluster):
    def workload(seed):
        return kr.Workload.poisson(9.0, 500, **LENGTHS, slo=SLO, seed=seed)

    runs = kr.replicate(workload, cluster, n=8, **QUIET)
    assert len(runs) == 8 and runs.values("attainment").nunique() > 1
    found = runs.interval("ttft", 90)
    assert found.low < found.value < found.high and found.method == "8 replications"
    values = runs.values("ttft", 90)
    half = 2.364_624 * values.std() / np.sqrt(8)  # Student's t of 7 degrees of freedom.
    assert found.half_width == pytest.approx(half, rel=1e-6)
    assert "8 replications of 2P1D, disaggregated" in repr(runs)
    with pytest.raises(kr.ConfigError, match=r"workload\(1\) and workload\(0\) are the same requests"):
        kr.replicate(lambda seed: workload(0), cluster, n=3, **QUIET)
    with pytest.raises(kr.ConfigError, match="must be a function of a seed"):
        kr.replicate(workload(0), cluster, **QUIET)
    with pytest.raises(kr.ConfigError, match="no two alike"):
        kr.replicate(workload, cluster, seeds=[3, 3], **QUIET)


def test_stable_runs_are_stationary_and_overloaded_ones_are_not():
    """The cluster serves about 26 requests per second."""
    calm = [simulated(16.0, 1000, seed).stationary() for seed in range(40)]
    assert sum(one.ok is not True for one in calm) <= 1
    busy = [simulated(40.0, 1000, seed).stationary() for seed in range(40)]
    assert sum(one.ok is not False for one in busy) == 0
    assert "the queue was still growing, so this rate is not sustainable" in busy[0].why
    assert "WARNING: the queue was still growing" in repr(simulated(40.0, 1000))
    assert "WARNING" not in repr(simulated(16.0, 1000))
    tiny = simulated(4.0, 20).stationary()
    assert tiny.ok is None and "too few" in tiny.why


@pytest.mark.parametrize("slo", [SLO, kr.SLO(ttft=4.0, tpot=0.1)])
@pytest.mark.parametrize("seed", range(4))
def test_short_and_long_searches_agree_within_their_intervals(slo, seed, cluster):
    short, long = (
        kr.max_goodput(
            kr.Workload.poisson(4.0, num_requests, **LENGTHS, slo=slo, seed=seed), cluster, **QUIET
        )
        for num_requests in (300, 4000)
    )
    for found in (short, long):
        assert 0 < found.low <= found.rate <= found.high
    assert short.low <= long.high and long.low <= short.high, (short, long)
    assert long.high - long.low < short.high - short.low


def test_a_rate_past_saturation_is_not_sustained_however_loose_the_objective(cluster):
    """With minutes to spare every request of a short run is good, and the queue grows all the same."""
    workload = kr.Workload.poisson(4.0, 2000, **LENGTHS, slo=kr.SLO(ttft=100.0))
    found = kr.max_goodput(workload, cluster, **QUIET)
    assert found.high < 40 and found.growing and found.rate < min(found.growing)
    assert all(value == 1.0 for value in found.tried.values())


def test_max_goodput_says_what_its_requests_cannot_confirm(cluster):
    workload = kr.Workload.poisson(4.0, 200, **LENGTHS, slo=SLO)
    strict = kr.max_goodput(workload, cluster, attainment=0.99, **QUIET)
    assert (
        strict.low == 0.0
        and "200 requests, even if all are good, do not confirm 0.99: it takes 381" in repr(strict)
    )
    few = kr.max_goodput(kr.Workload.poisson(4.0, 40, **LENGTHS, slo=SLO), cluster, **QUIET)
    assert few.confidence is None and few.low == few.rate and "too few" in few.why
    own = kr.max_goodput(workload, cluster, criterion=lambda result: result.attainment(), **QUIET)
    assert own.low == own.rate < own.high and "a criterion of your own has no confidence limits" in repr(own)
