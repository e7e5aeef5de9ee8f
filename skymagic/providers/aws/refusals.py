"""Questions to AWS that need no answer: a refused one leaves a note, and what goes on without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from skymagic.errors import CloudError

T = TypeVar("T")

_WORDS = {"permission": "no permission", "throttled": "asked too often just now", "unreachable": "it does not answer"}
# After these every further question fails too: they are not about the one question.
_OF_ALL = ("credentials", "account")


def why(problem: CloudError) -> str | None:
    """Why a question has no answer; None for a problem that is not of this question alone."""
    return None if problem.kind in _OF_ALL else _WORDS.get(problem.kind, problem.code)


def optional(ask: Callable[[], T], permission: str, notes: list[str]) -> T | None:
    """The answer, or None where it is refused: `notes` gets a line with the permission that it needs.

    Raises:
        CloudError: what is not of this question alone (see `why`).
    """
    try:
        return ask()
    except CloudError as problem:
        reason = why(problem)
        if reason is None:
            raise
        notes.append(f"{permission}: {reason}")
        return None
