"""Suggest the nearest known name for an unknown one: words, and keyword arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean 'A100'?"`` with the known word nearest to `word`, or ``""``.

    Ignores case, and the differences between - and _, o and 0, and i, l and 1.
    """
    folded = {_fold(name): name for name in candidates}
    close = get_close_matches(_fold(word), folded, n=1, cutoff=0.6)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""


def _fold(word: str) -> str:
    return word.casefold().translate(str.maketrans("oil", "011", "-_"))


class LazyNames(Collection[str]):
    """A collection of names, loaded on use.

    Some names are available immediately; finding all of them takes time.
    """

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
    name: str, replacements: Mapping[str, str] | None = None, hidden_keywords: Collection[str] = ()
) -> Callable[[T], T]:
    """Decorate a function or class so that unknown keywords raise an error with a suggestion.

    Args:
        name: name of the function or class in messages.
        replacements: maps keywords of other tools to those of skymagic.
        hidden_keywords: accepted keywords that the signature, and so completion, does not show.
    """

    def decorate(target: T) -> T:
        function: Any = target
        if isinstance(target, type):
            function = target.__init__  # type: ignore[misc]
        signature = inspect.signature(function)
        accepted = [
            arg.name
            for arg in signature.parameters.values()
            if arg.name != "self" and arg.kind in (arg.POSITIONAL_OR_KEYWORD, arg.KEYWORD_ONLY)
        ]

        @functools.wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            check_keywords(name, keywords, accepted, replacements or {})
            return function(*args, **keywords)

        if hidden_keywords:
            shown = [
                arg for arg in signature.parameters.values() if arg.name not in hidden_keywords
            ]
            documented = signature.replace(parameters=shown)
            checked.__signature__ = documented  # type: ignore[attr-defined]
        if isinstance(target, type):
            target.__init__ = checked  # type: ignore[misc]
            return target
        return checked  # type: ignore[return-value]

    return decorate


def check_keywords(
    name: str, keywords: Iterable[str], allowed: Collection[str], replacements: Mapping[str, str]
) -> None:
    """Raise TypeError for all unknown keywords at once."""
    wrong = [word for word in keywords if word not in allowed]
    if wrong:
        raise TypeError(
            "; ".join(
                f"{name} takes no {word!r}{_instead(word, allowed, replacements)}" for word in wrong
            )
        )


def _instead(word: str, allowed: Collection[str], replacements: Mapping[str, str]) -> str:
    if word in replacements:
        return f": write {replacements[word]}"
    return did_you_mean(word, allowed) or f"; it takes {', '.join(allowed) or 'none'}"
