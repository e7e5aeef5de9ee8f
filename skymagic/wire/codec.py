"""The message codec of all protocols, and what carries them: lines of JSON, with raw bytes behind a message where its type says so.

    ["Kind",{"field":value,…}]⏎                   a message
    ["Kind",{"field":value,…,"nbytes":n}]⏎ n bytes  a message with a payload (`WithPayload`)

JSON and no pickle: what comes can become one of the protocol's types, holding plain values, and nothing else. Lines
rather than length prefixes, because a login shell may print lines of its own before the first message.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Protocol, TypeVar, dataclass_transform

M = TypeVar("M")
_to_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class FrozenMessage:
    """Base of a protocol's messages: makes each class below it a dataclass that mypy takes for a frozen one.

    Each process that speaks a protocol makes all of its classes as it starts, and a frozen one takes three times as long to make.
    """

    def __init_subclass__(cls) -> None:
        dataclass(eq=False)(cls)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(self) == vars(other)


class WithPayload:
    """Base of messages that `nbytes` raw bytes follow."""

    nbytes: int


class Codec(Generic[M]):
    """Encodes and decodes the messages of one protocol.

    Args:
        kinds: the dataclasses that the protocol consists of.
        max_line: bytes of the longest line accepted.
        max_payload: most bytes that may follow a message.
        check: raises ValueError for a message whose values must not be trusted.
    """

    def __init__(
        self,
        *kinds: Any,
        max_line: int,
        max_payload: int = sys.maxsize,
        check: Callable[[M], None] = lambda _: None,
    ) -> None:
        self.max_line, self._max_payload, self._check = max_line, max_payload, check
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._tuples = {
            kind.__name__: [one.name for one in fields(kind) if str(one.type).startswith("tuple[")]
            for kind in kinds
        }

    def encode(self, message: M, payload: bytes = b"") -> bytes:
        """The message as one line, newline included, and the bytes that follow it."""
        line = _to_json([type(message).__name__, vars(message)]).encode() + b"\n"
        return line + payload if payload else line

    def decode(self, line: bytes) -> M:
        """The message that a line holds.

        Raises:
            ValueError: the line is no message of this version, or `check` refuses it.
        """
        try:
            kind, values = json.loads(line)
            for name in self._tuples[kind]:
                if name in values:
                    values[name] = tuple(values[name])
            message: Any = self._kinds[kind](**values)
            if not 0 <= payload_size(message) <= self._max_payload:
                raise ValueError("not the size of a payload")
            self._check(message)
        except (KeyError, TypeError, ValueError, RecursionError) as problem:
            raise ValueError(
                f"not a message of this skymagic: {line[:200]!r} ({problem})"
            ) from None
        return message  # type: ignore[no-any-return]

    def decoder(self, *, noise: bool = False) -> Decoder[M]:
        """Cuts a stream of bytes into messages; `noise` as in `Decoder`."""
        return Decoder(self, noise)

    def first(self, data: bytes, *, noise: bool = False) -> tuple[M, bytes] | None:
        """The first message in what has come so far, and the bytes after it; None if it has not come yet.

        Raises:
            ValueError: it is no message, or none came in `max_line` bytes.
        """
        decoder, start = self.decoder(noise=noise), 0
        while end := data.find(b"\n", start) + 1:
            for message in decoder.feed(data[start:end]):
                return message, data[end:]
            start = end
        if len(data) > self.max_line:
            raise ValueError(f"no answer, but {data[:200].decode(errors='replace')!r}…")
        return None

    def messages(
        self, read: Callable[[], bytes], *, noise: bool = False
    ) -> Iterator[tuple[M, bytes | memoryview]]:
        """Messages of a stream, each with its whole payload.

        Args:
            read: bytes that have come, at least one; b"" at the end.

        Raises:
            EOFError: the stream ended.
            ValueError: a line is no message.
        """
        decoder = self.decoder(noise=noise)
        message: Any = None
        pieces: list[memoryview] = []
        missing = 0
        while data := read():
            for item in decoder.feed(data):
                if isinstance(item, memoryview):
                    pieces.append(item)
                    missing -= len(item)
                else:
                    message, pieces, missing = item, [], payload_size(item)
                if not missing:
                    yield message, pieces[0] if len(pieces) == 1 else b"".join(pieces)
        raise EOFError("the other end is gone")


def payload_size(message: Any) -> int:
    """Bytes that follow a message."""
    if not isinstance(message, WithPayload):
        return 0
    return message.nbytes if isinstance(message.nbytes, int) else -1


class Decoder(Generic[M]):
    """Cuts a stream of bytes into messages and the raw bytes behind them.

    With `noise` it skips lines that do not look like messages until the first message: a login shell may print what it likes.
    """

    def __init__(self, codec: Codec[M], noise: bool = False) -> None:
        self._codec, self._noise = codec, noise
        self._line: list[bytes] = []
        self._size = 0
        self._missing = 0  # bytes of a payload that have not come

    def feed(self, data: bytes) -> Iterator[Any]:
        """Messages that are complete with these bytes, and views of payloads as far as they have come.

        Raises:
            ValueError: a line is too long or no message.
        """
        view, start = memoryview(data), 0
        while start < len(data):
            if self._missing:
                piece = view[start : start + self._missing]
                self._missing -= len(piece)
                start += len(piece)
                yield piece
                continue
            end = data.find(b"\n", start)
            self._line.append(data[start : end if end >= 0 else len(data)])
            self._size += len(self._line[-1])
            if self._size > self._codec.max_line:
                raise ValueError(f"a line is longer than {self._codec.max_line} bytes")
            if end < 0:
                return
            line, self._line, self._size = b"".join(self._line), [], 0
            start = end + 1
            if line.startswith(b'["') or (line and not self._noise):
                message = self._codec.decode(line)
                self._noise = False
                self._missing = payload_size(message)
                yield message


# -- what carries a protocol -----------------------------------------------------------------------


class Transport(Protocol):
    """A pair of byte streams to an agent, made by a provider."""

    def read(self) -> bytes:
        """Bytes that have come, at least one; b"" at the end. Called by the link's thread only."""

    def write(self, data: bytes | memoryview) -> None:
        """Send all of these bytes; raises OSError when the other end is gone."""

    def complaint(self) -> str:
        """What the other end said before it could speak the protocol: a traceback, a shell's error; else ""."""

    def close(self) -> None:
        """Close the link and wait until the agent has ended (or end it); twice is safe."""


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """`os.write` until everything is written: it may write a part only."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def read_line(descriptor: int) -> bytes:
    """One line, newline included; read byte by byte, for what follows belongs to another reader. Ends the process at an early end."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            raise SystemExit(0)
        line += byte
    return line
