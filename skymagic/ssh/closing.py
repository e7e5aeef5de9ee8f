"""Channels that are closed: nothing more is sent to them.

A channel of paramiko decides under its lock what to send, and sends it without: when a process ends, the answer to that (CLOSE) can
overtake what another thread is about to send (EOF, data). OpenSSH ends the whole connection at such a packet
(``ieof packet referred to nonexistent channel``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import paramiko


def send_nothing_after_close(transport: paramiko.Transport) -> None:
    """Have a transport drop what comes for a channel after its CLOSE; before it is started."""
    from paramiko.common import (
        MSG_CHANNEL_CLOSE,
        MSG_CHANNEL_DATA,
        MSG_CHANNEL_EOF,
        MSG_CHANNEL_EXTENDED_DATA,
        MSG_CHANNEL_OPEN_SUCCESS,
    )

    made: Any = transport
    send, open_channel = made._send_message, made.open_channel
    closed: set[bytes] = set()
    """The host's numbers of channels, as they stand in packets (RFC 4254, 5.3)."""

    def send_message(data: Any) -> None:
        """Called for one packet after the other: paramiko holds a lock around it."""
        packet = data.asbytes()
        kind, number = packet[0], packet[1:5]
        if kind in (MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA, MSG_CHANNEL_EOF) and number in closed:
            return
        if kind == MSG_CHANNEL_CLOSE:
            closed.add(number)
        elif kind == MSG_CHANNEL_OPEN_SUCCESS:  # one that the host has opened
            closed.discard(number)
        send(data)

    def opened(*args: Any, **kwargs: Any) -> paramiko.Channel:
        """The host may give a number again."""
        channel: paramiko.Channel = open_channel(*args, **kwargs)
        closed.discard(channel.remote_chanid.to_bytes(4, "big"))
        return channel

    made._send_message, made.open_channel = send_message, opened
