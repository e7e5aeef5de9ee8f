"""What is shown of text that may hold secrets: passwords in URLs, values of variables and what follows ``--token`` are masked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "****"
MIN_LENGTH = 6
"""Values shorter than this are no secrets: to mask each `1` would make a text unreadable."""
_IN_URL = re.compile(
    r"(?<=://)[^/\s]+@"
)  # up to the last @, as pip reads it: a password may hold one
_NAMED = re.compile(
    r"""((?:^|[^a-z])(?:token|secret|passw(?:or)?d|api[-_]?key|access[-_]?key)["']?(?:\s*[=:]\s*|\s+)["']?)(?![-$*])[^\s"'&;|]+""",
    re.IGNORECASE,
)
_TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_SECRET_NAME = re.compile(r"token|secret|passw|credential|key", re.IGNORECASE)


def without_colours(text: str) -> str:
    """`text` without a terminal's sequences, which are no text and must not be cut in half."""
    return _TERMINAL.sub("", text)


def masked(text: str) -> str:
    """`text` without what URLs hold before their @."""
    return _IN_URL.sub(f"{MASK}@", text)


def masked_command(text: str, values: Iterable[str] = ()) -> str:
    """A command, or what it printed: also without `values`, and without what follows words like ``--token``."""
    for value in sorted(
        {value for value in values if len(value) >= MIN_LENGTH}, key=len, reverse=True
    ):
        text = text.replace(value, MASK)
    return _NAMED.sub(rf"\g<1>{MASK}", masked(text))


def secret_values(names: Iterable[str], variables: Mapping[str, str]) -> frozenset[str]:
    """The values among `variables` of `names`, and of those whose names say that they are secret, as HF_TOKEN does."""
    stated = frozenset(names)
    return frozenset(
        value for name, value in variables.items() if name in stated or is_secret_name(name)
    )


def is_secret_name(name: str) -> bool:
    """Whether the name of a variable or an option says that its value is secret, as HF_TOKEN does."""
    return bool(_SECRET_NAME.search(name))
