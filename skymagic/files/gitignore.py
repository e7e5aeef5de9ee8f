"""The patterns of .gitignore as git matches them: gitignore(5), and wildmatch.c and dir.c of git where the manual is short.

pathspec cannot take its place: its version 1.1.1 reads ``[[:upper:]]*`` and ``a**/a`` otherwise than git.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_CLASSES = {
    "alnum": r"a-zA-Z0-9", "alpha": r"a-zA-Z", "blank": r" \t", "cntrl": r"\x00-\x1f\x7f", "digit": r"0-9", "lower": r"a-z",
    "graph": r"\x21-\x7e", "print": r"\x20-\x7e", "punct": r"!-/:-@\[-`{-~", "space": r"\s", "upper": r"A-Z", "xdigit": r"0-9a-fA-F",
}  # fmt: skip
_NEVER = "(?!)"


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
    pattern = pattern[plain.end() :]
    found, position = re.escape(plain[0]), 0
    while position < len(pattern):
        letter = pattern[position]
        if letter == "*":
            piece, position = _stars(pattern, position)
        elif letter == "[":
            piece, position = _bracket(pattern, position)
        elif letter == "?":
            piece, position = "[^/]", position + 1
        else:
            position += letter == "\\"
            piece = re.escape(pattern[position]) if position < len(pattern) else _NEVER
            position += 1
        found += piece
    return found


def _stars(pattern: str, start: int) -> tuple[str, int]:
    end = start
    while end < len(pattern) and pattern[end] == "*":
        end += 1
    alone = (start == 0 or pattern[start - 1] == "/") and (end == len(pattern) or pattern[end] == "/")
    if end - start == 1 or not alone:
        return "[^/]*", end
    return (".*", end) if end == len(pattern) else ("(?:.*/)?", end + 1)


def _bracket(pattern: str, start: int) -> tuple[str, int]:
    """A class of letters; one that is never closed matches nothing."""
    position = start + 1
    negated = pattern[position : position + 1] in ("!", "^") and position < len(pattern)
    position += negated
    first, body = position, ""
    while position < len(pattern) and (pattern[position] != "]" or position == first):
        known = re.match(r"\[:(\w+):\]", pattern[position:])
        if known:
            body += _CLASSES.get(known[1], "")
            position += known.end()
            continue
        low, position = _letter(pattern, position)
        if pattern[position : position + 1] == "-" and pattern[position + 1 : position + 2] not in ("", "]"):
            high, position = _letter(pattern, position + 1)
            body += f"{re.escape(low)}-{re.escape(high)}" if low <= high else re.escape(low)
        else:
            body += re.escape(low)
    if position >= len(pattern):
        return _NEVER, position
    inside = f"[{body}]" if body else _NEVER
    return f"(?!/)(?!{inside})." if negated else f"(?!/){inside}", position + 1


def _letter(pattern: str, position: int) -> tuple[str, int]:
    """A letter of a class, and where the next one is."""
    position += pattern[position] == "\\" and position + 1 < len(pattern)
    return pattern[position], position + 1
