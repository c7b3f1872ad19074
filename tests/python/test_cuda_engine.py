"""kr.Engine on emulated CUDA devices: the quickstart with one argument changed.

A process loads a driver once, so each test is a Python of its own that finds the emulated one first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data"
EMULATED = os.environ.get("KVRELAY_EMULATED_CUDA", "")

pytestmark = pytest.mark.skipif(
    not EMULATED, reason="KVRELAY_EMULATED_CUDA is not set: make test-python sets it"
)

BEGIN = """
import ctypes, json, sys
for path in sys.argv[2:]: ctypes.CDLL(path)
import numpy as np
import kvrelay as kr
MODEL, SMALL = sys.argv[1], {"kv_tokens": 2048, "max_batch": 8, "max_prefill_tokens": 64}
PROMPTS = ["hello there", "the end", *([5 + 7 * i, 9, 200 - i] * (3 + i) for i in range(10))]
"""


def on_devices(script: str, **settings: object) -> dict:
    """What a script prints last, as JSON, on emulated devices."""
    libraries = [
        str(Path(EMULATED) / name)
        for name in ("libcuda.so.1", "libcuda.so", "libcublas.so.13", "libcublas.so")
    ]
    command = [
        sys.executable,
        "-c",
        BEGIN + textwrap.dedent(script),
        str(DATA / "tiny_cuda.gguf"),
        *libraries,
    ]
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env |= {f"KVRELAY_EMU_{name}": str(value) for name, value in ({"MEMORY_MB": 256} | settings).items()}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_quickstart_runs_on_cuda_by_changing_one_argument() -> None:
    found = on_devices(
        """
        def served(device, **options):
            with kr.Engine(MODEL, topology="1P1D", device=device, **SMALL, **options) as engine:
                outputs = engine.generate(PROMPTS, max_tokens=6, ignore_eos=True)
                engine.check_integrity()
                assert all(one.text == engine.detokenize(one.token_ids) for one in outputs)
                return outputs
        found = served("cuda:0")
        records = {(int(one.record["prefill_worker"]), int(one.record["decode_worker"])) for one in found}
        tokens = [[one.token_ids for one in served(device, numerics="invariant")] for device in ("cuda:0", "cuda")]
        reference = kr.Engine(MODEL, "1M", device="cpu", numerics="invariant", **SMALL)
        clear, same = 0, 0
        for ours, theirs in zip(found, reference.generate(PROMPTS, max_tokens=6, ignore_eos=True)):
            ids = theirs.prompt_token_ids
            for token, expected in zip(ours.token_ids, theirs.token_ids):
                *_, second, first = np.sort(reference.logits(ids)[-1])
                if first - second <= 0.1:
                    break  # too near to tell, and what follows may be another text
                clear, same, ids = clear + 1, same + (token == expected), [*ids, expected]
        print(json.dumps({"same_again": tokens[0] == tokens[1], "records": list(records), "clear": clear, "same": same}))
        """
    )
    assert found["same_again"] and found["records"] == [[0, 1]]
    assert found["clear"] == found["same"] >= 12, found


def test_workers_say_where_they_are_and_logits_are_the_devices() -> None:
    found = on_devices(
        """
        with kr.Engine(MODEL, "2P1D", device="cuda", numerics="invariant", **SMALL) as engine:
            devices = [worker.device for worker in engine.workers]
            logits = engine.logits([5, 9, 200])
        with kr.Engine(MODEL, "1M", device="cpu", **SMALL) as engine:
            expected = engine.logits([5, 9, 200])
        off = float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))
        with kr.Engine(MODEL, **SMALL) as engine:
            auto = engine.workers[0].device
        print(json.dumps({"devices": devices, "off": off, "shape": logits.shape, "auto": auto, "found": repr(kr.devices())}))
        """,
        DEVICES=2,
    )
    assert [device.split(" ")[0] for device in found["devices"]] == ["cuda:0", "cuda:1", "cuda:0"]
    assert "Emulated device 0, invariant" in found["devices"][0]
    assert found["auto"].startswith("cuda:0 (Emulated device 0, fast, cuBLAS)")
    assert found["shape"] == [3, 288] and 0 < found["off"] < 3e-2
    assert "cuda:1: Emulated device 1" in found["found"]


def test_a_workload_is_measured_on_cuda() -> None:
    found = on_devices(
        """
        workload = kr.Workload.poisson(rate=50.0, num_requests=6, prompt_tokens=24, output_tokens=6, slo=kr.SLO(ttft=60.0))
        with kr.Engine(MODEL, "1P1D", device="cuda:0", **SMALL) as engine:
            result = engine.run(workload, progress=False)
            engine.check_integrity()
        print(json.dumps({"status": list(result.requests["status"]), "tokens": int(result.requests["output_tokens"].sum())}))
        """
    )
    assert found["status"] == ["finished"] * 6 and found["tokens"] == 36


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ('device="cuda:3"', {}, "there is no cuda:3; the CUDA driver lists 1"),
        ('device="cuda", kv_tokens=10**7', {}, "cuda:0: the engine needs "),
        ('device="cuda"', {"CAPABILITY": 75}, "the kernels need compute capability 8.0 or newer"),
        ('device="gpu"', {}, "expected one of cpu, auto, cuda, cuda:0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(options: str, settings: dict, message: str) -> None:
    found = on_devices(
        f"""
        options = SMALL | dict({options})
        try:
            kr.Engine(MODEL, **options)
        except kr.KvRelayError as error:
            print(json.dumps({{"error": str(error)}} | error.numbers))
        """,
        **settings,
    )
    assert message in found["error"]
    if "needs" in message:
        assert found["device"] == "cuda:0" and found["needed"] > found["free"] > 0
