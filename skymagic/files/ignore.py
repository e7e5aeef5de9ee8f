"""Which files of a folder a sync leaves out: by .gitignore at every level, .git itself, and the image's excludes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from skymagic.files.gitignore import Patterns
from skymagic.files.transfer.listing import Listing, Walk, absolute

NAME = ".gitignore"
DEFAULT_PATTERNS = ("__pycache__/", ".ipynb_checkpoints/")
"""Ignored unless a .gitignore says otherwise."""
_REMEDY = "sky.Image(includes=[…]) with its path copies it"


class Ignore:
    """Decides for paths below a folder, as git does: the nearest .gitignore first, in it the last line that matches.

    Those above the folder count too, up to the one where .git is; that they leave out the folder itself does not, for it was
    asked for.

    Args:
        folder: it.
        excludes: the image's patterns, as in .gitignore; they come first, and ``!pattern`` brings back what a .gitignore leaves out.
    """

    def __init__(self, folder: Path, excludes: Patterns) -> None:
        self._excludes, self._usual = excludes, Patterns(DEFAULT_PATTERNS)
        self._level = cache(lambda path: _read(folder / path))
        self._above = list(_above(folder))

    def __call__(self, path: str, folder: bool) -> bool:
        """Whether it is ignored; called for a folder before its contents."""
        if path.rpartition("/")[2] == ".git":
            return True
        said = self._excludes.decide(path, folder)
        parts = path.split("/")
        for depth in range(len(parts) - 1, -1, -1):
            if said is None and (patterns := self._level("/".join(parts[:depth]))) is not None:
                said = patterns.decide("/".join(parts[depth:]), folder)
        for prefix, patterns in self._above:
            said = patterns.decide(f"{prefix}/{path}", folder) if said is None else said
        return bool(self._usual.decide(path, folder) if said is None else said)


def _above(folder: Path) -> Iterable[tuple[str, Patterns]]:
    """(the folder's path below it, patterns) for each .gitignore of its repository above it, the nearest first."""
    top = next((one for one in [folder, *folder.parents] if (one / ".git").exists()), folder)
    for parent in folder.parents:
        if parent.is_relative_to(top) and (patterns := _read(parent)) is not None:
            yield folder.relative_to(parent).as_posix(), patterns


def _read(folder: Path) -> Patterns | None:
    try:
        text = (folder / NAME).read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError:
        return None
    return Patterns(text.split("\n"))


def unignored(folder: Path, excludes: Sequence[str] = (), includes: Sequence[str] = ()) -> Listing:
    """A folder's contents without ignored files, and `includes` besides.

    Args:
        includes: files and folders, relative to `folder`; they travel also where a .gitignore leaves them out. One from elsewhere
            arrives under its own name.
    """
    folder = Path(absolute(str(folder)))
    if not folder.is_dir():
        return Listing(problems=[f"there is no folder {folder}"])
    found, patterns = Listing(), Patterns(excludes)
    Walk(found, skip=Ignore(folder, patterns), remedy=_REMEDY).add_top(str(folder), contents=True)
    for text in includes:
        path = Path(absolute(text, str(folder)))
        name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name
        inner = Walk(found, skip=lambda below, is_folder: bool(patterns.decide(below, is_folder)), remedy=_REMEDY)
        if path != folder:
            inner.add_top(str(path), contents=False, name=name)
    return _once(found)


def _once(found: Listing) -> Listing:
    """Each path once: the first counts."""
    first = {entry.path: number for number, entry in reversed(list(enumerate(found.entries)))}
    kept = sorted(first.values())
    found.entries, found.places = [found.entries[n] for n in kept], [found.places[n] for n in kept]
    return found
