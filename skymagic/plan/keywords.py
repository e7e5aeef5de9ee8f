"""A keyword that a function does not take is refused with the nearest one that it does, before anything is done."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from skymagic.plan.suggest import did_you_mean

T = TypeVar("T", bound=Callable[..., Any])


def suggesting(name: str, others: Mapping[str, str] | None = None) -> Callable[[T], T]:
    """A decorator of functions and classes.

    Args:
        name: what messages call it.
        others: a keyword as other tools have it → what it is here.
    """

    def decorate(target: T) -> T:
        function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        known = [
            one.name
            for one in inspect.signature(function).parameters.values()
            if one.name != "self" and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        ]

        @functools.wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            check(name, keywords, known, others or {})
            return function(*args, **keywords)

        if isinstance(target, type):
            target.__init__ = checked  # type: ignore[misc]
            return target
        return checked  # type: ignore[return-value]

    return decorate


def check(name: str, given: Iterable[str], known: Collection[str], others: Mapping[str, str]) -> None:
    """Raise TypeError for keywords that are not known; all at once."""
    wrong = [word for word in given if word not in known]
    if wrong:
        raise TypeError("; ".join(f"{name} takes no {word!r}{_instead(word, known, others)}" for word in wrong))


def _instead(word: str, known: Collection[str], others: Mapping[str, str]) -> str:
    if word in others:
        return f": write {others[word]}"
    return did_you_mean(word, known) or f"; it takes {', '.join(known) or 'none'}"
