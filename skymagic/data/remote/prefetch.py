"""Prefetching: files come back from several nodes at once, before somebody waits for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

FILES_PER_NODE = 2
"""Files that come from one node at a time: while one arrives, the next is asked for."""


class Prefetch:
    """Fetches files ahead.

    Args:
        fetch: brings one file: its name, its node, and an event that is set when nobody wants it any more.
    """

    def __init__(self, fetch: Callable[[str, int, threading.Event], memoryview]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, int], tuple[Future[memoryview], threading.Event]] = {}

    def start(self, files: Iterable[tuple[str, int]]) -> None:
        """These files (name, node) will be taken or discarded, each once, in about this order."""
        queues: dict[int, list[tuple[str, int]]] = {}
        with self._lock:
            for file in files:
                self._pending[file] = Future(), threading.Event()
                queues.setdefault(file[1], []).insert(0, file)
        for queue in queues.values():
            for _ in range(min(FILES_PER_NODE, len(queue))):
                threading.Thread(target=self._work, args=(queue,), name="skymagic-prefetch", daemon=True).start()

    def take(self, name: str, node: int) -> memoryview:
        """A file's bytes. Raises what `fetch` raises."""
        with self._lock:
            future, _ = self._pending.get((name, node), (None, None))
        if future is None:
            return self._fetch(name, node, threading.Event())
        try:
            return future.result()
        finally:
            if future.done():  # an interrupt leaves it to be discarded
                with self._lock:
                    self._pending.pop((name, node), None)

    def cancel(self, name: str, node: int) -> None:
        """Nobody wants it; twice is safe."""
        with self._lock:
            _, unwanted = self._pending.pop((name, node), (None, None))
        if unwanted is not None:
            unwanted.set()

    def _work(self, queue: list[tuple[str, int]]) -> None:
        while queue:
            # Two threads share the queue: the other one may have taken the last file meanwhile.
            try:
                file = queue.pop()
            except IndexError:
                return
            with self._lock:
                future, unwanted = self._pending.get(file, (None, None))
            if future is None or unwanted is None:
                continue
            try:
                future.set_result(self._fetch(*file, unwanted))
            except BaseException as problem:
                future.set_exception(problem)
