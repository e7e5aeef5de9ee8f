"""`on_interruption`: a hook that runs before this machine is reclaimed (by EC2, from a spot
instance) or its job ends (in Slurm).

::

    control thread   notice ─▶ SIGURG ─┐
    Slurm            its own signal  ──┴─▶ main thread, between two bytecodes: fn(notice)
                                           (in a cell or between cells)
    timer            time is up ─▶ SIGURG ─▶ TimeoutError inside fn

The hook runs in a signal handler, because the main thread holds the state worth saving, and no
other thread may look at it while a step changes it. The signal is SIGURG, because programs that do
not expect it ignore it (Go's runtime uses it for the same reason).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

# Seconds that a hook may take if the time of the end is unknown: Slurm kills 30 seconds after its
# SIGTERM.
LIMIT = 25.0
# Seconds before the end at which a hook must have finished, so that its output reaches a disk.
MARGIN = 5.0
REPEAT = 1.0
"""Seconds after which a hook that caught its TimeoutError gets another one."""
WAKE = signal.SIGURG
NOWHERE = (
    "sky.on_interruption: this process is not a rank of a pool, so the hook will not be called"
)


@dataclass(frozen=True)
class Interruption:
    """Notice passed to a hook.

    Attributes:
        reason: text for the user.
        ranks: ranks that will be lost.
        mine: True if this rank is among them.
        at: time of the interruption in seconds since 1970; None if unknown.
    """

    reason: str
    ranks: tuple[int, ...]
    mine: bool = True
    at: float | None = None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the interruption; None if its time is unknown."""
        return None if self.at is None else max(0.0, self.at - time.time())


Hook = Callable[[Interruption], object]
F = TypeVar("F", bound=Hook)


@dataclass(frozen=True)
class _Registered:
    call: Hook
    limit: float | None
    before: dict[int, Any]
    """Previous handlers of the hook's own signals."""


class _State:
    """The hook of this process, and the notices not yet passed to it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.rank = 0
        self.ended: Callable[[float, str], None] | None = None
        """Called after each call of the hook with its seconds, and the error if any.

        None outside a rank.
        """
        # called with True if a hook is set
        self.changed: Callable[[bool], None] = lambda is_set: None
        self.last_signal: tuple[str, float] = ("", 0.0)
        """Name of the last signal to this process, and the time of its arrival (monotonic
        seconds).
        """
        # reason of the last notice that did not come from a signal to this process
        self.last_notice = ""
        # signals to this process whose call of the hook has not finished
        self.unfinished = 0
        self.hook: _Registered | None = None
        self.pending: deque[Interruption] = deque()
        # deadline of the current call (monotonic seconds)
        self.deadline: float | None = None


_state = _State()


def attach(
    rank: int,
    ended: Callable[[float, str], None],
    changed: Callable[[bool], None] = lambda is_set: None,
) -> None:
    """Mark this process as a rank; called on its main thread.

    Processes that it forks are not ranks.

    Args:
        ended: called after each call of a hook: seconds, and the error if there was one.
        changed: called with True when a hook is set, False when it is removed.
    """
    global _state
    _state = _State()
    _state.rank, _state.ended, _state.changed = rank, ended, changed


def on_interruption(
    fn: F | None, *, limit: float | None = None, signals: Iterable[int] = ()
) -> F | None:
    """Call ``fn(notice)`` on this rank before machines of the pool are reclaimed: time to write a
    checkpoint.

    Every rank with a hook calls it, even ranks that are not affected, and even while a cell runs:
    on the main thread, between two instructions of the interpreter, so that the cell's variables
    are consistent. Ranks do not wait for each other, so do not use collectives in it
    (``all_reduce``, ``barrier``, saving a sharded model). A rank in native code calls it when that
    code returns.

    It can be used as a decorator. A rank has one hook, the last one set; None removes it. A hook
    set after the notice is called immediately. Outside a pool the hook is never called, and you get
    one warning.

    Args:
        fn: called with an `Interruption`: ``reason``, ``ranks`` that will be lost, ``mine``, ``at``
            and ``seconds_left``.
        limit: seconds until TimeoutError is raised in the hook; None: 5 less than are left, or 25
            if the time left is unknown.
        signals: signals to this process that also count as a notice, as Slurm sends them:
            ``signals=[signal.SIGTERM]``, or ``[signal.SIGUSR1]`` with ``sbatch --signal=USR1@120``.

    Returns:
        `fn`.

    Raises:
        TypeError: `fn` is not callable.
        ValueError: `limit` is not above 0, or this is not the main thread.
    """
    if fn is not None and not callable(fn):
        raise TypeError(f"sky.on_interruption takes a function, not {type(fn).__name__}")
    if limit is not None and not limit > 0:
        raise ValueError(f"sky.on_interruption(limit={limit!r}): seconds above 0")
    if _state.ended is None or os.getpid() != _state.pid:
        warnings.warn(NOWHERE, stacklevel=2)
        return fn
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("sky.on_interruption: call it on the main thread, where the hook will run")
    _remove()
    if fn is not None:
        before = {int(number): signal.signal(number, _on_signal) for number in signals}
        _state.hook = _Registered(fn, limit, before)
        signal.signal(WAKE, _on_wake)
        _state.changed(True)
        _call_pending()
    return fn


def _remove() -> None:
    if _state.hook is not None:
        for number, handler in _state.hook.before.items():
            signal.signal(number, handler)
        _state.hook = None
        _state.changed(False)


def notify(notice: Interruption) -> None:
    """Queue a notice, and call the hook now or once one is set. Safe on any thread of a rank.

    Slurm sends a signal to all processes of a job: a notice for a signal that both the agent and
    this process received is handled only once.
    """
    reason, at = _state.last_signal
    if notice.reason == reason and time.monotonic() - at < LIMIT:
        if not _state.unfinished and _state.ended is not None:
            _state.ended(0.0, "")
        return
    _state.last_notice = notice.reason
    _state.pending.append(notice)
    if _state.hook is not None:
        _wake()


def _wake() -> None:
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, WAKE)  # also wakes a waiting event loop


def _on_wake(_: int, frame: FrameType | None) -> None:
    if os.getpid() != _state.pid:  # forked by a cell
        return
    if _state.deadline is None:
        _call_pending()
    elif time.monotonic() >= _state.deadline:
        raise TimeoutError("the on_interruption hook took too long")


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal that counts as a notice.

    A process forked by a cell has inherited this handler; there the signal gets its default action.
    """
    if os.getpid() != _state.pid:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    reason = f"{signal.Signals(number).name} received"
    if reason == _state.last_notice:  # already reported by the agent, which is ending
        return
    _state.unfinished += 1
    _state.last_signal = reason, time.monotonic()
    _state.pending.append(Interruption(reason, (_state.rank,)))
    if _state.deadline is None:
        _call_pending()


def _call_pending() -> None:
    while _state.hook is not None and _state.pending:
        _call(_state.hook, _state.pending.popleft())


def _call(hook: _Registered, notice: Interruption) -> None:
    seconds_left = notice.seconds_left
    limit = hook.limit or (LIMIT if seconds_left is None else max(1.0, seconds_left - MARGIN))
    start = time.monotonic()
    over, error = threading.Event(), ""
    _state.deadline = start + limit
    threading.Thread(
        target=_watch, args=(over, limit), name="skymagic-hook-limit", daemon=True
    ).start()
    try:
        hook.call(notice)
    except KeyboardInterrupt:  # the stop button, which is meant for the cell
        error = "it was interrupted"
        raise
    except BaseException as problem:
        error = f"{type(problem).__name__}: {problem}"
        traceback.print_exception(problem, file=sys.stderr)
    finally:
        _state.deadline = None
        if notice.reason == _state.last_signal[0]:
            _state.unfinished = max(0, _state.unfinished - 1)
        over.set()
        if _state.ended is not None:
            _state.ended(time.monotonic() - start, error)


def _watch(over: threading.Event, limit: float) -> None:
    while not over.wait(limit):
        _wake()
        limit = REPEAT
