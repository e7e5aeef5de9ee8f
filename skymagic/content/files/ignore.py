"""Files that a sync leaves out: by .gitignore at every level, .git, and the image's excludes.

Patterns match as git matches them: gitignore(5), and wildmatch.c and dir.c of git for details that
the manual omits. pathspec cannot replace `Patterns`: its version 1.1.1 interprets ``[[:upper:]]*``
and ``a**/a`` differently from git.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from skymagic.content.transfer.listing import Listing, Walk, absolute

NAME = ".gitignore"
DEFAULT_PATTERNS = ("__pycache__/", ".ipynb_checkpoints/")
"""Ignored unless a .gitignore decides otherwise."""
_REMEDY = "sky.Image(includes=[…]) with its path copies it"


class Ignore:
    """Decide which paths below a folder are ignored, as git does.

    The nearest .gitignore comes first, and in it the last matching line. Files above the folder
    count too, up to the folder with .git. If they ignore the folder itself, that does not count,
    because the user named it.

    Args:
        folder: the folder.
        excludes: the image's patterns, as in .gitignore. They come first, and ``!pattern`` restores
            what a .gitignore ignores.
    """

    def __init__(self, folder: Path, excludes: Patterns) -> None:
        self._excludes, self._usual = excludes, Patterns(DEFAULT_PATTERNS)
        self._level = cache(lambda path: _read(folder / path))
        self._above = list(_above(folder))

    def __call__(self, path: str, folder: bool) -> bool:
        """Return True if a path is ignored; called for a folder before its contents."""
        if path.rpartition("/")[2] == ".git":
            return True
        decision = self._excludes.decide(path, folder)
        parts = path.split("/")
        for depth in range(len(parts) - 1, -1, -1):
            if decision is None and (patterns := self._level("/".join(parts[:depth]))) is not None:
                decision = patterns.decide("/".join(parts[depth:]), folder)
        for prefix, patterns in self._above:
            decision = patterns.decide(f"{prefix}/{path}", folder) if decision is None else decision
        return bool(self._usual.decide(path, folder) if decision is None else decision)


def _above(folder: Path) -> Iterable[tuple[str, Patterns]]:
    """Yield (the folder's path below it, patterns) for each .gitignore above the folder in its
    repository, nearest first.
    """
    top = next(
        (candidate for candidate in [folder, *folder.parents] if (candidate / ".git").exists()),
        folder,
    )
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
    """List a folder's contents without ignored files, plus `includes`.

    Args:
        includes: files and folders, relative to `folder`, that are copied even if a .gitignore
            ignores them. One from elsewhere arrives under its own name.
    """
    folder = Path(absolute(str(folder)))
    if not folder.is_dir():
        return Listing(problems=[f"there is no folder {folder}"])
    result, patterns = Listing(), Patterns(excludes)
    Walk(result, skip=Ignore(folder, patterns), remedy=_REMEDY).add_top(str(folder), contents=True)
    for text in includes:
        path = Path(absolute(text, str(folder)))
        name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name
        inner = Walk(
            result,
            skip=lambda below, is_folder: bool(patterns.decide(below, is_folder)),
            remedy=_REMEDY,
        )
        if path != folder:
            inner.add_top(str(path), contents=False, name=name)
    return _without_duplicates(result)


def _without_duplicates(listing: Listing) -> Listing:
    """Keep the first entry of each path."""
    first = {entry.path: number for number, entry in reversed(list(enumerate(listing.entries)))}
    numbers = sorted(first.values())
    listing.entries, listing.file_places = (
        [listing.entries[n] for n in numbers],
        [listing.file_places[n] for n in numbers],
    )
    return listing


# -- the patterns of one file ----------------------------------------------------------------------


_CLASSES = {
    "alnum": r"a-zA-Z0-9",
    "alpha": r"a-zA-Z",
    "blank": r" \t",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": r"0-9",
    "lower": r"a-z",
    "graph": r"\x21-\x7e",
    "print": r"\x20-\x7e",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\s",
    "upper": r"A-Z",
    "xdigit": r"0-9a-fA-F",
}
_NEVER = "(?!)"
_RANGE = r"(?:-(?:\\.|[^\]\\]))?"
_TOKEN = re.compile(
    rf"""
    (?P<folders> (?:^|(?<=/)) \*\*+ (?:/|\Z) )
    | (?P<stars> \*+ )
    | (?P<letter> \? )
    | \[ (?P<negated> [!^]?+ ) """
    rf"""(?P<members> (?:\]{_RANGE})?+ (?: \[:\w+:\] | (?:\\.|[^\]\\]){_RANGE} )*+ ) \]
    | (?P<open> \[.* | \\\Z )
    | \\? (?P<plain> . )
    """,
    re.VERBOSE | re.DOTALL,
)
"""An unclosed class, and a trailing backslash, match nothing."""
_MEMBER = re.compile(r"\[:(\w+):\]|(\\.|[^\\])(?:-(\\.|[^\\\]]))?", re.DOTALL)
"""A named class, a letter, or a range."""


@dataclass(frozen=True)
class Pattern:
    """A line of a .gitignore.

    Attributes:
        ignore: True if matches are ignored; False for a line with ``!``.
        folders_only: True if it ends in ``/``.
        name_only: True if it matches the last name at any depth, rather than a path.
        regex: matches the name or the path.
    """

    ignore: bool
    folders_only: bool
    name_only: bool
    regex: re.Pattern[str]

    def matches(self, path: str, folder: bool) -> bool:
        """Return True if the line matches this path itself.

        A matching folder above does not count.
        """
        if self.folders_only and not folder:
            return False
        return bool(self.regex.fullmatch(path.rpartition("/")[2] if self.name_only else path))


class Patterns:
    """The lines of one file; the last match decides."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._last_first = list(_patterns(lines))[::-1]

    def decide(self, path: str, folder: bool) -> bool | None:
        """Return True if a path, relative to the file's folder, is ignored; None if no line
        matches.
        """
        return next(
            (pattern.ignore for pattern in self._last_first if pattern.matches(path, folder)), None
        )


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
            regex = re.compile(_to_regex(text.removeprefix("/")), re.DOTALL)
            yield Pattern(ignore, folders_only, "/" not in text, regex)


def _without_blanks(line: str) -> str:
    """Return the line without trailing blanks, except one escaped by a backslash."""
    bare = line.rstrip(" ")
    backslashes = len(bare) - len(bare.rstrip("\\"))
    return bare + " " if backslashes % 2 and len(bare) < len(line) else bare


def _to_regex(pattern: str) -> str:
    """Return the pattern as a regular expression.

    git splits off the leading plain text before it matches, so ``a**/b`` is ``a`` and ``**/b``.
    """
    plain = re.match(r"[^*?\[\\]*", pattern)
    assert plain is not None
    regex = re.escape(plain[0])
    for token in _TOKEN.finditer(pattern[plain.end() :]):
        match token.lastgroup:
            case "folders":
                regex += "(?:.*/)?" if token[0].endswith("/") else ".*"
            case "stars":
                regex += "[^/]*"
            case "letter":
                regex += "[^/]"
            case "members":
                regex += _class(token["members"], negated=bool(token["negated"]))
            case "open":
                regex += _NEVER
            case _:
                regex += re.escape(token["plain"])
    return regex


def _class(text: str, *, negated: bool) -> str:
    """Return a character class as a regular expression."""
    members = ""
    for name, low, high in _MEMBER.findall(text):
        if name:
            members += _CLASSES.get(name, "")
        elif high and low[-1] <= high[-1]:  # the last letter, because a backslash may precede it
            members += f"{re.escape(low[-1])}-{re.escape(high[-1])}"
        else:
            members += re.escape(low[-1])
    inside = f"[{members}]" if members else _NEVER
    return f"(?!/)(?!{inside})." if negated else f"(?!/){inside}"
