"""A source as a list of entries: a file, a folder with its contents, or only the contents.

Entries are plain values, with paths below a base; `refuse_unsafe` finds those that must not be
trusted. Links that lead out of the source are skipped unless requested.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from skymagic.content.transfer.folders import (
    OWN_PREFIX,
    FilePlace,
    Identity,
    Root,
    identity,
    opened,
)
from skymagic.wire.files import ListReply, Top
from skymagic.wire.processes import boot_id

FILE, FOLDER, LINK = "file", "folder", "link"


@dataclass(frozen=True)
class Entry:
    """A file, folder or link.

    Attributes:
        path: below the base, with ``/`` between its parts.
        kind: FILE, FOLDER or LINK.
        size: bytes of a file.
        mtime: time of its last modification, in nanoseconds.
        mode: its permission bits; None for a link.
        target: target of a link, relative to it.
    """

    path: str
    kind: str
    size: int = 0
    mtime: int = 0
    mode: int | None = None
    target: str = ""

    def plain(self) -> list[Any]:
        """Return it as a JSON array; ``Entry(*plain)`` restores it."""
        return list(astuple(self))


def columns_of(entries: Iterable[Entry]) -> list[list[Any]]:
    """Return a list for each field; `entries_of` restores the entries."""
    return [list(column) for column in zip(*(entry.plain() for entry in entries), strict=True)]


def entries_of(columns: Sequence[Sequence[Any]]) -> list[Entry]:
    """Return the entries whose fields these columns hold.

    Raises:
        ValueError: the columns have different lengths.
        TypeError: they are not as many as an entry has fields.
    """
    return [Entry(*fields) for fields in zip(*columns, strict=True)]


def renamed(entries: Iterable[Entry], name: str | None) -> list[Entry]:
    """Return the entries with the first part of each path replaced, unless `name` is None."""
    if name is None:
        return list(entries)
    return [replace(entry, path="/".join([name, *entry.path.split("/")[1:]])) for entry in entries]


def refuse_unsafe(entries: Sequence[Entry]) -> list[str]:
    """Return a refusal for each entry that would leave the base folder, or is otherwise invalid.

    A link may contain ``..`` only at its start: then it stays inside even if other such links are
    in its path.
    """
    links = {entry.path for entry in entries if entry.kind == LINK}
    wrong = []
    for entry in entries:
        parts = entry.path.split("/")
        above = {"/".join(parts[:count]) for count in range(1, len(parts))}
        if not all(map(_is_name, parts)) or entry.kind not in (FILE, FOLDER, LINK) or above & links:
            wrong.append(f"{entry.path!r} is refused: it points outside the destination folder")
        elif entry.kind == LINK and not stays_inside(entry.path, entry.target):
            wrong.append(
                f"{entry.path!r} is refused: it is a link that points outside, to {entry.target!r}"
            )
    return wrong


def stays_inside(path: str, target: str) -> bool:
    """Return True if a link at `path` leads below the base, wherever that is."""
    parts = target.split("/")
    ups = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    depth = len(path.split("/")) - 1
    return bool(target) and ups <= depth and all(map(_is_name, parts[ups:]))


def _is_name(part: str) -> bool:
    """Return True if it is a single file name on every system."""
    is_single = PurePosixPath(part).parts == (part,) and PureWindowsPath(part).parts == (part,)
    return is_single and part != ".." and "\0" not in part


# -- a source as entries ---------------------------------------------------------------------------


Skip = Callable[[str, bool], bool]
"""Returns True if a path below the source (a folder if the second argument is True) is skipped."""


@dataclass
class Listing:
    """The contents of a source.

    Attributes:
        entries: ordered so that a folder precedes its contents.
        file_places: local place of each entry; empty for a listing from another machine.
        tops: the files and folders that the source names.
        contents: True if a folder's contents are meant, rather than the folder.
        notes: what was skipped, and why.
        problems: reasons why it cannot be copied.
        machine: boot ID of the machine that has the source.
    """

    entries: list[Entry] = field(default_factory=list)
    file_places: list[FilePlace] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)
    contents: bool = False
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    machine: str = field(default_factory=boot_id)

    def reply(self) -> ListReply:
        """Return the listing as a message; `of` restores it without the places of the files."""
        return ListReply(
            columns=columns_of(self.entries),
            tops=self.tops,
            contents=self.contents,
            notes=self.notes,
            problems=self.problems,
            machine=self.machine,
        )

    @classmethod
    def of(cls, reply: ListReply) -> Listing:
        """Restore a listing from another machine."""
        return cls(
            entries=entries_of(reply.columns),
            tops=reply.tops,
            contents=reply.contents,
            notes=reply.notes,
            problems=reply.problems,
            machine=reply.machine,
        )


def listing(
    source: str,
    root: str = "",
    stopped: Callable[[], bool] = lambda: False,
    *,
    follow: bool = False,
) -> Listing:
    """List the contents of `source`.

    Args:
        source: a path, relative to `root`; ``~`` is the home folder, a trailing ``/`` means a
            folder's contents, and ``*``, ``?`` and ``[…]`` are wildcards if no such file exists.
        stopped: polled during the listing, which ends early once it returns True.
        follow: also copy targets of links that lead out of the source, and note each.
    """
    result = Listing()
    try:
        full = absolute(source, root)
    except LookupError as problem:
        return Listing(problems=[str(problem)])
    slash = source.endswith(("/", os.sep)) or os.path.basename(source) in (".", "..")
    names = [full]
    if not os.path.lexists(full) and glob.has_magic(source):
        names = sorted(glob.glob(full))
    walk = Walk(result, stopped, follow=follow)
    for name in names:
        walk.add_top(name, contents=slash and os.path.isdir(name) and len(names) == 1)
        if slash and os.path.isfile(name):
            result.problems.append(f"{name} is a file; write it without the slash at its end")
    if not names:
        result.problems.append(f"nothing is called {full}")
    return result


def absolute(path: str, root: str = "") -> str:
    """Return the absolute form of a path as users write it.

    Raises LookupError for an unknown user's home.
    """
    if path.startswith("~") and os.path.expanduser(path) == path:
        raise LookupError(
            f"there is no user {path.split('/')[0][1:]!r}; a file of that name is ./{path}"
        )
    return os.path.abspath(os.path.join(os.path.expanduser(root or "."), os.path.expanduser(path)))


class Within(NamedTuple):
    """A folder that is being listed: its root, and its descriptor."""

    root: Root
    descriptor: int


class Walk:
    """Walk that adds files and folders to a listing.

    Args:
        listing: the listing.
        stopped: called at each folder.
        skip: decides which paths, relative to the folder being walked, are skipped.
        follow: follow links that lead out. A folder created by others may have a link to a private
            file of the user.
        remedy: how to copy the target of such a link.
    """

    def __init__(
        self,
        listing: Listing,
        stopped: Callable[[], bool] = lambda: False,
        skip: Skip = lambda path, folder: False,
        *,
        follow: bool = False,
        remedy: str = "--follow copies what it leads to",
    ) -> None:
        self._found, self._stopped, self._skip, self._follow, self._remedy = (
            listing,
            stopped,
            skip,
            follow,
            remedy,
        )
        self._above: list[Identity] = []  # folders being walked

    def add_top(self, path: str, *, contents: bool, name: str | None = None) -> None:
        """Add a file or folder named by the user.

        Args:
            name: start of its path in the listing; by default its own name.
        """
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
            self._folder(path, "", "", state, None)
        else:
            prefix = own if name is None else name
            self._add(path, prefix, prefix, state, None)

    def _add(
        self, path: str, name: str, region: str, state: os.stat_result, within: Within | None
    ) -> None:
        """Add a file, or a folder with its contents.

        Args:
            within: the enclosing folder; None if the user named it, or a link led to it.
        """
        if stat.S_ISDIR(state.st_mode):
            root = within.root if within else Root(path, identity(state))
            entry = Entry(name, FOLDER, mtime=state.st_mtime_ns, mode=_mode(state))
            self._put(root.file_place(path), entry)
            self._folder(path, name, region, state, within)
        elif stat.S_ISREG(state.st_mode):
            if not os.access(path, os.R_OK):
                self._found.problems.append(f"{path}: no permission to read it")
            try:
                file_place = within.root.file_place(path) if within else FilePlace.of(path, state)
            except OSError as problem:
                self._found.problems.append(error_text(path, problem))
            else:
                self._put(
                    file_place, Entry(name, FILE, state.st_size, state.st_mtime_ns, _mode(state))
                )
        else:
            self._found.notes.append(f"{path} is skipped: it is no file")

    def _put(self, file_place: FilePlace, entry: Entry) -> None:
        self._found.entries.append(entry)
        self._found.file_places.append(file_place)

    def _folder(
        self, path: str, name: str, region: str, state: os.stat_result, within: Within | None
    ) -> None:
        """Add a folder's contents; links may lead to anything below `region`."""
        if self._stopped():
            return
        root = within.root if within else Root(path, identity(state))
        self._above.append(identity(state))
        try:
            with opened(path, within.descriptor if within else None, state) as descriptor:
                inside = sorted(os.scandir(descriptor), key=lambda dir_entry: dir_entry.name)
                for dir_entry in inside:
                    below = f"{name}/{dir_entry.name}" if name else dir_entry.name
                    if not dir_entry.name.startswith(OWN_PREFIX) and not self._skip(
                        below, dir_entry.is_dir()
                    ):
                        self._visit(
                            dir_entry,
                            os.path.join(path, dir_entry.name),
                            below,
                            region,
                            Within(root, descriptor),
                        )
        except OSError as problem:
            self._found.problems.append(error_text(path, problem))
        finally:
            self._above.pop()

    def _visit(
        self, entry: os.DirEntry[str], path: str, name: str, region: str, within: Within
    ) -> None:
        is_link = entry.is_symlink()
        try:
            if is_link and (target := self._inner_target(path, name, region)) is not None:
                self._put(within.root.file_place(path), Entry(name, LINK, target=target))
                return
            # Race: a file that was not a link when the names were read may be one now.
            state = entry.stat(follow_symlinks=is_link)
            if identity(state) in self._above:
                self._found.notes.append(
                    f"{path} is skipped: it is a link to a folder that it is in"
                )
            elif not is_link:
                self._add(path, name, region, state, within)
            else:
                real = os.path.realpath(path)
                leads = f"{path} is a link that points outside, to {real}"
                self._found.notes.append(
                    f"{leads}, which is copied" if self._follow else f"{leads}: {self._remedy}"
                )
                if self._follow:
                    self._add(real, name, region, state, None)
        except FileNotFoundError:
            what = "it is a link to nothing" if is_link else "it has gone"
            self._found.notes.append(f"{path} is skipped: {what}")
        except OSError as problem:
            self._found.problems.append(error_text(path, problem))

    def _inner_target(self, path: str, name: str, region: str) -> str | None:
        """Return the target of a link if it stays inside the copied region and exists."""
        target = Path(os.readlink(path)).as_posix()
        below = name.removeprefix(region).lstrip("/") if region else name
        return target if stays_inside(below, target) and os.path.exists(path) else None


def _mode(state: os.stat_result) -> int:
    return stat.S_IMODE(state.st_mode) & 0o777


def error_text(path: str, problem: OSError) -> str:
    """Return a readable message for an OSError."""
    texts = {
        FileNotFoundError: "no such file or folder",
        PermissionError: "no permission",
        IsADirectoryError: "it is a folder",
        NotADirectoryError: "a part of its path is a file",
    }
    reason = next((text for kind, text in texts.items() if isinstance(problem, kind)), None)
    return f"{path}: {reason or (problem.strerror or str(problem)).lower()}"
