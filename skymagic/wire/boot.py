"""The boot id: tells one boot of a machine from the next, and machines from each other."""

from __future__ import annotations

import contextlib
import socket
import sys


def boot_id() -> str:
    """Equal for all processes of one running system; changes when it boots. Where the system has none: its name."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return f"{socket.gethostname()} {sys.platform}"
