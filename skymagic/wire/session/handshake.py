"""How a connection to a daemon begins: the notebook says who it is, the node answers; one line each way, then frames."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

MARK = b"\x01skymagic-gate:"
"""Begins the answer: a login shell may print before it."""
LONGEST = 1 << 16
"""Bytes that a greeting, or a login shell, may take."""


@dataclass(frozen=True)
class Hello:
    """The notebook's line."""

    session: str = field(repr=False)
    """A word that only this notebook and its daemon know."""
    resume: bool
    """Whether the daemon must be there already."""
    attempt: int
    """Counts the connections of a session: a newer one takes the place of an older."""
    received: int
    """Frames that the notebook has."""

    def encode(self) -> bytes:
        """The line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def decode(line: bytes) -> Hello:
        """From a line.

        Raises:
            ValueError: it is no greeting.
        """
        try:
            return Hello(**json.loads(line))
        except TypeError as problem:
            raise ValueError(f"not a greeting of this skymagic: {problem}") from None


@dataclass(frozen=True)
class Answer:
    """The node's line."""

    boot: str
    """A word that changes when the machine starts anew."""
    received: int = 0
    """Frames that the daemon has."""
    error: str = ""
    """Why there is no connection."""
    gone: bool = False
    """Whether it is for good."""

    def encode(self) -> bytes:
        """The line."""
        return MARK + json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def find(data: bytes) -> tuple[Answer, bytes] | None:
        """The answer in what has come so far, and the bytes after it; None if it has not come yet.

        Raises:
            ValueError: it is no answer, or none came in `LONGEST` bytes.
        """
        _, mark, rest = data.partition(MARK)
        line, end, frames = rest.partition(b"\n")
        if mark and end:
            try:
                return Answer(**json.loads(line)), frames
            except TypeError as problem:
                raise ValueError(f"not an answer of this skymagic: {problem}") from None
        if len(data) > LONGEST:
            raise ValueError(f"no answer, but {data[:200].decode(errors='replace')!r}…")
        return None
