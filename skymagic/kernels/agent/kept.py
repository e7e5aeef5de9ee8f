"""What a rank has shown in its last run: kept for another notebook that takes over, a flood as its beginning and its end."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import Any

FIRST_BYTES = 64 << 10
"""Of what was shown first."""
LAST_BYTES = 1 << 20
"""Of what was shown last; a display that is larger is kept alone."""


class KeptOutput:
    """The contents of one run that were on their way to a notebook, numbered from 1.

    Args:
        rank: whose they are.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._count = 0
        self._first: list[dict[str, Any]] = []
        self._room = FIRST_BYTES
        self._last: deque[tuple[dict[str, Any], int]] = deque()
        self._nbytes = 0
        self._dropped = self._dropped_bytes = 0
        self.end: dict[str, Any] | None = None
        """What says that this was all, once it is."""

    def add(self, content: dict[str, Any]) -> dict[str, Any]:
        """Keep a content; it with its number as ``seq``."""
        self._count += 1
        content = {**content, "seq": self._count}
        if content["kind"] == "end":
            self.end = content
        nbytes = len(content["text"]) if content["kind"] == "stream" else len(json.dumps(content, default=str))
        if not self._last and nbytes <= self._room:
            self._first.append(content)
            self._room -= nbytes
            return content
        self._last.append((content, nbytes))
        self._nbytes += nbytes
        while self._nbytes > LAST_BYTES and len(self._last) > 1:
            gone = self._last.popleft()[1]
            self._nbytes -= gone
            self._dropped += 1
            self._dropped_bytes += gone
        return content

    def after(self, shown: int) -> Iterator[dict[str, Any]]:
        """What came after the first `shown` contents, and in the place of what is not kept any more, its size."""
        kept = [*self._first, *(content for content, _ in self._last)]
        before, displays = shown, set[str]()
        for content in filter(lambda one: one["seq"] > shown, kept):
            if gap := content["seq"] - before - 1:  # some of what was dropped may have been shown
                nbytes = self._dropped_bytes * gap // self._dropped
                yield {"rank": self._rank, "kind": "held_back", "nbytes": nbytes, "seq": content["seq"] - 1}
            before = content["seq"]
            yield _shown_anew(content, displays)


def _shown_anew(content: dict[str, Any], displays: set[str]) -> dict[str, Any]:
    """A content for a notebook that knows no other displays than these: the first state of another one is a display."""
    ident = (content.get("transient") or {}).get("display_id", "")
    if content["kind"] == "update_display_data" and ident not in displays:
        content = {**content, "kind": "display_data"}
    if ident:
        displays.add(ident)
    return content
