"""Every exception of kvrelay, as one tree.

An error carries the numbers of its message as attributes, so that a program need not read prose::

    try:
        engine.generate(long_prompt)
    except kr.RequestError as error:
        print(error.limit)
"""

from __future__ import annotations

from typing import Any


class KvRelayError(Exception):
    """Anything that kvrelay refuses or cannot do.

    >>> error = KvRelayError("too long", limit=8)
    >>> str(error), error.limit
    ('too long', 8)
    """

    def __init__(self, message: str, **numbers: Any) -> None:
        super().__init__(message)
        self.numbers = numbers
        for name, value in numbers.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0], self.numbers)


def _rebuild(cls: type[KvRelayError], message: str, numbers: dict[str, Any]) -> KvRelayError:
    return cls(message, **numbers)


class ConfigError(KvRelayError, ValueError):
    """A parameter that cannot be: an unknown name, a number out of its range."""


class WorkloadError(KvRelayError, ValueError):
    """A workload or trace that cannot be made or read."""


class DatasetError(KvRelayError, OSError):
    """A data set that cannot be fetched, or is not the one published.

    ``name`` is the data set, ``url`` where it was fetched from, ``path`` where it would have been kept:
    a file put there by hand is taken if it is the right one.
    """


class PolicyError(KvRelayError):
    """A policy answered what cannot be done. What a policy raises comes out as itself instead."""


class StaleView(KvRelayError, RuntimeError):
    """A view was kept beyond the policy call it belongs to."""


class StalledError(KvRelayError, RuntimeError):
    """A policy left requests that nothing will ever move."""


class ModelError(KvRelayError):
    """A model file that cannot be loaded: missing, damaged, or of a kind that is not supported."""


class EngineError(KvRelayError, RuntimeError):
    """An engine that cannot be made, or cannot go on."""


class RequestError(KvRelayError, ValueError):
    """A request that was refused; others are not concerned."""


class ForkError(KvRelayError, RuntimeError):
    """An engine used in a forked child: its threads live in the parent alone."""


class IntegrityError(KvRelayError, RuntimeError):
    """The KV block accounting does not add up: a fault of kvrelay."""
