"""Bounded buffers of a rank's output and metrics, for a notebook that is away or takes over.

Of the last run, the beginning and the end are kept. While the notebook is away, displays and
metrics may never end (a live plot), so only the newest are kept.
"""

from __future__ import annotations

import json
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from skymagic.wire import metrics

FIRST_BYTES = 64 << 10
"""Bytes kept of the output that was shown first."""
LAST_BYTES = 1 << 20  # bytes kept of the output shown last; a larger display is kept alone


class RunBuffer:
    """The contents of one run that were sent to a notebook, numbered from 1."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._count = 0
        self._first: list[dict[str, Any]] = []
        self._room = FIRST_BYTES
        self._last: deque[tuple[dict[str, Any], int]] = deque()
        self._nbytes = 0
        self._dropped = self._dropped_bytes = 0
        self.end: dict[str, Any] | None = None  # the content that marks the end of the output

    def add(self, content: dict[str, Any]) -> dict[str, Any]:
        """Keep a content, and return it with its number as ``seq``."""
        self._count += 1
        content = {**content, "seq": self._count}
        if content["kind"] == "end":
            self.end = content
        nbytes = (
            len(content["text"])
            if content["kind"] == "stream"
            else len(json.dumps(content, default=str))
        )
        # once a content did not fit, all later ones belong to the end
        if not self._last and nbytes <= self._room:
            self._first.append(content)
            self._room -= nbytes
            return content
        self._last.append((content, nbytes))
        self._nbytes += nbytes
        while self._nbytes > LAST_BYTES and len(self._last) > 1:
            dropped = self._last.popleft()[1]
            self._nbytes -= dropped
            self._dropped += 1
            self._dropped_bytes += dropped
        return content

    def after(self, shown: int) -> Iterator[dict[str, Any]]:
        """Yield the contents after the first `shown`; dropped ones are replaced by a note of their
        size.
        """
        contents = [*self._first, *(content for content, _ in self._last)]
        before, displays = shown, set[str]()
        for content in filter(lambda one: one["seq"] > shown, contents):
            if gap := content["seq"] - before - 1:  # some of what was dropped may have been shown
                nbytes = self._dropped_bytes * gap // self._dropped
                yield {
                    "rank": self._rank,
                    "kind": "held_back",
                    "nbytes": nbytes,
                    "seq": content["seq"] - 1,
                }
            before = content["seq"]
            yield _as_new_display(content, displays)


def _as_new_display(content: dict[str, Any], displays: set[str]) -> dict[str, Any]:
    """Turn the first update of a display that the notebook does not know into a new display.

    `displays` holds the ids that it knows.
    """
    ident = (content.get("transient") or {}).get("display_id", "")
    if content["kind"] == "update_display_data" and ident not in displays:
        content = {**content, "kind": "display_data"}
    if ident:
        displays.add(ident)
    return content


MAX_DISPLAYS = 20
MAX_DISPLAY_BYTES = 8 << 20
MAX_NUMBERS_BYTES = 4 << 20


class DisplayBuffer:
    """The newest displays of one rank, each in its latest state.

    Attributes:
        missed: displays that were dropped without having been shown.
    """

    def __init__(self) -> None:
        # (display id or "", content, bytes), the oldest first
        self._kept: list[tuple[str, dict[str, Any], int]] = []
        # ids of dropped displays, which the notebook does not know
        self._unknown: set[str] = set()
        self.missed = 0

    def add(self, content: dict[str, Any]) -> None:
        """Keep a content that would have gone to iopub."""
        if content["kind"] == "clear_output":
            self._kept.clear()
        ident = (content.get("transient") or {}).get("display_id", "")
        older = next((kept for kept in self._kept if ident and kept[0] == ident), None)
        if older is not None:  # keeps its position and its kind
            content = {**content, "kind": older[1]["kind"]}
            self._kept[self._kept.index(older)] = (ident, content, len(json.dumps(content)))
        else:
            if ident in self._unknown and content["kind"] == "update_display_data":
                content = {**content, "kind": "display_data"}
            self._kept.append((ident, content, len(json.dumps(content))))
        while len(self._kept) > MAX_DISPLAYS or (
            len(self._kept) > 1 and sum(one[2] for one in self._kept) > MAX_DISPLAY_BYTES
        ):
            ident, dropped, _ = self._kept.pop(0)
            self.missed += dropped["kind"] != "clear_output"
            if dropped["kind"] == "display_data":
                self._unknown.add(ident)

    def take(self) -> list[dict[str, Any]]:
        """Return all kept contents and forget them."""
        contents, self._kept = [content for _, content, _ in self._kept], []
        return contents


class MetricsBuffer:
    """The newest metrics of one rank, at most `MAX_NUMBERS_BYTES` of them.

    Attributes:
        dropped: number of oldest rows that were dropped.
    """

    def __init__(self) -> None:
        self._rows: metrics.Rows = {}
        self.dropped = 0

    def add(self, batches: Iterable[Mapping[str, Any]]) -> None:
        """Keep rows that the notebook would have received."""
        for names, rows in metrics.unpacked(batches):
            if metrics.imported_module(names) is not None:
                continue  # it describes the rank's present state only
            if names == metrics.USAGE:  # each row sums up those before it
                self._rows[names] = rows
            else:
                self._rows.setdefault(names, array("d")).extend(rows)
        while (excess := self._nbytes() - MAX_NUMBERS_BYTES) > 0:
            self._drop_oldest(excess)

    def _nbytes(self) -> int:
        return sum(rows.itemsize * len(rows) for rows in self._rows.values())

    def _drop_oldest(self, nbytes: int) -> None:
        """Drop the oldest rows of the longest table; slowly growing tables stay complete."""
        names, rows = max(self._rows.items(), key=lambda item: len(item[1]))
        width = metrics.FIXED + len(names)
        count = min(-(-nbytes // (rows.itemsize * width)), len(rows) // width)
        del rows[: count * width]
        self.dropped += count
        if not rows:
            del self._rows[names]

    @property
    def batches(self) -> tuple[dict[str, Any], ...]:
        """Kept rows, packed for the wire."""
        return metrics.packed(self._rows)
