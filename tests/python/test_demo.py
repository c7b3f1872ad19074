"""The demo's parts that need no minutes of engine time."""

from __future__ import annotations

import pytest

import kvrelay as kr
from kvrelay import demo


def test_a_picture_that_cannot_be_saved_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(kr.ConfigError, match="there is no folder"):
        demo.main(tmp_path / "nowhere" / "demo.png")
    for target in (tmp_path, tmp_path / "demo.docx"):
        with pytest.raises(kr.ConfigError, match=r"ends in one of .*png"):
            demo.main(target)


def test_the_published_example_comes_out(capsys):
    found = demo.simulate_the_example(progress=False)
    assert 1.8 <= found["2P1D"].per_gpu / found["1M"].per_gpu <= 2.6
    assert "per GPU as 1M (published: 2.1)" in capsys.readouterr().out


def test_the_table_and_the_picture(tmp_path):
    workload = demo.demo_workload(ttft=0.05, tpot=0.02, rate=4.0)
    assert len(workload) == demo.NUM_REQUESTS and set(workload.classes) == set(demo.CLASSES)
    assert workload.classes["tight"] == kr.SLO(ttft=0.25, tpot=0.04)
    results = {
        f"{topology} {policy}": kr.simulate(
            workload,
            kr.Cluster(topology, model="opt-13b", gpu="a100-80gb", latency="vllm"),
            policy,
            progress=False,
        )
        for topology, policy in demo.COMPARED
    }
    table = demo.comparison(results)
    assert list(table["policy"]) == ["fcfs", "chunked", "disaggregated", "goodput"]
    assert table["attainment"].str.endswith("%").all()
    best = kr.MaxGoodput(rate=1.0, high=1.1, attainment=0.9, num_gpus=1, tried={1.0: 0.9})
    picture = tmp_path / "demo.png"
    demo.save_picture(results, {"1M": best, "2P1D": best}, picture)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
