"""Text from other machines, made safe to print in a terminal."""

from __future__ import annotations

import re
import unicodedata
from typing import TextIO

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def sanitized(text: str) -> str:
    r"""Return text of several lines that no terminal interprets.

    Line ends and tabs stay, and colours are dropped. Every other unprintable character is escaped
    visibly (``\\x1b``): carriage returns, escape sequences, C1 controls, and the bidirectional
    controls that reorder the text.

    Use it for everything from another machine that is not the output of the user's own cell:
    errors, notes, names, progress. Sanitizing twice changes nothing.
    """
    if "\n" not in text and text.isprintable():
        return text
    # A terminal ends lines with CR LF. A CR alone would overwrite the line, and is escaped below.
    text = _COLOUR.sub("", text).replace("\r\n", "\n")
    return "".join(letter if letter in "\n\t" else _visible(letter) for letter in text)


def sanitized_line(text: str) -> str:
    """Return text on one line that no terminal interprets.

    Like `sanitized`, but line ends, tabs and colours are escaped as well.
    """
    return text if text.isprintable() else "".join(map(_visible, text))


def print_sanitized(text: str, file: TextIO | None = None) -> None:
    """Print text that is not the output of a cell, on standard output by default."""
    print(sanitized(text), file=file, flush=True)


def _visible(letter: str) -> str:
    # Blanks other than U+0020 do not count as printable, but occur in words of many languages.
    if letter.isprintable() or unicodedata.category(letter) == "Zs":
        return letter
    return letter.encode("unicode_escape").decode()
