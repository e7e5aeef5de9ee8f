"""The protocol of ``%sky_shell``: one command on a rank's node, and what it prints.

notebook                                  node
BeginCommand                         →    starts the command
InterruptCommand                     →    presses Ctrl-C
                                     ←    CommandOutput
                                     ←    CommandEnded
"""

from __future__ import annotations

from dataclasses import field

from skymagic.wire.codec import Codec, FrozenMessage, WithPayload


class CommandMessage(FrozenMessage):
    """Base of this protocol's messages."""


class BeginCommand(CommandMessage):
    """Start a command."""

    command: str
    """For ``/bin/sh -c``."""
    pid: int = 0
    """The process of a rank, in whose folder the command starts; 0 for the node process's own folder."""
    info: dict[str, object] = field(default_factory=dict)
    """The rank's place (``InstanceInfo.plain()``), for its environment."""
    env: dict[str, str] = field(default_factory=dict)
    """The rank's own variables."""


class InterruptCommand(CommandMessage):
    """The user has pressed the stop button."""


class CommandOutput(CommandMessage, WithPayload):
    """What the command prints, as bytes that follow."""

    nbytes: int


class CommandEnded(CommandMessage):
    """The command has ended, and all that it had printed was sent."""

    status: int
    """Exit code; negative for a signal."""


CODEC: Codec[CommandMessage] = Codec(
    *CommandMessage.__subclasses__(), max_line=1 << 20, max_payload=1 << 20
)
encode, messages = CODEC.encode, CODEC.messages
