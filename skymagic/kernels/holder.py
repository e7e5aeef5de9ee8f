"""Processes by a *holder*: where a scheduler ends, with each of its steps, whatever that has started, one process of each job that it started
itself starts what is to live as long as the job. It reads names from a FIFO, and runs the file of that name in its folder::

    a step ── folder/NAME (sh), then NAME to folder/start ──▶ holder ──▶ sh folder/NAME ──▶ the process
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence

from skymagic.wire.codec import write_all
from skymagic.wire.processes import HOLDER
from skymagic.wire.record import why_unsafe

HOLDER_TIMEOUT = 30.0
"""Seconds that a holder may take to be there, and then to start what was ordered."""
POLL = 0.02


def folder() -> str:
    """This step's holder's; "" where what is started outlives the step by itself."""
    return os.environ.get(HOLDER, "")


def order(place: str, name: str, words: Sequence[str], text: str) -> float:
    """Have the holder in this folder run ``python words`` with this text as its input; until when to wait for it (monotonic seconds).

    Raises:
        OSError: there is no holder, or it is not this user's.
    """
    deadline = time.monotonic() + HOLDER_TIMEOUT
    fifo = os.path.join(place, "start")
    while not os.path.exists(fifo):
        if time.monotonic() > deadline:
            raise FileNotFoundError(f"the job's holder is not on this node ({place}): has the job ended?")
        time.sleep(POLL)
    if (reason := why_unsafe(place)) is not None:
        raise PermissionError(f"{place}: {reason}")
    file = os.open(os.path.join(place, name), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    write_all(file, script(words, text, os.environ).encode())
    os.close(file)
    names = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)  # ENXIO where the holder has ended
    write_all(names, f"{name}\n".encode())
    os.close(names)
    return deadline


def script(words: Sequence[str], text: str, environ: Mapping[str, str]) -> str:
    """sh by which a holder runs this Python with these words, in the environment of who orders it; pure.

    Args:
        text: what the process reads from its input; no line of it is END.
    """
    kept = {key: environ[key] for key in ("PATH", "PYTHONPATH", "VIRTUAL_ENV") if key in environ}
    settings = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in kept.items())
    return f"{settings}exec {shlex.join([sys.executable, *words])} <<'END'\n{text.rstrip()}\nEND\n"
