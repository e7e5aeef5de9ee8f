"""Where a source lands, as users of cp, scp and rsync expect; one answer for all nodes."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePath

from skymagic.files.transfer.entries import FOLDER, LINK
from skymagic.files.transfer.listing import Listing


@dataclass(frozen=True)
class Destination:
    """The name that the source takes at its place; None when it goes into the folder that is there."""

    name: str | None = None

    def base(self, place: str) -> str:
        """The folder that it goes into, for a place in full."""
        return place if self.name is None else str(PurePath(place).parent)


def destination(found: Listing, target: str, kinds: Collection[str]) -> Destination:
    """The destination, by the rules of cp and rsync.

    A folder's contents, and several files, go into `target`; and so does what is put where a folder is, or to a path that ends in
    ``/``. Anything else takes the name. A folder that is put to a folder of its own name is brought up to date, not put inside.

    Args:
        target: as the user wrote it.
        kinds: what is there now, on each machine.
    """
    last = target.replace(os.sep, "/").rpartition("/")[2]
    if found.contents or len(found.tops) != 1 or last in ("", ".", "..", "~"):
        return Destination()
    top = found.tops[0]
    inside = FOLDER in kinds and not (top.kind == FOLDER and top.name == last)
    return Destination(None if inside else last)


def unrequested(found: Listing, source: str) -> list[str]:
    """Names in a node's listing that `source` does not mean: a node must not choose what it writes here."""
    last = source.rstrip("/").rpartition("/")[2]
    wrong = {entry.path.split("/")[0] for entry in found.entries} if not found.contents else set()
    if last in ("", ".", "..", "~"):
        wrong = set() if len(wrong) <= 1 else wrong
    elif glob.has_magic(last):
        wrong = {name for name in wrong if name != last and not fnmatch.fnmatchcase(name, last)}
    else:
        wrong -= {last}
    links = [
        entry.path for entry in found.entries if entry.kind == LINK and "/" not in entry.path and not found.contents
    ]
    return [
        *(f"{name!r} is refused: {source} was asked for" for name in sorted(wrong)),
        *(f"{name!r} is refused: it is a link, and a file or a folder was asked for" for name in links),
    ]
