"""Interrupts of a rank: they fall into cells alone, for what tidies up after these must not be torn; and whether the main thread waits in native
code, where Python cannot take one: in a collective that does not end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from skymagic.kernels import stacks
from skymagic.kernels.rank import gpu
from skymagic.runtime import interruption, rendezvous
from skymagic.wire.order import ON_GPU

IMPORT_RETRY_SECONDS = 0.05
"""Seconds after which an interrupt that came during an import is tried again."""


def importing(frame: FrameType | None) -> bool:
    """Whether this stack is inside an import."""
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename.startswith(
            "<frozen importlib"
        ):
            return True
        frame = frame.f_back
    return False


class Interrupts:
    """What SIGINT does to the order that a rank carries out."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.allowed = False  # whether one may fall now: a cell runs
        self.fallen = False  # whether one has fallen into this order's cell
        self.falls = 0  # how many have fallen into cells of this rank
        self.stopped_at: list[dict[str, Any]] = []  # where
        self.awaited: asyncio.Task[Any] | None = None  # the cell that runs, if it awaits something
        self._heard = self._repeated = False
        """Whether an interrupt of this order has come to Python, and whether it was sent once more to a rank that waits."""
        self._order_count = (
            0  # counts orders, so that what belongs to one does not fall into the next
        )

    def begin(self) -> None:
        """Note that another order is carried out."""
        self.fallen = self._heard = self._repeated = False
        self.stopped_at = []
        self._order_count += 1

    def fall(self, _: int, frame: FrameType | None) -> None:
        """The signal handler of SIGINT. Raises KeyboardInterrupt where it may."""
        if self.allowed and importing(frame):
            # a module that is torn while it is imported can never be imported again (torch._dynamo is one); it counts as not heard:
            # when it is sent again, the rank may wait in a collective, where only a release reaches it (DDP's first step imports)
            count = self._order_count
            threading.Timer(
                IMPORT_RETRY_SECONDS, lambda: count == self._order_count and self.again()
            ).start()
            return
        self._heard = True
        if not self.allowed:
            return
        self.fallen = True
        self.falls += 1
        try:
            # a collective that has failed since, because another rank was released first, is where it stopped, not torch's report of it
            frames = stacks.plain_frames(self._kernel, stacks.walk_to_error(frame, sys.exception()))
        except RecursionError:  # it fell at the end of a deep recursion
            frames = []
        awaited = self.awaited
        if awaited is None or any("cell" in one for one in frames):
            self.stopped_at = self.stopped_at or stacks.place(frames)
            raise KeyboardInterrupt
        # in the event loop, which it would end: the cell waits for something
        self.stopped_at = self.stopped_at or stacks.place(stacks.of_task(self._kernel, awaited))
        awaited.get_loop().call_soon_threadsafe(awaited.cancel)

    # -- called on the control thread --------------------------------------------------------------------------------

    def unwinding(self) -> bool:
        """Whether the cell is over, or handles an exception."""
        main = threading.main_thread().ident
        handled = sys._current_exceptions().get(main) if main is not None else None
        problem = handled[1] if isinstance(handled, tuple) else handled
        cancelled = self.awaited is not None and self.fallen  # its `finally` may await too
        return not self.allowed or cancelled or isinstance(problem, BaseException)

    def will_return(self) -> bool | str:
        """Whether the rank will leave its cell by itself if it is given time; `ON_GPU`: likely, as soon as kernels on its GPU end.

        Waiting for a GPU spins in native code, which no interrupt ends and which looks like a calculation.
        """
        if self.unwinding() or importing(stacks.main_frame()):
            return True
        return ON_GPU if gpu.in_use() else False

    def waits(self) -> list[dict[str, Any]]:
        """After an interrupt: where the main thread waits in native code and cannot take it; else nothing.

        A rank that has taken it is in Python code of the user's, which may tidy up; one with a handler of its own is left alone.
        """
        if self._heard or not self.allowed or signal.getsignal(signal.SIGINT) != self.fall:
            return []
        if importing(stacks.main_frame()) or not self._sleeps_through():
            return []
        return stacks.place(stacks.of_main_thread(self._kernel)["frames"])

    def _sleeps_through(self) -> bool:
        """Whether the main thread waits in native code, in a call that no signal ends."""
        if not waits_in_native_code() or self._heard:
            return False
        main = threading.main_thread().ident
        if not self._repeated and main is not None:
            # the interrupt came after the interpreter's last look and before the call began to wait: it takes another one to end that
            self._repeated = True
            _, switches = scheduled()
            signal.pthread_kill(main, signal.SIGINT)
            await_sleep(switches)
            return waits_in_native_code() and not self._heard
        return True

    def joining(self) -> dict[str, bool]:
        """While groups are formed: whether the main thread waits for other ranks, and whether it is in code
        of the user's, which has taken the place of something that forming a group needs."""
        in_cell = any(
            "cell" in one
            for one in stacks.plain_frames(self._kernel, stacks.walk(stacks.main_frame()))
        )
        return {"waits": rendezvous.waits(), "in_cell": in_cell}

    def again(self) -> bool:
        """Interrupt the cell once more, unless it is tidying up after the first interrupt."""
        main = threading.main_thread().ident
        if main is None or self.unwinding():
            return False
        signal.pthread_kill(main, signal.SIGINT)
        return True


HANDLERS = (Interrupts.fall.__code__, interruption._on_wake.__code__)
"""Signal handlers that raise: their frames end the traceback of what they have raised, and tell a user nothing."""


def hide_handler_frames() -> None:
    """Leave the frames of our signal handlers out of all that this process prints of an exception."""
    walk = traceback._walk_tb_with_full_positions  # type: ignore[attr-defined]  # of print_exc, logging and format_exception

    def without_handlers(tb: TracebackType | None) -> Iterator[tuple[FrameType, Any]]:
        return (each for each in walk(tb) if each[0].f_code not in HANDLERS)

    traceback._walk_tb_with_full_positions = without_handlers  # type: ignore[attr-defined]
    plain_hook = sys.unraisablehook

    def unraisable(lost: Any) -> None:
        """Python's own hook prints in C: an interrupt that has fallen into a ``__del__`` or a callback."""
        tb = _without_handlers(lost.exc_traceback)
        plain_hook(type(lost)((lost.exc_type, lost.exc_value, tb, lost.err_msg, lost.object)))

    sys.unraisablehook = unraisable


def _without_handlers(tb: TracebackType | None) -> TracebackType | None:
    if tb is None:
        return None
    rest = _without_handlers(tb.tb_next)
    if tb.tb_frame.f_code in HANDLERS:
        return rest
    return TracebackType(rest, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)


SAMPLE_INTERVAL = 0.05
"""Seconds between two looks at the main thread."""
WAKE_INTERVAL = 0.001  # seconds between looks at a thread that a signal has woken: no event tells that it sleeps again
QUICK_SWITCHES = 2.5
"""After so many of the interpreter's switch intervals (5 ms) a thread that waits for the interpreter has woken up to ask for it."""
WAITING_STATES = (
    "SD"  # states of a Linux thread that sleeps; one that waits for its turn on a busy machine is R
)


@dataclass(frozen=True)
class MainThreadSample:
    """The main thread at one moment: the frame and the instruction in it, its processor time, whether it sleeps.

    Attributes:
        switches: how often it has gone to sleep so far; None where there is no /proc to say so.
    """

    place: tuple[int, int]
    cpu: float
    asleep: bool
    switches: int | None


def sample() -> MainThreadSample | None:
    """The main thread now; None if it has no frame."""
    main, frame = threading.main_thread().ident, stacks.main_frame()
    if main is None or frame is None:
        return None
    state, switches = scheduled()
    return MainThreadSample(
        (id(frame), frame.f_lasti), stacks.processor_time(main), state in WAITING_STATES, switches
    )


def scheduled() -> tuple[str, int | None]:
    """(the state of the main thread, how often it has gone to sleep), as the kernel says; sleeping where there is no /proc to say so."""
    pid = os.getpid()  # also the number of its main thread
    try:
        lines = Path(f"/proc/self/task/{pid}/status").read_text().splitlines()
    except OSError:
        return WAITING_STATES[0], None
    found = dict(line.split(":", 1) for line in lines)
    return found["State"].split()[0], int(found.get("voluntary_ctxt_switches", "-1"))


def await_sleep(switches: int | None) -> None:
    """Wait until the main thread, which a signal has woken, sleeps again, having gone to sleep so often before; `SAMPLE_INTERVAL` at most."""
    end = time.monotonic() + SAMPLE_INTERVAL
    while time.monotonic() < end:
        state, now = scheduled()
        if state in WAITING_STATES and now != switches:
            return
        time.sleep(WAKE_INTERVAL)


def waits_in_native_code() -> bool:
    """Called on another thread, when an interrupt has been sent: whether the main thread sleeps through it.

    It must be so at two looks. In between it could have had the interpreter, and would have taken the interrupt if it had been in
    Python, or in one of Python's own waits, which a signal ends. A thread that has not woken up once in between does not wait for the
    interpreter either, so that two looks soon after each other are enough; one that wakes up now and then is given longer.
    """
    first, begun = sample(), time.monotonic()
    cpu = 0.0
    for interval in (
        min(QUICK_SWITCHES * sys.getswitchinterval(), SAMPLE_INTERVAL),
        SAMPLE_INTERVAL,
    ):
        time.sleep(max(0.0, begun + interval - time.monotonic()))
        last = sample()
        if (
            first is None
            or last is None
            or first.place != last.place
            or not (first.asleep and last.asleep)
        ):
            return False
        if first.switches is not None and first.switches == last.switches:
            return True
        cpu = last.cpu - first.cpu
    return cpu < SAMPLE_INTERVAL / 10
