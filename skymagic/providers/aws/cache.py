"""Answers of AWS that need not be asked again, or not be had at all: a cache on disk, each value with its date."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from skymagic.errors import CloudError
from skymagic.wire import atomic

T = TypeVar("T")

_WORDS = {
    "permission": "no permission",
    "throttled": "asked too often just now",
    "unreachable": "it does not answer",
}
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


FORM = 2
"""Raised by one where values come to look different: files of another form are not read."""
LONGEST_NAME = 100


@dataclass(frozen=True)
class Dated:
    """A value, and when it was true in seconds since 1970."""

    value: Any
    at: float

    @property
    def date(self) -> str:
        """``"2026-11-22"``, in UTC."""
        return datetime.fromtimestamp(self.at, UTC).strftime("%Y-%m-%d")


class Cache:
    """Values by name.

    Args:
        folder: where they are kept; platformdirs' cache folder unless said.
        now: seconds since 1970.
    """

    def __init__(self, folder: Path | None = None, now: Callable[[], float] = time.time) -> None:
        if folder is None:
            from platformdirs import user_cache_path

            folder = user_cache_path("skymagic") / "aws"
        self._folder = folder
        self._now = now

    def fresh(self, name: str, seconds: float, ask: Callable[[], Any]) -> Dated:
        """The value that is kept where it is younger than `seconds`, else the answer of `ask`, which is kept.

        Where `ask` is refused (no permission, throttled, no answer) an older value serves, however old: its date says so.

        Raises:
            CloudError: what `ask` raises, where nothing is kept, or the credentials themselves are refused.
        """
        kept = self._read(name)
        if kept is not None and 0 <= self._now() - kept.at < seconds:
            return kept
        try:
            answer = Dated(ask(), self._now())
        except CloudError as problem:
            if kept is None or why(problem) is None:
                raise
            return kept
        self._write(name, answer)
        return answer

    def _path(self, name: str) -> Path:
        told = re.sub(r"[^A-Za-z0-9.-]", "_", name)
        if told != name or len(told) > LONGEST_NAME:
            told = f"{told[:LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        return self._folder / f"{told}.{FORM}.json"

    def _read(self, name: str) -> Dated | None:
        """None also for a file that is no JSON, or of another form: it is asked anew."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(self._path(name).read_text("utf-8"))
            return Dated(found["value"], float(found["at"]))
        return None

    def _write(self, name: str, kept: Dated) -> None:
        atomic.keep(self._path(name), json.dumps({"at": kept.at, "value": kept.value}).encode())
