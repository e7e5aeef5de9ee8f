"""A pool to measure in: ranks on this machine, cells run as a script runs them, and the stop button."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from skymagic.display.screen import Screen
from skymagic.jobs import cell as broadcast
from skymagic.plan.requests import Defaults, PluginSpec, PoolRequest, RunRequest
from skymagic.plan.units import Selection
from skymagic.pool import Pool, launch, registry
from skymagic.run.state import Limits


class Quiet(Screen):
    """A screen that keeps what it is shown, by rank."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, str]] = []
        self.notes: list[str] = []

    def text(self, rank: int, name: str, text: str) -> None:
        """Text of a rank's standard stream."""
        self.pieces.append((rank, text))

    def note(self, text: str) -> None:
        """A line of skymagic's own."""
        self.notes.append(text)


def start(ranks: int, *plugins: str, agreed: bool = False) -> Pool:
    """A pool of its own on this machine; `agreed` to more ranks than it has cores and memory for without a question."""
    name = f"bench-{os.getpid()}-{len(registry.pools())}"
    request = PoolRequest(
        name=name,
        provider="local",
        nodes=ranks,
        plugins=tuple(PluginSpec(name) for name in plugins),
        yes=agreed,
    )
    return launch.ensure(request, {}, Defaults(), lambda text: None)


@contextmanager
def at_home(home: Path) -> Iterator[None]:
    """For the length of the block, this user's HOME is another folder, with an ssh configuration of its own."""
    before = os.environ["HOME"]
    os.environ["HOME"] = str(home)
    try:
        yield
    finally:
        os.environ["HOME"] = before


@contextmanager
def started(ranks: int, *plugins: str) -> Iterator[Pool]:
    """A pool that ends with the block."""
    with closing(start(ranks, *plugins)) as one:
        yield one


def run(
    one: Pool,
    body: str,
    *,
    timeout: float | None = None,
    only: str = "head",
    screen: Quiet | None = None,
) -> list[Any]:
    """Run a cell on all ranks; the value of its last expression by rank. Raises what the cell raises."""
    cell = broadcast.Cell(body)
    request = RunRequest(output="result", only=Selection(only), timeout=timeout)
    spec = broadcast.spec_of(
        request, one, cell, broadcast.check_syntax(cell.source, lambda source: source)
    )
    return broadcast.broadcast(one, spec, Limits(timeout=timeout), screen or Quiet()).value


@contextmanager
def stop_button(after: float) -> Iterator[list[float]]:
    """Press it `after` seconds from now: SIGINT to this process, as Jupyter does. The block ends after the press.

    Yields a list that holds, after the press, the `time.time()` of it.
    """
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.time())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(after, press)
    timer.start()
    try:
        yield pressed
    finally:
        timer.cancel()
        timer.join()


def problem_of(call: Callable[[], object]) -> BaseException | None:
    """What a call raises, None if it does not."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as problem:
        return problem
    return None
