"""What carries a protocol: a pair of byte streams to a process, on this machine or another, and whole reads and writes on one."""

from __future__ import annotations

import os
from typing import Protocol


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
