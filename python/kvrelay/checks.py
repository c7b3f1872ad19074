"""Checks of arguments: what is refused is named, with its value and what it must be."""

from __future__ import annotations

import math
from typing import Any

from kvrelay.errors import ConfigError, KvRelayError

#: Limits of the integers that the compiled core takes.
MAX_U32 = 2**32 - 1
MAX_U64 = 2**64 - 1
#: The most tokens a prompt or an output may have.
MAX_TOKENS = 2**24


def whole(
    name: str, value: Any, low: int, high: int = MAX_U32, error: type[KvRelayError] = ConfigError
) -> int:
    """``value`` as an int from ``low`` to ``high``, both included.

    >>> whole("max_batch", 64, 1)
    64
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or not low <= int(value) <= high:
        raise error(f"{name} is {value!r}; it must be a whole number from {low} to {high}", value=value)
    return int(value)


def optional_whole(name: str, value: Any, low: int, high: int = MAX_U32) -> int | None:
    """As :func:`whole`, but ``None`` is allowed."""
    return None if value is None else whole(name, value, low, high)


def number(name: str, value: Any, low: float = -math.inf, error: type[KvRelayError] = ConfigError) -> float:
    """``value`` as a float of at least ``low``. NaN passes only where there is no lower bound: the core then
    says what it thinks of it."""
    if isinstance(value, bool) or (not isinstance(value, (int, float)) and not hasattr(value, "__float__")):
        raise error(f"{name} is {value!r}; it must be a number", value=value)
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError) as problem:
        raise error(f"{name} is {value!r}; it must be a number", value=value) from problem
    if low > -math.inf and not found >= low:
        raise error(f"{name} is {value!r}; it must be at least {low:g}", value=value)
    return found


def text(name: str, value: Any, error: type[KvRelayError] = ConfigError) -> str:
    """``value`` if it is a string."""
    if not isinstance(value, str):
        raise error(f"{name} is {value!r}; it must be a string", value=value)
    return value
