"""The build of the CUDA kernels: what it leaves behind is whole, its own, or not there. Needs no compiler."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BUILD_KERNELS = ROOT / "rust" / "kernels" / "build_kernels.py"
BUILD_EMULATOR = ROOT / "rust" / "emulator" / "build_emulator.py"
BUILD_RS = ROOT / "rust" / "kernels" / "build.rs"
# No registry answers there.
OFFLINE = {"PIP_INDEX_URL": "http://127.0.0.1:1", "PIP_RETRIES": "0", "PIP_NO_INDEX": "1"}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_kernels", BUILD_KERNELS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bk = load()


def program(path: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(path), *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def in_words(ran: subprocess.CompletedProcess[str]) -> str:
    assert ran.returncode not in (0, None)
    assert "Traceback" not in ran.stderr
    return ran.stderr


# --- the compiler's folder ------------------------------------------------------------------------


def test_a_folder_of_somebody_else_stays(tmp_path: Path) -> None:
    thesis = tmp_path / "toolkit" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("x")
    said = in_words(program(BUILD_KERNELS, "--out", tmp_path, **OFFLINE))
    assert "holds something else" in said
    assert thesis.read_text() == "x"


def test_a_compiler_stays_until_there_is_another(tmp_path: Path) -> None:
    nvcc = tmp_path / "toolkit" / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("works")
    (tmp_path / "toolkit" / "pins").write_text("nvidia-cuda-nvcc==12.0.0")
    assert "pip could not install" in in_words(program(BUILD_KERNELS, "--out", tmp_path, **OFFLINE))
    assert nvcc.read_text() == "works"
    assert [file.name for file in tmp_path.iterdir()] == ["toolkit"]


def test_a_compiler_is_swapped_in_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "toolkit"

    def pip(command: list[str]) -> subprocess.CompletedProcess[str]:
        # Damaged installations are replaced too, and nothing is put into the old one.
        assert Path(command[command.index("--target") + 1]) != folder
        nvcc = Path(command[command.index("--target") + 1], "nvidia", "cu13", "bin", "nvcc")
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text("new")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(bk.subprocess, "run", pip)
    for _ in range(2):
        assert (bk.toolkit(folder) / "bin" / "nvcc").read_text() == "new"
        assert [file.name for file in tmp_path.iterdir()] == ["toolkit"]
        (folder / "nvidia" / "cu13" / "bin" / "nvcc").unlink()


# --- steps ----------------------------------------------------------------------------------------


def step(folder: Path, script: str) -> object:
    """A step that runs a line of shell with its output as $0 and its depfile as $1."""
    source, output = folder / "a.cu", folder / "parts" / "a.out"
    source.write_text("source")
    depfile = output.with_name("a.out.d")
    command = ["sh", "-c", script, str(output), f"MF={depfile}"]
    return bk.Step(command, output, (source,), (folder,), depfile)


def good(folder: Path) -> str:
    dependencies = shlex.quote(f"a.out: {folder / 'a.cu'}")
    return f'echo made >"$0"; echo said; echo {dependencies} >"${{1#MF=}}"'


@pytest.mark.parametrize("damaged", ["a.out", "a.out.log", "a.out.d", "a.out.key"])
@pytest.mark.parametrize("how", ["missing", "empty", "cut", "no text"])
def test_a_step_that_left_something_damaged_runs_again(tmp_path: Path, damaged: str, how: str) -> None:
    one = step(tmp_path, good(tmp_path))
    assert one.run()
    assert not one.run()
    file = tmp_path / "parts" / damaged
    whole = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "no text": b"\xff\xfe"}[how])
    assert one.run()
    assert file.read_bytes() == whole
    assert one.log() == "said\n"
    assert not one.run()


def test_a_step_that_is_cut_off_leaves_no_output(tmp_path: Path) -> None:
    one = step(tmp_path, good(tmp_path))
    one.run()
    (tmp_path / "a.cu").write_text("another source")
    broken = bk.Step(
        ["sh", "-c", 'echo half >"$0"; exit 3', str(one.output)], one.output, one.inputs, one.within
    )
    with pytest.raises(bk.BuildError, match="ended with status 3"):
        broken.run()
    assert sorted(file.name for file in one.output.parent.iterdir()) == ["a.out.d", "a.out.log"]


def test_what_a_compiler_says_need_not_be_text(tmp_path: Path) -> None:
    one = step(tmp_path, r"printf 'error: \377\n'; exit 1")
    with pytest.raises(bk.BuildError, match="error: \N{REPLACEMENT CHARACTER}"):
        one.run()


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    one = bk.Step(["no-such-compiler"], tmp_path / "x", (), ())
    with pytest.raises(bk.BuildError, match="no-such-compiler cannot be run"):
        one.run()


def test_a_list_of_files_with_spaces_and_colons(tmp_path: Path) -> None:
    depfile = tmp_path / "x.d"
    depfile.write_text("a:b/x.o: /one\\ file /c:d \\\n /three\n")
    assert bk.files_read(depfile) == {Path("/one file"), Path("/c:d"), Path("/three")}


# --- the programs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [BUILD_KERNELS, BUILD_EMULATOR])
@pytest.mark.parametrize("jobs", ["0", "-1", "many"])
def test_jobs_are_counted_from_one(tmp_path: Path, path: Path, jobs: str) -> None:
    said = in_words(program(path, "--out", tmp_path, "--jobs", jobs))
    assert "a whole number of at least 1" in said


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    # A file in its place is refused to root too.
    (tmp_path / "file").write_text("")
    said = in_words(program(BUILD_KERNELS, "--out", tmp_path / "file" / "out", **OFFLINE))
    assert said.startswith("build_kernels.py: ")


def test_an_interrupted_build_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        bk.run_program(main)
    assert ended.value.code == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"kernels": [{}], "fatbin": {"fnv1a64": "0"}}'])
def test_the_emulator_looks_at_its_manifest_first(tmp_path: Path, text: str | None) -> None:
    manifest = tmp_path / "kernels.json"
    if text is not None:
        manifest.write_text(text)
    said = in_words(program(BUILD_EMULATOR, "--out", tmp_path))
    assert str(manifest) in said
    assert "run build_kernels.py again" in said
    assert not (tmp_path / "emulated").exists()


# --- make and cargo -------------------------------------------------------------------------------


def test_make_in_a_folder_with_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "my own folder"
    (folder / ".venv").mkdir(parents=True)
    (folder / ".venv" / ".created").touch()
    (folder / "rust").mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CARGO")}
    ran = subprocess.run(
        ["make", "-n", "emulated-cuda", "test-cuda"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    commands = [shlex.split(line, comments=True) for line in ran.stdout.replace("\\\n", " ").splitlines()]
    outs = [words[words.index("--out") + 1] for words in commands if "--out" in words]
    assert outs == ["target/cuda"] * 4
    named = [word for words in commands for word in words if word.startswith("KVRELAY_EMULATED_CUDA=")]
    assert named == [f"KVRELAY_EMULATED_CUDA={folder}/target/cuda/emulated"]


def test_make_always_asks_whether_the_kernels_are_whole(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / "rust").mkdir()
    (tmp_path / "target" / "cuda").mkdir(parents=True)
    (tmp_path / ".venv" / ".created").touch()
    (tmp_path / "target" / "cuda" / "kernels.fatbin").write_text("cut off")
    shutil.copy(ROOT / "Makefile", tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CARGO")}
    ran = subprocess.run(
        ["make", "-n", "cuda-kernels"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "build_kernels.py --out" in ran.stdout


@pytest.fixture(scope="module")
def embed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build script that embeds a fatbin, as a program."""
    if shutil.which("rustc") is None:
        pytest.skip("rustc is not here")
    folder = tmp_path_factory.mktemp("embed")
    subprocess.run(
        ["rustc", "--edition", "2024", "-o", str(folder / "embed"), str(BUILD_RS)], check=True, timeout=60
    )
    return folder / "embed"


HEADER = bytes([0x50, 0xED, 0x55, 0xBA, 1, 0, 16, 0])


@pytest.mark.parametrize(
    ("image", "what"),
    [
        (HEADER + (5).to_bytes(8, "little") + b"12345", None),
        (HEADER + (5).to_bytes(8, "little") + b"123", "a damaged fatbin of 19 bytes, which should be 21"),
        (HEADER + (5).to_bytes(8, "little") + b"123456", "a damaged fatbin of 22 bytes, which should be 21"),
        (HEADER + b"\xff" * 8, "which should be 18446744073709551631"),
        (HEADER[:4], "a damaged fatbin of 4 bytes:"),
        (b"#!/bin/sh", "which is not a fatbin"),
        (b"", "which is not a fatbin"),
    ],
)
def test_only_a_whole_fatbin_is_embedded(embed: Path, tmp_path: Path, image: bytes, what: str | None) -> None:
    fatbin = tmp_path / "x.fatbin"
    fatbin.write_bytes(image)
    environment = os.environ | {"KVRELAY_CUDA_FATBIN": str(fatbin), "OUT_DIR": str(tmp_path)}
    ran = subprocess.run([embed], env=environment, capture_output=True, text=True, timeout=60)
    if what is None:
        assert ran.returncode == 0, ran.stderr
        assert (tmp_path / "kernels.fatbin").read_bytes() == image
    else:
        assert what in ran.stderr
