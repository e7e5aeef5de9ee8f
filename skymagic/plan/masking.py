"""Mask secrets in text: passwords in URLs, values of variables, and arguments of ``--token``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "****"
MIN_LENGTH = 6
"""Shorter values do not count as secrets.

Masking each `1` would make a text unreadable.
"""
# up to the last @, as in pip: a password may contain one
_IN_URL = re.compile(r"(?<=://)[^/\s]+@")
_NAMED = re.compile(
    r"""((?:^|[^a-z])(?:token|secret|passw(?:or)?d|api[-_]?key|access[-_]?key)["']?"""
    r"""(?:\s*[=:]\s*|\s+)["']?)(?![-$*])[^\s"'&;|]+""",
    re.IGNORECASE,
)
_TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_SECRET_NAME = re.compile(r"token|secret|passw|credential|key", re.IGNORECASE)


def without_colours(text: str) -> str:
    """Return `text` without a terminal's control sequences.

    They are not text, and must not be cut in half.
    """
    return _TERMINAL.sub("", text)


def masked(text: str) -> str:
    """Return `text` without the part of URLs before their @."""
    return _IN_URL.sub(f"{MASK}@", text)


def masked_command(text: str, values: Iterable[str] = ()) -> str:
    """Mask a command or its output.

    Also remove `values`, and the arguments of words like ``--token``.
    """
    for value in sorted(
        {value for value in values if len(value) >= MIN_LENGTH}, key=len, reverse=True
    ):
        text = text.replace(value, MASK)
    return _NAMED.sub(rf"\g<1>{MASK}", masked(text))


def secret_values(names: Iterable[str], variables: Mapping[str, str]) -> frozenset[str]:
    """Return the values of `names` in `variables`, and of variables with secret names.

    HF_TOKEN is such a name.
    """
    stated = frozenset(names)
    return frozenset(
        value for name, value in variables.items() if name in stated or is_secret_name(name)
    )


def is_secret_name(name: str) -> bool:
    """Return True if the name of a variable or an option marks it as secret, like HF_TOKEN."""
    return bool(_SECRET_NAME.search(name))
