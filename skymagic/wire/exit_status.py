"""How a process ended, in words: an exit code, or the signal that killed it and what that often means."""

from __future__ import annotations

import signal

from skymagic.wire import agent as wire

UNFIT = "skymagic: this rank could reply to nobody any more, and has ended"
"""The beginning of the last line that such a rank writes."""


def describe(exited: wire.RankExited) -> str:
    """How a rank's process ended."""
    last = exited.tail.rstrip().rpartition("\n")[2]
    if last.startswith(UNFIT):
        return f"it could reply to nobody any more{last.removeprefix(UNFIT)}"
    return status_words(exited.status, exited.out_of_memory)


def status_words(status: int | None, out_of_memory: bool = False) -> str:
    """An exit status as `subprocess` gives it: an exit code, or negative for a signal; None where it is not known."""
    if status is None:
        return "nobody could tell how"
    if status >= 0:
        return f"exit code {status}"
    name = signal_name(-status)
    hints = {
        "SIGSEGV": "a segmentation fault in native code",
        "SIGBUS": "often a full /dev/shm",
        "SIGABRT": "native code called abort()",
        "SIGKILL": "the machine ran out of memory" if out_of_memory else "killed from outside, or out of memory",
    }
    return f"{name}: {hints[name]}" if name in hints else name


def signal_name(number: int) -> str:
    """ "SIGKILL"; "signal 40" for one without a name, such as the real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
