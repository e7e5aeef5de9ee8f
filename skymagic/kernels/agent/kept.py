"""What a rank has shown and reported, kept for a notebook that is away or takes over; bounded.

Of its last run the beginning and the end are kept. While the notebook is away, nobody takes what is displayed, and a live plot never ends: of
displays the newest are kept. Numbers are thinned out when they are too many, so that what is kept spans all steps.
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


class Sampled:
    """Rows under one set of names: all of them, or of too many every second, then every fourth, …, and the newest in any case."""

    def __init__(self, names: metrics.Names) -> None:
        self._width = metrics.FIXED + len(names)
        self._rows, self._newest = (
            array("d"),
            array("d"),
        )  # rows that are kept; the newest, where it is not among them
        self._count = 0  # rows that came
        self.every = 1  # the first of this many rows is kept

    def __len__(self) -> int:
        """Rows that are kept."""
        return len(self._rows) // self._width

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self._rows.itemsize * len(self._rows)

    @property
    def rows(self) -> array[float]:
        """Rows that are kept, the newest last."""
        return self._rows + self._newest

    def add(self, rows: array[float]) -> None:
        """Take the rows of a batch."""
        self._take(rows, -self._count % self.every, self.every)
        self._count += len(rows) // self._width
        self._newest = rows[-self._width :] if (self._count - 1) % self.every else array("d")

    def thin(self) -> None:
        """Keep every second one of what is kept, and of what comes."""
        rows, newest = self._rows, self.rows[-self._width :]
        self._rows, self.every = array("d"), 2 * self.every
        self._take(rows, 0, 2)
        self._newest = newest if (self._count - 1) % self.every else array("d")

    def _take(self, rows: array[float], first: int, every: int) -> None:
        for index in range(first, len(rows) // self._width, every):
            self._rows.extend(rows[index * self._width : (index + 1) * self._width])


class KeptNumbers:
    """The numbers that one rank has reported; where they are too many, those with the most rows are thinned out evenly."""

    def __init__(self) -> None:
        self._sampled: dict[metrics.Names, Sampled] = {}
        self._usage: metrics.Rows = {}

    def add(self, batches: Iterable[Mapping[str, Any]]) -> None:
        """Keep rows that the notebook would have got. What a rank says of itself is summed up in its newest row."""
        for names, rows in metrics.unpacked(batches):
            if names == metrics.USAGE:
                self._usage = {names: rows}
            else:
                self._sampled.setdefault(names, Sampled(names)).add(rows)
        while sum(one.nbytes for one in self._sampled.values()) > MAX_NUMBERS_BYTES:
            longest = max(self._sampled.values(), key=len)
            if len(longest) == 1:
                break
            longest.thin()

    @property
    def kept(self) -> tuple[int, tuple[dict[str, Any], ...]]:
        """(one row of how many is kept at least, all that is kept)."""
        every = max((one.every for one in self._sampled.values()), default=1)
        return every, metrics.packed(
            {names: one.rows for names, one in self._sampled.items()} | self._usage
        )

    def take(self) -> tuple[int, tuple[dict[str, Any], ...]]:
        """What `kept` gives, which is forgotten here."""
        kept = self.kept
        self._sampled, self._usage = {}, {}
        return kept
