"""Answers of AWS cached on disk with their date, and queries that may go unanswered."""

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
# After these kinds every further query fails too.
_OF_ALL = ("credentials", "account")


def unanswered_reason(problem: CloudError) -> str | None:
    """Return why a query has no answer, or None if the problem affects every query."""
    return None if problem.kind in _OF_ALL else _WORDS.get(problem.kind, problem.cloud_code)


def optional(ask: Callable[[], T], permission: str, notes: list[str]) -> T | None:
    """Return the answer, or None if it is refused.

    Appends a line with the missing permission to `notes` if refused.

    Raises:
        CloudError: the problem affects every query (see `unanswered_reason`).
    """
    try:
        return ask()
    except CloudError as problem:
        reason = unanswered_reason(problem)
        if reason is None:
            raise
        notes.append(f"{permission}: {reason}")
        return None


FORM = 2
"""Version of the format, to be raised whenever values change shape. Other versions are not read."""
LONGEST_NAME = 100


@dataclass(frozen=True)
class Dated:
    """A value with its time of retrieval, in seconds since 1970."""

    value: Any
    at: float

    @property
    def date(self) -> str:
        """``"2026-11-22"``, in UTC."""
        return datetime.fromtimestamp(self.at, UTC).strftime("%Y-%m-%d")


class Cache:
    """Values on disk, by name.

    Args:
        folder: where to store them; platformdirs' cache folder by default.
        now: clock, in seconds since 1970.
    """

    def __init__(self, folder: Path | None = None, now: Callable[[], float] = time.time) -> None:
        if folder is None:
            from platformdirs import user_cache_path

            folder = user_cache_path("skymagic") / "aws"
        self._folder = folder
        self._now = now

    def fresh(self, name: str, seconds: float, ask: Callable[[], Any]) -> Dated:
        """Return the cached value if it is younger than `seconds`, else the answer of `ask`.

        Caches the answer. If `ask` is refused (no permission, throttled, no answer), an older value
        is used however old it is; its date shows that.

        Raises:
            CloudError: raised by `ask` if nothing is cached, or if the credentials themselves are
                refused.
        """
        cached = self._read(name)
        if cached is not None and 0 <= self._now() - cached.at < seconds:
            return cached
        try:
            answer = Dated(ask(), self._now())
        except CloudError as problem:
            if cached is None or unanswered_reason(problem) is None:
                raise
            return cached
        self._write(name, answer)
        return answer

    def _path(self, name: str) -> Path:
        safe_name = re.sub(r"[^A-Za-z0-9.-]", "_", name)
        if safe_name != name or len(safe_name) > LONGEST_NAME:
            safe_name = (
                f"{safe_name[:LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
            )
        return self._folder / f"{safe_name}.{FORM}.json"

    def _read(self, name: str) -> Dated | None:
        """Return the cached value, or None if it is missing, malformed, or of another version."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            stored = json.loads(self._path(name).read_text("utf-8"))
            return Dated(stored["value"], float(stored["at"]))
        return None

    def _write(self, name: str, entry: Dated) -> None:
        atomic.keep(self._path(name), json.dumps({"at": entry.at, "value": entry.value}).encode())
