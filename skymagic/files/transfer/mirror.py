"""The record of a mirrored folder: what the last sync brought into it, and only that may a later one remove."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any

from skymagic.files.transfer.entries import FOLDER, LINK, OWN_PREFIX, Entry, unsafe
from skymagic.files.transfer.folders import NEW_FILE, Folders, beside, rename

RECORD = f"{OWN_PREFIX}sync"


def remove_old(folders: Folders, entries: Sequence[Entry]) -> int:
    """Remove what the record names, is not wanted, and nobody has changed since, and folders that are empty then; how many files."""
    wanted = {entry.path for entry in entries}
    old = [entry for entry in _record(folders) if entry.path not in wanted]
    return sum(_remove(folders, entry) for entry in sorted(old, key=lambda one: one.path, reverse=True))


def _remove(folders: Folders, entry: Entry) -> bool:
    with contextlib.suppress(OSError):
        folder, name = folders.parent(entry.path)
        state = os.lstat(name, dir_fd=folder)
        if entry.kind == FOLDER:
            os.rmdir(name, dir_fd=folder)
        elif entry.kind == LINK or (state.st_size, state.st_mtime_ns) == (entry.size, entry.mtime):
            os.unlink(name, dir_fd=folder)
            return True
    return False


def _record(folders: Folders) -> list[Entry]:
    try:
        with open(RECORD, encoding="utf-8", opener=folders.open) as file:
            entries = [Entry(*plain) for plain in json.load(file)]
    except (OSError, ValueError, TypeError):
        return []
    return [] if unsafe(entries) else entries


def write_record(folders: Folders, entries: Sequence[Entry]) -> None:
    """Note what is there now."""
    noted: list[list[Any]] = []
    for entry in entries:
        folder, name = folders.parent(entry.path)
        state = os.lstat(name, dir_fd=folder)
        noted.append(Entry(entry.path, entry.kind, state.st_size, state.st_mtime_ns, target=entry.target).plain())
    folder, name = folders.parent(RECORD)
    temporary = beside(name)
    with open(os.open(temporary, NEW_FILE, 0o600, dir_fd=folder), "w", encoding="utf-8") as file:
        json.dump(noted, file)
    rename(folder, temporary, name)
