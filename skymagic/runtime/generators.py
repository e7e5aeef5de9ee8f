"""Generators that stay on a rank between runs: each run asks one of them for its next values."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from skymagic.runtime.info import instance_info

_open: dict[str, Iterator[Any]] = {}
"""Open generators by an id that the notebook generates."""


def open_one(
    key: str, function: Callable[..., Iterator[Any]], /, *args: Any, **kwargs: Any
) -> None:
    """Call a generator function and keep the generator, none of whose code has run yet."""
    _open[key] = iter(function(*args, **kwargs))


class Pull(NamedTuple):
    """Next values of a generator, True if it has ended, and True if the values took longer than
    allowed.
    """

    values: list[Any]
    over: bool
    slow: bool


def advance(key: str, most: int, seconds: float, ended: Collection[int] = ()) -> Pull:
    """Ask a generator for its next values.

    A generator that raises is forgotten, as is one that has ended.

    Args:
        most: limit on the number of values.
        seconds: time after which no further value is requested, so that a slow later value does not
            delay earlier ones.
        ended: ranks on which it ended earlier: they take part and have no values.

    Raises:
        LookupError: the generator was opened in an earlier process of this rank.
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
        _open[key] = _raising(problem)  # return the values so far, and raise at the next call
        return Pull(values, False, False)
    return Pull(values, True, False)


def _raising(problem: Exception) -> Iterator[Any]:
    raise problem
    yield


def close(key: str) -> None:
    """Close a generator, which runs its ``finally`` blocks. Safe to call twice."""
    generator = _open.pop(key, None)
    ending = getattr(generator, "close", None)
    if ending is not None:
        ending()
