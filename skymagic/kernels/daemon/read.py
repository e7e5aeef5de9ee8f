"""Read from a node's agent: ``python -m skymagic.kernels.daemon.read NAME`` relays between its standard streams and the agent's socket for readers."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress

from skymagic.kernels.daemon import rundir
from skymagic.kernels.daemon.attach import relay


def main(name: str) -> int:
    """Relay until either end closes."""
    try:
        found = rundir.find(name)
        if found is None:
            print(f"no pool's agent {name} is here: it has ended", file=sys.stderr)
            return 1
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(found.readers)
    except (OSError, rundir.RunDirectoryError) as problem:
        print(f"the agent {name} does not serve readers: {problem}", file=sys.stderr)
        return 1
    with suppress(OSError):
        relay(sock)
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1]))
