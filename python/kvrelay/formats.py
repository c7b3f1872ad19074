"""Numbers as people read them."""

from __future__ import annotations


def percent(share: float, digits: int = 0) -> str:
    """A share as people read it. Never rounded to all or none of what it is not.

    >>> percent(0.9995, 1), percent(0.9995), percent(1.0), percent(0.0004), percent(0.745)
    ('99.9%', '99%', '100%', '<1%', '74%')
    """
    unit = 10.0**-digits
    shown = share * 100.0
    if 0.0 < shown < unit:
        return f"<{unit:g}%"
    if shown < 100.0:
        shown = min(round(shown, digits), 100.0 - unit)
    return f"{shown:.{digits}f}%"
