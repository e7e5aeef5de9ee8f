"""Which files of a folder a sync leaves out: by .gitignore at every level, .git itself, and the image's excludes.

Patterns match as git matches them: gitignore(5), and wildmatch.c and dir.c of git where the manual is short. pathspec cannot take the
place of `Patterns`: its version 1.1.1 reads ``[[:upper:]]*`` and ``a**/a`` otherwise than git."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
        inner = Walk(
            found,
            skip=lambda below, is_folder: bool(patterns.decide(below, is_folder)),
            remedy=_REMEDY,
        )
        if path != folder:
            inner.add_top(str(path), contents=False, name=name)
    return _once(found)


def _once(found: Listing) -> Listing:
    """Each path once: the first counts."""
    first = {entry.path: number for number, entry in reversed(list(enumerate(found.entries)))}
    kept = sorted(first.values())
    found.entries, found.places = [found.entries[n] for n in kept], [found.places[n] for n in kept]
    return found


# -- the patterns of one file ----------------------------------------------------------------------


_CLASSES = {
    "alnum": r"a-zA-Z0-9", "alpha": r"a-zA-Z", "blank": r" \t", "cntrl": r"\x00-\x1f\x7f", "digit": r"0-9", "lower": r"a-z",
    "graph": r"\x21-\x7e", "print": r"\x20-\x7e", "punct": r"!-/:-@\[-`{-~", "space": r"\s", "upper": r"A-Z", "xdigit": r"0-9a-fA-F",
}  # fmt: skip
_NEVER = "(?!)"
_RANGE = r"(?:-(?:\\.|[^\]\\]))?"
_TOKEN = re.compile(
    rf"""
    (?P<folders> (?:^|(?<=/)) \*\*+ (?:/|\Z) )
    | (?P<stars> \*+ )
    | (?P<letter> \? )
    | \[ (?P<negated> [!^]?+ ) (?P<members> (?:\]{_RANGE})?+ (?: \[:\w+:\] | (?:\\.|[^\]\\]){_RANGE} )*+ ) \]
    | (?P<open> \[.* | \\\Z )
    | \\? (?P<plain> . )
    """,
    re.VERBOSE | re.DOTALL,
)
"""A class that is never closed, and a backslash at the end, match nothing."""
_MEMBER = re.compile(r"\[:(\w+):\]|(\\.|[^\\])(?:-(\\.|[^\\\]]))?", re.DOTALL)
"""A named class, a letter, or a range."""


@dataclass(frozen=True)
class Pattern:
    """One line.

    Attributes:
        ignore: whether a match is ignored; False for a line with ``!``.
        folders_only: whether it ends in ``/``.
        name_only: whether it matches a last name at any depth, not a path.
        regex: what the name or the path must be.
    """

    ignore: bool
    folders_only: bool
    name_only: bool
    regex: re.Pattern[str]

    def matches(self, path: str, folder: bool) -> bool:
        """Whether it matches this path itself; a folder above it does not count."""
        if self.folders_only and not folder:
            return False
        return bool(self.regex.fullmatch(path.rpartition("/")[2] if self.name_only else path))


class Patterns:
    """The lines of one file; the last match decides."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._last_first = list(_patterns(lines))[::-1]

    def decide(self, path: str, folder: bool) -> bool | None:
        """Whether a path, relative to the file's folder, is ignored; None when no line matches."""
        return next((one.ignore for one in self._last_first if one.matches(path, folder)), None)


def _patterns(lines: Iterable[str]) -> Iterator[Pattern]:
    for line in lines:
        text = _without_blanks(line.removesuffix("\n").removesuffix("\r"))
        if text.startswith("#"):
            continue
        ignore = not text.startswith("!")
        text = text.removeprefix("!")
        folders_only = text.endswith("/")
        text = text[:-1] if folders_only else text
        if text:
            regex = re.compile(_translated(text.removeprefix("/")), re.DOTALL)
            yield Pattern(ignore, folders_only, "/" not in text, regex)


def _without_blanks(line: str) -> str:
    """The line without the blanks at its end, but for one behind a backslash."""
    bare = line.rstrip(" ")
    backslashes = len(bare) - len(bare.rstrip("\\"))
    return bare + " " if backslashes % 2 and len(bare) < len(line) else bare


def _translated(pattern: str) -> str:
    """The pattern as a regular expression. What git matches as plain text first, it cuts off: ``a**/b`` is ``a`` and ``**/b``."""
    plain = re.match(r"[^*?\[\\]*", pattern)
    assert plain is not None
    found = re.escape(plain[0])
    for token in _TOKEN.finditer(pattern[plain.end() :]):
        match token.lastgroup:
            case "folders":
                found += "(?:.*/)?" if token[0].endswith("/") else ".*"
            case "stars":
                found += "[^/]*"
            case "letter":
                found += "[^/]"
            case "members":
                found += _class(token["members"], negated=bool(token["negated"]))
            case "open":
                found += _NEVER
            case _:
                found += re.escape(token["plain"])
    return found


def _class(text: str, *, negated: bool) -> str:
    """A class of letters."""
    members = ""
    for name, low, high in _MEMBER.findall(text):
        if name:
            members += _CLASSES.get(name, "")
        elif high and low[-1] <= high[-1]:  # the last letter: a backslash may be before it
            members += f"{re.escape(low[-1])}-{re.escape(high[-1])}"
        else:
            members += re.escape(low[-1])
    inside = f"[{members}]" if members else _NEVER
    return f"(?!/)(?!{inside})." if negated else f"(?!/){inside}"
