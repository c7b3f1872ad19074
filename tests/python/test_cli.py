"""The command line: what it prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from unittest.mock import Mock, create_autospec

import pytest

import kvrelay as kr
from kvrelay import cli, demo


@pytest.fixture
def demo_main(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands in for the demo, and takes what it takes."""
    main = create_autospec(demo.main)
    monkeypatch.setattr(demo, "main", main)
    return main


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"cpu: {kr.devices().cpu}", f"cuda: not usable: {kr.devices().why_no_cuda}"]


def test_devices_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["devices", "--json"]) == 0
    found, answer = kr.devices(), json.loads(capsys.readouterr().out)
    assert answer["cpu"] == {"device": "cpu", "cores": found.cpu.cores, "vector": found.cpu.vector}
    assert (answer["cuda_available"], answer["why_no_cuda"]) == (False, found.why_no_cuda)
    assert len(answer["cuda"]) == len(found.cuda)


@pytest.mark.parametrize(
    ("argv", "output", "progress"),
    [([], "demo.png", True), (["--output", "a.png", "--no-progress"], "a.png", False)],
)
def test_the_demo_gets_its_options(demo_main: Mock, argv: list[str], output: str, progress: bool) -> None:
    assert cli.main(["demo", *argv]) == 0
    demo_main.assert_called_once_with(output, progress=progress)


def test_a_refusal_is_one_line(demo_main: Mock, capsys: pytest.CaptureFixture[str]) -> None:
    demo_main.side_effect = kr.ModelError("model.gguf is damaged:\n  tensor 3")
    assert cli.main(["demo"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "kvrelay: model.gguf is damaged: tensor 3\n")


def test_ctrl_c(demo_main: Mock) -> None:
    demo_main.side_effect = KeyboardInterrupt
    assert cli.main(["demo"]) == 130


def test_a_fault_of_kvrelay_keeps_its_traceback(demo_main: Mock) -> None:
    demo_main.side_effect = ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "arguments are required: command"),
        (["devices", "--jsn"], "unrecognized arguments: --jsn"),
        (["divices"], "invalid choice: 'divices'"),
    ],
)
def test_usage(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_as_a_module() -> None:
    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvrelay", *argv], capture_output=True, text=True, timeout=120
        )

    version = run("--version")
    assert (version.returncode, version.stdout, version.stderr) == (0, f"kvrelay {kr.__version__}\n", "")
    listing = run("devices")
    assert (listing.returncode, listing.stderr) == (0, "") and listing.stdout.startswith("cpu: ")
    assert run().returncode == 2
