"""Arguments of workloads, checked, as the compiled core takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvrelay.checks import MAX_TOKENS, MAX_U32, MAX_U64, number, text, whole
from kvrelay.describe import SLO, Lengths
from kvrelay.errors import WorkloadError

ClassSpec = tuple[str, SLO | None, int, int | None]
LengthSpec = int | tuple[str, list[float]]
PairSpec = tuple[LengthSpec, LengthSpec, float | None]


def lengths_spec(value: int | Lengths, name: str) -> LengthSpec:
    """A law of lengths, or a number that is the argument ``name``."""
    if isinstance(value, Lengths):
        return value._spec()
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise WorkloadError(
            f"{name} is {value!r}; it must be a whole number or a law such as kr.lognormal(700, 900)",
            value=value,
        )
    return whole(name, value, 1, MAX_TOKENS, WorkloadError)


def field(record: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """A record's field; ``default`` where it is absent or a frame's missing value."""
    value = record.get(key, default)
    missing = value is None or (
        not isinstance(value, (list, tuple, str)) and pd.api.types.is_scalar(value) and pd.isna(value)
    )
    return default if missing else value


def class_spec(name: Any, slo: Any, priority: Any, max_tokens: Any) -> ClassSpec:
    """What a class of requests shares, checked."""
    if slo is not None and not isinstance(slo, SLO):
        raise WorkloadError(f"slo of class {name!r} is {slo!r}; it must be a kvrelay.SLO or None")
    if max_tokens is not None:
        max_tokens = whole("max_tokens", max_tokens, 1, MAX_TOKENS, WorkloadError)
    priority = whole("priority", priority, -(2**31), 2**31 - 1, WorkloadError)
    return text("slo_class", name, WorkloadError), slo, priority, max_tokens


def pair_spec(prompt: Any, output: Any, spearman: Any, prompt_name: str = "prompt_tokens") -> PairSpec:
    """Two laws of lengths and their rank correlation; ``prompt_name`` is what the caller calls the first."""
    if spearman is not None:
        spearman = real("spearman", spearman)
    return lengths_spec(prompt, prompt_name), lengths_spec(output, "output_tokens"), spearman


def think_spec(mean: Any, cv: Any) -> tuple[float, float]:
    """Think times: mean in seconds, coefficient of variation."""
    return number("think_time", mean, 0.0, WorkloadError), number("think_cv", cv, 0.0, WorkloadError)


def real(name: str, value: Any) -> float:
    """A number; the core says what it thinks of NaN and the like, with the name."""
    return number(name, value, error=WorkloadError)


def count(name: str, value: Any) -> int:
    """A number of things."""
    return whole(name, value, 0, MAX_U32, WorkloadError)


def checked_seed(seed: Any) -> int:
    """A seed."""
    return whole("seed", seed, 0, MAX_U64, WorkloadError)


def record_rows(
    records: Iterable[Mapping[str, Any]] | pd.DataFrame,
) -> tuple[list[tuple[Any, ...]], list[str]]:
    """The rows of ``Workload.from_records``, and the names of their classes in order of appearance."""
    if isinstance(records, pd.DataFrame):
        records = records.to_dict("records")
    if not isinstance(records, Iterable) or isinstance(records, (str, bytes, Mapping)):
        raise WorkloadError(f"records are {records!r}; they must be mappings, or a frame")
    names: list[str] = []
    rows = []
    for index, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise WorkloadError(f"records[{index}] is {record!r}; it must be a mapping", index=index)
        name = str(field(record, "slo_class", "default"))
        if name not in names:
            names.append(name)
        missing = [key for key in ("arrival", "prompt_tokens", "output_tokens") if field(record, key) is None]
        if missing:
            raise WorkloadError(f"records[{index}] has no {missing[0]}", index=index)
        at = f"records[{index}]"
        limits = {"max_tokens": (1, MAX_TOKENS), "priority": (-(2**31), 2**31 - 1)}
        own = {
            key: None
            if field(record, key) is None
            else _integral(f"{at}.{key}", field(record, key), *limits[key])
            for key in limits
        }
        rows.append(
            (
                number(f"{at}.arrival", record["arrival"], error=WorkloadError),
                _integral(f"{at}.prompt_tokens", record["prompt_tokens"], 1, MAX_TOKENS),
                _integral(f"{at}.output_tokens", record["output_tokens"], 1, MAX_TOKENS),
                names.index(name),
                own["max_tokens"],
                own["priority"],
                _hash_ids(at, record),
            )
        )
    return rows, names


def _integral(name: str, value: Any, low: int, high: int) -> int:
    """A whole number, also one that a frame with gaps has made a float."""
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        value = int(value)
    return whole(name, value, low, high, WorkloadError)


def _hash_ids(at: str, record: Mapping[str, Any]) -> tuple[list[int], int] | None:
    ids = field(record, "hash_ids")
    if ids is None:
        return None
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise WorkloadError(f"{at}.hash_ids is {ids!r}; it must be a list of whole numbers")
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    checked = [_integral(f"{at}.hash_ids[{index}]", one, 0, MAX_U64) for index, one in enumerate(ids)]
    return checked, _integral(f"{at}.tokens_per_id", field(record, "tokens_per_id", 512), 1, MAX_TOKENS)
