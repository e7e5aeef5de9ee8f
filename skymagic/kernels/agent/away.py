"""What a rank displays and reports while the notebook is away: bounded, for nobody would take it and a live plot never ends.

Of displays the newest are kept. Numbers are thinned out when they are too many, so that what is kept spans all steps.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from skymagic.wire import metrics

MAX_DISPLAYS = 20
MAX_BYTES = 8 << 20
MAX_NUMBERS_BYTES = 4 << 20


class KeptDisplays:
    """The newest displays of one rank, of which each is kept as it is now.

    Attributes:
        missed: displays that were shown to nobody and are not here any more.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[str, dict[str, Any], int]] = []
        """(display id or "", content, bytes), the oldest first."""
        self._unknown: set[str] = set()
        """Ids of displays that were left out: the notebook does not know them."""
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
        while len(self._kept) > MAX_DISPLAYS or (len(self._kept) > 1 and sum(one[2] for one in self._kept) > MAX_BYTES):
            ident, left_out, _ = self._kept.pop(0)
            self.missed += left_out["kind"] != "clear_output"
            if left_out["kind"] == "display_data":
                self._unknown.add(ident)

    def take(self) -> list[dict[str, Any]]:
        """All that is kept, which is forgotten here."""
        kept, self._kept = [content for _, content, _ in self._kept], []
        return kept


class KeptNumbers:
    """The numbers that one rank has reported; of too many every second step, then every fourth, …"""

    def __init__(self) -> None:
        self._rows: dict[metrics.Names, array[float]] = {}
        self._every = 1

    def add(self, batches: Iterable[Mapping[str, Any]]) -> None:
        """Keep rows that the notebook would have got."""
        for names, rows in metrics.unpacked(batches):
            self._rows.setdefault(names, array("d")).extend(rows)
        while sum(len(rows) for rows in self._rows.values()) * 8 > MAX_NUMBERS_BYTES:
            thinned = {names: metrics.thinned(names, rows) for names, rows in self._rows.items()}
            if all(len(rows) == len(self._rows[names]) for names, rows in thinned.items()):
                break  # one row each
            self._every, self._rows = 2 * self._every, thinned

    def take(self) -> tuple[int, tuple[dict[str, Any], ...]]:
        """(one row of how many is kept of the oldest, all that is kept), which is forgotten here."""
        every, batches = self._every, metrics.packed(self._rows)
        self._every, self._rows = 1, {}
        return every, batches
