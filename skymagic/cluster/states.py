"""What is known of the nodes and ranks of a pool: what each message of an agent changes in it, and waiting for such changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from skymagic.cluster.nodes import Node, RankState
from skymagic.errors import ProvisionError
from skymagic.wire import agent as wire
from skymagic.wire.processes import describe


class States:
    """What is known of the nodes of a pool and of their ranks; one lock guards it, and its waiters are notified of each message.

    Args:
        nodes: the machines, each with an agent of its own, the head first.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self.specs: dict[int, tuple[int, wire.RankSpec]] = {}
        """Rank → (index into `nodes`, its specification)."""
        self.ranks: dict[int, RankState] = {}
        self.started: dict[int, wire.AgentStarted] = {}
        """By index into `nodes`: what its agent said of itself."""
        self.controller: wire.ControllerUp | None = None
        self.away: set[int] = set()
        """Nodes whose links are down, and come back or not."""
        self.gone: dict[int, str] = {}
        """Nodes that are lost, each with a reason."""
        self.ending: dict[int, float] = {}
        """Nodes that will be taken away, each with when (seconds since 1970)."""
        self.last_lines: dict[int, str] = {}
        """After the end: what each rank's log ended with."""
        self._changed = threading.Condition()
        self._trouble: str | None = None
        """What ends each wait for the start of something."""

    def ranks_of(self, index: int) -> list[int]:
        """The ranks of one node."""
        return [rank for rank, (where, _) in self.specs.items() if where == index]

    def is_away(self, rank: int) -> bool:
        """Whether the link to a rank's node is down."""
        return self.specs[rank][0] in self.away

    def wait_controller(self, timeout: float) -> wire.ControllerUp:
        """The controller's connection info.

        Raises:
            ProvisionError: it did not come up.
        """
        self.wait(lambda: self.controller is not None, timeout, "the controller on the head node")
        assert self.controller is not None
        return self.controller

    def wait_ready(self, timeout: float, ranks: Iterable[int] | None = None) -> None:
        """Wait until these ranks (all of them) have run their plugins' hooks; `timeout` seconds at most for another one of them.

        Raises:
            ProvisionError: one failed or ended, or the time is over.
        """
        wanted = set(self.ranks if ranks is None else ranks)

        def ready() -> int:
            return sum(self.ranks[rank].ready for rank in wanted)

        def settled() -> bool:
            return ready() == len(wanted) or any(self.ranks[rank].failed or self.ranks[rank].exited for rank in wanted)

        while not settled():  # many ranks on few cores come up one after another
            self._wait_for_another(ready, settled, timeout, len(wanted))
        for rank in sorted(wanted):
            state = self.ranks[rank]
            if state.failed is not None:
                raise ProvisionError(
                    f"rank {rank} on {state.hostname} could not start: "
                    f"{state.failed.ename}: {state.failed.evalue}\n{state.failed.traceback}"
                )
            if state.exited is not None:
                raise ProvisionError(
                    f"rank {rank} on {state.hostname} ended while it started ({describe(state.exited)})\n{state.exited.tail}"
                )

    def _wait_for_another(
        self, ready: Callable[[], int], settled: Callable[[], bool], timeout: float, count: int
    ) -> None:
        before = ready()
        what = f"{count - before} of the ranks" if before else "the ranks"
        self.wait(lambda: settled() or ready() > before, timeout, what)

    def wait(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        """Wait until something is done that messages of agents tell.

        Raises:
            ProvisionError: it is not done within `timeout` seconds, or cannot be done any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: done() or self._trouble is not None, timeout)
            if not done():
                raise ProvisionError(self._trouble or f"{what} did not come up within {timeout:.0f} s")

    def _wait_known(self, timeout: float, partly: bool) -> None:
        """Wait until all agents have told how their ranks are, or, with `partly`, are gone and not the head. Raises ProvisionError."""

        def known() -> bool:
            settled = all(one.ready or one.failed or one.exited for one in self.ranks.values())
            return settled and len({*self.started, *self.gone}) == len(self.nodes) and 0 not in self.gone

        def hopeless() -> bool:
            return 0 in self.gone if partly else self._trouble is not None

        with self._changed:
            self._changed.wait_for(lambda: known() or hopeless(), timeout)
            if not known():
                silent = [node.name for node in self.nodes if node.index not in {*self.started, *self.gone}]
                slow = f"{', '.join(silent) or 'the ranks'} did not answer within {timeout:.0f} s"
                raise ProvisionError(self.gone.get(0) or (self._trouble if hopeless() else None) or slow)
            self._trouble = None  # that of nodes which are gone

    def _begin(self, specs: Mapping[int, tuple[int, wire.RankSpec]]) -> None:
        """These ranks, of none of which is known how it is."""
        self.specs = dict(specs)
        self.ranks = {rank: self._new_state(rank) for rank in specs}

    def _new_state(self, rank: int) -> RankState:
        index, _ = self.specs[rank]
        return RankState(self.nodes[index].name)

    def _apply(self, index: int, message: wire.AgentMessage | None) -> wire.RankExited | None:
        """Take over what a node's agent has sent, the lock held; the end of a rank, where it is news."""
        match message:
            case wire.AgentStarted():
                self.started[index] = message
            case wire.AgentFailed():
                self._trouble = f"{self.nodes[index].name}: {message.reason}"
            case wire.PoolEnded():
                self._trouble = f"the pool ended {message.reason}"
            case wire.ControllerUp():
                self.controller = message
            case wire.RankForked():
                state = self.ranks[message.rank]
                state.pid, state.ident = message.pid, message.ident
                if state.exited is not None and state.exited.pid != message.pid:
                    state.exited = None  # another notebook has started it anew
            case wire.RankReady():
                self.ranks[message.rank].ready = True
            case wire.RankFailed():
                self.ranks[message.rank].failed = message
            case wire.RankExited() if self.ranks[message.rank].pid == message.pid:
                self.ranks[message.rank].exited = message
                self.ranks[message.rank].ready = False
                return message
            case wire.LastLines():
                self.last_lines[message.rank] = message.text
        return None

    def _lost_node(self, index: int, reason: str) -> None:
        """A node is gone, and its ranks with it; the lock is held."""
        self.gone[index] = reason
        for rank in self.ranks_of(index):
            state = self.ranks[rank]
            state.exited = wire.RankExited(rank, state.pid or 0, None, False, tail=reason)
            state.ready = False
        self._changed.notify_all()
