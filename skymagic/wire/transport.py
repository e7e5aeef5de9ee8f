"""What carries a protocol: a pair of byte streams to a process, on this machine or another."""

from __future__ import annotations

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
