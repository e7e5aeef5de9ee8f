"""What nodes and ranks are asked and told while they run, by the links to their agents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from skymagic.cluster.links import AgentLinks, PendingCalls
from skymagic.cluster.nodes import Node, States
from skymagic.wire import agent as wire


class AgentRequests(States):
    """Requests to the agents of a pool, each for its node and its ranks, and their replies."""

    def __init__(
        self,
        nodes: Sequence[Node],
        received: Callable[[int, wire.AgentMessage | None], None],
        changed: Callable[[int, str], None],
    ) -> None:
        super().__init__(nodes)
        self._node_specs: tuple[wire.AgentSpec, ...] = ()
        self._links = AgentLinks(self, received, changed)
        self._calls = PendingCalls(self._changed)

    def follow(self, shown: Mapping[int, int]) -> None:
        """Have agents tell what ranks show (`shown` of the constructor), after what has been shown.

        Args:
            shown: rank → number of the last content that was shown already.
        """
        for link, mine in self._links.of(shown):
            link.send(wire.Follow({str(rank): shown[rank] for rank in mine}))

    def signal(self, ranks: Iterable[int], signum: int) -> None:
        """Send a signal; SIGKILL reaches what a rank started too."""
        for link, mine in self._links.of(ranks):
            link.send(wire.Signal(mine, signum))

    def ask(self, ranks: Iterable[int], what: str, timeout: float) -> dict[int, Any]:
        """Ask ranks' control threads, also while their cells run; the answers that came within `timeout` seconds."""
        wanted = {rank: state for rank in ranks if (state := self.ranks[rank]).exited is None}
        with self._calls.call() as (number, answers):
            for link, mine in self._links.of(wanted):
                link.send(wire.RankRequest(mine, what, number))
            # no answer comes of ranks that are lost meanwhile
            self._calls.wait(
                lambda: all(rank in answers or state.exited for rank, state in wanted.items()),
                timeout,
            )
            return dict(answers)

    def ask_nodes(
        self,
        ranks: Iterable[int],
        message: Callable[[tuple[int, ...], int], wire.AgentMessage],
        timeout: float,
    ) -> dict[int, Any]:
        """Send each node a message about its ranks; by its first rank the answers that came within `timeout` seconds.

        Args:
            message: makes it, given the ranks and the number that the answer must bear.
        """
        with self._calls.call() as (number, answers):
            asked = [
                (link, mine)
                for link, mine in self._links.of(ranks)
                if link.node not in {*self.away, *self.gone}
            ]
            for link, mine in asked:
                link.send(message(mine, number))
            self._calls.wait(lambda: len(answers) >= len(asked), timeout)
            return dict(answers)

    def read_log(self, rank: int, timeout: float, **what: Any) -> dict[str, Any] | None:
        """What a node answers to a `wire.ReadLog` with these fields; None where it does not within `timeout` seconds."""
        with self._calls.call() as (number, answers):
            self._links[self.specs[rank][0]].send(wire.ReadLog(rank, number, **what))
            self._calls.wait(lambda: rank in answers, timeout)
            return answers.get(rank)

    @contextlib.contextmanager
    def busy(self, ranks: Iterable[int]) -> Iterator[None]:
        """For the length of a run: nodes without any of its ranks do not take the pool for idle."""
        at_work = {self.specs[rank][0] for rank in ranks}
        specs = enumerate(self._node_specs)
        others = [
            node for node, spec in specs if spec.idle_timeout is not None and node not in at_work
        ]
        number = self._calls.number() if others else 0

        def tell(busy: bool) -> None:
            for node in others:
                self._links[node].send(wire.RunElsewhere(number, busy))

        tell(True)
        try:
            yield
        finally:
            tell(False)
