"""Requests to nodes and ranks while they run, over the links to their agents."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from skymagic.cluster.links import AgentLinks, PendingCalls
from skymagic.cluster.nodes import Node, States
from skymagic.wire import agent as wire
from skymagic.wire.order import Order, packed_order
from skymagic.wire.queries import Query

T = TypeVar("T")

logger = logging.getLogger(__name__)


class AgentRequests(States):
    """Client of a pool's agents: sends requests to their nodes and ranks, and waits for replies."""

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
        self._granting = threading.Lock()
        # index of a node → cost of read output for which its agent has got no new credit yet
        self._ungranted: dict[int, int] = {}

    def execute(
        self, ranks: Iterable[int], request: str, order: Order, source: str, run: int = 0
    ) -> None:
        """Have ranks carry out an order, and return at once.

        Their output and outcomes go to `on_result` (an argument of `Agents`).

        Args:
            request: identity of the request.
            source: code for the ranks to execute.
            run: number of the run; 0 if the request is not a run.
        """
        packed = packed_order(order)
        for link, node_ranks in self._links.of(ranks):
            link.send(wire.Request(node_ranks, request, run, packed, source))
            logger.debug(
                "order is sent: kind=%s request=%s node=%s ranks=%s",
                type(order).__name__,
                request,
                link.node,
                node_ranks,
            )

    def grant(self, output: wire.Output) -> None:
        """Allow the agent that sent this output, which was read, to send as much more.

        Safe on any thread.
        """
        location = self.specs.get(output.rank)
        if location is None or not output.cost:
            return
        index = location[0]
        with self._granting:
            cost = self._ungranted.get(index, 0) + output.cost
            is_due = cost >= wire.window(len(self.nodes)) // 4
            self._ungranted[index] = 0 if is_due else cost
        if is_due:
            self._links[index].send(wire.Credit(cost))

    def follow(self, request: str, ranks: Iterable[int]) -> None:
        """Have agents send the outcomes of an earlier request, and its output as far as it was not
        acknowledged; both go to `on_result`.
        """
        for link, node_ranks in self._links.of(ranks):
            link.send(wire.Follow(request, node_ranks))

    def acknowledge(self, request: str, shown: Mapping[int, int]) -> None:
        """Tell agents that the user has seen a request's output.

        Args:
            shown: rank → number of the last piece of output that was shown.
        """
        for link, node_ranks in self._links.of(shown):
            link.send(wire.Shown(request, {rank: shown[rank] for rank in node_ranks}))

    def deliver(self, request: str, ranks: Iterable[int]) -> None:
        """Tell agents that the user has a request's results, or its error."""
        for link, node_ranks in self._links.of(ranks):
            link.send(wire.Delivered(request, node_ranks))

    def set_log_level(self, level: str) -> None:
        """Set the level of the debug logs of agents and ranks, also of those started later."""
        self._node_specs = tuple(replace(spec, log_level=level) for spec in self._node_specs)
        for link in self._links:
            link.send(wire.LogLevel(level))

    def signal(self, ranks: Iterable[int], signum: int) -> None:
        """Send a signal; SIGKILL also reaches processes that a rank started."""
        ranks = list(ranks)
        logger.info("ranks are signalled: ranks=%s signal=%s", ranks, signum)
        for link, node_ranks in self._links.of(ranks):
            link.send(wire.Signal(node_ranks, signum))

    def ask(self, ranks: Iterable[int], query: Query[T], timeout: float) -> dict[int, T]:
        """Ask the control threads of ranks, which also answer while a cell runs.

        Returns:
            The answers received within `timeout` seconds, by rank.
        """
        logger.debug("ranks are asked: what=%s timeout=%s", query.method, timeout)
        asked_ranks = {rank: state for rank in ranks if (state := self.ranks[rank]).exited is None}
        with self._calls.call() as (number, answers):
            for link, node_ranks in self._links.of(asked_ranks):
                link.send(wire.RankRequest(node_ranks, query.method, number))
            # No answer will come from ranks that are lost meanwhile.
            self._calls.wait(
                lambda: all(rank in answers or state.exited for rank, state in asked_ranks.items()),
                timeout,
            )
            if silent := [rank for rank in asked_ranks if rank not in answers]:
                logger.debug("ranks have not answered: what=%s ranks=%s", query.method, silent)
            read: dict[int, T] = {}
            for rank, answer in dict(answers).items():
                # a cell may have broken what a rank answers with: that counts as no answer
                with contextlib.suppress(ValueError):
                    read[rank] = query.read(answer)
            return read

    def ask_nodes(
        self,
        ranks: Iterable[int],
        message: Callable[[tuple[int, ...], int], wire.AgentMessage],
        timeout: float,
    ) -> dict[int, Any]:
        """Send each node a message about its ranks.

        Args:
            message: builds the message from the ranks and the number of the request.

        Returns:
            The answers received within `timeout` seconds, by each node's first rank.
        """
        with self._calls.call() as (number, answers):
            reachable = [
                (link, node_ranks)
                for link, node_ranks in self._links.of(ranks)
                if link.node not in {*self.away, *self.gone}
            ]
            for link, node_ranks in reachable:
                link.send(message(node_ranks, number))
            self._calls.wait(lambda: len(answers) >= len(reachable), timeout)
            return dict(answers)

    def read_log(self, request: wire.ReadLog, timeout: float) -> wire.LogPiece | None:
        """Return a piece of a rank's log, or None after `timeout` seconds.

        `request.number` is set here.
        """
        answer: wire.LogReply | None = self._ask_log(request, timeout)
        return answer.piece if answer is not None else None

    def logged_runs(self, rank: int, timeout: float) -> tuple[tuple[int, int], ...] | None:
        """Return the runs in a rank's log and their cells, or None after `timeout` seconds."""
        answer: wire.LoggedRuns | None = self._ask_log(wire.ReadLog(rank, 0, runs=True), timeout)
        return answer.runs if answer is not None else None

    def _ask_log(self, request: wire.ReadLog, timeout: float) -> Any:
        with self._calls.call() as (number, answers):
            self._links[self.specs[request.rank][0]].send(replace(request, number=number))
            self._calls.wait(lambda: request.rank in answers, timeout)
            return answers.get(request.rank)

    @contextlib.contextmanager
    def busy(self, ranks: Iterable[int]) -> Iterator[None]:
        """Keep nodes without any of these ranks from treating the pool as idle during a run."""
        busy_nodes = {self.specs[rank][0] for rank in ranks}
        specs = enumerate(self._node_specs)
        idle_nodes = [
            node for node, spec in specs if spec.idle_timeout is not None and node not in busy_nodes
        ]
        number = self._calls.number() if idle_nodes else 0

        def announce(busy: bool) -> None:
            for node in idle_nodes:
                self._links[node].send(wire.RunElsewhere(number, busy))

        announce(True)
        try:
            yield
        finally:
            announce(False)
