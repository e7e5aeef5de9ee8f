"""Interrupts of a rank: SIGINT reaches cells only, never the code that cleans up after them.

Also detects that the main thread waits in native code, where Python cannot handle a signal: in a
collective that does not end.
"""

from __future__ import annotations

import asyncio
import logging
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
from skymagic.wire.queries import Joining, StackFrame

logger = logging.getLogger(__name__)

IMPORT_RETRY_SECONDS = 0.05
"""Seconds after which an interrupt that arrived during an import is repeated."""
LOCK_RETRY_SECONDS = 0.001
"""The same for one that arrived while a lock was taken or released."""
MAX_LOCK_SECONDS = 1.0
"""Seconds for which it is repeated: the thread may wait for the lock forever."""


def importing(frame: FrameType | None) -> bool:
    """Return True if this stack is inside an import."""
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename.startswith(
            "<frozen importlib"
        ):
            return True
        frame = frame.f_back
    return False


LOCKING_CODE = {threading.Condition.__enter__.__code__, threading.Condition.__exit__.__code__}
LOGGING_FILE = logging.Logger.debug.__code__.co_filename


def locking(frame: FrameType | None) -> bool:
    """Return True if this frame takes or releases a lock, which an interrupt could leave locked.

    `logging` takes its lock also for each fork. If it stayed locked, no other thread of the rank
    could log, and the rank would answer nothing any more. A frame of the handler of another
    interrupt counts too, because that one may have arrived at such a place.
    """
    if frame is not None and (
        frame.f_code in LOCKING_CODE or frame.f_code.co_filename == LOGGING_FILE
    ):
        return True
    while frame is not None and frame.f_code is not Interrupts.on_sigint.__code__:
        frame = frame.f_back
    return frame is not None


class Interrupts:
    """SIGINT handling of the order that a rank carries out."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.allowed = False  # whether an interrupt may be raised now, because a cell runs
        self.was_raised = False  # whether one was raised in this order's cell
        self.raised_count = 0  # how many were raised in cells of this rank
        self.stopped_at: tuple[StackFrame, ...] = ()  # the places where it was raised
        self.awaited: asyncio.Task[Any] | None = None  # the running cell, if it awaits something
        self._was_handled = self._repeated = self._resent = False
        """Whether Python has handled an interrupt of this order, whether it was repeated because
        the main thread waited, and whether it was repeated at all.
        """
        # counts orders, so that a delayed interrupt cannot hit the next one
        self._order_count = 0
        self._lock_deadline: float | None = None

    def begin(self) -> None:
        """Reset the state for the next order."""
        self.was_raised = self._was_handled = self._repeated = self._resent = False
        self.stopped_at = ()
        self._order_count += 1
        self._lock_deadline = None

    def on_sigint(self, _: int, frame: FrameType | None) -> None:
        """Handle SIGINT. Raises KeyboardInterrupt if that is allowed now."""
        if self.allowed and importing(frame):
            # A module whose import is interrupted may never be importable again (torch._dynamo is
            # one). The interrupt counts as not handled: when it is repeated, the rank may wait in a
            # collective, where only a release reaches it (DDP's first step imports).
            self._postpone(IMPORT_RETRY_SECONDS, "a module is being imported")
            return
        if self.allowed and locking(frame):
            self._lock_deadline = self._lock_deadline or time.monotonic() + MAX_LOCK_SECONDS
            if time.monotonic() < self._lock_deadline:
                self._postpone(LOCK_RETRY_SECONDS, "a lock is being taken or released")
                return
        self._was_handled = True
        if not self.allowed:
            return
        if self._resent and self.was_raised and self.is_unwinding():
            # The first interrupt arrived after the control thread had looked for it, and before
            # it repeated the interrupt: a checkpoint in `finally` must not be cut short by that.
            logger.debug("repeated interrupt is dropped: the cell cleans up")
            return
        logger.info("interrupt reaches the cell")
        self.was_raised = True
        self.raised_count += 1
        try:
            # if a collective has failed meanwhile, because another rank was released first, the
            # place is that collective, not torch's report of its failure
            frames = stacks.plain_frames(self._kernel, stacks.walk_to_error(frame, sys.exception()))
        except RecursionError:  # it arrived at the bottom of a deep recursion
            frames = []
        awaited = self.awaited
        if awaited is None or any(frame.cell is not None for frame in frames):
            self.stopped_at = self.stopped_at or stacks.most_telling_frames(frames)
            raise KeyboardInterrupt
        # in the event loop, which a KeyboardInterrupt would end: the cell awaits something
        self.stopped_at = self.stopped_at or stacks.most_telling_frames(
            stacks.of_task(self._kernel, awaited)
        )
        awaited.get_loop().call_soon_threadsafe(awaited.cancel)

    def _postpone(self, seconds: float, why: str) -> None:
        logger.debug("interrupt is postponed: %s", why)
        threading.Timer(seconds, self._interrupt_later, [self._order_count]).start()

    def _interrupt_later(self, order: int) -> None:
        """Repeat a postponed interrupt, unless the order has ended."""
        main = threading.main_thread().ident
        if order != self._order_count or not self.allowed or main is None:
            return
        if self.was_raised:
            self.repeat()
        else:  # a cell that handles an exception does not clean up after an interrupt yet
            self._resend(main)

    # -- called on the control thread --------------------------------------------------------------

    def is_unwinding(self) -> bool:
        """Return True if the cell is over, or handles an exception."""
        main = threading.main_thread().ident
        handled = sys._current_exceptions().get(main) if main is not None else None
        problem = handled[1] if isinstance(handled, tuple) else handled
        cancelled = (
            self.awaited is not None and self.was_raised
        )  # its `finally` blocks may await too
        return not self.allowed or cancelled or isinstance(problem, BaseException)

    def will_return(self) -> bool | str:
        """Return whether the rank will leave its cell by itself, given time.

        The result is `ON_GPU` if it will probably do so as soon as kernels on its GPU end: waiting
        for a GPU spins in native code, which no interrupt ends and which looks like a calculation.
        """
        if self.is_unwinding() or importing(stacks.main_frame()):
            return True
        return ON_GPU if gpu.in_use() else False

    def blocked_frames(self) -> tuple[StackFrame, ...]:
        """Return the place where the main thread blocks in native code after an interrupt, else ().

        A rank that has handled it runs the user's Python code, which may be cleaning up; one with
        its own signal handler is left alone.
        """
        if (
            self._was_handled
            or not self.allowed
            or signal.getsignal(signal.SIGINT) != self.on_sigint
        ):
            return ()
        if importing(stacks.main_frame()) or not self._is_blocked():
            return ()
        return stacks.most_telling_frames(stacks.of_main_thread(self._kernel).frames)

    def _is_blocked(self) -> bool:
        """Return True if the main thread is blocked in a native call that no signal ends."""
        if not waits_in_native_code() or self._was_handled:
            return False
        main = threading.main_thread().ident
        if not self._repeated and main is not None:
            # the interrupt may have arrived after the interpreter's last check and before the call
            # blocked: a second one ends such a call
            self._repeated = True
            _, switches = scheduling_state()
            self._resend(main)
            await_sleep(switches)
            return waits_in_native_code() and not self._was_handled
        return True

    def joining(self) -> Joining:
        """Return the state of the main thread while process groups are formed."""
        in_cell = any(
            frame.cell is not None
            for frame in stacks.plain_frames(self._kernel, stacks.walk(stacks.main_frame()))
        )
        return Joining(rendezvous.is_waiting(), in_cell)

    def repeat(self) -> bool:
        """Interrupt the cell once more, unless it is cleaning up after the first interrupt."""
        main = threading.main_thread().ident
        if main is None or self.is_unwinding():
            logger.debug("interrupt is not repeated: the cell is over or cleans up")
            return False
        logger.info("interrupt is repeated")
        self._resend(main)
        return True

    def _resend(self, main: int) -> None:
        self._resent = True
        signal.pthread_kill(main, signal.SIGINT)


HANDLERS = (Interrupts.on_sigint.__code__, interruption._on_wake.__code__)
"""Signal handlers that raise: their frames end the traceback, and are meaningless to users."""


def hide_handler_frames() -> None:
    """Hide the frames of our signal handlers in every traceback that this process prints."""
    # print_exc, logging and format_exception use this function
    walk = traceback._walk_tb_with_full_positions  # type: ignore[attr-defined]

    def without_handlers(tb: TracebackType | None) -> Iterator[tuple[FrameType, Any]]:
        return (entry for entry in walk(tb) if entry[0].f_code not in HANDLERS)

    traceback._walk_tb_with_full_positions = without_handlers  # type: ignore[attr-defined]
    plain_hook = sys.unraisablehook

    def unraisable(lost: Any) -> None:
        """Hide handler frames, then call Python's hook, which prints in C.

        It reports interrupts inside a ``__del__`` or a callback.
        """
        tb = _without_handlers(lost.exc_traceback)
        plain_hook(type(lost)((lost.exc_type, lost.exc_value, tb, lost.err_msg, lost.object)))

    sys.unraisablehook = unraisable


def _without_handlers(tb: TracebackType | None) -> TracebackType | None:
    if tb is None:
        return None
    remaining = _without_handlers(tb.tb_next)
    if tb.tb_frame.f_code in HANDLERS:
        return remaining
    return TracebackType(remaining, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)


SAMPLE_INTERVAL = 0.05
"""Seconds between two samples of the main thread."""
# seconds between looks at a thread that a signal has woken: no event reports that it sleeps again
WAKE_INTERVAL = 0.001
QUICK_SWITCHES = 2.5
"""Wait before the second sample, in the interpreter's switch intervals (5 ms).

A thread that waits for the GIL wakes up within that time to request it.
"""
# states of a sleeping Linux thread; one that waits for a processor on a busy machine is R
WAITING_STATES = "SD"


@dataclass(frozen=True)
class MainThreadSample:
    """Sample of the main thread: frame and instruction, processor time, and whether it sleeps.

    Attributes:
        switches: how often it has gone to sleep so far; None without /proc.
    """

    position: tuple[int, int]
    cpu: float
    asleep: bool
    switches: int | None


def sample() -> MainThreadSample | None:
    """Sample the main thread, or return None if it has no frame."""
    main, frame = threading.main_thread().ident, stacks.main_frame()
    if main is None or frame is None:
        return None
    state, switches = scheduling_state()
    return MainThreadSample(
        (id(frame), frame.f_lasti), stacks.processor_time(main), state in WAITING_STATES, switches
    )


def scheduling_state() -> tuple[str, int | None]:
    """Return the main thread's state in the kernel, and how often it has gone to sleep.

    Without /proc it counts as sleeping, and the number is None.
    """
    pid = os.getpid()  # also the thread id of its main thread
    try:
        lines = Path(f"/proc/self/task/{pid}/status").read_text().splitlines()
    except OSError:
        return WAITING_STATES[0], None
    fields = dict(line.split(":", 1) for line in lines)
    return fields["State"].split()[0], int(fields.get("voluntary_ctxt_switches", "-1"))


def await_sleep(switches: int | None) -> None:
    """Wait until the main thread, which a signal has woken, sleeps again.

    Args:
        switches: how often it had gone to sleep before.

    It waits `SAMPLE_INTERVAL` at most.
    """
    end = time.monotonic() + SAMPLE_INTERVAL
    while time.monotonic() < end:
        state, now = scheduling_state()
        if state in WAITING_STATES and now != switches:
            return
        time.sleep(WAKE_INTERVAL)


def waits_in_native_code() -> bool:
    """Return True if the main thread sleeps through an interrupt; called on another thread.

    The interrupt was sent before, and two samples must agree. In between, a thread in Python, or in
    one of Python's own waits, which a signal ends, could have got the interpreter and would have
    handled the interrupt. A thread that never woke up in between does not wait for the interpreter
    either, so that two samples in quick succession are enough; one that wakes up now and then is
    given longer.
    """
    first, start_time = sample(), time.monotonic()
    cpu = 0.0
    for interval in (
        min(QUICK_SWITCHES * sys.getswitchinterval(), SAMPLE_INTERVAL),
        SAMPLE_INTERVAL,
    ):
        time.sleep(max(0.0, start_time + interval - time.monotonic()))
        last = sample()
        if (
            first is None
            or last is None
            or first.position != last.position
            or not (first.asleep and last.asleep)
        ):
            return False
        if first.switches is not None and first.switches == last.switches:
            return True
        cpu = last.cpu - first.cpu
    return cpu < SAMPLE_INTERVAL / 10
