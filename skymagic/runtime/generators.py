"""Generators that live on a rank between runs: each run asks one of them for its next values."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from skymagic.runtime.info import instance_info

_open: dict[str, Iterator[Any]] = {}
"""By an id that the notebook has made up."""


def open_one(
    key: str, function: Callable[..., Iterator[Any]], /, *args: Any, **kwargs: Any
) -> None:
    """Call a generator function and keep what it makes; none of its own code has run then."""
    _open[key] = iter(function(*args, **kwargs))


class Pull(NamedTuple):
    """The next values of a generator; whether it has ended; whether they took longer than they should."""

    values: list[Any]
    over: bool
    slow: bool


def advance(key: str, most: int, seconds: float, ended: Collection[int] = ()) -> Pull:
    """Ask a generator for its next values.

    A generator that raises is forgotten, as is one that has ended.

    Args:
        most: values to ask for, at most.
        seconds: after these no further value is asked for, so that none waits for a slow one that comes later.
        ended: ranks on which it has ended before: they take part and have no values.

    Raises:
        LookupError: this process is not the one in which it was opened.
    """
    if instance_info().rank in ended:
        return Pull([], True, False)
    if key not in _open:
        raise LookupError("the rank was restarted, and the generator is lost: call it again")
    generator, values, end = _open.pop(key), list[Any](), time.monotonic() + seconds
    try:
        for value in generator:
            values.append(value)
            slow = time.monotonic() >= end
            if len(values) >= most or slow:
                _open[key] = generator
                return Pull(values, False, slow)
    except Exception as problem:
        if not values:
            raise
        _open[key] = _raising(problem)  # what it gave before must not be lost
        return Pull(values, False, False)
    return Pull(values, True, False)


def _raising(problem: Exception) -> Iterator[Any]:
    raise problem
    yield


def close(key: str) -> None:
    """End a generator where it stands: its ``finally`` runs. Twice is safe."""
    generator = _open.pop(key, None)
    ending = getattr(generator, "close", None)
    if ending is not None:
        ending()
