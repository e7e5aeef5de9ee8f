"""Whether a main thread sleeps in native code, as another thread sees it: soon where it does, and never where it works."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
from collections.abc import Callable

from skymagic.kernels.rank import interrupts

LIBC = ctypes.CDLL(None)


def seen(wait: Callable[[], object]) -> tuple[bool, float]:
    """What is said of this thread, which must be the main one, while it waits; and after how many seconds."""
    found: list[tuple[bool, float]] = []

    def look() -> None:
        time.sleep(0.02)  # the main thread is on its way into its wait, which nothing tells
        begun = time.monotonic()
        found.append((interrupts.waits_in_native_code(), time.monotonic() - begun))

    looks = threading.Thread(target=look)
    looks.start()
    wait()
    looks.join()
    return found[0]


def test_a_wait_in_native_code_is_seen_at_once() -> None:
    found = [seen(lambda: LIBC.poll(None, 0, 400)) for _ in range(5)]
    assert [waits for waits, _ in found] == [True] * 5
    assert min(seconds for _, seconds in found) < interrupts.SAMPLE_INTERVAL * 0.8


def test_native_code_that_works_does_not_wait() -> None:
    text = bytes(200_000_000)
    assert not seen(lambda: hashlib.sha512(text))[0]
