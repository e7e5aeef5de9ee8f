"""Standard output and error of a rank in one pipe, in the order written.

::

    print, C, child processes    ──▶ fd 1 ──▶ pipe ─┐
    sys.stderr, in frames        ───────────▶ pipe ─┴─▶ the agent: one order
    C, child processes           ──▶ fd 2 ──▶ a separate pipe

A frame is written in one call and is no longer than the system's limit for atomic writes
(PIPE_BUF), so text from other writers never lands inside it.
"""

from __future__ import annotations

import select

# ESC and NUL in a row are no control sequence of a terminal, so text hardly ever contains them.
MARK = b"\x1b\x00stderr "
HEADER_BYTES = len(MARK) + 5  # four hexadecimal digits of the text's size, and a NUL byte
MAX_TEXT_BYTES = select.PIPE_BUF - HEADER_BYTES
"""Maximum number of bytes of text in a frame."""


def frame(text: bytes | memoryview) -> bytes:
    """Return a frame of standard error for the pipe of standard output.

    `text` has at most `MAX_TEXT_BYTES` bytes.
    """
    return MARK + b"%04x\x00" % len(text) + bytes(text)


class FrameReader:
    """Splits the data of standard output's pipe into standard output and error. Does no I/O.

    Data that only resembles a frame counts as standard output.
    """

    def __init__(self) -> None:
        self._left = 0  # bytes of the current frame still to be read
        self._rest = b""  # possibly the start of a frame

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Return (stream's name, text) pairs in the order written."""
        parts: list[tuple[str, bytes]] = []
        data, self._rest = self._rest + data, b""
        while data:
            if self._left:
                parts.append(("stderr", data[: self._left]))
                self._left, data = max(0, self._left - len(data)), data[self._left :]
                continue
            start = data.find(MARK)
            # Without a whole mark, hold back a possible start of one at the end.
            start = start if start >= 0 else len(data) - _partial_mark_length(data)
            if start:
                parts.append(("stdout", data[:start]))
                data = data[start:]
            # The header is incomplete: wait for the rest.
            elif len(data) < HEADER_BYTES:
                self._rest, data = data, b""
            # The mark is not followed by a size: pass on its first byte, and search in the rest.
            elif (size := _size(data)) is None:
                parts.append(("stdout", data[:1]))
                data = data[1:]
            else:
                self._left, data = size, data[HEADER_BYTES:]
        return parts

    def end(self) -> list[tuple[str, bytes]]:
        """Return the text that is held back; called when no more follows."""
        held_back, self._rest = self._rest, b""
        return [("stdout", held_back)] if held_back else []


def _partial_mark_length(data: bytes) -> int:
    """Return how many of the last bytes may be the start of a mark."""
    return next(
        (
            size
            for size in range(min(len(MARK) - 1, len(data)), 0, -1)
            if MARK.startswith(data[-size:])
        ),
        0,
    )


def _size(data: bytes) -> int | None:
    """Return the size of the frame that starts here, or None if there isn't one."""
    try:
        return int(data[len(MARK) : HEADER_BYTES - 1], 16) if data[HEADER_BYTES - 1] == 0 else None
    except ValueError:
        return None
