"""The protocol of a terminal on a node: one program on a pseudo-terminal there, its keys and what it prints.

notebook                                  node
StartProgram                         →    starts the program
Typed, Resized                       →
                                     ←    Printed
                                     ←    ProgramEnded
"""

from __future__ import annotations

from dataclasses import field

from skymagic.wire.codec import Codec, FrozenMessage, WithPayload


class TerminalMessage(FrozenMessage):
    """Base of this protocol's messages."""


class StartProgram(TerminalMessage):
    """Start a shell, or one command in one."""

    command: str = ""
    """For ``/bin/sh -c``; "" for the user's own shell, with a prompt."""
    pid: int = 0
    """Of a rank, in whose folder it starts; 0 for the process's own."""
    info: dict[str, object] = field(default_factory=dict)
    """Of that rank (``InstanceInfo.plain()``), for its environment."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables besides, the rank's own."""
    rows: int = 24
    columns: int = 120


class Typed(TerminalMessage, WithPayload):
    """Keys, as bytes that follow."""

    nbytes: int


class Resized(TerminalMessage):
    """The user's window has another size."""

    rows: int
    columns: int


class Printed(TerminalMessage, WithPayload):
    """What it prints, as bytes that follow."""

    nbytes: int


class ProgramEnded(TerminalMessage):
    """It has ended, and all that it had printed was sent."""

    status: int
    """Exit code; negative for a signal."""


CODEC: Codec[TerminalMessage] = Codec(*TerminalMessage.__subclasses__(), max_line=1 << 20, max_payload=1 << 20)
encode, messages = CODEC.encode, CODEC.messages
