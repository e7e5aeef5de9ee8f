"""Suggest the nearest name for one that is unknown: words, and keywords that a function does not take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'A100'?"`` for the known word nearest to `word`, or ``""`` when none is near.

    Case, dashes and look-alikes (o and 0, l and 1) do not count.
    """
    folded = {_fold(name): name for name in known}
    close = get_close_matches(_fold(word), folded, n=1, cutoff=0.6)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""


def _fold(word: str) -> str:
    return word.casefold().translate(str.maketrans("oil", "011", "-_"))


class LazyNames(Collection[str]):
    """A collection of names, loaded on use: a few are at hand, and finding all of them takes time."""

    def __init__(
        self, at_hand: Collection[str], all_of_them: Callable[[], Collection[str]]
    ) -> None:
        self._at_hand = at_hand
        self._all = all_of_them

    def __contains__(self, name: object) -> bool:
        return name in self._at_hand or name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


T = TypeVar("T", bound=Callable[..., Any])


def suggesting(
    name: str, others: Mapping[str, str] | None = None, second_names: Collection[str] = ()
) -> Callable[[T], T]:
    """A decorator of functions and classes.

    Args:
        name: what messages call it.
        others: a keyword as other tools have it → what it is here.
        second_names: keywords that are accepted, and not in the signature, so that they do not complete.
    """

    def decorate(target: T) -> T:
        function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        signature = inspect.signature(function)
        known = [
            one.name
            for one in signature.parameters.values()
            if one.name != "self" and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        ]

        @functools.wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            check_keywords(name, keywords, known, others or {})
            return function(*args, **keywords)

        if second_names:
            shown = [one for one in signature.parameters.values() if one.name not in second_names]
            checked.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        if isinstance(target, type):
            target.__init__ = checked  # type: ignore[misc]
            return target
        return checked  # type: ignore[return-value]

    return decorate


def check_keywords(
    name: str, given: Iterable[str], known: Collection[str], others: Mapping[str, str]
) -> None:
    """Raise TypeError for keywords that are not known; all at once."""
    wrong = [word for word in given if word not in known]
    if wrong:
        raise TypeError(
            "; ".join(f"{name} takes no {word!r}{_instead(word, known, others)}" for word in wrong)
        )


def _instead(word: str, known: Collection[str], others: Mapping[str, str]) -> str:
    if word in others:
        return f": write {others[word]}"
    return did_you_mean(word, known) or f"; it takes {', '.join(known) or 'none'}"
