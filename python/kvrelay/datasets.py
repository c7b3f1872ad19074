"""Public request traces: fetched once, checked, kept.

>>> from kvrelay import datasets
>>> datasets.names()
['mooncake-conversation']

A trace is fetched from its public repository at a fixed commit, compared with its SHA-256 and kept
in a cache folder; later calls need no network. What :func:`load` returns is a path, for
``kr.Workload.from_trace``.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import DatasetError

__all__ = ["Dataset", "DatasetError", "cache_dir", "info", "load", "names"]

#: Where the files are, unless ``base_url`` or the environment variable ``KVRELAY_DATASETS_URL`` says
#: otherwise: a mirror must serve the same paths.
BASE_URL = "https://raw.githubusercontent.com"

_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Dataset:
    """A public file, by its content."""

    #: What it is called here.
    name: str
    #: What it is, in a line.
    description: str
    #: Path below the base URL.
    url_path: str
    #: SHA-256 of its content, in hexadecimal.
    sha256: str
    #: Its size.
    num_bytes: int
    #: Its licence.
    licence: str

    @property
    def file_name(self) -> str:
        """Its name in the cache."""
        return f"{self.name}-{self.url_path.rsplit('/', 1)[-1]}"


_DATASETS = {
    dataset.name: dataset
    for dataset in [
        Dataset(
            name="mooncake-conversation",
            description="12,031 requests of an hour of Kimi's chat, with hash ids of 512-token blocks",
            url_path="kvcache-ai/Mooncake/3b5a594133958449a1feaf1c9e0fc1b553e34a28"
            "/FAST25-release/traces/conversation_trace.jsonl",
            sha256="b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
            num_bytes=3_029_533,
            licence="Apache-2.0",
        ),
    ]
}


def names() -> list[str]:
    """The names of the datasets there are."""
    return list(_DATASETS)


def info(name: str) -> Dataset:
    """The dataset called ``name``.

    Raises:
        ValueError: If there is none; the message lists those there are.
    """
    try:
        return _DATASETS[name]
    except KeyError:
        nearest = difflib.get_close_matches(name, _DATASETS, n=len(_DATASETS), cutoff=0.0)
        raise ValueError(f"unknown dataset {name!r}; known, nearest first: {', '.join(nearest)}") from None


def cache_dir() -> Path:
    """Where datasets are kept: ``$KVRELAY_CACHE``, ``$XDG_CACHE_HOME/kvrelay`` or ``~/.cache/kvrelay``."""
    if own := os.environ.get("KVRELAY_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvrelay"


def load(
    name: str,
    *,
    base_url: str | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = True,
    timeout: float = 30.0,
) -> Path:
    """The path of a dataset's file, fetched first if it is not in the cache.

    Args:
        name: One of :func:`names`.
        base_url: Where to fetch from, in place of ``$KVRELAY_DATASETS_URL`` or GitHub.
        cache: The folder to keep it in, in place of :func:`cache_dir`.
        progress: Whether to show how far it is.
        timeout: Seconds to wait for the server, each time it is waited for.

    Raises:
        ValueError: If there is no such dataset.
        DatasetError: If it cannot be fetched, or is not the file that was published. Nothing is left
            in the cache then.
    """
    dataset = info(name)
    path = Path(cache if cache is not None else cache_dir()) / dataset.file_name
    if path.is_file() and _sha256(path) == dataset.sha256:
        return path
    base = base_url or os.environ.get("KVRELAY_DATASETS_URL") or BASE_URL
    url = f"{base.rstrip('/')}/{dataset.url_path}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with _beside(path) as partial:
        try:
            _fetch(url, partial, dataset, progress, timeout)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            raise _offline(dataset, url, path, error) from error
        _check(partial, dataset, url, path)
        os.replace(partial, path)
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A temporary file in ``path``'s folder, so that it can be moved there in one step."""
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        yield Path(partial)
    finally:
        # Gone already if it was moved; anything else, Ctrl-C included, must not leave a part behind.
        Path(partial).unlink(missing_ok=True)


def _fetch(url: str, target: Path, dataset: Dataset, progress: bool, timeout: float) -> None:
    from tqdm.auto import tqdm

    with (
        urllib.request.urlopen(url, timeout=timeout) as response,
        target.open("wb") as file,
        tqdm(
            total=dataset.num_bytes,
            desc=dataset.name,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not progress,
        ) as bar,
    ):
        # A server that sends something else entirely need not be read to its end.
        while file.tell() <= dataset.num_bytes and (chunk := response.read(_CHUNK_BYTES)):
            file.write(chunk)
            bar.update(len(chunk))


def _check(partial: Path, dataset: Dataset, url: str, path: Path) -> None:
    size, seen = partial.stat().st_size, _sha256(partial)
    if seen == dataset.sha256:
        return
    more = " or more" if size > dataset.num_bytes else ""
    raise DatasetError(
        f"{url} is not the published {dataset.name}: {size}{more} bytes with SHA-256 {seen}, "
        f"expected {dataset.num_bytes} bytes with {dataset.sha256}",
        name=dataset.name,
        url=url,
        path=path,
    )


def _offline(dataset: Dataset, url: str, path: Path, error: Exception) -> DatasetError:
    reason = getattr(error, "reason", None) or error
    status = f"HTTP {error.code} {reason}" if isinstance(error, urllib.error.HTTPError) else reason
    return DatasetError(
        f"could not fetch {dataset.name} from {url}: {status}. Without a network, put the file "
        f"(SHA-256 {dataset.sha256}) at {path}",
        name=dataset.name,
        url=url,
        path=path,
    )
