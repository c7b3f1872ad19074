"""Latency tables, callables, profiles of an engine, and how true a simulation of it is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import kvrelay as kr
from kvrelay.profile import _fit_steps, _overlap

TINY = Path(__file__).parents[1] / "data/tiny.gguf"
QUIET = {"progress": False}
SLO = kr.SLO(ttft=60.0, tpot=10.0)


def steps() -> pd.DataFrame:
    """Prompts of 1 to 512 tokens at 0.1 ms a token beside 5 ms; decode at 5 ms and 0.05 ms a row."""
    prompts = pd.DataFrame({"prefill_tokens": [1, 8, 32, 64, 128, 256, 512]})
    prompts["seconds"] = 5e-3 + 1e-4 * prompts["prefill_tokens"]
    decode = pd.DataFrame({"num_decode": [1, 2, 4, 8, 16], "decode_context": [100, 900, 400, 6000, 1600]})
    decode["seconds"] = 5e-3 + 1.5e-4 * decode["num_decode"] + 1e-6 * decode["decode_context"]
    return pd.concat([prompts, decode], ignore_index=True).fillna(0)


def cluster(latency, topology="1P1D"):
    return kr.Cluster(topology, model="llama-3.1-8b", gpu="h100", latency=latency, kv_tokens=50_000)


def test_a_table_says_what_was_measured_and_goes_through_json_and_csv(tmp_path):
    table = kr.LatencyTable.from_steps(steps())
    assert np.allclose(table.predict(steps()), steps()["seconds"], rtol=0.02)
    again = kr.LatencyTable.from_dict(table.to_dict())
    assert again.to_dict() == table.to_dict()
    steps().to_csv(tmp_path / "steps.csv", index=False)
    assert kr.LatencyTable.from_csv(tmp_path / "steps.csv").to_dict() == table.to_dict()
    simulated = cluster(table)
    assert simulated.prefill_time(128) == pytest.approx(5e-3 + 1e-4 * 128, rel=0.02)
    workload = kr.Workload.poisson(20.0, 50, 100, 10, SLO)
    assert kr.simulate(workload, simulated, **QUIET).attainment() == 1.0


def test_a_table_is_not_extrapolated_silently():
    simulated = cluster(kr.LatencyTable.from_steps(steps()))
    with pytest.warns(UserWarning, match="steps of up to 3000 tokens, 512 were measured"):
        kr.simulate(kr.Workload.fixed(1.0, 2, 3000, 2, SLO), simulated, **QUIET)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (pd.DataFrame({"prefill_tokens": [5]}), "no column 'seconds'"),
        (pd.DataFrame({"seconds": [1.0]}), "need prefill_tokens or num_decode"),
        (pd.DataFrame({"prefill_tokens": [5, -1], "seconds": [1.0, 1.0]}), "prefill_tokens of row 1 is .*-1"),
        (pd.DataFrame({"prefill_tokens": [5], "seconds": ["fast"]}), "seconds of row 0 is 'fast'"),
        (
            pd.DataFrame({"prefill_tokens": [5, 7.5], "seconds": [1.0, 2.0]}),
            r"prefill_tokens of row 1 is .*7\.5.*; it must be a whole number",
        ),
        (
            pd.DataFrame({"num_decode": [1], "decode_context": [0.25], "seconds": [1.0]}),
            r"decode_context of row 0 is .*0\.25.*; it must be a whole number",
        ),
        (
            pd.DataFrame({"prefill_tokens": [5], "seconds": [0.0]}),
            "at least 1 step with a time above 0, found 1",
        ),
    ],
)
def test_steps_that_make_no_table_are_refused(frame, message):
    with pytest.raises(kr.ConfigError, match=message):
        kr.LatencyTable.from_steps(frame)


def test_tables_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(kr.ConfigError, match="nowhere"):
        kr.LatencyTable.from_csv(tmp_path / "nowhere.csv")
    falls = {
        "tokens_ms": [[1, 2.0], [4, 1.0]],
        "per_row_ms": 0,
        "per_square_ms": 0,
        "per_context_ms": 0,
        "most_context": 1,
    }
    with pytest.raises(kr.ConfigError, match="4 tokens take 1 ms after 1 tokens took 2 ms"):
        kr.LatencyTable.from_dict(falls)
    huge = falls | {"tokens_ms": [[1, 1e12]]}
    with pytest.raises(
        kr.ConfigError, match="its first time is 1000000000000 ms; it must be at least 0 and at most"
    ):
        kr.LatencyTable.from_dict(huge)
    with pytest.raises(kr.ConfigError, match="OverflowError"):
        kr.LatencyTable.from_dict(falls | {"tokens_ms": [[-5, 1.0]]})
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(kr.ConfigError, match=r"profile .*other.json.*kvrelay_profile"):
        kr.Profile.load(tmp_path / "other.json")


def test_a_callable_is_a_latency_model_and_its_errors_come_out():
    def latency(num_prefill, prefill_tokens, prefill_context, prefill_square, num_decode, decode_context):
        return 0.01 + 1e-4 * prefill_tokens

    result = kr.simulate(kr.Workload.fixed(1.0, 3, 100, 5, SLO), cluster(latency), **QUIET)
    assert result.percentile("ttft", 50) == pytest.approx(0.02)
    assert result.percentile("tpot", 50) == pytest.approx(0.01, rel=0.01)
    for answer, message in ((math.nan, "it must be seconds, at least 0"), ("soon", "is 'soon'")):
        with pytest.raises(kr.ConfigError, match=message):
            kr.simulate(kr.Workload.fixed(1.0, 3, 100, 5, SLO), cluster(lambda *_, a=answer: a), **QUIET)

    class Odd(Exception):
        pass

    def fails(*sums):
        raise Odd("third floor")

    with pytest.raises(Odd, match="third floor"):
        kr.simulate(kr.Workload.fixed(1.0, 3, 100, 5, SLO), cluster(fails), **QUIET)
    with pytest.raises(kr.ConfigError, match="latency is 5"):
        cluster(5)


def test_the_time_that_others_compute_beside_a_run():
    runs = pd.DataFrame({"worker": [0, 0, 1, 1], "start": [0.0, 2.0, 0.5, 1.5], "end": [1.0, 4.0, 1.5, 2.5]})
    assert _overlap(runs).tolist() == [0.5, 0.25, 0.5, 0.5]


def test_a_slowdown_beside_others_is_found_apart_from_what_steps_take_alone():
    frame = pd.concat([steps().assign(overlap=share) for share in (0.0, 0.5, 1.0)], ignore_index=True)
    for column in ("num_prefill", "prefill_context", "prefill_square"):
        frame[column] = 0.0
    frame["num_prefill"] = (frame["prefill_tokens"] > 0).astype(float)
    frame["prefill_square"] = frame["prefill_tokens"] ** 2
    slower = np.where(frame["num_prefill"] > 0, 0.8, 0.3)
    frame["seconds"] *= 1.0 + frame["overlap"] * slower
    table, slowdowns = _fit_steps(frame)
    assert slowdowns == pytest.approx((0.8, 0.3), rel=0.05)
    assert np.allclose(table.predict(steps()), steps()["seconds"], rtol=0.03)


def test_an_engine_profiles_itself_and_is_simulated_like_it(tmp_path):
    with kr.Engine(TINY, "1P1D", kv_tokens=4096, max_batch=8) as engine:
        profile = engine.profile(progress=False)
        assert set(profile.residuals().index) >= {"prefill", "decode"}
        assert "Profile of" in repr(profile) and "<table" in profile._repr_html_()
        profile.save(tmp_path / "profile.json")
        again = kr.Profile.load(tmp_path / "profile.json")
        assert again.table.to_dict() == profile.table.to_dict() and again.engine == profile.engine
        assert again.cluster().kv_tokens == [4096, 4096]
        saved = json.loads((tmp_path / "profile.json").read_text())
        for change, message in (
            ({"slowdowns": [-5, 1]}, "slowdown is -5"),
            ({"engine": saved["engine"] | {"kv_blocks": 0}}, "engine kv_blocks is 0"),
            ({"link": {"bandwidth": -1, "latency": 0}}, "bandwidth is -1"),
            ({"samples": {}}, "samples have no columns"),
        ):
            (tmp_path / "bad.json").write_text(json.dumps(saved | change))
            with pytest.raises(kr.ConfigError, match=message):
                kr.Profile.load(tmp_path / "bad.json")
        workload = kr.Workload.poisson(50.0, 30, kr.uniform(5, 60), kr.uniform(1, 20), SLO)
        found = kr.fidelity(engine, workload, "goodput", profile=again, runs=2, progress=False)
        assert found.table.loc["attainment", "error"] == 0.0 and len(found.measured) == 2
        assert found.worst() >= 0.0 and len(found.plot()) == 2
        assert (found.table["low"] <= found.table["high"] + 1e-12).all()
        with pytest.raises(kr.ConfigError, match="this cluster was measured"):
            kr.simulate(workload, again.cluster(), belief="roofline", **QUIET)
        assert len(kr.simulate(workload, again.cluster("2P1D"), **QUIET)) == 30
