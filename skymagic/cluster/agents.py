"""The node agents of one pool, and the ranks that they run: start, watch, signal, call, replace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from skymagic.cluster.links import Routes
from skymagic.cluster.nodes import Liveness, Node
from skymagic.cluster.requests import AgentRequests
from skymagic.plan.units import count, duration_text
from skymagic.wire import agent as wire

REVIVE_TIMEOUT = 30.0
"""Seconds that nodes which were gone have for their new agents' first words; the agents before may have to end first."""


class Agents(AgentRequests):
    """The agents of a pool and the links to them, with their lifetimes.

    Args:
        nodes: the machines, each with an agent of its own, the head first.
        died: called (on a link's thread) when a rank ended that nobody asked to end.
        lost: called (on a link's thread) when an agent is gone, with the node and a reason.
        note: called with what the user should know of links that are down, and up again.
        ended: called (on a link's thread) when an agent ends everything, for a limit is over or somebody else ends the pool, with the reason.
        problem: called (on a link's thread) with what went wrong on a node that goes on.
        shown: called (on a link's thread) with a rank and what it shows in a run that another notebook began.
        told: called (on a link's thread) with what is told of machines that will be taken away, and of the ranks' hooks.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        died: Callable[[wire.RankExited], None],
        lost: Callable[[int, str], None],
        note: Callable[[str], object],
        ended: Callable[[str], None],
        problem: Callable[[str], None],
        shown: Callable[[int, Mapping[str, Any]], None] = lambda rank, content: None,
        told: Callable[[wire.InterruptionNotice | wire.HookEnded], None] = lambda message: None,
    ) -> None:
        super().__init__(nodes, self._received, self._link_changed)
        self._died, self._lost, self._note, self._ended, self._problem = (
            died,
            lost,
            note,
            ended,
            problem,
        )
        self._shown, self._told = shown, told
        self._unreachable: set[int] = set()  # nodes that are lost and may run on, out of reach
        self.unreached: list[str] = []  # after the end: nodes that could not be told of it
        self._offers: dict[str, wire.RendezvousKey] = {}
        self._closing = False
        self._routes = Routes(self, self._links, self._calls)
        self._liveness = Liveness(self._note_link, self._routes.reached, self._give_up)

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    def start(self, specs: Sequence[wire.AgentSpec]) -> None:
        """Open all links; `specs` has one for each node."""
        self._node_specs = tuple(specs)
        for index, transport in self._links.connect(range(len(specs))).items():
            self._links.add(index, transport).send(specs[index])

    def attach(
        self,
        agents: Sequence[wire.AgentSpec],
        ranks: Mapping[int, tuple[int, wire.RankSpec]],
        timeout: float,
    ) -> wire.ControllerUp:
        """Take up agents and ranks that another notebook has started, as they are: ready, failed, or ended.

        Args:
            agents: what each was told at its start.
            ranks: as for `order`.

        Returns:
            The controller's connection info. Nodes that are gone are in `gone`.

        Raises:
            ProvisionError: the head is gone, or a node does not answer within `timeout` seconds.
        """
        self._node_specs = tuple(agents)
        self.read(ranks, timeout, partly=True)
        controller = self.wait_controller(timeout)
        self._routes.listen(range(len(self.nodes)))
        return controller

    def read(
        self,
        ranks: Mapping[int, tuple[int, wire.RankSpec]],
        timeout: float,
        *,
        partly: bool = False,
    ) -> None:
        """Open all links to agents that run, and find out how the ranks are: ready, failed, or ended.

        Args:
            partly: whether nodes other than the head may be gone.

        Raises:
            ProvisionError: a node is gone, or does not answer within `timeout` seconds.
        """
        self._begin(ranks)
        for index, transport in self._links.connect(range(len(self.nodes))).items():
            self._links.add(index, transport)
        self._wait_known(timeout, partly)

    def meet(self, timeout: float) -> tuple[Node, ...]:
        """Find out where the nodes reach each other, and have the head's controller listen there.

        Raises:
            ProvisionError: no private address of the head can be reached by all others.
        """
        self.wait(lambda: len(self.started) == len(self.nodes), timeout, "the node agents")
        if all(node.address for node in self.nodes):
            self.nodes = tuple(replace(node, hostname=node.name) for node in self.nodes)
            self._routes.listen(range(len(self.nodes)))
            return self.nodes
        addresses = self._routes.find(timeout)
        self._links[0].send(wire.StartController(addresses[0]))
        self._place(addresses)
        self._routes.listen(range(len(self.nodes)))
        return self.nodes

    def order(self, specs: Mapping[int, tuple[int, wire.RankSpec]]) -> None:
        """Order the ranks (rank → index into `nodes`, specification); returns at once."""
        self._begin(specs)
        self._order(self.ranks, 0)

    def _order(self, ranks: Iterable[int], generation: int) -> None:
        for link, mine in self._links.of(ranks):
            specs = tuple(vars(self.specs[rank][1]) | {"generation": generation} for rank in mine)
            # by this engines find the controller; the head's agent has it, and so does one that was told before
            engine = (
                self.controller.engine if self.controller is not None and link.node > 0 else None
            )
            link.send(wire.Spawn(specs, engine))

    def close(self) -> None:
        """End all agents and what they started; twice is safe."""
        self._closing = True
        self._liveness.close()
        self._links.close()
        self.unreached = [self.nodes[index].name for index in sorted(self._unreachable | self.away)]

    def leave(self) -> None:
        """Close the links, and leave the agents and all that they run; twice is safe."""
        self._closing = True
        self._liveness.close()
        for node in self.nodes:
            if node.leave is not None:
                node.leave()

    # -- ranks -------------------------------------------------------------------------------------------------------

    def respawn(self, ranks: Iterable[int], generation: int) -> None:
        """Start these ranks anew; what still runs of them is killed."""
        chosen = sorted(set(ranks))
        with self._changed:
            for rank in chosen:
                self.ranks[rank] = self._new_state(rank)
            self._progress_at = time.monotonic()
        self._order(chosen, generation)

    def reshape(self, specs: Mapping[int, tuple[int, wire.RankSpec]], timeout: float) -> None:
        """Other ranks from now on: wait for the end of those that `specs` lacks; new ones are not started yet.

        Raises:
            ProvisionError: one did not end in time.
        """
        gone = [rank for rank in self.ranks if rank not in specs]
        self.wait(
            lambda: all(self.ranks[rank].exited for rank in gone),
            timeout,
            "the end of released ranks",
        )
        with self._changed:
            self.specs = dict(specs)
            self.ranks = {rank: self.ranks.get(rank) or self._new_state(rank) for rank in specs}

    # -- nodes that are out of sight ---------------------------------------------------------------------------------

    def _link_changed(self, index: int, state: str) -> None:
        with self._changed:
            # "lost" is for certain: its agent has ended, and needs not be told of anything
            (self.away.discard if state in ("connected", "lost") else self.away.add)(index)
        if state == "connected":
            self._liveness.link_up(index)
        elif (
            state == "reconnecting" and not self._closing
        ):  # the end of one that is lost comes by its link
            self._liveness.link_down(index)

    def _note_link(self, index: int, away: bool) -> None:
        name = self.nodes[index].name
        if away:
            limit = self._node_specs[index].max_away
            bound = f" for {duration_text(limit)} at most" if limit is not None else ""
            self._note(
                f"{name}: connection lost; ranks there keep running{bound}, and this notebook reconnects"
            )
        elif not self._closing and index not in self.gone:
            self._note(f"{name}: connected again")

    def _give_up(self, index: int) -> None:
        """No other node reaches it: its link ends."""
        name, others = self.nodes[index].name, len(self.nodes) - 1
        if self.nodes[index].alive() is False:
            reason = f"{name} is terminated"
        else:
            self._unreachable.add(index)
            other_nodes = "node" if others == 1 else count(others, "node")
            reason = f"{name} does not answer, neither here nor to the other {other_nodes}"
        self.abandon(index, reason)

    def drop_silent(self, ranks: Iterable[int], timeout: float) -> None:
        """Give up nodes whose link stands and whose agents do not say within `timeout` seconds what these ranks use: they hang, or were
        stopped. Ranks of this machine end with them."""
        heard = {self.specs[rank][0] for rank in self.ask(ranks, "usage", timeout)}
        for index in {self.specs[rank][0] for rank in ranks} - heard - self.away - self.gone.keys():
            self.abandon(index, f"the agent on {self.nodes[index].name} does not answer")

    def abandon(self, index: int, reason: str) -> None:
        """Give up a node whose link stands, and all that runs there: `revive` starts another agent."""
        self.lose(index, reason)
        self._links[index].drop()

    def lose(self, index: int, reason: str, fate: str | None = None) -> None:
        """Give up a node: its ranks are lost, and whoever gives it says why, unless its fate is known."""
        if index in self.gone or self._closing:
            return
        fate = self.nodes[index].fate() if fate is None else fate
        reason = f"{reason} ({fate})" if fate and fate not in reason else reason
        with self._changed:
            if index in self.gone or self._closing:
                return
            self._lost_node(index, reason)
        self._liveness.link_up(index)  # nobody waits for it any more
        self._lost(index, reason)

    def revive(
        self, timeout: float, machines: Mapping[int, Node] = MappingProxyType({})
    ) -> list[int]:
        """Start agents anew on the nodes that are gone; the ranks that must be started, none of which runs yet.

        With the head, its controller is another one too, which all ranks must meet: those of other nodes are among them.

        Args:
            timeout: seconds that the head's controller may take; the agents have `REVIVE_TIMEOUT`.
            machines: other machines in the place of some of them.

        Raises:
            ProvisionError: one is not to be reached still.
        """
        back, unreachable = dict(self.gone), set(self._unreachable)
        if not back:
            return []
        self.nodes = tuple(machines.get(node.index, node) for node in self.nodes)
        before = {index: self.started[index] for index in back if index in self.started}
        self._links.retire(
            back, REVIVE_TIMEOUT
        )  # an agent may live on whose controller, or forkserver, has ended
        try:
            self._relink(back)
            names = ", ".join(self.nodes[index].name for index in back)
            self.wait(
                lambda: all(index in self.started for index in back),
                REVIVE_TIMEOUT,
                f"the agent on {names}",
            )
            if machines:
                self._place(self._routes.find(timeout))
            if 0 in back:
                if self._node_specs[0].address is None:
                    self._links[0].send(wire.StartController(self.nodes[0].address))
                self.wait_controller(timeout)
            self._routes.listen(back)
        except BaseException:
            with self._changed:
                self.gone = {**back, **self.gone}
                self.started = {**before, **self.started}
                self._unreachable |= unreachable
            self._links.retire(back, REVIVE_TIMEOUT)
            raise
        return (
            list(self.specs)
            if 0 in back
            else [rank for index in back for rank in self.ranks_of(index)]
        )

    def _relink(self, indices: Iterable[int]) -> None:
        indices = tuple(indices)
        transports = self._links.connect(indices)
        with self._changed:
            self._trouble = None
            self._unreachable.difference_update(indices)
            if 0 in indices:
                self.controller = None
            for index in indices:
                self.ending.pop(index, None)
                self.started.pop(index, None)
                self._routes.forget(index)
                del self.gone[index]
        for index in indices:
            link = self._links.add(index, transports[index])
            link.send(self._node_specs[index])
            for offer in self._offers.values():
                link.send(offer)

    def _pass_on(self, index: int, message: wire.InterruptionNotice | wire.HookEnded) -> None:
        """The ranks of all nodes hear of a machine that will be taken away."""
        if isinstance(message, wire.InterruptionNotice) and message.at is not None:
            self.ending[index] = message.at
            self._links.send_others(index, message)
        self._told(message)

    # -- events --------------------------------------------------------------------------------------------------------

    def _received(self, index: int, message: wire.AgentMessage | None) -> None:
        reason = ""
        with self._changed:
            match message:
                case None if index not in self.gone:
                    said = self._links.complaint(index)
                    ended = f"the agent on {self.nodes[index].name} ended"
                    reason = (
                        (f"{ended}:\n{said}" if "\n" in said else f"{ended}: {said}")
                        if said
                        else ended
                    )
                    self._trouble = self._trouble or reason
                case wire.AgentFailed():
                    reason = f"{self.nodes[index].name}: {message.reason}"
                case wire.ProbeReply():
                    self._calls.replied(message.number, index, message)
                case wire.RankReply():
                    self._calls.replied(message.number, message.rank, message.value)
                case wire.ControllerUp():
                    self._links.send_others(
                        0, wire.Spawn((), message.engine)
                    )  # their ranks wait for it
            died = self._apply(index, message)
            self._changed.notify_all()
        if isinstance(message, wire.RendezvousKey):
            if not message.key.partition("/")[2]:  # holds for all generations
                self._offers[message.key] = message
            self._links.send_others(index, message)
        if self._closing:
            return
        if isinstance(message, wire.InterruptionNotice | wire.HookEnded):
            self._pass_on(index, message)
        if isinstance(message, wire.FollowedOutput):
            self._shown(message.rank, message.content)
        if isinstance(message, wire.AgentProblem):
            self._problem(f"{self.nodes[index].name}: {message.text}")
        if isinstance(message, wire.PoolEnded):
            self._ended(message.reason)
        if died is not None:
            self._died(died)
        if message is None or isinstance(message, wire.AgentFailed):
            self.lose(index, reason)
