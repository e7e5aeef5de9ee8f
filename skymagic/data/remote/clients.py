"""The lines to all depots of a pool: opened together, opened again when they are lost, told what to unlink."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from skymagic.data.remote.client import DepotLine, LineLost, Node
from skymagic.errors import PoolError, SkyError
from skymagic.wire import store

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 2.0


class Fleet:
    """Owns a line to each node's depot.

    Args:
        nodes: in the order of their numbers.
        terms: what each depot is told first.
        heard: called on the lines' threads with a node's number and what its depot says of values; with None when the
            line is lost.
        notify: called with one sentence when a node cannot be reached for a while.
        patience: seconds for which a node that cannot be reached is tried again.
        silence: seconds without a word after which a line is taken for lost.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        terms: Callable[[Node], store.Open],
        heard: Callable[[int, store.Message | None], None],
        notify: Callable[[str], None],
        patience: float,
        silence: float,
    ) -> None:
        self.lines = [
            DepotLine(node, number, terms(node), heard, silence) for number, node in enumerate(nodes)
        ]
        self.given_up: set[int] = set()
        """Nodes that are gone for good."""
        self._notify = notify
        self._patience = patience
        self._unlink: list[set[str]] = [set() for _ in nodes]
        """Names that a node could not yet be told to unlink."""

    @property
    def nodes(self) -> set[int]:
        """Nodes that are to have what is put."""
        return set(range(len(self.lines))) - self.given_up

    def up(self) -> list[int]:
        """Nodes that can be spoken to."""
        return [line.number for line in self.lines if line.up and line.number not in self.given_up]

    def reach(self, nodes: Iterable[int] | None = None) -> list[int]:
        """Open the lines that are down, all at once; which ones were.

        Raises:
            PoolError: nodes cannot be reached, all of them named.
        """
        among = self.nodes if nodes is None else nodes
        wanted = [self.lines[node] for node in sorted(among) if not self.lines[node].up]
        problems: list[BaseException] = []
        threads = [
            threading.Thread(target=self._try, args=(line, problems), daemon=True) for line in wanted[1:]
        ]
        for thread in threads:
            thread.start()
        for line in wanted[:1]:
            self._try(line, problems)
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0] if len(problems) == 1 else PoolError("\n".join(map(str, problems)))
        for line in wanted:
            self._flush(line.number)
        return [line.number for line in wanted]

    def _try(self, line: DepotLine, problems: list[BaseException]) -> None:
        begun = time.monotonic()
        pause = _FIRST_PAUSE
        while line.number not in self.given_up:
            try:
                return line.open()
            except (OSError, SkyError) as problem:
                if time.monotonic() - begun > self._patience or line.closed:
                    problems.append(_unreachable(line, problem))
                    return None
                if pause == _FIRST_PAUSE:
                    self._notify(f"{line.node.name} cannot be reached at present ({problem}); trying again")
            except BaseException as problem:
                problems.append(problem)
                return None
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.6)
        return None

    def send(self, node: int, message: store.Message, data: memoryview | None = None) -> bool:
        """Whether a message was sent, with the raw bytes behind it; if not, the line is lost."""
        try:
            self.lines[node].send(message, data)
        except LineLost:
            return False
        return True

    def follow(self, node: int, name: str, nbytes: int, source: int) -> None:
        """Let a node get a value from another one."""
        line = self.lines[source]
        self.send(node, store.Follow(name, nbytes, line.node.address, line.port))

    def unlink(self, names: Iterable[str], nodes: Iterable[int] | None = None) -> None:
        """Unlink files, on all nodes unless said, now or when they can be reached."""
        names = set(names)
        for node in range(len(self.lines)) if nodes is None else nodes:
            self._unlink[node] |= names
            self._flush(node)

    def _flush(self, node: int) -> None:
        names = set(self._unlink[node])
        if names and self.lines[node].up and self.send(node, store.Drop(sorted(names))):
            self._unlink[node] -= names

    def silent(self) -> None:
        """Drop the lines on which nothing was heard for too long."""
        for line in self.lines:
            line.silent()

    def close(self, names: Iterable[str]) -> None:
        """Unlink these files where that can be said, and end all depots; twice is safe."""
        names = set(names)
        ends = [threading.Thread(target=self._end, args=(line, names), daemon=True) for line in self.lines]
        for end in ends:
            end.start()
        for end in ends:
            end.join(timeout=10.0)

    def _end(self, line: DepotLine, names: set[str]) -> None:
        if line.up and not line.silent():
            with contextlib.suppress(LineLost):
                line.send(store.Drop(sorted(names | self._unlink[line.number])))
        line.close()


def _unreachable(line: DepotLine, problem: BaseException) -> PoolError:
    return PoolError(
        f"node {line.number} ({line.node.name}) cannot be reached: {problem}; "
        "run the cell again when it is back, or end the pool with %sky_down"
    )
