"""Arguments of workloads, checked, as the compiled core takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
    names: list[str] = []
    rows = []
    for index, record in enumerate(records):
        name = str(field(record, "slo_class", "default"))
        if name not in names:
            names.append(name)
        missing = [key for key in ("arrival", "prompt_tokens", "output_tokens") if field(record, key) is None]
        if missing:
            raise WorkloadError(f"records[{index}] has no {missing[0]}", index=index)
        ids = field(record, "hash_ids")
        try:
            rows.append(
                (
                    float(record["arrival"]),
                    int(record["prompt_tokens"]),
                    int(record["output_tokens"]),
                    names.index(name),
                    field(record, "max_tokens"),
                    field(record, "priority"),
                    None if ids is None else (list(ids), int(field(record, "tokens_per_id", 512))),
                )
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise WorkloadError(f"records[{index}]: {error}", index=index) from error
    return rows, names
