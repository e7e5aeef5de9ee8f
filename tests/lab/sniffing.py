"""All packets on a machine's loopback interface, as root, in search of what must not be in them.

::

    with heard(tmp_path) as packets:
        ...
    assert not packets.have(b"the secret")  # what asks for it may be heard itself: look for it afterwards
"""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RECEIVE_BUFFER = 64 << 20
SO_RCVBUFFORCE = 33
ALL_PROTOCOLS = 3
OUTGOING = 4


class Packets:
    """What was heard."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def have(self, text: bytes) -> bool:
        """Return True if a packet has this text."""
        with (
            open(self._file, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return content.find(text) >= 0


@contextmanager
def heard(folder: Path) -> Iterator[Packets]:
    """Listen meanwhile.

    Args:
        folder: where the packets are kept.
    """
    file = folder / "packets"
    listening = subprocess.Popen(
        [sys.executable, "-P", __file__, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert listening.stdin is not None
    assert listening.stdout is not None
    try:
        assert listening.stdout.read(1) == b"\n"
        yield Packets(file)
    finally:
        listening.terminate()
        listening.wait()
        listening.stdin.close()
        listening.stdout.close()


def main(path: str) -> None:
    """Keep the packets of the loopback interface in a file, until this process is ended."""
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    packets.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER)
    packets.bind(("lo", 0))
    with open(path, "wb", buffering=0) as file:
        print(flush=True)
        while True:
            data, address = packets.recvfrom(1 << 17)
            if address[2] == OUTGOING:  # on this interface each comes twice
                file.write(data)


if __name__ == "__main__":
    main(sys.argv[1])
