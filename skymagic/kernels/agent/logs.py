"""Reading a rank's log for the notebook: its last lines, and what came after."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PIECE = 1 << 20
"""Bytes of a log that are read at once."""


def last(path: str, lines: int) -> dict[str, Any]:
    """The last lines of a log as ``text``, and where it ended, as ``end``; a log that is not there is empty."""
    try:
        with open(path, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            found, length = b"", min(end, PIECE)
            while length and found.count(b"\n") <= lines and len(found) < end:
                log.seek(end - length)
                found = log.read(length)
                length = min(end, 4 * length)
    except FileNotFoundError:
        return {"text": "", "end": 0}
    text = b"\n".join(found.split(b"\n")[-lines - found.endswith(b"\n") :])  # a bar's states are one line
    return {"text": text.decode(errors="replace"), "end": end}


def all_of(folder: Path, lines: int, limit: int) -> Iterator[tuple[int, str]]:
    """(rank, the last lines of its log) of all logs in a folder; of each at most so many characters."""
    for path in sorted(folder.glob("rank-*.log")):
        yield int(path.stem.removeprefix("rank-")), last(str(path), lines)["text"][-limit:]


def since(path: str, start: int) -> dict[str, Any]:
    """What a log holds from byte `start` on, in whole lines: ``text``, and where it ends: ``end``."""
    try:
        with open(path, "rb") as log:
            log.seek(start)
            found = log.read(PIECE)
    except FileNotFoundError:
        found = b""
    if len(found) < PIECE:
        found = found[: found.rfind(b"\n") + 1]
    return {"text": found.decode(errors="replace"), "end": start + len(found)}
