"""Pipeline stages, early transfers and unlike ranks, as a user sets them."""

import math

import pytest

import kvrelay as kr

SLO = kr.SLO(ttft=5.0, tpot=0.5)


def cluster(topology="1P1D", **options):
    options = {"model": "llama-2-70b", "gpu": "a100-80gb", "tp": 4, **options}
    return kr.Cluster(topology, **options)


def one_request(cluster, prompt_tokens=2000):
    workload = kr.Workload.fixed(1.0, 1, prompt_tokens, 20, slo=SLO)
    return kr.simulate(workload, cluster, progress=False).requests.iloc[0]


def test_stages_add_memory_and_gpus():
    two = cluster(tp=2, pp={"prefill": 2, "decode": 4})
    assert two.num_gpus == 12
    prefill, decode = two.kv_tokens
    assert prefill == pytest.approx(cluster(tp=4).kv_tokens[0], rel=1e-3)
    assert decode == pytest.approx(cluster(tp=8).kv_tokens[1], rel=1e-3)
    assert repr(two).endswith("tp=2, pp={'prefill': 2, 'decode': 4})")


def test_a_step_passes_every_stage_and_the_next_follows_behind_it():
    whole, staged = cluster("1M", tp=4), cluster("1M", tp=4, pp=4)
    alone = whole.prefill_time(2000)
    assert alone < staged.prefill_time(2000) < 1.1 * alone
    # Prompts that come together: the last of four follows three quarters of a pass behind the first.
    workload = kr.Workload.fixed(1e6, 4, 2000, 1, slo=SLO)
    options = {"max_prefill_tokens": 2000}
    firsts = kr.simulate(workload, cluster("1M", pp=4, **options), progress=False).requests.first_token
    assert firsts.max() == pytest.approx(staged.prefill_time(2000) * 7 / 4, rel=1e-3)
    firsts = kr.simulate(workload, cluster("1M", **options), progress=False).requests.first_token
    assert firsts.max() == pytest.approx(alone * 4, rel=1e-3)


def test_published_profiles_have_stages():
    opt = cluster(model="opt-66b", latency="distserve", tp={"prefill": 4, "decode": 2}, pp={"decode": 2})
    # Two stages of (48.29 + 0.0009424 · 512 + 0.1276) / 2 ms each.
    assert opt.decode_time(1, 512) == pytest.approx((48.29 + 0.0009424 * 512 + 0.1276) * 1e-3, rel=1e-3)
    # DistServe's own table.
    assert opt.kv_tokens[1] == 78_512
    with pytest.raises(kr.ConfigError, match="pp = 3"):
        cluster(model="opt-66b", latency="distserve", tp=2, pp=3)


def test_layers_leave_beside_the_prompt():
    slow = {"link": kr.Link(bandwidth=2e9)}
    after, early = one_request(cluster(**slow)), one_request(cluster(layer_groups=8, **slow))
    assert early.first_token == after.first_token
    wire = 2000 * 327_680 / 2e9
    assert after.transfer_end - after.first_token == pytest.approx(wire, rel=0.01)
    # As much of the wire's time as the prompt lasts, less one group of eight, is hidden.
    hidden = min(after.first_token * 7 / 8, wire * 7 / 8)
    assert after.transfer_end - early.transfer_end == pytest.approx(hidden, rel=0.02)
    assert early.transfer_start < early.first_token < early.transfer_end
    workload = kr.Workload.fixed(1.0, 1, 2000, 20, slo=SLO)
    story = kr.simulate(workload, cluster(layer_groups=8, **slow), progress=False).explain(0)
    assert "beside its last chunk" in story


@pytest.mark.parametrize("network", [None, kr.Network(nodes=1)])
def test_unlike_ranks_lay_kv_out_anew(network):
    def moved(tp, **options):
        row = one_request(cluster(tp=tp, network=network, **options))
        return row.transfer_end - row.transfer_start

    free = moved({"prefill": 4, "decode": 2}, conversion_bandwidth=math.inf)
    taken = moved({"prefill": 4, "decode": 2}, conversion_bandwidth=1e10)
    assert taken - free == pytest.approx(2000 * 327_680 / (2 * 1e10), rel=0.01)
    assert moved({"prefill": 4, "decode": 2}) > free
    assert moved(4) == pytest.approx(moved(4, conversion_bandwidth=1e9))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pp": 81}, "80 layers, which do not make pp = 81"),
        ({"pp": {"encode": 2}}, "pp of role 'encode'"),
        ({"pp": 0}, "pp is 0"),
        ({"layer_groups": 0}, "layer_groups is 0"),
        ({"layer_groups": 81}, "layer_groups is 81; llama-2-70b has 80 layers"),
        ({"conversion_bandwidth": 0.0}, "conversion_bandwidth is 0.0 bytes/s"),
        ({"conversion_bandwidth": math.nan}, "conversion_bandwidth is nan"),
        ({"conversion_bandwidth": "fast"}, "conversion_bandwidth is 'fast'"),
    ],
)
def test_what_cannot_be_is_refused(options, told):
    with pytest.raises(kr.ConfigError, match=told):
        cluster(**options)


def test_policies_in_python_see_what_is_free():
    seen = []

    class Watching:
        def batch(self, worker):
            seen.append((len(worker.waiting), worker.num_waiting, len(worker.running), worker.num_running))
            return kr.Batch(prefill=[(request, request.pending) for request in worker.waiting[:1]])

    workload = kr.Workload.poisson(20.0, 50, 500, 20, slo=SLO, seed=1)
    result = kr.simulate(workload, cluster("1M", pp=3), policy=Watching(), progress=False)
    assert (result.requests.status == "finished").all()
    assert all(waiting == count and running == many for waiting, count, running, many in seen)


def test_a_rate_search_ends_where_no_load_is_left():
    workload = kr.Workload.poisson(1.0, 300, 500, 20, slo=kr.SLO(ttft=1e-4), seed=0)
    with pytest.raises(kr.ConfigError, match="missed without load as well"):
        kr.max_goodput(workload, cluster("1M"), policy="fcfs", progress=False)
