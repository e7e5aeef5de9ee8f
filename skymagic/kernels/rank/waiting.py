"""Whether the main thread waits in native code, where Python cannot take an interrupt: in a collective that does not end."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from skymagic.kernels import stacks

LOOK_INTERVAL = 0.05
"""Seconds between two looks at the main thread."""
QUICK_SWITCHES = 2.5
"""After so many of the interpreter's switch intervals (5 ms) a thread that waits for the interpreter has woken up to ask for it."""
WAITING_STATES = "SD"
"""States of a Linux thread that sleeps; one that waits for its turn on a busy machine is R."""


@dataclass(frozen=True)
class Look:
    """The main thread at one moment: the frame and the instruction in it, its processor time, whether it sleeps.

    Attributes:
        switches: how often it has gone to sleep so far; None where there is no /proc to say so.
    """

    place: tuple[int, int]
    cpu: float
    asleep: bool
    switches: int | None


def look() -> Look | None:
    """The main thread now; None if it has no frame."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    if frame is None:
        return None
    state, switches = scheduled()
    return Look((id(frame), frame.f_lasti), stacks.processor_time(main), state in WAITING_STATES, switches)


def scheduled() -> tuple[str, int | None]:
    """(the state of the main thread, how often it has gone to sleep), as the kernel says; sleeping where there is no /proc to say so."""
    pid = os.getpid()  # also the number of its main thread
    try:
        lines = Path(f"/proc/self/task/{pid}/status").read_text().splitlines()
    except OSError:
        return WAITING_STATES[0], None
    found = dict(line.split(":", 1) for line in lines)
    return found["State"].split()[0], int(found.get("voluntary_ctxt_switches", "-1"))


def waits_in_native_code() -> bool:
    """Called on another thread, when an interrupt has been sent: whether the main thread sleeps through it.

    It must be so at two looks. In between it could have had the interpreter, and would have taken the interrupt if it had been in
    Python, or in one of Python's own waits, which a signal ends. A thread that has not woken up once in between does not wait for the
    interpreter either, so that two looks soon after each other are enough; one that wakes up now and then is given longer.
    """
    first, begun = look(), time.monotonic()
    cpu = 0.0
    for interval in (min(QUICK_SWITCHES * sys.getswitchinterval(), LOOK_INTERVAL), LOOK_INTERVAL):
        time.sleep(max(0.0, begun + interval - time.monotonic()))
        last = look()
        if first is None or last is None or first.place != last.place or not (first.asleep and last.asleep):
            return False
        if first.switches is not None and first.switches == last.switches:
            return True
        cpu = last.cpu - first.cpu
    return cpu < LOOK_INTERVAL / 10
