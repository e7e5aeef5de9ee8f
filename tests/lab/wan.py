"""A wire between two interfaces with a delay, a rate and losses: what ``tc netem`` does, where the kernel lacks it.

``python wan.py IF_A IF_B delay_ms=25 rate_mbit=100``; further settings come on standard input, one line each, and are
answered with ``ok``. The delay is for one way.
"""

from __future__ import annotations

import collections
import random
import select
import socket
import sys
import time

SETTINGS = {"delay_ms": 0.0, "rate_mbit": 0.0, "loss": 0.0, "limit_kb": 4096.0}
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, ETH_P_ALL = 263, 15, 23, 3
HEADER = 10
"""Bytes before each frame: with them its checksum may stay unfinished, and frames of 64 KB cross whole."""


class Way:
    """One direction: frames on their way, each with the time at which it arrives."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.frames: collections.deque[tuple[float, bytes]] = collections.deque()
        self.free = 0.0
        self.held = 0

    def take(self, frame: bytes, now: float) -> None:
        """Put a frame on the way, unless it is lost."""
        size = len(frame) - HEADER
        if random.random() < SETTINGS["loss"] or self.held > SETTINGS["limit_kb"] * 1024:
            return
        rate = SETTINGS["rate_mbit"] * 1e6 / 8
        self.free = max(now, self.free) + (size / rate if rate else 0.0)
        self.frames.append((self.free + SETTINGS["delay_ms"] / 1000, frame))
        self.held += size

    def deliver(self, now: float) -> None:
        """Hand over the frames whose time has come."""
        while self.frames and self.frames[0][0] <= now:
            _, frame = self.frames.popleft()
            self.held -= len(frame) - HEADER
            try:
                self.end.send(frame)
            except OSError:
                pass


def opened(interface: str) -> socket.socket:
    """A socket that takes and gives whole frames."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    sock.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, buffer, 32 << 20)
    sock.bind((interface, ETH_P_ALL))
    sock.setblocking(False)
    return sock


def settle(words: list[str]) -> None:
    """Take settings of the form ``delay_ms=25``."""
    for word in words:
        key, _, value = word.partition("=")
        if key not in SETTINGS:
            raise SystemExit(f"no setting {key!r}")
        SETTINGS[key] = float(value)


def main() -> None:
    """Carry frames until standard input ends."""
    settle(sys.argv[3:])
    first, second = opened(sys.argv[1]), opened(sys.argv[2])
    ways = {first: Way(second), second: Way(first)}
    print("ok", flush=True)
    while True:
        now = time.monotonic()
        for way in ways.values():
            way.deliver(now)
        due = [way.frames[0][0] for way in ways.values() if way.frames]
        wait = max(0.0, min(due) - now) if due else None
        readable, _, _ = select.select([*ways, sys.stdin], [], [], wait)
        if sys.stdin in readable:
            line = sys.stdin.readline()
            if not line:
                return
            settle(line.split())
            print("ok", flush=True)
        for end, way in ways.items():
            if end in readable:
                receive(end, way)


def receive(end: socket.socket, way: Way) -> None:
    """Take what waits at one end, but not for ever."""
    for _ in range(64):
        try:
            way.take(end.recv(70_000), time.monotonic())
        except OSError:
            return


if __name__ == "__main__":
    main()
