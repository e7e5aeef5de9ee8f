"""What travels: files, folders and links by their paths below a base; plain values, and which of them may be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

FILE, FOLDER, LINK = "file", "folder", "link"
OWN_PREFIX = ".skymagic-"
"""Prefix of our own files among the user's."""


@dataclass(frozen=True)
class Entry:
    """One file, folder or link.

    Attributes:
        path: below the base, with ``/`` between its parts.
        kind: FILE, FOLDER or LINK.
        size: bytes of a file.
        mtime: when it was last written, in nanoseconds.
        mode: its permission bits; None where the system has none.
        target: where a link leads, relative to it.
    """

    path: str
    kind: str
    size: int = 0
    mtime: int = 0
    mode: int | None = None
    target: str = ""

    def plain(self) -> list[Any]:
        """As JSON takes it; ``Entry(*plain)`` gives it back."""
        return list(astuple(self))


@dataclass(frozen=True)
class Top:
    """What was named as the source, to tell whether something would be copied onto itself.

    Attributes:
        name: its last name.
        kind: FILE or FOLDER.
        real: its path without links.
        device, number: of the file system, and in it.
    """

    name: str
    kind: str
    real: str
    device: int
    number: int


def renamed(entries: Iterable[Entry], name: str | None) -> list[Entry]:
    """The entries with the first part of each path replaced; None leaves it."""
    if name is None:
        return list(entries)
    return [replace(entry, path="/".join([name, *entry.path.split("/")[1:]])) for entry in entries]


def unsafe(entries: Sequence[Entry]) -> list[str]:
    """Path traversal: entries that would leave the base folder, or that no honest sender sends; a sentence for each.

    A link may climb only with its first parts: then it stays inside also where other links of the same kind are on its way.
    """
    links = {entry.path for entry in entries if entry.kind == LINK}
    wrong = []
    for entry in entries:
        parts = entry.path.split("/")
        above = {"/".join(parts[:count]) for count in range(1, len(parts))}
        if not all(map(_is_name, parts)) or entry.kind not in (FILE, FOLDER, LINK) or above & links:
            wrong.append(f"{entry.path!r} is refused: it leads out of the folder that it is copied into")
        elif entry.kind == LINK and not stays_inside(entry.path, entry.target):
            wrong.append(f"{entry.path!r} is refused: it is a link that leads out, to {entry.target!r}")
    return wrong


def stays_inside(path: str, target: str) -> bool:
    """Whether a link at `path` leads to something below the base, wherever that is."""
    parts = target.split("/")
    ups = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    depth = len(path.split("/")) - 1
    return bool(target) and ups <= depth and all(map(_is_name, parts[ups:]))


def _is_name(part: str) -> bool:
    """One name of a file, on every system."""
    one = PurePosixPath(part).parts == (part,) and PureWindowsPath(part).parts == (part,)
    return one and part != ".." and "\0" not in part
