"""Waiting for what no event tells of: a file that another process makes, or an answer that must be asked for."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds on a busy machine."""


def until(there: Callable[[], object]) -> None:
    """Ask again and again until the answer is true. Fails after `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not there():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)  # the only way: nobody tells
