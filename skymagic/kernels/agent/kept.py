"""What a rank has shown and reported, kept for a notebook that is away or takes over; bounded.

Of its last run the beginning and the end are kept. While the notebook is away, nobody takes what is displayed, and a live plot never ends: of
displays and of reported numbers the newest are kept.
"""

from __future__ import annotations

import json
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from skymagic.wire import metrics

FIRST_BYTES = 64 << 10
"""Bytes kept of what was shown first."""
LAST_BYTES = 1 << 20  # bytes kept of what was shown last; a display that is larger is kept alone


class KeptOutput:
    """The contents of one run that were on their way to a notebook, numbered from 1."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._count = 0
        self._first: list[dict[str, Any]] = []
        self._room = FIRST_BYTES
        self._last: deque[tuple[dict[str, Any], int]] = deque()
        self._nbytes = 0
        self._dropped = self._dropped_bytes = 0
        self.end: dict[str, Any] | None = None  # what says that this was all, once it is

    def add(self, content: dict[str, Any]) -> dict[str, Any]:
        """Keep a content; it with its number as ``seq``."""
        self._count += 1
        content = {**content, "seq": self._count}
        if content["kind"] == "end":
            self.end = content
        nbytes = (
            len(content["text"])
            if content["kind"] == "stream"
            else len(json.dumps(content, default=str))
        )
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
                yield {
                    "rank": self._rank,
                    "kind": "held_back",
                    "nbytes": nbytes,
                    "seq": content["seq"] - 1,
                }
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


MAX_DISPLAYS = 20
MAX_DISPLAY_BYTES = 8 << 20
MAX_NUMBERS_BYTES = 4 << 20


class KeptDisplays:
    """The newest displays of one rank, of which each is kept as it is now.

    Attributes:
        missed: displays that were shown to nobody and are not here any more.
    """

    def __init__(self) -> None:
        self._kept: list[
            tuple[str, dict[str, Any], int]
        ] = []  # (display id or "", content, bytes), the oldest first
        self._unknown: set[str] = (
            set()
        )  # ids of displays that were left out: the notebook does not know them
        self.missed = 0

    def add(self, content: dict[str, Any]) -> None:
        """Keep a content that iopub would have got."""
        if content["kind"] == "clear_output":
            self._kept.clear()
        ident = (content.get("transient") or {}).get("display_id", "")
        older = next((kept for kept in self._kept if ident and kept[0] == ident), None)
        if older is not None:  # in its place, and as what it is
            content = {**content, "kind": older[1]["kind"]}
            self._kept[self._kept.index(older)] = (ident, content, len(json.dumps(content)))
        else:
            if ident in self._unknown and content["kind"] == "update_display_data":
                content = {**content, "kind": "display_data"}
            self._kept.append((ident, content, len(json.dumps(content))))
        while len(self._kept) > MAX_DISPLAYS or (
            len(self._kept) > 1 and sum(one[2] for one in self._kept) > MAX_DISPLAY_BYTES
        ):
            ident, left_out, _ = self._kept.pop(0)
            self.missed += left_out["kind"] != "clear_output"
            if left_out["kind"] == "display_data":
                self._unknown.add(ident)

    def take(self) -> list[dict[str, Any]]:
        """All that is kept, which is forgotten here."""
        kept, self._kept = [content for _, content, _ in self._kept], []
        return kept


class KeptNumbers:
    """The newest numbers that one rank has reported, at most `MAX_NUMBERS_BYTES` of them.

    Attributes:
        dropped: how many of the oldest rows were dropped.
    """

    def __init__(self) -> None:
        self._rows: metrics.Rows = {}
        self.dropped = 0

    def add(self, batches: Iterable[Mapping[str, Any]]) -> None:
        """Keep rows that the notebook would have received."""
        for names, rows in metrics.unpacked(batches):
            if metrics.imported_module(names) is not None:
                continue  # it says how the rank is now
            if names == metrics.USAGE:  # each row sums up those before it
                self._rows[names] = rows
            else:
                self._rows.setdefault(names, array("d")).extend(rows)
        while (excess := self._nbytes() - MAX_NUMBERS_BYTES) > 0:
            self._drop_oldest(excess)

    def _nbytes(self) -> int:
        return sum(rows.itemsize * len(rows) for rows in self._rows.values())

    def _drop_oldest(self, nbytes: int) -> None:
        """Drop the oldest rows of the longest table: tables that grow slowly keep all of theirs."""
        names, rows = max(self._rows.items(), key=lambda item: len(item[1]))
        width = metrics.FIXED + len(names)
        count = min(-(-nbytes // (rows.itemsize * width)), len(rows) // width)
        del rows[: count * width]
        self.dropped += count
        if not rows:
            del self._rows[names]

    @property
    def batches(self) -> tuple[dict[str, Any], ...]:
        """All rows that are kept, packed for the wire."""
        return metrics.packed(self._rows)
