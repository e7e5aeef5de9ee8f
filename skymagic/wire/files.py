"""Headers and bytes on a pair of streams: a JSON line ``[name, values, n]``, and after it `n` bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

STEP = 1 << 20
"""Most bytes after one header, and most that are written at once."""
LONGEST = 1 << 30
"""Longest header; the listing of a million files is a tenth of it."""
Buffer = bytes | bytearray | memoryview


class Ended(Exception):
    """The other end is gone."""


@dataclass(frozen=True)
class Frame:
    """A header, and the bytes that came with it."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    body: memoryview = field(default_factory=lambda: memoryview(b""))


def packed(name: str, values: dict[str, Any] | None = None, body: Buffer = b"") -> bytes:
    """A frame as bytes."""
    return json.dumps([name, values or {}, len(body)], separators=(",", ":")).encode() + b"\n" + body


def joined(frames: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in fewer pieces: small ones are put together."""
    waiting: list[bytes] = []
    size = 0
    for frame in frames:
        if size + len(frame) > STEP and waiting:
            yield b"".join(waiting)
            waiting, size = [], 0
        waiting.append(frame)
        size += len(frame)
    if waiting:
        yield b"".join(waiting)


class Frames:
    """Reads frames from a stream.

    Args:
        read: bytes that have come, at least one; b"" at the end.
    """

    def __init__(self, read: Callable[[], bytes]) -> None:
        self._read = read
        self._have = bytearray()

    def next(self) -> Frame:
        """The next frame.

        Raises:
            Ended: the stream ended.
            ValueError: this is not a frame: something else speaks there.
        """
        looked = 0
        while (end := self._have.find(b"\n", looked)) < 0:
            looked = len(self._have)
            if looked > LONGEST:
                raise ValueError("a header without an end")
            self._more()
        name, values, size = json.loads(self._take(end + 1))
        if not isinstance(name, str) or not isinstance(values, dict) or not 0 <= size <= STEP:
            raise ValueError("not a header")
        while len(self._have) < size:
            self._more()
        return Frame(name, values, memoryview(self._take(size)))

    def _more(self) -> None:
        data = self._read()
        if not data:
            raise Ended("the other end is gone")
        self._have += data

    def _take(self, count: int) -> bytes:
        with memoryview(self._have) as view:
            taken = bytes(view[:count])
        del self._have[:count]
        return taken
