"""kr.Workload, kr.SLO, kr.Cluster: what is refused says the name and the numbers; results replay."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pandas as pd
import pytest

import kvrelay as kr

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kr.Workload.poisson(0, 10, 5, 5), "rate is 0"),
        (lambda: kr.Workload.poisson(NAN, 10, 5, 5), "rate is NaN"),
        (lambda: kr.Workload.poisson(INF, 10, 5, 5), "rate is inf"),
        (lambda: kr.Workload.poisson(1.0, 0, 5, 5), "num_requests is 0"),
        (lambda: kr.Workload.poisson(1.0, -3, 5, 5), "num_requests is -3"),
        (lambda: kr.Workload.poisson(1.0, 2.5, 5, 5), "num_requests is 2.5"),
        (lambda: kr.Workload.poisson(1.0, 10, 0, 5), "0"),
        (lambda: kr.Workload.poisson(1.0, 10, 5, -1), "-1"),
        (lambda: kr.Workload.poisson(1.0, 10, "many", 5), "prompt_tokens is 'many'"),
        (lambda: kr.lognormal(800, -1), "lognormal std is -1"),
        (lambda: kr.Workload.poisson(1.0, 10, 5, 5, (1, 2)), r"slo of class 'default' is \(1, 2\)"),
        (lambda: kr.Workload.merge([kr.Workload.fixed(1.0, 1, 1, 1)]), r"workloads\[0\] is \["),
        (lambda: kr.Workload.from_trace("t.csv", limit=-1), "limit is -1"),
        (lambda: kr.Workload.from_trace("t.csv", slot=-1), "slot is -1"),
        (lambda: kr.Workload.from_trace("t.csv", unit=5), "unit is 5"),
        (lambda: kr.Workload.poisson(1.0, 10, kr.lognormal(-5, 1), 5), "-5"),
        (lambda: kr.Workload.poisson(1.0, 10, kr.uniform(9, 3), 5), "9|3"),
        (lambda: kr.Workload.poisson(1.0, 10, 5, 5, seed=-1), "seed is -1"),
        (lambda: kr.Workload.gamma(1.0, 0.0, 10, 5, 5), "cv is 0"),
        (lambda: kr.Workload.preset("azure", 10), "nearest first: azure-"),
        (lambda: kr.Workload.preset("sharegpt-8k", 10), "give one, in requests per second"),
        (lambda: kr.Workload.from_records([]), "number of requests is 0"),
        (
            lambda: kr.Workload.from_records([{"arrival": 0.0, "prompt_tokens": 4}]),
            r"records\[0\] has no output_tokens",
        ),
        (
            lambda: kr.Workload.from_records([{"arrival": -1.0, "prompt_tokens": 4, "output_tokens": 1}]),
            r"records\[0\].arrival is -1",
        ),
        (
            lambda: kr.Workload.from_records([{"arrival": 0.0, "prompt_tokens": 0, "output_tokens": 1}]),
            r"records\[0\].prompt_tokens is 0",
        ),
        *(
            (
                lambda own=own: kr.Workload.from_records(
                    [{"arrival": 0.0, "prompt_tokens": 40, "output_tokens": 1} | own]
                ),
                message,
            )
            for own, message in [
                ({"priority": 1.7}, r"records\[0\].priority is 1.7"),
                ({"max_tokens": -1}, r"records\[0\].max_tokens is -1"),
                ({"prompt_tokens": 5.9}, r"records\[0\].prompt_tokens is 5.9"),
                ({"hash_ids": [-1]}, r"records\[0\].hash_ids\[0\] is -1"),
                ({"hash_ids": "ab"}, r"records\[0\].hash_ids is 'ab'"),
                ({"hash_ids": [1], "tokens_per_id": 0}, r"records\[0\].tokens_per_id is 0"),
            ]
        ),
        (lambda: kr.Workload.from_records(5), "records are 5"),
        (lambda: kr.Workload.from_records([5]), r"records\[0\] is 5"),
        (lambda: kr.Workload.from_trace("no/such/file.jsonl"), "no/such/file.jsonl"),
        (lambda: kr.Workload.poisson(1.0, 10, 5, 5).at_rate(-2), "rate is -2"),
        (lambda: kr.SLO(ttft=0), "ttft is 0"),
        (lambda: kr.SLO(tpot=NAN), "tpot is nan"),
        (lambda: kr.SLO(e2e="1"), "e2e is '1'"),
        (lambda: kr.SLO(ttft=1.0, token_deadlines=True), "needs both"),
        (lambda: kr.Cluster("2P", model="opt-13b", gpu="h100"), "2 prefill, 0 decode"),
        (lambda: kr.Cluster("1M", model="opt-13", gpu="h100"), "nearest first: opt-13b"),
        (lambda: kr.Cluster("1M", model="opt-13b", gpu="h101"), "nearest first: h100"),
        (lambda: kr.Cluster("1M", model="opt-13b", gpu="h100", latency="slow"), "known: roofline"),
        (lambda: kr.Cluster("1M", model="opt-13b", gpu="h100", latency="vllm"), "measured on a100-80gb"),
        (lambda: kr.Cluster("1M", model="llama-3.1-405b", gpu="h100"), "405"),
        (lambda: kr.Cluster("1M", model="opt-13b", gpu="h100", tp=0), "tp is 0"),
        (lambda: kr.Cluster("1M", model="opt-13b", gpu="h100", tp={"boss": 2}), "role 'boss'"),
        (lambda: kr.Cluster("1M", model="opt-13b", gpu="l40s", link="nvlink"), "no NVLink"),
        (lambda: kr.Cluster("1M", model="opt-13b", gpu="h100", link=kr.Link(-1.0)), "bandwidth is -1"),
        (lambda: kr.Cluster("1M", model="opt-13b", gpu="h100", block_tokens=0), "block_tokens is 0"),
        (lambda: kr.Cluster("1M", model="opt-13b", gpu="h100", max_batch=-1), "max_batch is -1"),
        (
            lambda: kr.Cluster("1M", model="opt-13b", gpu="h100", max_prefill_tokens=2**40),
            "max_prefill_tokens is 1099511627776",
        ),
        (lambda: kr.Cluster(7, model="opt-13b", gpu="h100"), "topology is 7"),
        (lambda: kr.Cluster("1M", model="opt-13b", gpu="h100", link=7), "link is 7"),
        (
            lambda: kr.Cluster("1M", model="opt-13b", gpu="h100", kv_tokens=2**40),
            "at most 67108864 are simulated",
        ),
        (
            lambda: kr.Cluster("1M", model="opt-13b", gpu="h100").decode_time(1, 2**62),
            "context_tokens is 461168",
        ),
        (lambda: kr.Cluster("1M", model="opt-13b", gpu="h100").prefill_time(-1), "prompt_tokens is -1"),
        (
            lambda: kr.Cluster("1M", model="opt-13b", gpu="h100", kv_tokens=3),
            "3 tokens is less than a block of 16",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(kr.KvRelayError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "milliseconds", "seconds"),
    [("ttft", 400, 100.0), ("tpot", 40, 10.0), ("e2e", 20_000, 3600.0), ("max_gap", 500, 60.0)],
)
def test_objectives_in_milliseconds_are_noticed(name, milliseconds, seconds):
    with pytest.warns(
        UserWarning, match=rf"SLO {name} is {milliseconds} s: .* above {seconds:g} s"
    ) as caught:
        slo = kr.SLO(**{name: milliseconds})
    assert f"{name}={milliseconds / 1e3:g}" in str(caught[0].message) and caught[0].filename == __file__
    assert getattr(slo, name) == milliseconds
    kr.SLO(**{name: seconds})
    # Warnings are errors here: what was noticed once is not said again by whatever holds it.
    workload = kr.Workload.poisson(4.0, 5, 10, 5, slo)
    result = kr.simulate(workload, kr.Cluster("1M", model="opt-13b", gpu="h100"), progress=False)
    assert workload.classes == {"default": slo} and result.objectives == {"default": [slo]}


def test_errors_carry_their_numbers_and_travel():
    with pytest.raises(kr.ConfigError) as caught:
        kr.SLO(ttft=-2.5)
    assert caught.value.value == -2.5
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy), copy.value) == (kr.ConfigError, str(caught.value), -2.5)
    assert isinstance(caught.value, (kr.KvRelayError, ValueError))


def test_a_result_replays_as_a_workload(workload, cluster, slo):
    first = kr.simulate(workload, cluster, "goodput", progress=False)
    again = kr.Workload.from_records(first.requests, slo)
    second = kr.simulate(again, cluster, "goodput", progress=False)
    columns = ["arrival", "ttft", "tpot", "e2e", "good"]
    pd.testing.assert_frame_equal(first.requests[columns], second.requests[columns])


def test_classes_are_told_apart(cluster):
    chat = kr.Workload.poisson(2.0, 50, 100, 20, kr.SLO(ttft=0.2), slo_class="chat")
    code = kr.Workload.poisson(2.0, 30, 100, 20, kr.SLO(ttft=1e-6), slo_class="code", seed=1)
    both = kr.Workload.merge(chat, code)
    assert both.classes == {"chat": kr.SLO(ttft=0.2), "code": kr.SLO(ttft=1e-6)}
    result = kr.simulate(both, cluster, progress=False)
    assert (result.attainment("chat"), result.attainment("code")) == (1.0, 0.0)
    assert result.attainment() == 50 / 80
    with pytest.raises(kr.ConfigError, match="this run has chat, code"):
        result.attainment("prose")


def test_prefixes_are_shared_where_the_trace_says_so(cluster, tmp_path):
    rows = [
        f'{{"timestamp": {i * 1000}, "input_length": 1024, "output_length": 4, "hash_ids": [0, {i // 2 + 1}]}}'
        for i in range(6)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(rows))
    requests = kr.simulate(
        kr.Workload.from_trace(path), kr.Cluster("1M", model="opt-13b", gpu="a100-80gb"), progress=False
    ).requests
    assert list(requests["cached_tokens"]) == [0, 1008, 512, 1008, 512, 1008]
    assert (requests["cached_tokens"] < requests["prompt_tokens"]).all()


def test_azure_reads_in_seconds(shared):
    workload = kr.Workload.from_trace(shared / "traces/AzureLLMInferenceTrace_conv.csv")
    vidur = pd.read_csv(shared / "traces/vidur_splitwise_conv.csv")
    frame = workload.to_frame()
    assert np.allclose(frame["arrival"], vidur["arrived_at"], atol=1e-6)
    assert (frame["prompt_tokens"] == vidur["num_prefill_tokens"]).all()


def test_everything_prints(workload, cluster, slo):
    result = kr.simulate(workload, cluster, progress=False)
    assert repr(workload) == "Workload(200 requests, Poisson at 4 req/s, prompts 512, outputs 64)"
    assert "<table" in workload._repr_html_() and "<table" in result._repr_html_()
    assert repr(cluster) == "Cluster('2P1D', model='opt-13b', gpu='a100-80gb', latency='vllm')"
    assert "attainment 100.0%" in repr(result) and "goodput" in repr(result)
    story = result.explain(7)
    assert story.startswith("request 7 (default): 512 prompt tokens") and story.endswith("counts as good")
    assert "KV transfer to worker 2" in story and "within 400.0 ms" in story
    with pytest.raises(kr.ConfigError, match=r"this run has 200 \(ids 0 to 199\)"):
        result.explain(200)
