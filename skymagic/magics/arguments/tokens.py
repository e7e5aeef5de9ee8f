"""The lexer: a line becomes tokens; quotes, comments and a last ``;`` are understood; nothing is evaluated."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Token:
    """A word of the line; a quoted one is never an option."""

    text: str
    quoted: bool = False

    @property
    def is_option(self) -> bool:
        """Whether it starts as an option does, also with a dash that a word processor made; ``-1`` is a value."""
        return not self.quoted and re.match(r"[-–—][^\d.:]", self.text) is not None


def split(line: str) -> tuple[list[Token], list[str]]:
    """(tokens, mistakes) of a line: quotes as in a shell, ``#`` at a token's start ends it, a last ``;`` is dropped.

    A backslash only escapes a blank, a quote, ``#`` or itself, so that paths of Windows stay whole.
    """
    tokens: list[Token] = []
    position, end = 0, len(line)
    while position < end:
        if line[position].isspace():
            position += 1
        elif line[position] == "#":
            break
        else:
            token, position = _token(line, position)
            if token is None:
                return tokens, [f"a quote is not closed: {line[position:].strip()}"]
            tokens.append(token)
    if tokens and not tokens[-1].quoted and tokens[-1].text.endswith(";"):
        last = tokens.pop().text.rstrip(";")
        tokens += [Token(last)] if last else []
    return tokens, []


def _token(line: str, position: int) -> tuple[Token | None, int]:
    """(token, where it ends), or (None, where the quote is that has no end)."""
    text, opened, opens_at = "", "", position
    quoted = line[position] in "'\""
    while position < len(line):
        here, following = line[position], line[position + 1 : position + 2]
        if here == "\\" and opened != "'" and following and (following in "\"'\\#" or following.isspace()):
            text, position = text + following, position + 1
        elif opened:
            text, opened = (text, "") if here == opened else (text + here, opened)
        elif here in "'\"":
            opened, opens_at = here, position
        elif here.isspace():
            break
        else:
            text += here
        position += 1
    return (None, opens_at) if opened else (Token(text, quoted), position)
