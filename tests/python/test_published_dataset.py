"""The entry of the Mooncake trace against the file itself, where a copy lies beside the repository."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvrelay import datasets

COPY = Path(__file__).parents[2].parent / "shared/traces/mooncake_conversation_trace.jsonl"


@pytest.mark.skipif(not COPY.exists(), reason=f"{COPY} is not there")
def test_sum_and_size_are_the_files() -> None:
    entry = datasets.info("mooncake-conversation")
    content = COPY.read_bytes()
    assert (hashlib.sha256(content).hexdigest(), len(content)) == (entry.sha256, entry.num_bytes)
