"""Waiting for what no event tells of: a file that another process makes, or an answer that must be asked for."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds on a busy machine."""


def until(there: Callable[[], object]) -> None:
    """Ask again and again until the answer is true. Fails after `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not there():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)  # the only way: nobody tells


def at(nbytes: int, act: Callable[[], object]) -> Callable[[int], None]:
    """Progress that acts once, when so many bytes were sent."""
    done: list[int] = []

    def progress(sent: int) -> None:
        if sent >= nbytes and not done:
            done.append(sent)
            act()

    return progress


def says(process: subprocess.Popen[str], words: str) -> None:
    """Read what a program prints up to a line with these words. Fails where it ends before."""
    assert process.stdout is not None
    assert any(words in line for line in iter(process.stdout.readline, "")), process.communicate()


def press_in(function: Callable[..., object]) -> None:
    """Press stop when the main thread is in this function of Python; for another thread to call. Before that, a test would get the interrupt."""
    code = inspect.unwrap(function).__code__

    def there() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return any(each.f_code is code for each, _ in traceback.walk_stack(frame))

    until(there)
    os.kill(os.getpid(), signal.SIGINT)


class Overtaken:
    """What a thread sends while the main one ends its cell. It lasts until the cell has ended, or for 0.3 s where that waits for it."""

    def __init__(self) -> None:
        self._happened: list[tuple[object, ...]] = []
        self._taken, self._ended = threading.Event(), threading.Event()

    def send(self, *content: object) -> None:
        """Stands in the place of what sends."""
        self._taken.set()
        self._ended.wait(0.3)
        self._happened.append(content)

    def order(self, flush: Callable[[], object]) -> list[tuple[object, ...]]:
        """What was sent, and the end of the cell (without content), in their order; both threads flush."""
        flusher = threading.Thread(target=flush)
        flusher.start()
        assert self._taken.wait(10)
        flush()
        self._happened.append(())
        self._ended.set()
        flusher.join()
        return self._happened
