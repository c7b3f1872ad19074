"""Policies written in Python: answers, faults, views."""

from __future__ import annotations

import pytest

import kvrelay as kr

QUIET = {"progress": False}


def run(policy, topology="1P1D", num_requests=40, **options):
    workload = kr.Workload.poisson(20.0, num_requests, 200, 10, kr.SLO(ttft=1.0, tpot=0.1), **options)
    cluster = kr.Cluster(topology, model="opt-13b", gpu="a100-80gb", latency="distserve", kv_tokens=4000)
    return kr.simulate(workload, cluster, policy, **QUIET)


def test_a_name_its_object_and_its_parameters():
    assert run("chunked", "2M").requests.equals(run(kr.policies.Chunked(), "2M").requests)
    assert not run("chunked", "2M").requests.equals(run(kr.policies.Chunked(token_budget=64), "2M").requests)


def test_missing_methods_fall_to_the_defaults():
    class OnlyObserves:
        def __init__(self):
            self.outcomes = []

        def observe(self, outcome):
            self.outcomes.append(outcome)

        def rebalance(self, cluster):
            return None

    policy = OnlyObserves()
    assert run(policy, "2M").requests.equals(run("fcfs", "2M").requests)
    ended = [outcome for outcome in policy.outcomes if isinstance(outcome, kr.policies.Ended)]
    ran = [outcome for outcome in policy.outcomes if isinstance(outcome, kr.policies.Ran)]
    assert len(ended) == 40 and all(outcome.good for outcome in ended)
    assert sum(outcome.prefill_tokens for outcome in ran) == 40 * 200


def test_every_form_of_a_placement():
    answers = [
        lambda request, cluster: 0,
        lambda request, cluster: cluster.workers[0],
        lambda request, cluster: (0, 1),
        lambda request, cluster: kr.Placement(0),
        lambda request, cluster: kr.Placement(cluster.workers[0], decode=1, reserve=False),
    ]
    results = [run(answer).requests for answer in answers]
    assert all(result.equals(results[0]) for result in results)


def test_a_reservation_is_kept_and_given_back():
    result = run(lambda request, cluster: kr.Placement(0, decode=1, reserve=True))
    assert (result.requests["status"] == "finished").all()


def test_a_prompt_may_run_where_it_decodes():
    result = run(lambda request, cluster: 1)
    assert (result.requests["prefill_worker"] == 1).all()
    assert result.requests["transfer_start"].isna().all()


def test_admission_holds_demotes_and_refuses():
    class Doorman:
        def admit(self, request, cluster):
            if request.id % 4 == 1:
                return kr.Refuse("by turn", turn=request.id)
            if request.id % 4 == 2 and cluster.now < request.arrival + 0.5:
                return kr.Hold(request.arrival + 0.5)
            if request.id % 4 == 3:
                return kr.Demote()

    requests = run(Doorman()).requests
    refused = requests[requests["status"] == "refused"]
    assert list(refused["id"]) == list(range(1, 40, 4))
    assert refused["reason"].iloc[0] == "by turn (turn=1)"
    assert refused["ttft"].isna().all() and not refused["good"].any()
    held = requests[requests["id"] % 4 == 2]
    assert ((held["admitted"] - held["arrival"] - 0.5).abs() < 1e-9).all()


def test_batches_preempt_drop_and_repeat():
    class Rough:
        def begin(self, cluster, rng):
            self.preempted, self.dropped = set(), set()

        def batch(self, worker):
            for request in worker.running:
                if request.generated == 5 and request.id not in self.preempted and request.id % 2:
                    self.preempted.add(request.id)
                    return kr.Batch(preempt=[request], repeat=1)
                if request.generated == 3 and request.id % 10 == 8 and request.id not in self.dropped:
                    self.dropped.add(request.id)
                    return kr.Batch(drop=[request.id])
            startable = [request for request in worker.waiting if worker.can_start(request)]
            return kr.Batch(prefill=[(request, 64) for request in startable[:2]], repeat=1)

    policy = Rough()
    requests = run(policy, "1M").requests.set_index("id")
    assert policy.preempted and (requests.loc[sorted(policy.preempted), "preemptions"] >= 1).all()
    assert set(requests.index[requests["status"] == "refused"]) == policy.dropped != set()
    finished = requests[requests["status"] == "finished"]
    assert (finished["output_tokens"] == 10).all()


def test_roles_change_at_ticks():
    class Flips:
        def rebalance(self, cluster):
            if cluster.now == 0:
                return kr.Rebalance(next=1.0)
            return kr.Rebalance(roles={0: "decode", 1: "prefill"})

    requests = run(Flips()).requests
    late = requests[requests["arrival"] > 1.2]
    assert (late["prefill_worker"] == 1).all() and (requests["status"] == "finished").all()


class Odd(Exception):
    pass


@pytest.mark.parametrize("method", ["begin", "observe", "admit", "place", "accept", "batch", "rebalance"])
def test_an_exception_comes_out_as_that_very_exception(method):
    raised = Odd(method)

    def fail(self, *arguments):
        raise raised

    policy = type(
        "Failing", (), {method: fail, "place": lambda *_: 0} if method != "place" else {method: fail}
    )()
    with pytest.raises(Odd) as caught:
        run(policy)
    assert caught.value is raised
    assert any(entry.name == "fail" for entry in caught.traceback)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda request, cluster: 7, r"worker 7 of 2 workers \(0 to 1\)"),
        (lambda request, cluster: -1, "expected a worker"),
        (lambda request, cluster: True, "expected a worker .* found True"),
        (lambda request, cluster: "0", "expected a worker"),
        (lambda request, cluster: (0, 0), "worker 0, a prefill worker"),
        (lambda request, cluster: (0, 1, 2), r"expected \(prefill, decode\)"),
        (lambda request, cluster: kr.Placement(0, reserve=True), "reserve room at no worker"),
        (type("P", (), {"admit": lambda *_: "yes"})(), "expected None, Hold"),
        (type("P", (), {"admit": lambda self, r, c: kr.Hold(c.now - 1)})(), "before|negative"),
        (type("P", (), {"accept": lambda *_: "maybe"})(), 'expected "now", "later"|expected \'now\'|now'),
        (type("P", (), {"accept": lambda *_: 0})(), "worker 0 is a prefill worker"),
        (type("P", (), {"batch": lambda *_: kr.Batch(prefill=[(999, 1)])})(), "request 999"),
        (type("P", (), {"batch": lambda *_: kr.Batch(prefill=[(0, -5)])})(), "number of prompt tokens"),
        (type("P", (), {"batch": lambda *_: kr.Batch(prefill=[0])})(), r"expected \(request, tokens\)"),
        (type("P", (), {"admit": lambda *_: kr.Hold(float("inf"))})(), "213 days"),
        (type("P", (), {"batch": lambda *_: kr.Batch(wake_at=1e300)})(), "213 days"),
        (type("P", (), {"rebalance": lambda *_: kr.Rebalance(next=float("inf"))})(), "213 days"),
        (type("P", (), {"admit": lambda *_: kr.Hold("x")})(), "`admit` answered Hold.*seconds as until"),
        (type("P", (), {"admit": lambda *_: kr.Refuse(5)})(), "`admit` answered .* found 5"),
        (
            type("P", (), {"batch": lambda *_: kr.Batch(repeat=-1)})(),
            "`batch` answered .* as repeat, found -1",
        ),
        (type("P", (), {"batch": lambda *_: kr.Batch})(), "`batch` answered .* not its class"),
        (type("P", (), {"batch": lambda *_: [1]})(), "expected a kvrelay.Batch or None"),
        (type("P", (), {"rebalance": lambda *_: {0: "decode"}})(), "expected a kvrelay.Rebalance or None"),
        (type("P", (), {"rebalance": lambda *_: kr.Rebalance({0: "decode"})})(), "without a worker"),
        (
            type("P", (), {"rebalance": lambda *_: kr.Rebalance({0: "boss"})})(),
            "known: prefill, decode, mixed",
        ),
    ],
)
def test_an_answer_that_cannot_be_is_refused_with_its_value(policy, message):
    with pytest.raises(kr.KvRelayError, match=message):
        run(policy)


def test_methods_that_cannot_be_called_as_they_are():
    with pytest.raises(
        kr.ConfigError, match=r"place\(request\) cannot be called as place\(request, cluster\)"
    ):
        run(lambda request: 0)
    with pytest.raises(kr.ConfigError, match=r"batch\(\) cannot be called as batch\(worker\)"):
        run(type("P", (), {"batch": lambda self: None})())
    with pytest.raises(kr.ConfigError, match="'plaec' is never called; did you mean 'place'"):
        run(type("P", (), {"plaec": lambda *_: 0})())


def test_what_is_no_policy():
    with pytest.raises(kr.ConfigError, match="built in are fcfs"):
        run("fast")
    with pytest.raises(kr.ConfigError, match="is no policy"):
        run(object())
    with pytest.raises(kr.ConfigError, match="give an object of it"):
        run(kr.policies.Chunked)
    with pytest.raises(kr.ConfigError, match="token_budget is 0"):
        run(kr.policies.Chunked(token_budget=0))


def test_a_policy_that_leaves_requests_is_told_so():
    with pytest.raises(kr.StalledError) as caught:
        run(lambda request, cluster: None)
    assert caught.value.num_live == 40 and caught.value.first_request == 0


def test_views_end_with_their_call():
    kept = []

    def keeps(request, cluster):
        kept.extend([request, cluster, cluster.workers[0]])
        return 0

    run(keeps)
    for view in kept[:3]:
        assert "stale" in repr(view)
        with pytest.raises(kr.StaleView, match="copy what you want to keep"):
            _ = view.now if hasattr(type(view), "now") else view.id
    with pytest.raises(kr.StaleView):
        _ = kept[0].prompt_tokens


def test_views_tell_what_there_is():
    seen = {}

    class Looks:
        def place(self, request, cluster):
            worker = cluster.least_loaded("queued_tokens")
            assert worker.role == "prefill" and list(cluster.column("num_waiting")) == [
                worker.num_waiting for worker in cluster.workers
            ]
            assert request.slo == kr.SLO(ttft=1.0, tpot=0.1) and request.deadline == pytest.approx(
                request.arrival + 1.0
            )
            assert cluster.prefix_hits(request) == [0, 0]
            assert worker.predict_prefill(200) == pytest.approx(
                0.0181 + 0.1019e-3 * 200 + 7.12e-9 * 200**2 + 1e-3, rel=1e-3
            )
            assert cluster.predict_transfer(2000) == pytest.approx(2000 * 819_200 / 300e9)
            with pytest.raises(kr.ConfigError, match="known: queued_tokens"):
                cluster.least_loaded("mood")
            seen["place"] = True
            return worker

        def batch(self, worker):
            if worker.role == "decode":
                for request in worker.running:
                    assert request.first_token is not None and request.generated >= 1
                    assert request.computed == request.prompt_tokens + request.generated - 1
                    assert request.pending == 1
                seen["batch"] = True

    run(Looks())
    assert seen == {"place": True, "batch": True}


def test_the_same_object_starts_anew_every_run():
    class Random:
        def begin(self, cluster, rng):
            self.rng = rng

        def place(self, request, cluster):
            return int(self.rng.integers(2))

    policy = Random()
    assert run(policy, "2M").requests.equals(run(policy, "2M").requests)


def test_check_policy():
    class Good:
        def place(self, request, cluster):
            return cluster.least_loaded("num_waiting")

    assert kr.check_policy(Good()).methods == ("place",)
    assert kr.check_policy(lambda request, cluster: cluster.least_loaded()).methods == (
        "a callable for placement",
    )

    class Forgets:
        seen = 0

        def place(self, request, cluster):
            self.seen += 1
            workers = [worker for worker in cluster.workers if worker.role != "decode"]
            return workers[(self.seen // 7) % len(workers)]

    with pytest.raises(kr.PolicyError, match="two runs with the same seed differ"):
        kr.check_policy(Forgets())

    class Misspelt:
        def places(self, request, cluster):
            return 0

        def batch(self, worker):
            return None

    with pytest.raises(kr.PolicyError, match="'places' is never called; did you mean 'place'"):
        kr.check_policy(Misspelt())

    class Helpers(Good):
        batch_size, a, placed = max, max, max

    assert kr.check_policy(Helpers()).methods == ("place",)
    for name in ("bacth", "rebalanse", "Accept"):
        with pytest.raises(kr.PolicyError, match=f"{name!r} is never called"):
            kr.check_policy(type("Typo", (Good,), {name: max})())
