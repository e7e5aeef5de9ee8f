"""Whether a main thread sleeps in native code, as another thread sees it: soon where it does, and never where it works."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
from collections.abc import Callable

from skymagic.kernels.rank import interrupts

POLL = ctypes.CDLL(None).poll


def looks(wait: Callable[[], object]) -> tuple[bool, float]:
    """What another thread sees of this one, the main one, while it waits; and after how many seconds."""
    found: list[tuple[bool, float]] = []

    def look() -> None:
        time.sleep(0.02)  # the main thread is on its way into its wait, which nothing tells
        begun = time.monotonic()
        found.append((interrupts.waits_in_native_code(), time.monotonic() - begun))

    looking = threading.Thread(target=look)
    looking.start()
    wait()
    looking.join()
    return found[0]


def test_a_wait_in_native_code_is_seen_by_the_first_short_look() -> None:
    """A rank that waits in a collective is freed so much sooner after another one has raised."""
    found = [looks(lambda: POLL(None, 0, 300)) for _ in range(3)]
    assert [waits for waits, _ in found] == [True] * 3
    assert min(seconds for _, seconds in found) < interrupts.SAMPLE_INTERVAL * 0.8


def test_native_code_that_works_does_not_wait() -> None:
    text = bytes(150_000_000)
    assert not looks(lambda: hashlib.sha512(text))[0]
