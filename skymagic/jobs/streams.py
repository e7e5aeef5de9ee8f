"""What a generator function yields on the ranks, value by value: each pull is a run."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from skymagic.errors import SkyError
from skymagic.jobs.task import Task, run
from skymagic.pool import Pool
from skymagic.pool.states import State
from skymagic.runtime import generators

PULL_SECONDS = 0.05
"""A pull of one rank returns with what there is after so long; the run around it costs about a fifth of that."""
QUICK_VALUES, MOST_VALUES = 32, 1024
"""After so many quick values in a row one pull brings several, and that many at most. A value that is made quickly is then
held back by a slow one behind it, but not each time in a loop that has slow steps."""


class Stream(Iterator[Any]):
    """The values of a generator function that runs on ranks, one at a time, when they are asked for.

    The generator is opened at once, and works while a value is waited for, as any generator does: it is never ahead of who
    reads it by more than one pull. Between two values the ranks are free for other runs. A timeout of the call counts
    for each pull.

    Args:
        task: of a generator function.
        ranks: one, which gives values; or several, in step, which give lists by rank with None where a rank has ended.

    Raises:
        RunError: also of the type that the generator raised; it is over then.
    """

    def __init__(self, task: Task, pool: Pool, ranks: Sequence[int], *, together: bool) -> None:
        self._key = uuid.uuid4().hex
        self._task, self._pool, self._ranks, self._together = task, pool, tuple(ranks), together
        self._values: deque[Any] = deque()
        self._quick, self._ended = 0, frozenset[int]()
        self._over = True
        # the name, and the names of the arguments in messages, are the function's own
        opening = functools.wraps(task.function)(functools.partial(generators.open_one, self._key, task.function))
        run(replace(task, function=opening), pool, self._ranks)
        self._over = False

    def __next__(self) -> Any:
        while not self._values and not self._over:
            self._pull()
        if not self._values:
            raise StopIteration
        return self._values.popleft()

    def _pull(self) -> None:
        # ranks in step must take the same number of steps: there may be collectives in them
        several = self._quick >= QUICK_VALUES and not self._together
        try:
            most = min(self._quick, MOST_VALUES) if several else 1
            pulls = self._call(generators.advance, self._key, most, PULL_SECONDS, self._ended)
        except BaseException:
            self._over = True  # what has raised, or was interrupted, cannot go on
            raise
        self._ended = frozenset(rank for rank, pull in zip(self._ranks, pulls, strict=True) if pull.over)
        self._over = len(self._ended) == len(self._ranks)
        self._quick = 0 if pulls[0].slow else self._quick + len(pulls[0].values)
        if not self._together:
            self._values.extend(pulls[0].values)
        elif any(pull.values for pull in pulls):
            self._values.append([pull.values[0] if pull.values else None for pull in pulls])

    def _call(self, function: Any, *args: Any) -> list[Any]:
        named = functools.partial(function, *args)
        named.__name__ = self._task.name  # type: ignore[attr-defined]
        return run(Task(named, timeout=self._task.timeout), self._pool, self._ranks)

    def close(self) -> None:
        """End the generator where it stands; its ``finally`` runs on the ranks. Twice is safe."""
        self._values.clear()
        if not self._over:
            self._over = True
            if self._pool.state is not State.STOPPED:
                self._call(generators.close, self._key)

    def __del__(self) -> None:
        with contextlib.suppress(SkyError):  # the pool is gone, or the generator raises as it ends
            self.close()

    def __repr__(self) -> str:
        return f"<values of {self._task.name}(…)>"
