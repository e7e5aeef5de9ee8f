"""What a kernel says of a cell, as the outputs that a notebook keeps (nbformat 4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

OUTPUTS = ("stream", "display_data", "execute_result", "error")
REDRAWN = re.compile(r"[^\n]*\r(?=[^\n])")
"""The beginning of a line that a carriage return takes back."""


class Outputs:
    """The outputs of one cell, as they stand now.

    Args:
        kept: the list that is filled: the cell's own.
    """

    def __init__(self, kept: list[dict[str, Any]]) -> None:
        self._kept = kept
        self._ids: dict[str, list[dict[str, Any]]] = {}
        """Outputs that may be replaced, by their display's id."""
        self._clear = False

    def take(self, kind: str, content: Mapping[str, Any]) -> None:
        """Take a message of this cell, as a front end does."""
        if kind == "clear_output":
            self._clear = bool(content.get("wait"))
            if not self._clear:
                self._kept.clear()
        elif kind in OUTPUTS:
            if self._clear:
                self._clear = False
                self._kept.clear()
            if kind == "stream":
                self._stream(content["name"], content["text"])
            else:
                self._add(kind, content)

    def _stream(self, name: str, text: str) -> None:
        last = self._kept[-1] if self._kept else {}
        if last.get("output_type") == "stream" and last["name"] == name:
            last["text"] = joined(last["text"], text)
        else:
            self._kept.append({"output_type": "stream", "name": name, "text": text})

    def _add(self, kind: str, content: Mapping[str, Any]) -> None:
        fields: tuple[str, ...]
        if kind == "error":
            fields = ("ename", "evalue", "traceback")
        elif kind == "execute_result":
            fields = ("execution_count", "data", "metadata")
        else:
            fields = ("data", "metadata")
        output = {"output_type": kind, **{field: content.get(field) for field in fields}}
        self._kept.append(output)
        if name := (content.get("transient") or {}).get("display_id"):
            self._ids.setdefault(name, []).append(output)

    def update(self, content: Mapping[str, Any]) -> None:
        """A display is replaced, also one of an earlier cell: to be called of every cell."""
        for output in self._ids.get((content.get("transient") or {}).get("display_id", ""), ()):
            output["data"], output["metadata"] = content["data"], content["metadata"]


def joined(before: str, text: str) -> str:
    """A stream's text with more of it; of a line that was redrawn, its last state."""
    kept, newline, last = before.rpartition("\n")
    return kept + newline + REDRAWN.sub("", last + text)


def plain(kind: str, content: Mapping[str, Any]) -> tuple[str, str]:
    """(stream, text) of a message, for a terminal; ("", "") for what has none."""
    if kind == "stream":
        return content["name"], content["text"]
    text = (content.get("data") or {}).get("text/plain", "")
    return ("display", f"{text}\n") if text else ("", "")
