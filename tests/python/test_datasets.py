"""Datasets are fetched whole, checked and kept, or not at all. No network: a server in this process."""

from __future__ import annotations

import hashlib
import http.server
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay import datasets

CONTENT = b'{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n' * 5_000


class Server:
    """Serves one answer, and counts how often it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.body = CONTENT
        self.claimed_length: int | None = None
        self.paths: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.paths.append(self.path)
                self.send_response(outer.status)
                self.send_header("Content-Length", str(outer.claimed_length or len(outer.body)))
                self.end_headers()
                self.wfile.write(outer.body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def small_dataset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> datasets.Dataset:
    """The Mooncake entry, but for content that fits a test; and a cache of its own."""
    entry = replace(
        datasets.info("mooncake-conversation"),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
    )
    monkeypatch.setitem(datasets._DATASETS, entry.name, entry)
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVRELAY_DATASETS_URL", raising=False)
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    return entry


def load(server: Server) -> Path:
    return datasets.load("mooncake-conversation", base_url=server.url, progress=False)


def leftovers(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").glob("*"))


def test_fetched_once_and_kept(server: Server, tmp_path: Path, small_dataset: datasets.Dataset) -> None:
    path = load(server)
    assert path.read_bytes() == CONTENT
    assert path.suffix == ".jsonl"
    assert server.paths == [f"/{small_dataset.url_path}"]
    assert load(server) == path
    assert len(server.paths) == 1
    assert leftovers(tmp_path) == [path.name]


def test_the_environment_names_a_mirror(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_DATASETS_URL", server.url + "/")
    assert datasets.load("mooncake-conversation", progress=False).read_bytes() == CONTENT


def test_a_damaged_cache_is_fetched_again(server: Server) -> None:
    path = load(server)
    path.write_bytes(CONTENT[:100])
    assert load(server).read_bytes() == CONTENT
    assert len(server.paths) == 2


def test_a_file_put_there_by_hand_needs_no_server(tmp_path: Path, small_dataset: datasets.Dataset) -> None:
    path = tmp_path / "cache" / small_dataset.file_name
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    assert datasets.load("mooncake-conversation", base_url="http://127.0.0.1:1", progress=False) == path


@pytest.mark.parametrize("body", [CONTENT[:-1] + b"x", CONTENT + b"more", b"", CONTENT * 40])
def test_another_content_is_refused_with_both_sums(body: bytes, server: Server, tmp_path: Path) -> None:
    server.body = body
    with pytest.raises(datasets.DatasetError, match="is not the published mooncake-conversation") as caught:
        load(server)
    assert hashlib.sha256(CONTENT).hexdigest() in str(caught.value)
    assert f"expected {len(CONTENT)} bytes" in str(caught.value)
    assert leftovers(tmp_path) == []


def test_an_answer_cut_short_is_refused(server: Server, tmp_path: Path) -> None:
    server.body, server.claimed_length = CONTENT[:1000], len(CONTENT)
    with pytest.raises(datasets.DatasetError):
        load(server)
    assert leftovers(tmp_path) == []


def test_a_missing_file_names_status_and_url(server: Server, tmp_path: Path) -> None:
    server.status = 404
    with pytest.raises(datasets.DatasetError, match="HTTP 404") as caught:
        load(server)
    assert caught.value.url.startswith(server.url)
    assert leftovers(tmp_path) == []


def test_without_a_network_the_error_says_what_to_do(small_dataset: datasets.Dataset) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(datasets.DatasetError) as caught:
        datasets.load("mooncake-conversation", base_url=f"http://127.0.0.1:{port}", progress=False)
    message = str(caught.value)
    assert "could not fetch mooncake-conversation from http://127.0.0.1" in message
    assert f"put the file (SHA-256 {small_dataset.sha256}) at {caught.value.path}" in message


def test_no_url_at_all_is_the_same_error() -> None:
    with pytest.raises(datasets.DatasetError, match="could not fetch"):
        datasets.load("mooncake-conversation", base_url="nonsense", progress=False)


def test_an_interrupt_leaves_nothing(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(datasets, "_check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(server)
    assert leftovers(tmp_path) == []


def test_progress_is_shown_unless_turned_off(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    load(server)
    assert capsys.readouterr().err == ""
    datasets.load("mooncake-conversation", base_url=server.url, cache=datasets.cache_dir() / "other")
    assert "mooncake-conversation" in capsys.readouterr().err


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown dataset 'mooncake'; known, nearest first: mooncake-conv"):
        datasets.load("mooncake")
