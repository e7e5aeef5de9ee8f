"""Nodes and ranks of a pool: machines from the provider, state reported by agents, and liveness."""

from __future__ import annotations

import logging
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

logger = logging.getLogger(__name__)


@dataclass
class RankState:
    """State of one rank, as reported by its agent."""

    hostname: str
    """Name of the rank's machine, as shown to users."""
    pid: int | None = None
    ready: bool = False
    exited: wire.RankExited | None = None
    failed: wire.RankFailed | None = None
    delivered: str = ""
    """Identity of its latest request, if an earlier notebook has delivered its results."""


@dataclass(frozen=True)
class Node:
    """A machine of a pool, as described by its provider.

    Attributes:
        index: number among the machines, 0 for the head.
        name: name shown to users.
        start_agent: starts its node agent and returns a transport to it. Its argument is called
            with the link's state: "connected", "reconnecting" or "lost".
        run: ``run(module, *arguments)`` starts ``python -m module arguments`` on that machine, in
            the environment of its ranks, and returns a transport to it. Each call starts another
            process, which ends when the transport is closed.
        forward: maps an address and port on that machine (and a preferred local port) to a port of
            127.0.0.1 here that leads there; None if the machine is this one.
        address: address at which the other nodes reach it; empty until that is known.
        install: ``install(addition, words, cancelled)`` installs packages into the environment of
            its ranks. `words` is called with each line that the installer prints; the installation
            ends soon after `cancelled` returns True. None if the environment is the notebook's own,
            or an interpreter that is used as it is.
        python: that interpreter; empty if there is none.
        access: data with which its provider reaches the agent again from another notebook; None if
            the agent ends with its notebook.
        leave: closes the connection to its agent without stopping the agent; safe to call twice.
            None if the agent would end.
        alive: returns True if the provider reports the machine as running, None if unknown.
        fate: returns the provider's explanation of why the machine is gone, as a sentence, or "".
            May take some seconds.
        hostname: the machine's own host name; empty until its agent has reported it.
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
    """State of the nodes of a pool and of their ranks.

    One lock guards it; its waiters are notified of each message.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        # rank → (index into `nodes`, its specification)
        self.specs: dict[int, tuple[int, wire.RankSpec]] = {}
        self.ranks: dict[int, RankState] = {}
        # index into `nodes` → first message of its agent
        self.started: dict[int, wire.AgentStarted] = {}
        self.away: set[int] = set()  # nodes whose links are down, perhaps for good
        self.gone: dict[int, str] = {}  # lost nodes, each with a reason
        # nodes that will be reclaimed, each with the time (seconds since 1970)
        self.ending: dict[int, float] = {}
        self.last_lines: dict[int, str] = {}  # after the end: last lines of each rank's log
        self._changed = threading.Condition()
        self._progress_at = time.monotonic()  # of the last message about a rank's start or end
        self._trouble: str | None = None  # reason that ends any wait for something to start

    def ranks_of(self, index: int) -> list[int]:
        """Return the ranks of one node."""
        return [rank for rank, (node, _) in self.specs.items() if node == index]

    def is_away(self, rank: int) -> bool:
        """Return True if the link to a rank's node is down."""
        return self.specs[rank][0] in self.away

    def late(self, seconds: float) -> list[int]:
        """Return the ranks still starting, if none has made progress for this long; else []."""
        with self._changed:
            if time.monotonic() - self._progress_at < seconds:
                return []
            return [
                rank
                for rank, state in self.ranks.items()
                if not (state.ready or state.failed or state.exited)
            ]

    def wait_ready(self, timeout: float, ranks: Iterable[int] | None = None) -> None:
        """Wait until these ranks (default: all) have run their plugins' hooks.

        The timeout restarts whenever another rank becomes ready.

        Raises:
            ProvisionError: a rank failed or ended, or none became ready within `timeout` seconds.
        """
        awaited = set(self.ranks if ranks is None else ranks)

        def ready() -> int:
            return sum(self.ranks[rank].ready for rank in awaited)

        def all_decided() -> bool:
            return ready() == len(awaited) or any(
                self.ranks[rank].failed or self.ranks[rank].exited for rank in awaited
            )

        while not all_decided():  # many ranks on few cores start one after another
            before = ready()
            what = f"{len(awaited) - before} of the ranks" if before else "the ranks"
            self.wait(
                lambda before=before: all_decided() or ready() > before,  # type: ignore[misc]
                timeout,
                what,
            )
        for rank in sorted(awaited):
            state = self.ranks[rank]
            if state.failed is not None:
                raise ProvisionError(
                    f"rank {rank} on {state.hostname} could not start: "
                    f"{state.failed.ename}: {state.failed.evalue}\n{state.failed.traceback}",
                    code="rank-start",
                    rank=rank,
                    host=state.hostname,
                )
            if state.exited is not None:
                raise ProvisionError(
                    f"rank {rank} on {state.hostname} ended while it started "
                    f"({describe(state.exited)})\n{state.exited.tail}",
                    code="rank-start",
                    rank=rank,
                    host=state.hostname,
                )

    def wait(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        """Wait for a condition on the state that agents report.

        Raises:
            ProvisionError: it is not met within `timeout` seconds, or cannot be met any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: done() or self._trouble is not None, timeout)
            if not done():
                logger.warning("gave up waiting: for=%s timeout=%s", what, timeout)
                raise ProvisionError(
                    self._trouble or f"{what} did not come up within {timeout:.0f} s",
                    code="start-timeout",
                )

    def _wait_known(self, timeout: float, partly: bool) -> None:
        """Wait until all agents have reported their ranks.

        With `partly`, some nodes may be gone, but not all.

        Raises:
            ProvisionError: not all have reported within `timeout` seconds, or one cannot any more.
        """

        def known() -> bool:
            settled = all(
                state.ready or state.failed or state.exited for state in self.ranks.values()
            )
            return settled and len({*self.started, *self.gone}) == len(self.nodes)

        def is_hopeless() -> bool:
            return len(self.gone) == len(self.nodes) if partly else self._trouble is not None

        with self._changed:
            self._changed.wait_for(lambda: known() or is_hopeless(), timeout)
            if not known() or (partly and is_hopeless()):
                silent = [
                    node.name
                    for node in self.nodes
                    if node.index not in {*self.started, *self.gone}
                ]
                slow = f"{', '.join(silent) or 'the ranks'} did not answer within {timeout:.0f} s"
                losses = "; ".join(dict.fromkeys(self.gone.values()))
                raise ProvisionError(losses or (self._trouble if is_hopeless() else None) or slow)
            self._trouble = None  # left over from nodes that are gone

    def _begin(self, specs: Mapping[int, tuple[int, wire.RankSpec]]) -> None:
        """Initialize the state of these ranks."""
        self.specs = dict(specs)
        self.ranks = {rank: self._new_state(rank) for rank in specs}
        self._progress_at = time.monotonic()

    def _set_addresses(self, addresses: Sequence[str]) -> None:
        """Record the nodes' addresses, the head first."""
        self.nodes = tuple(
            replace(node, address=address, hostname=self.started[node.index].hostname)
            for node, address in zip(self.nodes, addresses, strict=True)
        )

    def _new_state(self, rank: int) -> RankState:
        index, _ = self.specs[rank]
        return RankState(self.nodes[index].name)

    def _apply(self, index: int, message: wire.AgentMessage | None) -> wire.RankExited | None:
        """Apply a message of a node's agent, with the lock held.

        Return the end of a rank if it is new.
        """
        if isinstance(
            message, wire.RankForked | wire.RankReady | wire.RankFailed | wire.RankExited
        ):
            self._progress_at = time.monotonic()
        match message:
            case wire.AgentStarted():
                logger.info(
                    "agent reports: node=%s host=%s", index, sanitized_line(message.hostname)
                )
                self.started[index] = replace(message, hostname=sanitized_line(message.hostname))
            case wire.AgentFailed():
                self._trouble = f"{self.nodes[index].name}: {message.reason}"
            case wire.PoolEnded():
                self._trouble = f"the pool {message.reason}"
            case wire.RankForked():
                state = self.ranks[message.rank]
                logger.debug(
                    "rank forked: node=%s rank=%s pid=%s", index, message.rank, message.pid
                )
                state.pid = message.pid
                if state.exited is not None and state.exited.pid != message.pid:
                    state.exited = None  # another notebook has restarted it
            case wire.RankReady():
                logger.info("rank ready: node=%s rank=%s", index, message.rank)
                self.ranks[message.rank].ready = True
            case wire.RankFailed():
                logger.warning("rank failed at its start: node=%s rank=%s", index, message.rank)
                self.ranks[message.rank].failed = message
            # Race: the end of a replaced rank may be reported after its successor's start.
            case wire.RankExited() if self.ranks[message.rank].pid == message.pid:
                self.ranks[message.rank].exited = message
                self.ranks[message.rank].ready = False
                return message
            case wire.Delivered():
                for rank in message.ranks:
                    self.ranks[rank].delivered = message.request
            case wire.LastLines():
                self.last_lines[message.rank] = message.text
        return None

    def reclaimed_nodes(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return reclaimed nodes that have some of these ranks, with the provider's explanation.

        Only nodes where a signal has ended a rank are asked about: that may happen a moment before
        the agent ends. May take some seconds.
        """
        ends = [
            (self.specs[rank][0], self.ranks[rank].exited) for rank in {*ranks} & self.ranks.keys()
        ]
        killed = {node for node, end in ends if end and end.status in (-SIGTERM, -SIGKILL)}
        return {
            node: fate for node in killed - self.gone.keys() if (fate := self.nodes[node].fate())
        }

    def _lost_node(self, index: int, reason: str) -> None:
        """Mark a node and its ranks as gone; the lock is held."""
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
    """Failure detector with a thread for each node whose link is down.

    Args:
        on_change: called with a node and True when its link has been down for the grace period,
            False when it is up again.
        probe: returns True if other nodes reach this one, None if there are no others. Called on
            the node's thread.
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
        """Start watching a node whose link is down. Safe to call twice."""
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
        """Stop watching a node whose link is up, or that nothing waits for any more.

        Safe to call twice.
        """
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
            # The link may have come back while the others were probing.
            logger.debug("other nodes are asked for the node: node=%s", index)
            if self._probe(index) is False and not connected.is_set():
                self.link_up(index)
                self._on_dead(index)
                return
            if connected.wait(PROBE_INTERVAL):
                self._on_change(index, False)
                return
