"""Pickle streams in pieces, so that what is large need not be copied into one."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

from skymagic.data.store.base import Buffer
from skymagic.data.store.device import DeviceBytes, behind
from skymagic.data.store.store import LARGE
from skymagic.data.values.memory import SMALL


class Buffers:
    """Out-of-band buffers in the order of the pickle; small ones stay in it."""

    def __init__(self) -> None:
        self.kept: list[memoryview | DeviceBytes] = []

    def add(self, buffer: pickle.PickleBuffer) -> bool:
        """For the pickler: True for a buffer that stays in the stream."""
        raw = buffer.raw()
        if (data := behind(raw)) is not None:
            self.kept.append(data)
            return False
        if raw.nbytes < SMALL:
            return True
        self.kept.append(raw)
        return False


class StreamPieces:
    """A file for the pickler to write to, which keeps large byte strings as they are."""

    def __init__(self) -> None:
        self._parts: list[Buffer] = []
        self.write = self._parts.append

    def clear(self) -> None:
        """Begin anew."""
        self._parts.clear()

    def pieces(self) -> tuple[Buffer, ...]:
        """What was written; small parts joined."""
        if len(self._parts) == 1:
            return (self._parts[0],)
        joined: list[Buffer] = []
        small: list[Buffer] = []
        for part in self._parts:
            if len(part) >= LARGE:
                joined += [b"".join(small), part]
                small = []
            else:
                small.append(part)
        return tuple(part for part in (*joined, b"".join(small)) if part)


class Rope(io.RawIOBase):
    """Reads pieces as one stream, without joining them."""

    def __init__(self, pieces: Sequence[Buffer]) -> None:
        self._pieces = [memoryview(piece).cast("B") for piece in pieces]

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        done = 0
        while self._pieces and done < view.nbytes:
            part = self._pieces[0][: view.nbytes - done]
            view[done : done + part.nbytes] = part
            done += part.nbytes
            rest = self._pieces[0][part.nbytes :]
            self._pieces[:1] = [rest] if rest else []
        return done

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            size = sum(piece.nbytes for piece in self._pieces)
        data = bytearray(min(size, sum(piece.nbytes for piece in self._pieces)))
        self.readinto(data)
        return bytes(data)

    def readable(self) -> bool:
        return True
