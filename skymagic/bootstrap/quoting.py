"""Shell quoting: for POSIX sh, and for whatever shell a user logs in with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from shlex import quote

MARK = "@sky "
"""Begins each line that our scripts say to us; all other lines are other programs' output."""

TELL = f"tell() {{ printf '{MARK}%s\\n' \"$*\"; }}"
"""A shell function that says such a line."""

_SAFE = re.compile(r"[A-Za-z0-9_./:=@%+-]+")
_PLAIN = re.compile(r"[A-Za-z0-9_./:=@%+ ,~-]")


def assignments(names: Mapping[str, str]) -> list[str]:
    """Lines of sh that give variables their values."""
    return [f"{name}={quote(value)}" for name, value in names.items()]


def any_shell(script: str) -> str:
    """A line of sh, as a command that sh, bash, zsh, fish, csh and tcsh all understand in the same way; it replaces the shell.

    Args:
        script: without single quotes, newlines and exclamation marks; other text goes through `any_shell_word`.
    """
    assert not set(script) & set("'!\n"), script
    return f"exec /bin/sh -c '{script}'"


def any_shell_word(text: str) -> str:
    """`text` as one word within `any_shell`: what any of the shells might read otherwise is written in octal.

    Fish reads backslashes in single quotes, but only before a quote or another backslash. Newlines at the end are lost.
    """
    if _SAFE.fullmatch(text):
        return text
    octal = (char if _PLAIN.match(char) else "".join(f"\\0{byte:03o}" for byte in char.encode()) for char in text)
    return f'"$(printf %b "{"".join(octal)}")"'
