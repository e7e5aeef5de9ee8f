"""`on_interruption`: a hook for the time before this machine is taken away: a spot instance that EC2 takes back, a job that Slurm ends.

::

    control thread   notice ─▶ SIGURG ─┐
    Slurm            its own signal  ──┴─▶ main thread, between two bytecodes, in a cell or between cells: fn(notice)
    timer            time is up ─▶ SIGURG ─▶ TimeoutError inside fn

A signal handler, because the main thread holds the state that is worth keeping, and no other thread may look at it while a step
changes it. SIGURG, for it is ignored by whatever does not expect it (Go's runtime uses it so, for the same reason).
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

LIMIT = 25.0  # seconds that a hook has where nobody says when the end comes: Slurm kills 30 seconds after its SIGTERM
MARGIN = 5.0  # seconds before the end at which a hook must be over, so that what it has written reaches a disk
REPEAT = 1.0
"""Seconds after which a hook that has caught its TimeoutError gets another."""
WAKE = signal.SIGURG
NOWHERE = (
    "sky.on_interruption: this process is not a rank of a pool, so the hook will not be called"
)


@dataclass(frozen=True)
class Interruption:
    """What a hook is told.

    Attributes:
        reason: in words.
        ranks: those that will be lost.
        mine: whether this rank is among them.
        at: seconds since 1970 when that will be; None where nobody knows.
    """

    reason: str
    ranks: tuple[int, ...]
    mine: bool = True
    at: float | None = None

    @property
    def seconds_left(self) -> float | None:
        """Until then; None where nobody knows when."""
        return None if self.at is None else max(0.0, self.at - time.time())


Hook = Callable[[Interruption], object]
F = TypeVar("F", bound=Hook)


@dataclass(frozen=True)
class _Registered:
    call: Hook
    limit: float | None
    before: dict[int, Any]
    """The handlers that its own signals had."""


class _State:
    """The hook of this process, and the notices that it has not been told of."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.rank = 0
        self.ended: Callable[[float, str], None] | None = None
        """Told of each call: seconds, and the error if there was one. None outside a rank."""
        self.changed: Callable[[bool], None] = lambda there: None  # told whether there is a hook
        self.signalled: tuple[str, float] = ("", 0.0)
        """What the last signal to this process is called, and when it has come (monotonic seconds)."""
        self.told = ""  # the reason of the last notice that was no signal to this process
        self.unfinished = 0  # signals to this process whose call is not over
        self.hook: _Registered | None = None
        self.pending: deque[Interruption] = deque()
        self.over_at: float | None = (
            None  # when the call that goes on must be over (monotonic seconds)
        )


_state = _State()


def attach(
    rank: int,
    ended: Callable[[float, str], None],
    changed: Callable[[bool], None] = lambda there: None,
) -> None:
    """This process is a rank; called on its main thread. Processes that it forks are none.

    Args:
        ended: told of each call of a hook: seconds, and the error if there was one.
        changed: told whether there is a hook.
    """
    global _state
    _state = _State()
    _state.rank, _state.ended, _state.changed = rank, ended, changed


def on_interruption(
    fn: F | None, *, limit: float | None = None, signals: Iterable[int] = ()
) -> F | None:
    """Call ``fn(notice)`` on this rank when machines of the pool are about to be taken away: time to write a checkpoint.

    Every rank with a hook calls it, also ranks that stay, and also while a cell runs: on the main thread, between two instructions of
    the interpreter, so that the cell's variables are consistent. Ranks do not wait for each other: do not use collectives in it
    (``all_reduce``, ``barrier``, saving a sharded model). A rank in native code calls it when that code returns.

    Also a decorator. A rank has one hook: the last one set; None removes it. A hook that is set after the notice is called
    immediately. Outside a pool nothing is called, and you get one warning.

    Args:
        fn: gets an `Interruption`: ``reason``, ``ranks`` that will be lost, ``mine``, ``at`` and ``seconds_left``.
        limit: seconds until TimeoutError is raised in the hook; None: 5 less than are left, or 25 if the time left is unknown.
        signals: signals to this process that also count as a notice, as Slurm sends them: ``signals=[signal.SIGTERM]``, or
            ``[signal.SIGUSR1]`` with ``sbatch --signal=USR1@120``.

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
    """Have the hook called, now or when there is one; on any thread of a rank.

    A signal that the agent has had and this process too is one: Slurm sends it to all processes of a job.
    """
    reason, at = _state.signalled
    if notice.reason == reason and time.monotonic() - at < LIMIT:
        if not _state.unfinished and _state.ended is not None:
            _state.ended(0.0, "")
        return
    _state.told = notice.reason
    _state.pending.append(notice)
    if _state.hook is not None:
        _wake()


def _wake() -> None:
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, WAKE)  # also wakes an event loop that waits


def _on_wake(_: int, frame: FrameType | None) -> None:
    if os.getpid() != _state.pid:  # forked by a cell
        return
    if _state.over_at is None:
        _call_pending()
    elif time.monotonic() >= _state.over_at:
        raise TimeoutError("the on_interruption hook took too long")


def _on_signal(number: int, frame: FrameType | None) -> None:
    """A signal that the hook is to hear. A process that a cell has forked has inherited this: there it does what it would have done."""
    if os.getpid() != _state.pid:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    reason = f"{signal.Signals(number).name} has come"
    if reason == _state.told:  # by the agent, which ends
        return
    _state.unfinished += 1
    _state.signalled = reason, time.monotonic()
    _state.pending.append(Interruption(reason, (_state.rank,)))
    if _state.over_at is None:
        _call_pending()


def _call_pending() -> None:
    while _state.hook is not None and _state.pending:
        _call(_state.hook, _state.pending.popleft())


def _call(hook: _Registered, notice: Interruption) -> None:
    left = notice.seconds_left
    limit = hook.limit or (LIMIT if left is None else max(1.0, left - MARGIN))
    begun = time.monotonic()
    over, error = threading.Event(), ""
    _state.over_at = begun + limit
    threading.Thread(
        target=_watch, args=(over, limit), name="skymagic-hook-limit", daemon=True
    ).start()
    try:
        hook.call(notice)
    except KeyboardInterrupt:  # the stop button, which is for the cell
        error = "it was interrupted"
        raise
    except BaseException as problem:
        error = f"{type(problem).__name__}: {problem}"
        traceback.print_exception(problem, file=sys.stderr)
    finally:
        _state.over_at = None
        if notice.reason == _state.signalled[0]:
            _state.unfinished = max(0, _state.unfinished - 1)
        over.set()
        if _state.ended is not None:
            _state.ended(time.monotonic() - begun, error)


def _watch(over: threading.Event, limit: float) -> None:
    while not over.wait(limit):
        _wake()
        limit = REPEAT
