"""The messages of a session that are JSON: the handshake, one line each way, and what OPEN and EXIT frames carry."""

from __future__ import annotations

from dataclasses import field

from skymagic.wire.codec import Codec, FrozenMessage

LONGEST = 1 << 16
"""Bytes that a request or a reply, or what a login shell prints before it, may take."""
REPLACED = "another notebook has attached in the place of this one"
"""Why a daemon refuses the notebook that it had before."""


class HandshakeRequest(FrozenMessage):
    """Notebook → daemon: who attaches."""

    secret: str = field(repr=False)
    """Known to this user's notebooks and the daemon only."""
    resume: bool
    """Whether the daemon must be there already."""
    attempt: int
    """Counts the connections of a session: a newer one takes the place of an older."""
    received: int
    """Frames that the notebook has."""
    client: str = ""
    """Which notebook it is: the daemon serves one, until another takes its place."""
    takes_over: bool = False
    """Whether it begins a session of its own, in the place of the one that the daemon has; what that had under way is lost."""


class HandshakeReply(FrozenMessage):
    """Daemon, or the attach process when there is no daemon → notebook."""

    boot_id: str
    received: int = 0
    """Frames that the daemon has."""
    error: str = ""
    """Why there is no connection."""
    gone: bool = False
    """Whether it is for good."""


class OpenChannel(FrozenMessage):
    """In an OPEN frame, notebook → daemon: where the node is to connect the channel to."""

    address: str
    port: int


class AgentExit(FrozenMessage):
    """In an EXIT frame, daemon → notebook: how the agent ended, after all that it wrote."""

    status: int
    """Exit code; negative for a signal."""
    stderr: str
    """The end of its standard error."""


REQUEST: Codec[HandshakeRequest] = Codec(HandshakeRequest, max_line=LONGEST)
REPLY: Codec[HandshakeReply] = Codec(HandshakeReply, max_line=LONGEST)
OPEN: Codec[OpenChannel] = Codec(OpenChannel, max_line=LONGEST)
EXIT: Codec[AgentExit] = Codec(AgentExit, max_line=LONGEST)
