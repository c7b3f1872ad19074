"""Without a usable CUDA driver everything imports and runs, and says why there is no CUDA.

A process loads a driver once, so each kind of driver is met by a Python of its own."""

from __future__ import annotations

import ctypes
import dataclasses
import html
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvrelay as kr
from kvrelay.devices import CpuDevice, CudaDevice, Devices

SOURCE = Path(__file__).parents[1] / "data" / "stand_in_libcuda.c"

ASK = """
import json, kvrelay as kr
found = kr.devices()
result = kr.simulate(
    kr.Workload.poisson(rate=4.0, num_requests=5, prompt_tokens=64, output_tokens=4, slo=kr.SLO(ttft=1.0), seed=0),
    kr.Cluster("1P1D", model="opt-13b", gpu="a100-80gb"), progress=False,
)
print(json.dumps({
    "why": found.why_no_cuda, "available": [found.cuda_available, kr.cuda_available()], "usable": [one.device for one in found],
    "listed": [[one.device, one.name, one.memory, one.compute_capability, one.driver_version] for one in found.cuda],
    "repr": repr(found), "simulated": len(result.requests),
}))
"""


# Where the emulated CUDA is; its driver, loaded before kvrelay looks for one, is the one that kvrelay finds.
EMULATED = os.environ.get("KVRELAY_EMULATED_CUDA", "")
PRELOAD = "import ctypes, sys\nfor path in sys.argv[1:]: ctypes.CDLL(path)\n"


def ask(folder: Path, *preloaded: str, **variables: str) -> dict[str, object]:
    """What a fresh Python that finds its libraries in `folder` first says of its devices."""
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env["LD_LIBRARY_PATH"] = f"{folder}:{env.get('LD_LIBRARY_PATH', '')}"
    command = [sys.executable, "-c", PRELOAD + ASK, *(str(folder / name) for name in preloaded)]
    done = subprocess.run(command, env=env | variables, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["available"] == [False, False] and answer["usable"] == ["cpu"] and answer["simulated"] == 5
    assert answer["repr"].endswith(f"; cuda: not usable: {answer['why']}")
    return answer


def stand_in(folder: Path, *defines: str) -> Path:
    """A folder with a driver library that is not one."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = folder / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", SOURCE, "-o", library, *(f"-D{define}" for define in defines)],
        check=True,
    )
    shutil.copy(library, folder / "libcuda.so")
    return folder


@pytest.mark.parametrize(
    ("defines", "variables", "why"),
    [
        (["EMPTY"], {}, "libcuda.so.1 that was found has no cuInit"),
        (["PARTIAL"], {}, "libcuda.so.1 that was found has no cuDeviceGetCount"),
        (["INIT=100"], {}, "found no device (CUDA error 100, CUDA_ERROR_NO_DEVICE: "),
        (["COUNT=0"], {}, "the CUDA driver found no device"),
        (["COUNT=2"], {"CUDA_VISIBLE_DEVICES": ""}, 'CUDA_VISIBLE_DEVICES is set to ""'),
        (["INIT=803"], {}, "CUDA error 803, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: "),
        (["INIT=4711", "NAMELESS"], {}, "CUDA error 4711"),
    ],
    ids=" ".join,
)
def test_no_usable_driver(tmp_path: Path, defines: list[str], variables: dict[str, str], why: str) -> None:
    answer = ask(stand_in(tmp_path, *defines), **variables)
    assert why in str(answer["why"]) and answer["listed"] == []


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    for name in ("libcuda.so", "libcuda.so.1"):
        (tmp_path / name).write_text("not a library")
    assert str(ask(tmp_path)["why"]).startswith("libcuda.so.1 could not be loaded (")


def test_devices_that_the_driver_lists_are_named_and_not_usable(tmp_path: Path) -> None:
    answer = ask(stand_in(tmp_path, "COUNT=1"))
    assert answer["listed"] == [["cuda:0", "Stand-in 0", 3 << 29, [9, 0], [12, 8]]]
    # Which of the two depends on whether this build has kernels.
    reasons = (
        "was built without CUDA kernels, so it cannot use",
        "runs CUDA 12.8, the kernels need 13.0; it lists",
    )
    assert any(f"{reason} cuda:0 (Stand-in 0, 1.5 GiB" in str(answer["why"]) for reason in reasons)


@pytest.mark.skipif(not EMULATED, reason="KVRELAY_EMULATED_CUDA is not set: make test-python sets it")
def test_emulated_devices_are_listed() -> None:
    folder = Path(EMULATED)
    answer = ask(folder, "libcuda.so.1", "libcuda.so", KVRELAY_EMU_DEVICES="2", KVRELAY_EMU_MEMORY_MB="512")
    assert answer["listed"] == [
        [f"cuda:{ordinal}", f"Emulated device {ordinal}", 512 << 20, [9, 0], [13, 0]] for ordinal in range(2)
    ]
    # There are kernels and devices to run them on, and no engine yet that does.
    assert answer["why"] == "the engine of this build of kvrelay does not run on CUDA devices"


@pytest.mark.skipif(not EMULATED, reason="KVRELAY_EMULATED_CUDA is not set: make test-python sets it")
def test_emulated_devices_that_are_too_old() -> None:
    answer = ask(Path(EMULATED), "libcuda.so.1", "libcuda.so", KVRELAY_EMU_CAPABILITY="75")
    assert "the kernels need compute capability 8.0 or newer" in str(answer["why"])
    assert "compute capability 7.5" in str(answer["why"]) and len(answer["listed"]) == 1


def test_without_a_driver_there_is_no_device() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        found = kr.devices()
        assert (found.cuda, found.why_no_cuda) == ((), "no libcuda.so.1 was found")
    else:
        pytest.skip("this machine has a CUDA driver")


def test_this_machine() -> None:
    found = kr.devices()
    assert not found.cuda_available and not kr.cuda_available() and found.why_no_cuda
    assert list(found) == [found.cpu] == [found[0]] and len(found) == 1
    assert 1 <= found.cpu.cores <= (os.cpu_count() or 1)
    assert found == kr.devices()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.why_no_cuda = None


def test_the_vector_instructions_are_ones_the_processor_has() -> None:
    processor = Path("/proc/cpuinfo")
    if not processor.exists():
        pytest.skip("no /proc/cpuinfo")
    flags = set(processor.read_text().split())
    wide = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
    expected = "AVX-512" if wide <= flags else "AVX2" if {"avx2", "fma", "f16c"} <= flags else None
    assert kr.devices().cpu.vector == expected


def test_a_usable_device_would_be_listed() -> None:
    card = CudaDevice("cuda:0", "NVIDIA <H200>", 150_754_820_096, (9, 0), (13, 0))
    found = Devices(CpuDevice("cpu", 1, None), (card,), None)
    assert found.cuda_available and list(found) == [found.cpu, card]
    card_line = "NVIDIA <H200>, 140.4 GiB, compute capability 9.0, driver for CUDA 13.0"
    assert repr(found) == f"cpu: 1 core, no vector instructions beyond the baseline; cuda:0: {card_line}"
    assert html.escape(card_line) in found._repr_html_() and "<H200>" not in found._repr_html_()


def test_reprs() -> None:
    found = Devices(CpuDevice("cpu", 2, "AVX-512"), (), "no libcuda.so.1 was found")
    assert repr(found) == "cpu: 2 cores, AVX-512; cuda: not usable: no libcuda.so.1 was found"
    assert found._repr_html_() == (
        "<table><tr><th>cpu</th><td>2 cores, AVX-512</td></tr>"
        "<tr><th>cuda</th><td>not usable: no libcuda.so.1 was found</td></tr></table>"
    )
