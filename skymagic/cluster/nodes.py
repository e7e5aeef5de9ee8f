"""Nodes and ranks of a pool: a machine as its provider gives it, what agents tell of it and of its ranks, and whether it is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from signal import SIGKILL, SIGTERM
from typing import TYPE_CHECKING, Any

from skymagic.errors import ProvisionError
from skymagic.wire import agent as wire
from skymagic.wire.codec import Transport
from skymagic.wire.processes import describe
from skymagic.wire.untrusted import sanitized_line

if TYPE_CHECKING:
    from skymagic.bootstrap.provision import Addition


@dataclass
class RankState:
    """What is known of one rank."""

    hostname: str
    """The rank's machine, as users call it."""
    pid: int | None = None
    ident: str | None = None
    """Identity under which its engine registers."""
    ready: bool = False
    exited: wire.RankExited | None = None
    failed: wire.RankFailed | None = None


@dataclass(frozen=True)
class Node:
    """A machine of a pool, as its provider gives it.

    Attributes:
        index: its number among the machines, 0 for the head.
        name: what users call it.
        start_agent: starts its node agent, and is a link to it; its argument is called with the link's state:
            "connected", "reconnecting" or "lost".
        run: ``run(module, *arguments)`` starts ``python -m module arguments`` on that machine, in the environment of
            its ranks, and is a link to it; each call another process, which ends when the link is closed.
        forward: an address and port on that machine (and the port wanted here) → a port of 127.0.0.1 here that leads there; None where
            the machine is this one.
        address: where the other nodes reach it; empty until the nodes have met.
        install: ``install(addition, words, cancelled)`` installs packages into the environment of its ranks; `words` gets each
            line that the installer prints, and it ends soon once `cancelled` says so. None where the environment is the
            notebook's own, or an interpreter that is used as it is.
        python: that interpreter; empty where there is none.
        access: what its provider needs to reach its agent again from another notebook; None where an agent ends with its notebook.
        leave: closes what leads to its agent, and leaves that running; twice is safe. None where it would end.
        alive: whether who gives the machine says that it runs; None where nobody says it.
        fate: why it is gone, where who gives the machine says it: a sentence; "" where nobody does. May take some seconds.
        hostname: its own name for itself; empty until the nodes have met.
        own: name → digest of the notebook's own distributions in the environment of its ranks.
    """

    index: int
    name: str
    start_agent: Callable[[Callable[[str], None]], Transport] = field(repr=False, compare=False)
    run: Callable[..., Transport] = field(repr=False, compare=False)
    forward: Callable[..., int] | None = field(default=None, repr=False, compare=False)
    install: Callable[[Addition, Callable[[str], None], Callable[[], bool]], None] | None = field(
        default=None, repr=False, compare=False
    )
    python: str = ""
    access: Any = field(default=None, repr=False, compare=False)
    leave: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    alive: Callable[[], bool | None] = field(default=lambda: None, repr=False, compare=False)
    fate: Callable[[], str] = field(default=str, repr=False, compare=False)
    address: str = ""
    hostname: str = ""
    own: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        return f"node {self.index} ({self.name})"


class States:
    """What is known of the nodes of a pool and of their ranks; one lock guards it, and its waiters are notified of each message."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self.specs: dict[
            int, tuple[int, wire.RankSpec]
        ] = {}  # rank → (index into `nodes`, its specification)
        self.ranks: dict[int, RankState] = {}
        self.started: dict[
            int, wire.AgentStarted
        ] = {}  # by index into `nodes`: what its agent said of itself
        self.controller: wire.ControllerUp | None = None
        self.away: set[int] = set()  # nodes whose links are down, and come back or not
        self.gone: dict[int, str] = {}  # nodes that are lost, each with a reason
        self.ending: dict[
            int, float
        ] = {}  # nodes that will be taken away, each with when (seconds since 1970)
        self.last_lines: dict[int, str] = {}  # after the end: what each rank's log ended with
        self._changed = threading.Condition()
        self._progress_at = time.monotonic()  # of the last news of a rank's start or end
        self._trouble: str | None = None  # what ends each wait for the start of something

    def ranks_of(self, index: int) -> list[int]:
        """The ranks of one node."""
        return [rank for rank, (where, _) in self.specs.items() if where == index]

    def is_away(self, rank: int) -> bool:
        """Whether the link to a rank's node is down."""
        return self.specs[rank][0] in self.away

    def late(self, seconds: float) -> list[int]:
        """Return the ranks that are starting, if there has been no news of any rank's start for this long; else none."""
        with self._changed:
            if time.monotonic() - self._progress_at < seconds:
                return []
            return [
                rank
                for rank, state in self.ranks.items()
                if not (state.ready or state.failed or state.exited)
            ]

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
            return ready() == len(wanted) or any(
                self.ranks[rank].failed or self.ranks[rank].exited for rank in wanted
            )

        while not settled():  # many ranks on few cores come up one after another
            before = ready()
            what = f"{len(wanted) - before} of the ranks" if before else "the ranks"
            self.wait(lambda before=before: settled() or ready() > before, timeout, what)  # type: ignore[misc]
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

    def wait(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        """Wait until something is done that messages of agents tell.

        Raises:
            ProvisionError: it is not done within `timeout` seconds, or cannot be done any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: done() or self._trouble is not None, timeout)
            if not done():
                raise ProvisionError(
                    self._trouble or f"{what} did not come up within {timeout:.0f} s"
                )

    def _wait_known(self, timeout: float, partly: bool) -> None:
        """Wait until all agents have told how their ranks are, or, with `partly`, are gone and not the head. Raises ProvisionError."""

        def known() -> bool:
            settled = all(one.ready or one.failed or one.exited for one in self.ranks.values())
            return (
                settled
                and len({*self.started, *self.gone}) == len(self.nodes)
                and 0 not in self.gone
            )

        def hopeless() -> bool:
            return 0 in self.gone if partly else self._trouble is not None

        with self._changed:
            self._changed.wait_for(lambda: known() or hopeless(), timeout)
            if not known():
                silent = [
                    node.name
                    for node in self.nodes
                    if node.index not in {*self.started, *self.gone}
                ]
                slow = f"{', '.join(silent) or 'the ranks'} did not answer within {timeout:.0f} s"
                raise ProvisionError(
                    self.gone.get(0) or (self._trouble if hopeless() else None) or slow
                )
            self._trouble = None  # that of nodes which are gone

    def _begin(self, specs: Mapping[int, tuple[int, wire.RankSpec]]) -> None:
        """Begin with these ranks, of which nothing is known yet."""
        self.specs = dict(specs)
        self.ranks = {rank: self._new_state(rank) for rank in specs}
        self._progress_at = time.monotonic()

    def _place(self, addresses: Sequence[str]) -> None:
        """Note where the nodes reach each other, the head first."""
        self.nodes = tuple(
            replace(node, address=address, hostname=self.started[node.index].hostname)
            for node, address in zip(self.nodes, addresses, strict=True)
        )

    def _new_state(self, rank: int) -> RankState:
        index, _ = self.specs[rank]
        return RankState(self.nodes[index].name)

    def _apply(self, index: int, message: wire.AgentMessage | None) -> wire.RankExited | None:
        """Take over what a node's agent has sent, the lock held; the end of a rank, where it is news."""
        if isinstance(
            message, wire.RankForked | wire.RankReady | wire.RankFailed | wire.RankExited
        ):
            self._progress_at = time.monotonic()
        match message:
            case wire.AgentStarted():
                self.started[index] = replace(message, hostname=sanitized_line(message.hostname))
            case wire.AgentFailed():
                self._trouble = f"{self.nodes[index].name}: {message.reason}"
            case wire.PoolEnded():
                self._trouble = f"the pool {message.reason}"
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
            # race: the end of a rank that was replaced may come after its successor's start
            case wire.RankExited() if self.ranks[message.rank].pid == message.pid:
                self.ranks[message.rank].exited = message
                self.ranks[message.rank].ready = False
                return message
            case wire.LastLines():
                self.last_lines[message.rank] = message.text
        return None

    def taken_back(self, ranks: Iterable[int]) -> dict[int, str]:
        """The nodes of these ranks that were taken back, and the fate that who gives them tells, where a signal has ended a rank, which may be a
        moment before it ends the agent. May take some seconds."""
        ends = [
            (self.specs[rank][0], self.ranks[rank].exited) for rank in {*ranks} & self.ranks.keys()
        ]
        killed = {node for node, end in ends if end and end.status in (-SIGTERM, -SIGKILL)}
        return {
            node: fate for node in killed - self.gone.keys() if (fate := self.nodes[node].fate())
        }

    def _lost_node(self, index: int, reason: str) -> None:
        """A node is gone, and its ranks with it; the lock is held."""
        self.gone[index] = reason
        for rank in self.ranks_of(index):
            state = self.ranks[rank]
            state.exited = wire.RankExited(rank, state.pid or 0, None, False, tail=reason)
            state.ready = False
        self._changed.notify_all()


GRACE = 1.0
"""Seconds that a link has to come back before other nodes probe."""
PROBE_INTERVAL = 5.0
"""Seconds between two rounds of probes."""


class Liveness:
    """Failure detection: a thread for each node whose link is down.

    Args:
        on_change: called with a node, and whether its link is down, for the user; not for less than the grace period.
        probe: whether other nodes reach this one; None when there are no others. Called on a thread of its own.
        on_dead: called once, on that thread, for a node that no other node reaches.
    """

    def __init__(
        self,
        on_change: Callable[[int, bool], None],
        probe: Callable[[int], bool | None],
        on_dead: Callable[[int], None],
    ) -> None:
        self._on_change, self._probe, self._on_dead = on_change, probe, on_dead
        self._lock = threading.Lock()
        self._connected: dict[int, threading.Event] = {}

    def link_down(self, index: int) -> None:
        """The link to this node is down; twice is safe."""
        with self._lock:
            if index in self._connected:
                return
            connected = self._connected[index] = threading.Event()
        threading.Thread(
            target=self._watch,
            args=(index, connected),
            name=f"skymagic-liveness-{index}",
            daemon=True,
        ).start()

    def link_up(self, index: int) -> None:
        """The link is up again, or nobody waits for it any more; twice is safe."""
        with self._lock:
            connected = self._connected.pop(index, None)
        if connected is not None:
            connected.set()

    def close(self) -> None:
        """End all threads; the results of probes under way are dropped."""
        for index in list(self._connected):
            self.link_up(index)

    def _watch(self, index: int, connected: threading.Event) -> None:
        if connected.wait(GRACE):
            return
        self._on_change(index, True)
        while True:
            # the link may have come back while the others were probing
            if self._probe(index) is False and not connected.is_set():
                self.link_up(index)
                self._on_dead(index)
                return
            if connected.wait(PROBE_INTERVAL):
                self._on_change(index, False)
                return
