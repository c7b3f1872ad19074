"""Closed loops and rates that change, in the simulator and on an engine."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import kvrelay as kr

TINY = Path(__file__).parents[1] / "data/tiny.gguf"
NAN = float("nan")


def nanos(seconds):
    """Whole nanoseconds, in which both drivers count: sums of them are exact."""
    return np.round(np.asarray(seconds, dtype=float) * 1e9).astype(np.int64)


def most_at_once(requests):
    starts, ends = nanos(requests["arrival"]), nanos(requests["last_token"])
    return max(((starts <= at) & (at < ends)).sum() for at in starts)


@pytest.fixture(scope="module")
def engine():
    with kr.Engine(TINY, "1P1D", kv_tokens=4096, max_batch=16, max_prefill_tokens=64) as engine:
        yield engine
        engine.check_integrity()


@pytest.mark.parametrize("topology", ["1M", "1P1D"])
@pytest.mark.parametrize("think_time", [0.0, 0.25])
def test_users_have_one_request_each_and_think_exactly(topology, think_time, slo):
    cluster = kr.Cluster(topology, model="opt-13b", gpu="a100-80gb", latency="vllm")
    loop = kr.Workload.closed_loop(
        5, 80, kr.uniform(20, 900), kr.uniform(2, 90), slo, think_time=think_time, seed=3
    )
    requests = kr.simulate(loop, cluster, progress=False).requests
    assert len(requests) == len(loop) == 80 and (requests["status"] == "finished").all()
    assert most_at_once(requests) == 5 and (requests["arrival"].head(5) == 0).all()
    # The k-th to be over, after its think time, is the k-th of those that wait.
    expected = np.sort(nanos(requests["last_token"]))[:75] + nanos(think_time)
    assert (nanos(requests["arrival"])[5:] == expected).all()
    assert (requests["prompt_tokens"] == loop.to_frame()["prompt_tokens"]).all()
    for options in ({}, {"single_steps": True}):
        again = kr.simulate(loop, cluster, progress=False, **options).requests
        pd.testing.assert_frame_equal(requests, again)


def test_a_request_that_is_refused_is_over_as_well():
    small = kr.Cluster("1M", model="opt-13b", gpu="a100-80gb", latency="vllm", max_model_len=500)
    loop = kr.Workload.closed_loop(2, 30, kr.uniform(100, 900), 20)
    requests = kr.simulate(loop, small, progress=False).requests
    assert len(requests) == 30 and {"finished", "refused"} == set(requests["status"])


def test_turns_come_in_order_and_reuse_the_prompt_before(slo):
    think = 0.5
    chats = kr.Workload.sessions(
        6, 3.0, kr.uniform(2, 5), kr.uniform(40, 300), kr.uniform(5, 60), slo, think_time=think, seed=1
    )
    cluster = kr.Cluster("1P1D", model="opt-13b", gpu="a100-80gb", latency="vllm")
    requests = kr.simulate(chats, cluster, progress=False).requests
    key = ["prompt_tokens", "output_tokens"]
    frame = chats.to_frame()
    assert not frame.duplicated(key).any()
    place = ["session", "turn"]
    told = requests.drop(columns=place).merge(frame[[*key, *place]], on=key, validate="one_to_one")
    assert len(told) == len(chats)
    pd.testing.assert_frame_equal(told[place], requests[place])
    for _, session in told.groupby("session"):
        turns = session.sort_values("turn")
        assert turns["id"].is_monotonic_increasing
        ends, starts = nanos(turns["last_token"])[:-1], nanos(turns["arrival"])[1:]
        assert (starts == ends + nanos(think)).all()
        prompts = turns["prompt_tokens"].to_numpy()
        assert (prompts[1:] > prompts[:-1] + turns["output_tokens"].to_numpy()[:-1]).all()
        assert (turns["cached_tokens"].to_numpy() == [0, *(prompts[:-1] // 16 * 16)]).all()
    without = kr.Cluster("1P1D", model="opt-13b", gpu="a100-80gb", latency="vllm", prefix_caching=False)
    assert (kr.simulate(chats, without, progress=False).requests["cached_tokens"] == 0).all()


def test_the_largest_rate_of_a_loop_is_no_question(cluster, slo):
    loop = kr.Workload.closed_loop(4, 20, 100, 10, slo)
    with pytest.raises(kr.WorkloadError, match="they have no rate to set to"):
        kr.max_goodput(loop, cluster, progress=False)


def test_parts_of_a_run_know_their_sessions_and_other_runs_have_none(cluster):
    chats = kr.Workload.sessions(15, 4.0, kr.uniform(1, 6), 100, 20, think_time=0.5, seed=2)
    result = kr.simulate(chats, cluster, progress=False)
    whole, part = result.requests.set_index("id"), result.window(1.0, 2.0).requests
    assert 0 < len(part) < len(whole) and not whole["session"].is_monotonic_increasing
    for column in ("session", "turn"):
        assert part[column].tolist() == whole.loc[part["id"], column].tolist()
    assert "session" not in kr.simulate(kr.Workload.fixed(1.0, 2, 10, 5), cluster, progress=False).requests


def test_the_frame_says_what_is_not_known_beforehand():
    loop = kr.Workload.closed_loop(3, 8, 10, 5)
    assert loop.to_frame()["arrival"].isna().tolist() == [False] * 3 + [True] * 5
    assert (len(loop), loop.rate, loop.is_closed_loop) == (8, None, True)
    assert "users" in repr(loop) and "<table" in loop._repr_html_()
    chats = kr.Workload.sessions(2, 1.0, 2, 10, 5).to_frame()
    assert chats[["session", "turn"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert chats["arrival"].isna().tolist() == [False, True, False, True]
    assert not kr.Workload.fixed(1.0, 2, 10, 5).is_closed_loop


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kr.Workload.closed_loop(0, 5, 1, 1), "concurrency is 0"),
        (lambda: kr.Workload.closed_loop(1, 0, 1, 1), "num_requests is 0"),
        (lambda: kr.Workload.closed_loop(1, 5, 1, 1, think_time=-1), "think_time is -1"),
        (lambda: kr.Workload.closed_loop(1, 5, 1, 1, think_time=NAN), "think_time is nan"),
        (lambda: kr.Workload.closed_loop(1, 5, 1, 1, think_time=1e9), "think_time is 1000000000"),
        (lambda: kr.Workload.closed_loop(1, 5, 1, 1, think_cv=1e-9), "think_cv is 0.000000001"),
        (lambda: kr.Workload.closed_loop(1, 5, 1, 1).at_rate(2.0), "no rate to set to 2 req/s"),
        (
            lambda: kr.Workload.merge(kr.Workload.fixed(1.0, 1, 1, 1), kr.Workload.sessions(1, 1.0, 2, 1, 1)),
            r"workloads\[1\] is a closed loop \(1 sessions, 2 turns",
        ),
        (lambda: kr.Workload.sessions(0, 1.0, 2, 1, 1), "num_sessions is 0"),
        (lambda: kr.Workload.sessions(1, 0.0, 2, 1, 1), "rate is 0"),
        (lambda: kr.Workload.sessions(1, 1.0, "two", 1, 1), "turns is 'two'"),
        (lambda: kr.Workload.sessions(1, 1.0, 9999, 1, 1), "turns of session 0 is 9999"),
        (lambda: kr.Workload.sessions(1, 1.0, 2, 0, 1), "user_tokens is 0"),
        (lambda: kr.Workload.ramp(1, 2, prompt_tokens=1, output_tokens=1), "give one of the two"),
        (
            lambda: kr.Workload.ramp(1, 2, prompt_tokens=1, output_tokens=1, num_requests=3, duration=4),
            "num_requests is 3 and duration is 4",
        ),
        (
            lambda: kr.Workload.ramp(-1, 2, prompt_tokens=1, output_tokens=1, duration=4),
            "rate_from is -1",
        ),
        (
            lambda: kr.Workload.sinusoid(2, 3, 60, prompt_tokens=1, output_tokens=1, duration=4),
            "amplitude is 3; it must be between 0 and the rate, which is 2",
        ),
        (
            lambda: kr.Workload.on_off(2, 1, 0, 5, prompt_tokens=1, output_tokens=1, num_requests=4),
            "mean_on is 0",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(kr.WorkloadError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "mean"),
    [
        (lambda **how: kr.Workload.ramp(0, 20, **how), 10),
        (lambda **how: kr.Workload.sinusoid(10, 10, 60, **how), 10),
        (lambda **how: kr.Workload.on_off(40, 0, 1.0, 3.0, **how), 10),
    ],
)
def test_rates_change_about_their_mean(make, mean, cluster):
    lengths = {"prompt_tokens": 64, "output_tokens": 4}
    workload = make(duration=600, seed=4, **lengths)
    arrivals = workload.to_frame()["arrival"]
    assert arrivals.is_monotonic_increasing and arrivals.max() < 600
    # Bursts of a second each: 150 of them make the number scatter more than a Poisson one.
    assert abs(len(workload) / (600 * mean) - 1) < 0.25
    assert make(duration=600, seed=4, **lengths).to_frame().equals(workload.to_frame())
    exactly = make(num_requests=300, **lengths)
    assert len(exactly) == 300 and exactly.at_rate(2.0).rate == pytest.approx(2.0)
    assert len(kr.simulate(exactly, cluster, progress=False).requests) == 300


def test_an_engine_runs_the_same_loops(engine):
    loop = kr.Workload.closed_loop(3, 12, kr.uniform(5, 60), kr.uniform(2, 8), think_time=0.01)
    requests = engine.run(loop, progress=False).requests
    assert len(requests) == 12 and (requests["status"] == "finished").all()
    assert most_at_once(requests) <= 3
    # The engine tells of an end some time after the last token, never before.
    assert (nanos(requests["arrival"])[3:] >= np.sort(nanos(requests["last_token"]))[:9] + 10_000_000).all()

    chats = kr.Workload.sessions(2, 50.0, 3, 40, 6, think_time=0.005)
    requests = engine.run(chats, progress=False).requests
    assert sorted(requests["prompt_tokens"]) == [40, 40, 86, 86, 132, 132]
    later = requests[requests["prompt_tokens"] > 40]
    assert (later["cached_tokens"] > 0).all()


def test_a_packed_trace_of_sessions_is_a_closed_loop(tmp_path, cluster):
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 100, "output_length": 10, "priority": 2},
        {"session_id": "a", "delay": 250, "input_length": 50, "output_length": 5},
        {"timestamp": 10, "input_length": 30, "output_length": 3},
    ]
    path = tmp_path / "sessions.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    workload = kr.Workload.from_trace(path)
    assert workload.is_closed_loop and "aiperf" in repr(workload)
    assert workload.to_frame()["priority"].tolist() == [2, 0, 0]
    requests = kr.simulate(workload, cluster, progress=False).requests
    assert requests["prompt_tokens"].tolist() == [100, 30, 160]
    assert nanos(requests["arrival"])[2] == nanos(requests["last_token"])[0] + 250_000_000


def test_published_objectives_have_their_figures_and_sources():
    table = kr.slo_presets()
    assert kr.SLO.preset("Code") == kr.SLO(ttft=0.125, tpot=0.2)
    assert kr.SLO.preset("mlperf-llama3.1-8b-interactive") == kr.SLO(ttft=0.5, tpot=0.03)
    assert table["source"].str.len().gt(20).all() and table["share"].isin([0.9, 0.99]).all()
    assert [kr.SLO.preset(name).ttft for name in table.index] == table["ttft"].tolist()
    with pytest.raises(kr.ConfigError, match="unknown SLO preset 'chatt'; known, nearest first: chat, "):
        kr.SLO.preset("chatt")
    with pytest.raises(kr.ConfigError, match="SLO preset is 3"):
        kr.SLO.preset(3)
