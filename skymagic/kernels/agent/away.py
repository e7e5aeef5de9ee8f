"""What a rank displays while the notebook is away: the newest is kept, for nobody would take it and a live plot never ends."""

from __future__ import annotations

import json
from typing import Any

MAX_DISPLAYS = 20
MAX_BYTES = 8 << 20


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
