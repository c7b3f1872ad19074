"""What users of other simulators reported, each with its smallest scenario."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest

import kvrelay as kr

QUIET = {"progress": False}


def prefix_groups(path: Path) -> kr.Workload:
    """60 requests in 6 groups, each group with 1,024 tokens of its own in common, in two classes."""
    rows = [
        {
            "timestamp": index * 40,
            "input_length": 1100 + 20 * (index % 7),
            "output_length": 5 + index % 11,
            "hash_ids": [index % 6, 100 + index % 6, 1000 + index],
        }
        for index in range(60)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    chat = kr.Workload.from_trace(path, kr.SLO(ttft=0.3, tpot=0.05), slo_class="chat")
    code = kr.Workload.poisson(
        5.0, 20, 300, kr.uniform(2, 30), kr.SLO(ttft=0.2), slo_class="code", priority=1
    )
    return kr.Workload.merge(chat, code)


WORKLOADS = {
    "prefix groups": prefix_groups,
    "sessions": lambda _: kr.Workload.sessions(
        12, 3.0, kr.uniform(1, 5), kr.uniform(100, 600), kr.uniform(5, 60), kr.SLO(ttft=0.3), think_time=0.4
    ),
    "users": lambda _: kr.Workload.closed_loop(6, 60, kr.uniform(50, 900), kr.uniform(2, 60), think_time=0.1),
}


def exported(workload: kr.Workload, path: Path) -> kr.Workload:
    """Through a file: JSON lines, as a user would keep a trace."""
    rows = workload.to_frame().astype(object).to_dict("records")
    path.write_text("\n".join(json.dumps(row, default=plain) for row in rows))
    return kr.Workload.from_records(map(json.loads, path.read_text().splitlines()), workload.classes)


def plain(value: object) -> object:
    """What JSON has no word for."""
    return None if value is pd.NA else value.tolist()


@pytest.mark.parametrize("kind", WORKLOADS)
@pytest.mark.parametrize("policy", ["disaggregated", "goodput"])
def test_i05_an_exported_run_replays_as_the_run_it_was(kind, policy, tmp_path):
    """Elsewhere TTFTs came out 36 times lower. Every column of every request is the same, twice, whichever
    thread runs it and how many do."""
    workload = WORKLOADS[kind](tmp_path / "given.jsonl")
    cluster = kr.Cluster("2P1D", model="opt-13b", gpu="a100-80gb", latency="vllm", kv_tokens=12_000)

    def run(what: kr.Workload, **options: bool) -> pd.DataFrame:
        requests = kr.simulate(what, cluster, policy, seed=3, **options, **QUIET).requests
        return requests.drop(columns=["session", "turn"], errors="ignore")

    first = kr.simulate(workload, cluster, policy, seed=3, **QUIET)
    assert (first.requests["status"] == "finished").all()
    replayed = exported(first.to_workload(), tmp_path / "exported.jsonl")
    assert not replayed.is_closed_loop and len(replayed) == len(workload)
    expected = run(workload)
    for options in ({}, {}, {"single_steps": True}):
        pd.testing.assert_frame_equal(run(replayed, **options), expected)
    with ThreadPoolExecutor(4) as threads:
        for requests in threads.map(lambda _: run(replayed), range(8)):
            pd.testing.assert_frame_equal(requests, expected)
    if kind != "users":
        # The prefixes matter here, so a replay that lost them would not pass.
        assert expected["cached_tokens"].sum() > 5_000
        without = run(kr.Workload.from_records(first.requests, workload.classes))
        assert without["ttft"].mean() > 1.05 * expected["ttft"].mean()


def test_i05_a_part_of_a_run_and_a_run_of_no_workload(workload, cluster):
    result = kr.simulate(workload, cluster, **QUIET)
    window = result.window(10.0, 20.0)
    part = window.to_workload()
    assert part.to_frame()["arrival"].tolist() == window.requests["arrival"].tolist()
    with pytest.raises(kr.ConfigError, match="a result of no workload"):
        kr.Result(result._core, title="by hand", source="measured", num_gpus=1).to_workload()


@pytest.mark.parametrize(
    ("topology", "policy"),
    [("1M", "fcfs"), ("1M", "chunked"), ("1P1D", "disaggregated"), ("1P1D", "goodput")],
)
def test_i03_requests_larger_than_the_cache_are_dropped_and_counted(topology, policy):
    """50 blocks of 16; prompts of 57 blocks. Elsewhere the loop never ended."""
    cluster = kr.Cluster(topology, model="opt-13b", gpu="a100-80gb", latency="vllm", kv_tokens=50 * 16)
    oversized = kr.Workload.poisson(5.0, 40, 57 * 16, 4, kr.SLO(ttft=1.0), slo_class="oversized")
    result = kr.simulate(oversized, cluster, policy, **QUIET)
    assert (result.requests["status"] == "refused").all() and result.steps.empty
    assert result.counts() == {"good": 0, "offered": 40, "out": 0, "without_slo": 0}
    assert result.requests["reason"].str.contains("57 KV blocks.*has 50").all()
    small = kr.Workload.poisson(5.0, 40, 100, 4, kr.SLO(ttft=1.0), slo_class="small", seed=1)
    both = kr.simulate(kr.Workload.merge(oversized, small), cluster, policy, **QUIET)
    assert both.attainment("oversized") == 0.0 and both.attainment("small") == 1.0


def test_c05_who_arrived_in_the_warm_up_does_not_count():
    """10 s of warm-up, 30 s that count, requests of 5 s, each on a worker of its own: the arrival alone
    decides, to the nanosecond, and whoever counts keeps what came after the border."""
    nano = 1e-9
    arrivals = [3.0, 7.0, 10.0 - nano, 10.0, 25.0, 40.0 - nano, 40.0]
    workload = kr.Workload.from_records(
        [{"arrival": at, "prompt_tokens": 100, "output_tokens": 5} for at in arrivals],
        kr.SLO(ttft=1.0, e2e=5.0),
    )
    cluster = kr.Cluster("4M", model="opt-13b", gpu="a100-80gb", latency=lambda *_: 1.0)
    result = kr.simulate(workload, cluster, "fcfs", **QUIET)
    assert result.requests["ttft"].tolist() == [1.0] * 7 and result.requests["e2e"].tolist() == [5.0] * 7
    main = result.window(10.0, 40.0)
    assert main.requests["id"].tolist() == [3, 4, 5]
    assert main.requests["last_token"].max() == 45.0 - nano
    assert (main.attainment(), main.goodput(), main.makespan) == (1.0, 3 / 30, 30.0)
    assert main.throughput() == {"requests": 3 / 30, "output_tokens": 15 / 30}
    assert "3 before and 1 after are left out" in repr(main)
