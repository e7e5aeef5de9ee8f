"""Standard output and standard error of a rank in one pipe, so that the agent reads them in the order in which they were written.

::

    print, C, child processes    ──▶ fd 1 ──▶ pipe ─┐
    sys.stderr, in frames        ───────────▶ pipe ─┴─▶ the agent: one order
    C, child processes           ──▶ fd 2 ──▶ a pipe of its own

A frame is written at once and is not longer than what the system writes as a whole (PIPE_BUF): other writers' text stays outside.
"""

from __future__ import annotations

import select

MARK = b"\x1b\x00stderr "
HEADER_BYTES = len(MARK) + 5
MOST = select.PIPE_BUF - HEADER_BYTES
"""Bytes of text in a frame."""


def frame(text: bytes | memoryview) -> bytes:
    """Text of standard error for the pipe of standard output: `MOST` bytes of it at most."""
    return MARK + b"%04x\x00" % len(text) + bytes(text)


class FrameReader:
    """Takes apart what comes from such a pipe; what only looks like a frame passes as it is. Pure."""

    def __init__(self) -> None:
        self._left = 0  # bytes of the present frame that have not come
        self._rest = b""  # what may be the beginning of a frame

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """(stream's name, text) in the order in which they were written."""
        parts: list[tuple[str, bytes]] = []
        data, self._rest = self._rest + data, b""
        while data:
            if self._left:
                parts.append(("stderr", data[: self._left]))
                self._left, data = max(0, self._left - len(data)), data[self._left :]
                continue
            start = data.find(MARK)
            start = start if start >= 0 else len(data) - _begun(data)
            if start:
                parts.append(("stdout", data[:start]))
                data = data[start:]
            elif len(data) < HEADER_BYTES:
                self._rest, data = data, b""
            elif (size := _size(data)) is None:
                parts.append(("stdout", data[:1]))
                data = data[1:]
            else:
                self._left, data = size, data[HEADER_BYTES:]
        return parts

    def end(self) -> list[tuple[str, bytes]]:
        """Text that was kept back, at the end of the stream."""
        rest, self._rest = self._rest, b""
        return [("stdout", rest)] if rest else []


def _begun(data: bytes) -> int:
    """How many of the last bytes may be the beginning of a mark."""
    return next(
        (
            size
            for size in range(min(len(MARK) - 1, len(data)), 0, -1)
            if MARK.startswith(data[-size:])
        ),
        0,
    )


def _size(data: bytes) -> int | None:
    """Bytes of the frame that begins here; None where none does."""
    try:
        return int(data[len(MARK) : HEADER_BYTES - 1], 16) if data[HEADER_BYTES - 1] == 0 else None
    except ValueError:
        return None
