"""A source as entries: one file, a folder with all that is in it, or what is in it alone; links that lead out stay behind unless asked for."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skymagic.files.transfer.entries import FILE, FOLDER, LINK, OWN_PREFIX, Entry, Top, stays_inside
from skymagic.wire.boot import boot_id

Skip = Callable[[str, bool], bool]
"""Whether a path below the source, which is a folder or not, stays behind."""


@dataclass
class Listing:
    """What a source holds.

    Attributes:
        entries: in an order in which a folder comes before what is in it.
        paths: for each entry, where it lies here.
        tops: what was named, one for each file or folder that it means.
        contents: whether a folder's contents are meant, and not the folder.
        notes: what stays behind, and why.
        problems: why it cannot be copied.
    """

    entries: list[Entry] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)
    contents: bool = False
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    machine: str = field(default_factory=boot_id)

    def plain(self) -> dict[str, Any]:
        """As JSON takes it, without `paths`; `of` gives it back."""
        entries, tops = [entry.plain() for entry in self.entries], [vars(top) for top in self.tops]
        plain = {**vars(self), "entries": entries, "tops": tops}
        del plain["paths"]
        return plain

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Listing:
        """A listing from elsewhere."""
        entries, tops = [Entry(*entry) for entry in plain["entries"]], [Top(**top) for top in plain["tops"]]
        return cls(**{**plain, "entries": entries, "tops": tops})


def listing(
    source: str, root: str = "", stopped: Callable[[], bool] = lambda: False, *, follow: bool = False
) -> Listing:
    """What `source` holds.

    Args:
        source: a path, relative to `root`; ``~`` is the home folder, a trailing ``/`` means a folder's contents, and ``*``, ``?``
            and ``[…]`` stand for names where no such file exists.
        stopped: asked now and then; when it says so, the listing ends early.
        follow: copy what links lead to outside of the source, and name each.
    """
    found = Listing()
    try:
        full = absolute(source, root)
    except LookupError as problem:
        return Listing(problems=[str(problem)])
    slash = source.endswith(("/", os.sep)) or os.path.basename(source) in (".", "..")
    names = [full]
    if not os.path.lexists(full) and glob.has_magic(source):
        names = sorted(glob.glob(full))
    walk = Walk(found, stopped, follow=follow)
    for name in names:
        walk.add_top(name, contents=slash and os.path.isdir(name) and len(names) == 1)
        if slash and os.path.isfile(name):
            found.problems.append(f"{name} is a file; write it without the slash at its end")
    if not names:
        found.problems.append(f"nothing is called {full}")
    return found


def absolute(path: str, root: str = "") -> str:
    """A path as users write it, in full. Raises LookupError for the home of a user whom nobody knows."""
    if path.startswith("~") and os.path.expanduser(path) == path:
        raise LookupError(f"there is no user {path.split('/')[0][1:]!r}; a file of that name is ./{path}")
    return os.path.abspath(os.path.join(os.path.expanduser(root or "."), os.path.expanduser(path)))


class Walk:
    """Fills a listing.

    Args:
        found: what is filled.
        stopped: asked at each folder.
        skip: what stays behind, by its path below the folder that is walked.
        follow: whether links that lead out are followed. A folder that somebody else made may have one to a private file of the user's.
        remedy: how to copy what such a link leads to.
    """

    def __init__(
        self,
        found: Listing,
        stopped: Callable[[], bool] = lambda: False,
        skip: Skip = lambda path, folder: False,
        *,
        follow: bool = False,
        remedy: str = "--follow copies what it leads to",
    ) -> None:
        self._found, self._stopped, self._skip, self._follow, self._remedy = found, stopped, skip, follow, remedy
        self._above: list[tuple[int, int]] = []
        """Folders that are being walked, by device and number."""

    def add_top(self, path: str, *, contents: bool, name: str | None = None) -> None:
        """Add what was named; `name` is what its path begins with, its own name unless said."""
        own = os.path.basename(path.rstrip("/" + os.sep)) or "root"
        try:
            state = os.stat(path)
        except OSError as problem:
            self._found.problems.append(error_text(path, problem))
            return
        kind = FOLDER if stat.S_ISDIR(state.st_mode) else FILE
        self._found.tops.append(Top(own, kind, os.path.realpath(path), state.st_dev, state.st_ino))
        if contents:
            self._found.contents = True
            self._folder(path, "", "")
        else:
            prefix = own if name is None else name
            self._add(path, prefix, prefix, state)

    def _add(self, path: str, name: str, region: str, state: os.stat_result) -> None:
        """Add a file, or a folder with all that is in it; a link has been followed."""
        if (state.st_dev, state.st_ino) in self._above:
            self._found.notes.append(f"{path} stays behind: it is a link to a folder that it is in")
        elif stat.S_ISDIR(state.st_mode):
            self._put(path, Entry(name, FOLDER, mtime=state.st_mtime_ns, mode=_mode(state)))
            self._folder(path, name, region)
        elif stat.S_ISREG(state.st_mode):
            if not os.access(path, os.R_OK):
                self._found.problems.append(f"{path}: no permission to read it")
            self._put(path, Entry(name, FILE, state.st_size, state.st_mtime_ns, _mode(state)))
        else:
            self._found.notes.append(f"{path} stays behind: it is no file")

    def _put(self, path: str, entry: Entry) -> None:
        self._found.entries.append(entry)
        self._found.paths.append(path)

    def _folder(self, path: str, name: str, region: str) -> None:
        """What is in a folder; links may lead to all that is below `region`."""
        if self._stopped():
            return
        try:
            state = os.stat(path)
            inside = sorted(os.scandir(path), key=lambda one: one.name)
        except OSError as problem:
            self._found.problems.append(error_text(path, problem))
            return
        self._above.append((state.st_dev, state.st_ino))
        for one in inside:
            below = f"{name}/{one.name}" if name else one.name
            if not one.name.startswith(OWN_PREFIX) and not self._skip(below, one.is_dir()):
                self._one(one, below, region)
        self._above.pop()

    def _one(self, one: os.DirEntry[str], name: str, region: str) -> None:
        try:
            if one.is_symlink() and (target := self._inner_target(one.path, name, region)) is not None:
                self._put(one.path, Entry(name, LINK, target=target))
                return
            state = one.stat()
            if one.is_symlink() and (state.st_dev, state.st_ino) not in self._above:
                leads = f"{one.path} is a link that leads out, to {os.path.realpath(one.path)}"
                self._found.notes.append(f"{leads}, which is copied" if self._follow else f"{leads}: {self._remedy}")
                if not self._follow:
                    return
        except FileNotFoundError:
            what = "it is a link to nothing" if one.is_symlink() else "it has gone"
            self._found.notes.append(f"{one.path} stays behind: {what}")
        except OSError as problem:
            self._found.problems.append(error_text(one.path, problem))
        else:
            self._add(one.path, name, region, state)

    def _inner_target(self, path: str, name: str, region: str) -> str | None:
        """The target of a link that stays inside what is copied, and is there."""
        target = Path(os.readlink(path)).as_posix()
        below = name.removeprefix(region).lstrip("/") if region else name
        return target if stays_inside(below, target) and os.path.exists(path) else None


def _mode(state: os.stat_result) -> int | None:
    return stat.S_IMODE(state.st_mode) & 0o777 if os.name == "posix" else None


def error_text(path: str, problem: OSError) -> str:
    """An OSError in words."""
    words = {
        FileNotFoundError: "no such file or folder",
        PermissionError: "no permission",
        IsADirectoryError: "it is a folder",
        NotADirectoryError: "a part of its path is a file",
    }
    said = next((text for kind, text in words.items() if isinstance(problem, kind)), None)
    return f"{path}: {said or (problem.strerror or str(problem)).lower()}"


def digests(
    paths: Iterable[str], stopped: Callable[[], bool] = lambda: False, opener: Callable[[str, int], int] | None = None
) -> Iterator[str]:
    """The xxh3-128 of each file, in hex; "" for one that cannot be read. `opener` as for `open`."""
    import xxhash

    scratch = memoryview(bytearray(1 << 18))
    for path in paths:
        state = xxhash.xxh3_128()
        try:
            with open(path, "rb", buffering=0, opener=opener) as file:
                while (count := file.readinto(scratch)) and not stopped():
                    state.update(scratch[:count])
        except OSError:
            yield ""
        else:
            yield str(state.hexdigest())
