"""Whether a main thread sleeps in native code, as another thread sees it: soon where it does, and never where it works; and where an
interrupt has stopped it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from skymagic.kernels.rank import interrupts

LIBC = ctypes.CDLL(None)
POLL = LIBC.poll


class PollFd(ctypes.Structure):
    """Of ``poll``: a descriptor, what to wait for, what has come."""

    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]


def asleep() -> None:
    """Return when the main thread sleeps and has not woken for 20 ms: on its way into its wait it wakes for the interpreter every 5 ms."""
    before = None
    while (now := interrupts.scheduling_state()) != before or now[
        0
    ] not in interrupts.WAITING_STATES:
        before = now
        time.sleep(0.02)  # the only way: nobody tells


def looks(
    wait: Callable[[], object],
    ready: Callable[[], object],
    seen: Callable[[], object] = lambda: None,
) -> tuple[bool, float]:
    """What another thread sees of this one, the main one, while it waits; and after how many seconds.

    Args:
        ready: returns when that thread may look. seen: is called when it has.
    """
    found: list[tuple[bool, float]] = []

    def look() -> None:
        ready()
        begun = time.monotonic()
        found.append((interrupts.waits_in_native_code(), time.monotonic() - begun))
        seen()

    looking = threading.Thread(target=look)
    looking.start()
    wait()
    looking.join()
    return found[0]


def test_a_wait_in_native_code_is_seen_by_the_first_short_look() -> None:
    """A rank that waits in a collective is freed so much sooner after another one has raised."""
    here, there = socket.socketpair()
    with here, there:
        waited = ctypes.byref(PollFd(here.fileno(), select.POLLIN, 0))

        def once() -> tuple[bool, float]:
            try:
                return looks(lambda: POLL(waited, 1, 60_000), asleep, lambda: there.send(b"."))
            finally:
                here.recv(1)

        found = [once() for _ in range(3)]
    assert [waits for waits, _ in found] == [True] * 3
    assert min(seconds for _, seconds in found) < interrupts.SAMPLE_INTERVAL * 0.8


def test_native_code_that_works_does_not_wait() -> None:
    text = bytes(150_000_000)
    # 0.02 s: the digest has begun by then
    waiting, _ = looks(lambda: hashlib.sha512(text), lambda: time.sleep(0.02))
    assert not waiting


def test_first_request_detects_a_wait_that_ignores_signals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when the thread that a signal has just woken has had no time yet to sleep again: it is asked twice in 0.1 s otherwise."""
    mutex, state = ctypes.create_string_buffer(64), interrupts.scheduling_state
    look = interrupts.Interrupts(SimpleNamespace())
    look.allowed = True
    woken: list[float] = []
    main = threading.main_thread().ident

    def kill(thread: int, number: int) -> None:
        assert (thread, number) == (main, signal.SIGINT)
        woken.append(time.monotonic())

    def scheduled() -> tuple[str, int | None]:
        now, switches = state()
        running = woken and time.monotonic() - woken[0] < 0.005  # as on a busy processor
        return (
            "R" if running else now,
            switches if not woken or running or switches is None else switches + 1,
        )

    monkeypatch.setattr(signal, "pthread_kill", kill)
    monkeypatch.setattr(interrupts, "scheduling_state", scheduled)
    found: list[bool] = []

    def ask() -> None:
        time.sleep(0.02)  # the main thread is on its way into its wait, which nothing tells
        found.append(look._is_blocked())
        LIBC.pthread_mutex_unlock(mutex)

    LIBC.pthread_mutex_lock(mutex)
    asking = threading.Thread(target=ask)
    asking.start()
    LIBC.pthread_mutex_lock(mutex)
    asking.join()
    assert found == [True]


# ------------------------------------------------------------------------------------ where an interrupt has fallen

LIBRARY = """
def connect():
    raise RuntimeError("Connection closed by peer")

def all_reduce(report):
    try:
        connect()
    except Exception:
        report()
        raise

def stopped():
    import signal
    signal.raise_signal(signal.SIGINT)
"""


@pytest.fixture
def library(tmp_path: Path) -> ModuleType:
    """A module that counts as installed."""
    file = tmp_path / "site-packages" / "torch_like.py"
    file.parent.mkdir()
    file.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("torch_like", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> interrupts.Interrupts:
    """Interrupts of a rank whose cell is this test."""
    compiler = SimpleNamespace(_filename_map={__file__: 7})
    found = interrupts.Interrupts(SimpleNamespace(shell=SimpleNamespace(compile=compiler)))
    found.allowed = True
    return found


def names(rank: interrupts.Interrupts, cell: Callable[[], object]) -> list[str]:
    """The functions in which a cell was stopped: its own, and the innermost."""
    before = signal.signal(signal.SIGINT, rank.on_sigint)
    try:
        with pytest.raises(KeyboardInterrupt):
            cell()
    finally:
        signal.signal(signal.SIGINT, before)
    return [str(frame.name) for frame in rank.stopped_at]


def test_interrupt_in_a_librarys_error_report_names_its_origin(
    rank: interrupts.Interrupts, library: ModuleType
) -> None:
    """Another rank was released first: the collective has failed, and torch is about to log it when the interrupt falls."""

    def cell() -> None:
        library.all_reduce(library.stopped)

    assert names(rank, cell) == ["cell", "connect"]


def test_interrupt_in_the_users_handler_is_located_there(
    rank: interrupts.Interrupts, library: ModuleType
) -> None:
    def handler() -> None:
        library.stopped()

    def cell() -> None:
        try:
            library.connect()
        except RuntimeError:
            handler()

    assert names(rank, cell) == ["handler", "stopped"]


def test_interrupt_below_a_librarys_handler_is_located_there(
    rank: interrupts.Interrupts, library: ModuleType
) -> None:
    def callback() -> None:
        library.stopped()

    def cell() -> None:
        library.all_reduce(callback)

    assert names(rank, cell) == ["callback", "stopped"]
