"""How processes ended, in words."""

from __future__ import annotations

import signal

from skymagic.wire import agent as wire


def describe(exited: wire.RankExited) -> str:
    """How a rank's process ended, in words."""
    return status_words(exited.status, exited.out_of_memory)


def status_words(status: int | None, out_of_memory: bool = False) -> str:
    """A process's exit code or signal, in words."""
    if status is None:
        return "nobody could tell how"
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hints = {
        "SIGSEGV": "a segmentation fault in native code",
        "SIGBUS": "often a full /dev/shm",
        "SIGABRT": "native code called abort()",
        "SIGKILL": "the machine ran out of memory"
        if out_of_memory
        else "killed from outside, or out of memory",
    }
    return f"{name}: {hints[name]}" if name in hints else name
