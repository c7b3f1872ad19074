"""Progress bars: shown to a terminal or a notebook, and to nobody else."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

with warnings.catch_warnings():
    # In a notebook without widgets tqdm says so, and writes text, which is fine.
    warnings.simplefilter("ignore")
    from tqdm.auto import tqdm


def _shows() -> bool:
    return "ipykernel" in sys.modules or sys.stderr.isatty()


def bar(over: Iterable[Any] | None, what: str, unit: str, wanted: bool) -> tqdm:
    """A bar over an iterable, or one to be moved on by hand; gone when it is done, and not there at all
    where nobody would see it or nothing takes long."""
    return tqdm(
        over, desc=what, unit=unit, leave=False, disable=not (wanted and _shows()), delay=0.5, mininterval=0.2
    )


@contextmanager
def request_bar(total: int, what: str, wanted: bool) -> Iterator[Callable[[int, int, float], None] | None]:
    """A bar over requests; gives the callback that the compiled core calls, or ``None``."""
    if not (wanted and _shows()):
        yield None
        return
    with tqdm(total=total, desc=what, unit="req", leave=False, delay=0.5) as shown:

        def tell(arrived: int, over: int, seconds: float) -> None:
            shown.update(over - shown.n)

        yield tell
