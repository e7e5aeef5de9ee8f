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
WAITING_STATES = "SD"
"""States of a Linux thread that sleeps; one that waits for its turn on a busy machine is R."""


@dataclass(frozen=True)
class Look:
    """The main thread at one moment: the frame and the instruction in it, its processor time, whether it sleeps."""

    place: tuple[int, int]
    cpu: float
    asleep: bool


def look() -> Look | None:
    """The main thread now; None if it has no frame."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    if frame is None:
        return None
    return Look((id(frame), frame.f_lasti), stacks.processor_time(main), asleep())


def asleep() -> bool:
    """Whether the kernel says that the main thread sleeps; True where there is no /proc to say so."""
    pid = os.getpid()  # also the number of its main thread
    try:
        status = Path(f"/proc/self/task/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in WAITING_STATES


def waits_in_native_code() -> bool:
    """Called on another thread, when an interrupt has been sent: whether the main thread sleeps through it.

    It must be so at two looks. In between it could have had the interpreter, and would have taken the interrupt if it had been in
    Python, or in one of Python's own waits, which a signal ends.
    """
    one = look()
    time.sleep(LOOK_INTERVAL)
    two = look()
    if one is None or two is None or one.place != two.place:
        return False
    return one.asleep and two.asleep and two.cpu - one.cpu < LOOK_INTERVAL / 10
