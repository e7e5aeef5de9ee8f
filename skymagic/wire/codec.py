"""Message codec of all protocols: lines of JSON, optionally followed by raw bytes.

    ["Kind",{"field":value,…}]⏎                   a message
    ["Kind",{"field":value,…,"nbytes":n}]⏎ n bytes  a message with a payload (`WithPayload`)

JSON rather than pickle: input can only become one of the protocol's types, holding plain values and
the dataclasses that its fields are annotated with; `wire.typed` checks both.
Lines rather than length prefixes, because a login shell may print lines before the first message.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, dataclass_transform

from skymagic.wire.typed import fields_of, plain, reader

CHUNK = 1 << 20
"""Bytes of a value or a file that are hashed, compared and, in a copy of files, sent together."""

M = TypeVar("M")
# C code calls `fields_of` for nested dataclasses only
_to_json = json.JSONEncoder(separators=(",", ":"), default=fields_of).encode


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class FrozenMessage:
    """Base of a protocol's messages; makes each subclass a dataclass, which mypy treats as frozen.

    The dataclasses are not really frozen: each process creates all classes of its protocol at
    startup, and a frozen one takes three times as long to create.
    """

    def __init_subclass__(cls) -> None:
        # `dataclass` compiles each method that it generates, at the start of each process. The one
        # `__eq__` below serves all messages.
        dataclass(eq=False)(cls)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(self) == vars(other)


class WithPayload:
    """Base of messages followed by `nbytes` raw bytes."""

    nbytes: int


class Codec(Generic[M]):
    """Encoder and decoder for the messages of one protocol.

    Args:
        kinds: the protocol's dataclasses.
        max_line: length in bytes of the longest line accepted.
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

    def encode(self, message: M, payload: bytes = b"") -> bytes:
        """Return the message as one line, newline included, followed by its payload."""
        # JSON writes a newline inside a text as \n, so the first one ends the message
        line = _to_json([type(message).__name__, vars(message)]).encode() + b"\n"
        return line + payload if payload else line

    def decode(self, line: bytes) -> M:
        """Return the message in a line.

        Raises:
            ValueError: the line is not a message of this version, or `check` refuses it.
        """
        try:
            return self._read(json.loads(line))
        # RecursionError: brackets nested a thousand deep, which only a hostile sender writes
        except (KeyError, TypeError, ValueError, RecursionError) as problem:
            raise ValueError(
                f"not a message of this skymagic: {line[:200]!r} ({problem})"
            ) from None

    def to_plain(self, message: M) -> list[Any]:
        """Return the message as the JSON value of its line, for carriers with their own encoder."""
        return [type(message).__name__, plain(message)]

    def from_plain(self, value: Any) -> M:
        """Return the message that `to_plain` has converted.

        Raises:
            ValueError: the value is not a message of this version, or `check` refuses it.
        """
        try:
            return self._read(value)
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(
                f"not a message of this skymagic: {value!r:.200} ({problem})"
            ) from None

    def _read(self, value: Any) -> M:
        name, values = value
        message: M = reader(self._kinds[name])(values)
        # before anybody allocates memory for the payload
        if not 0 <= payload_size(message) <= self._max_payload:
            raise ValueError("not the size of a payload")
        self._check(message)
        return message

    def decoder(self, *, noise: bool = False) -> Decoder[M]:
        """Return a decoder that cuts a stream of bytes into messages; `noise` as in `Decoder`."""
        return Decoder(self, noise)

    def first(self, data: bytes, *, noise: bool = False) -> tuple[M, bytes] | None:
        """Return the first message in the data and the bytes after it, or None if it is incomplete.

        Raises:
            ValueError: it is not a message, or none was found in `max_line` bytes.
        """
        decoder, start = self.decoder(noise=noise), 0
        # Decode line by line, because everything behind the first message belongs to another
        # decoder.
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
        """Yield the messages of a stream, each with its whole payload.

        Args:
            read: returns the bytes available, at least one; b"" at the end.

        Raises:
            EOFError: the stream ended.
            ValueError: a line is not a message.
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
                # The payload is complete, or there is none.
                if not missing:
                    yield message, pieces[0] if len(pieces) == 1 else b"".join(pieces)
        raise EOFError("the other end is gone")


def payload_size(message: Any) -> int:
    """Return the number of bytes that follow a message."""
    if not isinstance(message, WithPayload):
        return 0
    return message.nbytes if isinstance(message.nbytes, int) else -1


class Decoder(Generic[M]):
    """Cut a stream of bytes into messages and the raw bytes behind them.

    With `noise`, lines before the first message that do not look like messages are skipped: a login
    shell may print anything.
    """

    def __init__(self, codec: Codec[M], noise: bool = False) -> None:
        self._codec, self._noise = codec, noise
        self._line: list[bytes] = []
        self._size = 0
        self._missing = 0  # bytes of a payload still to be read

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that these bytes complete, and views of payloads as they arrive.

        Raises:
            ValueError: a line is too long or not a message.
        """
        view, start = memoryview(data), 0
        while start < len(data):
            # Payload bytes are handed out as views, without waiting for the rest.
            if self._missing:
                piece = view[start : start + self._missing]
                self._missing -= len(piece)
                start += len(piece)
                yield piece
                continue
            # Pieces are joined once the line is complete: to append each one to the line so far
            # would copy a line of a gigabyte a thousand times.
            end = data.find(b"\n", start)
            self._line.append(data[start : end if end >= 0 else len(data)])
            self._size += len(self._line[-1])
            if self._size > self._codec.max_line:
                raise ValueError(f"a line is longer than {self._codec.max_line} bytes")
            if end < 0:
                return
            line, self._line, self._size = b"".join(self._line), [], 0
            start = end + 1
            # anything else before the first message is output of a login shell
            # (an empty line is skipped: a sender may begin with one, to end the shell's last line)
            if line.startswith(b'["') or (line and not self._noise):
                message = self._codec.decode(line)
                # From the first message on, every line has to be one.
                self._noise = False
                self._missing = payload_size(message)
                yield message


# -- what carries a protocol -----------------------------------------------------------------------


class Transport(Protocol):
    """A pair of byte streams to an agent, made by a provider."""

    def read(self) -> bytes:
        """Return the bytes available, at least one; b"" at the end.

        Called by the link's thread only.
        """

    def write(self, data: bytes | memoryview) -> None:
        """Send all of these bytes; raise OSError if the other end is gone."""

    def complaint(self) -> str:
        """Return what the other end printed before it could speak the protocol (a traceback, a
        shell's error), or "".
        """

    def close(self) -> None:
        """Close the link and wait until the agent has ended, or end it. Safe to call twice."""


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """Call `os.write` until everything is written, because one call may write only a part."""
    # In bytes, as `os.write` counts: a slice of a view counts the items of its buffer.
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def read_line(descriptor: int) -> bytes:
    """Read one line, newline included. Exits the process if the stream ends first.

    Reads byte by byte, because everything after the line belongs to another reader.
    """
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            raise SystemExit(0)
        line += byte
    return line
