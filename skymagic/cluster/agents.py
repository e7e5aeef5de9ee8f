"""Node agents of one pool and the ranks that they run: start, watch, signal, call, replace."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from skymagic.cluster.links import Routes
from skymagic.cluster.nodes import Liveness, Node
from skymagic.cluster.requests import AgentRequests
from skymagic.plan.units import count, duration_text
from skymagic.wire import agent as wire
from skymagic.wire import queries
from skymagic.wire.processes import status_words

logger = logging.getLogger(__name__)

RequestResult = wire.Output | wire.OrderFinished | wire.RequestUnknown
"""Messages of an agent about a request."""

REVIVE_TIMEOUT = 30.0
"""Seconds that restarted nodes have until their new agents report; the old agents may have to end
first.
"""


class AgentObserver:
    """Receives the events of a pool's agents, each on the thread of a link; ignores them all.

    A subclass overrides what it wants to know. No method may block for long: the link's other
    messages wait for it.
    """

    def on_death(self, exited: wire.RankExited) -> None:
        """A rank has ended without being asked to."""

    def on_loss(self, index: int, reason: str) -> None:
        """A node is given up, with its ranks; called once for each agent."""

    def on_link(self, text: str) -> None:
        """A link has gone down or come up again; the text is a note for the user."""

    def on_end(self, reason: str) -> None:
        """An agent ends everything: a limit was reached, or the pool was ended from elsewhere.

        Called by each agent. The reason is that of `wire.agent.PoolEnded`.
        """

    def on_problem(self, text: str) -> None:
        """Something went wrong on a node that continues."""

    def on_result(self, message: RequestResult) -> None:
        """Output or an outcome of a request has arrived."""

    def on_notice(self, message: wire.InterruptionNotice | wire.HookEnded) -> None:
        """A machine will be reclaimed, or a rank's hook for that has run."""


class Agents(AgentRequests):
    """The agents of a pool and the links to them, with their lifetimes.

    Args:
        nodes: the machines, each with its agent, the head first.
        observer: receives the agents' events.
    """

    def __init__(self, nodes: Sequence[Node], observer: AgentObserver) -> None:
        super().__init__(nodes, self._on_message, self._link_changed)
        self._observer = observer
        self._unreachable: set[int] = set()  # lost nodes that may still run, out of reach
        self.unreached: list[str] = []  # after the end: nodes that could not be notified
        self._closing = False
        self._routes = Routes(self, self._links, self._calls)
        self._liveness = Liveness(self._note_link, self._routes.is_reachable, self._give_up)

    @property
    def pool(self) -> str:
        """Name of the pool, for logs; "" for a mere reader of it."""
        return self._node_specs[0].pool if self._node_specs else ""

    # -- lifecycle ---------------------------------------------------------------------------------

    def start(self, specs: Sequence[wire.AgentSpec]) -> None:
        """Open all links; `specs` has one entry for each node."""
        self._node_specs = tuple(specs)
        logger.info("agents start: pool=%s nodes=%s", self.pool, len(specs))
        for index, transport in self._links.connect(range(len(specs))).items():
            self._links.add(index, transport).send(specs[index])

    def attach(
        self,
        agents: Sequence[wire.AgentSpec],
        ranks: Mapping[int, tuple[int, wire.RankSpec]],
        timeout: float,
    ) -> None:
        """Attach to agents and ranks that another notebook started: ready, failed, or ended.

        Args:
            agents: the spec that each agent was started with.
            ranks: as for `order`.

        Nodes that are gone are in `gone`.

        Raises:
            ProvisionError: all nodes are gone, or one does not answer within `timeout` seconds.
        """
        self._node_specs = tuple(agents)
        logger.info("attaching to agents: pool=%s nodes=%s", self.pool, len(agents))
        self.read(ranks, timeout, partly=True)
        self._routes.listen(range(len(self.nodes)))
        if level := agents[0].log_level:
            self.set_log_level(level)

    def read(
        self,
        ranks: Mapping[int, tuple[int, wire.RankSpec]],
        timeout: float,
        *,
        partly: bool = False,
    ) -> None:
        """Open all links to running agents, and wait for the state of all ranks.

        A rank is ready, failed, or ended.

        Args:
            partly: True if some nodes may be gone, but not all.

        Raises:
            ProvisionError: a node is gone, or does not answer within `timeout` seconds.
        """
        self._begin(ranks)
        for index, transport in self._links.connect(range(len(self.nodes))).items():
            self._links.add(index, transport)
        self._wait_known(timeout, partly)

    def find_addresses(self, timeout: float) -> tuple[Node, ...]:
        """Find addresses for the traffic between nodes, and return the nodes with them.

        Raises:
            ProvisionError: no private address of the head can be reached by all others.
        """
        self.wait(lambda: len(self.started) == len(self.nodes), timeout, "the node agents")
        if all(node.address for node in self.nodes):
            self.nodes = tuple(replace(node, hostname=node.name) for node in self.nodes)
            self._routes.listen(range(len(self.nodes)))
            return self.nodes
        addresses = self._routes.find(timeout)
        self._links[0].send(wire.HeadAddress(addresses[0]))
        self._set_addresses(addresses)
        self._routes.listen(range(len(self.nodes)))
        return self.nodes

    def order(self, specs: Mapping[int, tuple[int, wire.RankSpec]]) -> None:
        """Start the ranks (rank → index into `nodes`, specification) without waiting for them."""
        self._begin(specs)
        self._order(self.ranks, 0)

    def _order(self, ranks: Iterable[int], generation: int) -> None:
        for link, node_ranks in self._links.of(ranks):
            specs = tuple(
                replace(self.specs[rank][1], generation=generation) for rank in node_ranks
            )
            logger.info(
                "ranks are ordered: pool=%s node=%s ranks=%s generation=%s",
                self.pool,
                link.node,
                list(node_ranks),
                generation,
            )
            link.send(wire.Spawn(specs))

    def close(self) -> None:
        """End all agents and everything that they started. Safe to call twice."""
        logger.info("agents are ended: pool=%s", self.pool)
        self._closing = True
        self._liveness.close()
        self._links.close()
        self.unreached = [self.nodes[index].name for index in sorted(self._unreachable | self.away)]

    def leave(self) -> None:
        """Close the links without stopping the agents or their ranks. Safe to call twice."""
        logger.info("agents are left running: pool=%s", self.pool)
        self._closing = True
        self._liveness.close()
        for node in self.nodes:
            if node.leave is not None:
                node.leave()

    # -- ranks -------------------------------------------------------------------------------------

    def respawn(self, ranks: Iterable[int], generation: int) -> None:
        """Start these ranks again; any that still run are killed."""
        sorted_ranks = sorted(set(ranks))
        logger.info("ranks start again: pool=%s ranks=%s", self.pool, sorted_ranks)
        with self._changed:
            for rank in sorted_ranks:
                self.ranks[rank] = self._new_state(rank)
            self._progress_at = time.monotonic()
        self._order(sorted_ranks, generation)

    def reshape(self, specs: Mapping[int, tuple[int, wire.RankSpec]], timeout: float) -> None:
        """Change the set of ranks: wait for the end of those missing in `specs`.

        New ones are not started yet.

        Raises:
            ProvisionError: a rank did not end in time.
        """
        removed = [rank for rank in self.ranks if rank not in specs]
        logger.info(
            "pool changes its ranks: pool=%s count=%s removed=%s", self.pool, len(specs), removed
        )
        self.wait(
            lambda: all(self.ranks[rank].exited for rank in removed),
            timeout,
            "the end of released ranks",
        )
        with self._changed:
            self.specs = dict(specs)
            self.ranks = {rank: self.ranks.get(rank) or self._new_state(rank) for rank in specs}

    # -- unreachable nodes -------------------------------------------------------------------------

    def _link_changed(self, index: int, state: str) -> None:
        log = logger.info if state == "connected" or self._closing else logger.warning
        log("link is %s: pool=%s node=%s", state, self.pool, index)
        with self._changed:
            # "lost" is certain: the agent has ended, and needs no messages.
            (self.away.discard if state in ("connected", "lost") else self.away.add)(index)
        if state == "connected":
            self._liveness.link_up(index)
        # the end of a lost one is reported by its link
        elif state == "reconnecting" and not self._closing:
            self._liveness.link_down(index)

    def _note_link(self, index: int, away: bool) -> None:
        name = self.nodes[index].name
        if away:
            limit = self._node_specs[index].max_away
            bound = f" for {duration_text(limit)} at most" if limit is not None else ""
            self._observer.on_link(
                f"{name}: connection lost; ranks there keep running{bound}, "
                "and this notebook reconnects"
            )
        elif not self._closing and index not in self.gone:
            self._observer.on_link(f"{name}: connected again")

    def _give_up(self, index: int) -> None:
        """Give up a node that no other node reaches, which ends its link."""
        logger.warning("node is reached by no other node: pool=%s node=%s", self.pool, index)
        name, other_count = self.nodes[index].name, len(self.nodes) - 1
        if self.nodes[index].alive() is False:
            reason = f"{name} is terminated"
        else:
            self._unreachable.add(index)
            other_nodes = "node" if other_count == 1 else count(other_count, "node")
            reason = f"{name} does not answer, neither here nor to the other {other_nodes}"
        self.abandon(index, reason)

    def drop_silent(self, ranks: Iterable[int], timeout: float) -> None:
        """Give up nodes whose agents do not report these ranks' usage within `timeout` seconds.

        Their links are up, so the agents hang or were stopped. Ranks of such a machine end with
        them.
        """
        answered = {self.specs[rank][0] for rank in self.ask(ranks, queries.USAGE, timeout)}
        for index in (
            {self.specs[rank][0] for rank in ranks} - answered - self.away - self.gone.keys()
        ):
            logger.warning("agent does not answer: pool=%s node=%s", self.pool, index)
            self.abandon(index, f"the agent on {self.nodes[index].name} does not answer")

    def abandon(self, index: int, reason: str) -> None:
        """Give up a node whose link is up, and everything that runs there.

        `revive` starts another agent.
        """
        self.lose(index, reason)
        self._links[index].drop()

    def lose(self, index: int, reason: str, fate: str | None = None) -> None:
        """Give up a node and its ranks.

        The reason includes the fate that the provider reports, if any.
        """
        if index in self.gone or self._closing:
            return
        # the provider may take some seconds to answer: not with the lock held
        fate = self.nodes[index].fate() if fate is None else fate
        reason = f"{reason} ({fate})" if fate and fate not in reason else reason
        with self._changed:
            if index in self.gone or self._closing:
                return
            logger.error(
                "node is lost: pool=%s node=%s ranks=%s reason=%s",
                self.pool,
                index,
                self.ranks_of(index),
                reason.partition("\n")[0],
            )
            self._lost_node(index, reason)
        self._liveness.link_up(index)  # nothing waits for it any more
        self._observer.on_loss(index, reason)

    def revive(
        self, timeout: float, machines: Mapping[int, Node] = MappingProxyType({})
    ) -> list[int]:
        """Start agents again on the nodes that are gone, and return the ranks to start.

        Args:
            timeout: seconds to find the addresses of replacements; agents have `REVIVE_TIMEOUT`.
            machines: replacement machines for some of the nodes.

        Raises:
            ProvisionError: a node still cannot be reached.
        """
        back, unreachable = dict(self.gone), set(self._unreachable)
        if not back:
            return []
        logger.info("lost nodes start again: pool=%s nodes=%s", self.pool, list(back))
        self.nodes = tuple(machines.get(node.index, node) for node in self.nodes)
        before = {index: self.started[index] for index in back if index in self.started}
        # an agent may still run although its forkserver has ended
        self._links.retire(back, REVIVE_TIMEOUT)
        try:
            self._relink(back)
            names = ", ".join(self.nodes[index].name for index in back)
            self.wait(
                lambda: all(index in self.started for index in back),
                REVIVE_TIMEOUT,
                f"the agent on {names}",
            )
            if machines:
                self._set_addresses(self._routes.find(timeout))
            if 0 in back and self._node_specs[0].address is None:
                self._links[0].send(wire.HeadAddress(self.nodes[0].address))
            self._routes.listen(back)
        except BaseException as problem:
            logger.warning(
                "lost nodes did not start again: pool=%s nodes=%s error=%s",
                self.pool,
                list(back),
                type(problem).__name__,
            )
            with self._changed:
                self.gone = {**back, **self.gone}
                self.started = {**before, **self.started}
                self._unreachable |= unreachable
            self._links.retire(back, REVIVE_TIMEOUT)
            raise
        return [rank for index in back for rank in self.ranks_of(index)]

    def _relink(self, indices: Iterable[int]) -> None:
        indices = tuple(indices)
        transports = self._links.connect(indices)
        with self._changed:
            self._trouble = None
            self._unreachable.difference_update(indices)
            for index in indices:
                self.ending.pop(index, None)
                self.started.pop(index, None)
                self._routes.forget(index)
                del self.gone[index]
        for index in indices:
            link = self._links.add(index, transports[index])
            link.send(self._node_specs[index])

    def _pass_on(self, index: int, message: wire.InterruptionNotice | wire.HookEnded) -> None:
        """Tell the ranks of all other nodes about a machine that will be reclaimed."""
        if isinstance(message, wire.InterruptionNotice) and message.at is not None:
            self.ending[index] = message.at
            self._links.send_others(index, message)
        self._observer.on_notice(message)

    # -- events ------------------------------------------------------------------------------------

    def _on_message(self, index: int, message: wire.AgentMessage | None) -> None:
        reason = ""
        with self._changed:
            match message:
                case None if index not in self.gone:
                    complaint = self._links.complaint(index)
                    ended = f"the agent on {self.nodes[index].name} ended"
                    reason = (
                        (f"{ended}:\n{complaint}" if "\n" in complaint else f"{ended}: {complaint}")
                        if complaint
                        else ended
                    )
                    self._trouble = self._trouble or reason
                case wire.AgentFailed():
                    reason = f"{self.nodes[index].name}: {message.reason}"
                case wire.ProbeReply():
                    self._calls.deliver(message.number, index, message)
                case wire.Measurement() | wire.LogReply() | wire.LoggedRuns():
                    self._calls.deliver(message.number, message.rank, message)
                case wire.RankReply():
                    self._calls.deliver(message.number, message.rank, message.value)
            died = self._apply(index, message)
            self._changed.notify_all()
        if isinstance(message, wire.RendezvousKey):
            self._links.send_others(index, message)
        if self._closing:
            return
        if isinstance(message, wire.InterruptionNotice | wire.HookEnded):
            self._pass_on(index, message)
        if isinstance(message, wire.Output | wire.OrderFinished | wire.RequestUnknown):
            self._observer.on_result(message)
        if isinstance(message, wire.AgentProblem):
            logger.warning("agent reports a problem: pool=%s node=%s", self.pool, index)
            self._observer.on_problem(f"{self.nodes[index].name}: {message.text}")
        if isinstance(message, wire.PoolEnded):
            self._observer.on_end(message.reason)
        if died is not None:
            log = logger.info if died.expected else logger.warning
            log(
                "rank died: pool=%s node=%s rank=%s pid=%s status=%s expected=%s",
                self.pool,
                index,
                died.rank,
                died.pid,
                status_words(died.status),
                died.expected,
            )
            self._observer.on_death(died)
        if message is None or isinstance(message, wire.AgentFailed):
            self.lose(index, reason)
