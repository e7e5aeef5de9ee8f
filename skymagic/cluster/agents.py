"""The node agents of one pool, and the ranks that they run: start, watch, signal, call, replace."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from skymagic.cluster.link import Link
from skymagic.cluster.liveness import Liveness
from skymagic.cluster.nodes import Node, RankState
from skymagic.cluster.rpc import PendingCalls
from skymagic.errors import ProvisionError
from skymagic.plan.units import count, duration_text
from skymagic.wire import agent as wire
from skymagic.wire.exit_status import describe
from skymagic.wire.threads import run_all
from skymagic.wire.transport import Transport

REVIVE_TIMEOUT = 10.0
"""Seconds that nodes which were gone have for their new agents' first words."""
PROBE_TIMEOUT = 5.0
"""Seconds that nodes have to probe another one."""


class Agents:
    """Owns the links to all agents of a pool.

    Args:
        nodes: the machines, each with an agent of its own, the head first.
        died: called (on a link's thread) when a rank ended that nobody asked to end.
        lost: called (on a link's thread) when an agent is gone, with the node and a reason.
        note: called with what the user should know of links that are down, and up again.
        ended: called (on a link's thread) when an agent ends everything because a limit is over, with the reason.
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
        told: Callable[[wire.Interruption | wire.HookEnded], None] = lambda message: None,
    ) -> None:
        self.nodes = tuple(nodes)
        self.specs: dict[int, tuple[int, wire.RankSpec]] = {}
        """Rank → (index into `nodes`, its specification)."""
        self.ranks: dict[int, RankState] = {}
        self.started: dict[int, wire.AgentStarted] = {}
        """By index into `nodes`: what its agent said of itself."""
        self.away: set[int] = set()
        """Nodes whose links are down, and come back or not."""
        self.gone: dict[int, str] = {}
        """Nodes that are lost, each with a reason."""
        self.ending: dict[int, float] = {}
        """Nodes that will be taken away, each with when (seconds since 1970)."""
        self._unreachable: set[int] = set()
        """Those of them that may run on, out of reach."""
        self.last_lines: dict[int, str] = {}
        """After the end: what each rank's log ended with."""
        self.unreached: list[str] = []
        """After the end: nodes that could not be told of it."""
        self._probe_addresses: dict[int, dict[str, int]] = {}
        """Where each node can be reached by the others."""
        self._liveness = Liveness(self._note_link, self._reached_by_others, self._give_up)
        self._node_specs: tuple[wire.AgentSpec, ...] = ()
        self._offers: dict[str, wire.Offer] = {}
        self.controller: wire.ControllerUp | None = None
        self._died, self._lost, self._note, self._ended, self._problem = died, lost, note, ended, problem
        self._shown, self._told = shown, told
        self._links: list[Link] = []
        self._changed = threading.Condition()
        self._calls = PendingCalls(self._changed)
        self._trouble: str | None = None
        self._closing = False

    def _new_state(self, rank: int) -> RankState:
        index, spec = self.specs[rank]
        return RankState(spec.info["node"], self.nodes[index].name)

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    def start(self, specs: Sequence[wire.AgentSpec]) -> None:
        """Open all links; `specs` has one for each node."""
        self._node_specs = tuple(specs)
        transports = self._open(range(len(specs)))
        for index, spec in enumerate(specs):
            link = Link(transports[index], index, self._received)
            self._links.append(link)
            link.send(spec)

    def attach(
        self, agents: Sequence[wire.AgentSpec], ranks: Mapping[int, tuple[int, wire.RankSpec]], timeout: float
    ) -> wire.ControllerUp:
        """Take up agents and ranks that another notebook has started, as they are: ready, failed, or ended.

        Args:
            agents: what each was told at its start.
            ranks: as for `order`.

        Returns:
            The controller's connection info.

        Raises:
            ProvisionError: one is gone, or does not answer within `timeout` seconds.
        """
        self._node_specs = tuple(agents)
        self.read(ranks, timeout)
        return self.wait_controller(timeout)

    def read(self, ranks: Mapping[int, tuple[int, wire.RankSpec]], timeout: float) -> None:
        """Open all links to agents that run, and find out how the ranks are: ready, failed, or ended. Raises as `attach` does."""
        self.specs = dict(ranks)
        self.ranks = {rank: self._new_state(rank) for rank in ranks}
        transports = self._open(range(len(self.nodes)))
        self._links = [Link(transport, index, self._received) for index, transport in sorted(transports.items())]

        def known() -> bool:
            settled = all(one.ready or one.failed or one.exited for one in self.ranks.values())
            return settled and len(self.started) == len(self.nodes)

        self._wait(known, timeout, "the node agents")

    def follow(self, shown: Mapping[int, int]) -> None:
        """Have agents tell what ranks show (`shown` of the constructor), after what has been shown.

        Args:
            shown: rank → number of the last content that was shown already.
        """
        for link, mine in self._by_link(shown):
            link.send(wire.Follow({str(rank): shown[rank] for rank in mine}))

    def _open(self, indices: Iterable[int]) -> dict[int, Transport]:
        """Open links side by side; when one fails, the others are closed."""
        opened: dict[int, Transport | BaseException] = {}

        def open_one(index: int) -> None:
            try:
                opened[index] = self.nodes[index].start_agent(functools.partial(self._link_changed, index))
            except BaseException as problem:
                opened[index] = problem

        first, *others = indices
        threads = [threading.Thread(target=open_one, args=(index,), daemon=True) for index in others]
        for thread in threads:
            thread.start()
        open_one(first)
        for thread in threads:
            thread.join()
        transports = {index: made for index, made in opened.items() if not isinstance(made, BaseException)}
        problems = [made for made in opened.values() if isinstance(made, BaseException)]
        if problems:
            for transport in transports.values():
                transport.close()
            raise problems[0]
        return transports

    def meet(self, secret: str, timeout: float) -> tuple[Node, ...]:
        """Find out where the nodes reach each other, and have the head's controller listen there.

        Args:
            secret: by which the others know the head.

        Raises:
            ProvisionError: no private address of the head can be reached by all others.
        """
        self._wait(lambda: len(self.started) == len(self.nodes), timeout, "the node agents")
        if all(node.address for node in self.nodes):
            self.nodes = tuple(replace(node, hostname=node.name) for node in self.nodes)
            return self.nodes
        addresses = self._addresses(secret, timeout)
        self._links[0].send(wire.StartController(addresses[0]))
        self._place(addresses)
        return self.nodes

    def _addresses(self, secret: str, timeout: float) -> list[str]:
        """Where the nodes reach each other, the head first. Raises ProvisionError."""
        started = [self.started[index] for index in range(len(self.nodes))]
        if len({agent.machine for agent in started}) == 1:
            return ["127.0.0.1"] * len(started)
        return self._reach(self._probe_addresses.get(0) or started[0].addresses, secret, timeout)

    def _place(self, addresses: Sequence[str]) -> None:
        self.nodes = tuple(
            replace(node, address=address, hostname=self.started[node.index].hostname)
            for node, address in zip(self.nodes, addresses, strict=True)
        )

    def _reach(self, places: Mapping[str, int], secret: str, timeout: float) -> list[str]:
        others = range(1, len(self.nodes))
        with self._calls.call() as (number, answers):
            for index in others:
                self._links[index].send(wire.ProbeAddresses(dict(places), secret, number, listen=True))
            self._wait(lambda: len(answers) == len(others), timeout, "the way from node to node")
            ways = {index: answers[index].routes for index in others}
            self._probe_addresses = {index: answers[index].addresses for index in others}
        for address in places:
            if all(address in ways[index] for index in others):
                self._probe_addresses[0] = {address: places[address]}
                return [address, *(ways[index][address] for index in others)]
        head = self.nodes[0].name
        if not places:
            raise ProvisionError(
                f"{head} has no private IPv4 address, by which the nodes of a pool reach each other (IPv6 alone does not do): "
                "give each node one, or make a pool of one node"
            )
        lost = [self.nodes[index].name for index in others if not ways[index]]
        raise ProvisionError(
            f"{', '.join(lost) or 'the nodes'} cannot reach {head} at a private address that serves all "
            f"({head} has {', '.join(places) or 'none'}); the nodes of a pool must be in one network, and let each other in"
        )

    def order(self, specs: Mapping[int, tuple[int, wire.RankSpec]]) -> None:
        """Order the ranks (rank → index into `nodes`, specification); returns at once."""
        self.specs = dict(specs)
        self.ranks = {rank: self._new_state(rank) for rank in specs}
        self._order(self.ranks, 0)

    def _order(self, ranks: Iterable[int], generation: int) -> None:
        for link, mine in self._by_link(ranks):
            specs = tuple(vars(self.specs[rank][1]) | {"generation": generation} for rank in mine)
            # by this engines find the controller; the head's agent has it, and so does one that was told before
            engine = self.controller.engine if self.controller is not None and link.node > 0 else None
            link.send(wire.Spawn(specs, engine))

    def wait_controller(self, timeout: float) -> wire.ControllerUp:
        """The controller's connection info.

        Raises:
            ProvisionError: it did not come up.
        """
        self._wait(lambda: self.controller is not None, timeout, "the controller on the head node")
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
        self._wait(lambda: settled() or ready() > before, timeout, what)

    def _wait(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: done() or self._trouble is not None, timeout)
            if not done():
                raise ProvisionError(self._trouble or f"{what} did not come up within {timeout:.0f} s")

    def close(self) -> None:
        """End all agents and what they started; twice is safe."""
        self._closing = True
        self._liveness.close()
        run_all([link.close for link in self._links])
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
        self._order(chosen, generation)

    def reshape(self, specs: Mapping[int, tuple[int, wire.RankSpec]], timeout: float) -> None:
        """Other ranks from now on: wait for the end of those that `specs` lacks; new ones are not started yet.

        Raises:
            ProvisionError: one did not end in time.
        """
        gone = [rank for rank in self.ranks if rank not in specs]
        self._wait(lambda: all(self.ranks[rank].exited for rank in gone), timeout, "the end of released ranks")
        with self._changed:
            self.specs = dict(specs)
            self.ranks = {rank: self.ranks.get(rank) or self._new_state(rank) for rank in specs}

    def signal(self, ranks: Iterable[int], signum: int) -> None:
        """Send a signal; SIGKILL reaches what a rank started too."""
        for link, mine in self._by_link(ranks):
            link.send(wire.Signal(mine, signum))

    def ask(self, ranks: Iterable[int], what: str, timeout: float) -> dict[int, Any]:
        """Ask ranks' control threads, also while their cells run; the answers that came within `timeout` seconds."""
        wanted = [rank for rank in ranks if self.ranks[rank].exited is None]
        with self._calls.call() as (number, answers):
            for link, mine in self._by_link(wanted):
                link.send(wire.Request(mine, what, number))
            self._calls.wait(lambda: len(answers) >= len(wanted), timeout)
            return dict(answers)

    def ask_nodes(
        self, ranks: Iterable[int], message: Callable[[tuple[int, ...], int], wire.Message], timeout: float
    ) -> dict[int, Any]:
        """Send each node a message about its ranks; by its first rank the answers that came within `timeout` seconds.

        Args:
            message: makes it, given the ranks and the number that the answer must bear.
        """
        with self._calls.call() as (number, answers):
            asked = [(link, mine) for link, mine in self._by_link(ranks) if link.node not in {*self.away, *self.gone}]
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

    def _by_link(self, ranks: Iterable[int]) -> list[tuple[Link, tuple[int, ...]]]:
        chosen = sorted(set(ranks))
        shares = [(link, tuple(rank for rank in chosen if self.specs[rank][0] == link.node)) for link in self._links]
        return [(link, mine) for link, mine in shares if mine]

    @contextlib.contextmanager
    def busy(self, ranks: Iterable[int]) -> Iterator[None]:
        """For the length of a run: nodes without any of its ranks do not take the pool for idle."""
        at_work = {self.specs[rank][0] for rank in ranks}
        limited = [link for link in self._links if self._node_specs[link.node].idle_timeout is not None]
        others = [link for link in limited if link.node not in at_work]
        number = self._calls.number() if others else 0
        for link in others:
            link.send(wire.RunElsewhere(number, True))
        try:
            yield
        finally:
            for link in others:
                link.send(wire.RunElsewhere(number, False))

    # -- nodes that are out of sight ---------------------------------------------------------------------------------

    def ranks_of(self, index: int) -> list[int]:
        """The ranks of one node."""
        return [rank for rank, (where, _) in self.specs.items() if where == index]

    def _link_changed(self, index: int, state: str) -> None:
        with self._changed:
            # "lost" is for certain: its agent has ended, and needs not be told of anything
            (self.away.discard if state in ("connected", "lost") else self.away.add)(index)
        if state == "connected":
            self._liveness.link_up(index)
        elif not self._closing:
            self._liveness.link_down(index)

    def is_away(self, rank: int) -> bool:
        """Whether the link to a rank's node is down."""
        return self.specs[rank][0] in self.away

    def _note_link(self, index: int, away: bool) -> None:
        name = self.nodes[index].name
        if away:
            limit = self._node_specs[index].max_away
            bound = f" for {duration_text(limit)} at most" if limit is not None else ""
            self._note(f"{name}: the connection is lost; what runs there goes on{bound}, and this notebook reconnects")
        elif not self._closing and index not in self.gone:
            self._note(f"{name}: connected again")

    def _reached_by_others(self, index: int) -> bool | None:
        """Whether another node reaches this one, and it was not given back; None when nobody can tell."""
        if self.nodes[index].alive() is False:
            return False
        others = [other for other in range(len(self.nodes)) if other not in {index, *self.away, *self.gone}]
        probed = self._probe_addresses.get(index)
        if not probed or not others:
            return None
        with self._calls.call() as (number, answers):
            for other in others:
                self._links[other].send(wire.ProbeAddresses(probed, self._node_specs[0].job_id, number))
            self._calls.wait(lambda: len(answers) == len(others), PROBE_TIMEOUT)
            found = list(answers.values())
        return any(answer.routes for answer in found) if found else None

    def _give_up(self, index: int) -> None:
        """No other node reaches it: its link ends."""
        name, others = self.nodes[index].name, len(self.nodes) - 1
        if self.nodes[index].alive() is False:
            reason = f"{name} is terminated"
        else:
            self._unreachable.add(index)
            reason = f"{name} does not answer, neither here nor to the other {count(others, 'node')}"
        self._lose(index, reason)
        self._links[index].drop()

    def _lose(self, index: int, reason: str) -> None:
        with self._changed:
            if index in self.gone or self._closing:
                return
            self.gone[index] = reason
            for rank in self.ranks_of(index):
                state = self.ranks[rank]
                state.exited = wire.RankExited(rank, state.pid or 0, None, False, tail=reason)
                state.ready = False
            self._changed.notify_all()
        self._lost(index, reason)

    def revive(self, timeout: float, machines: Mapping[int, Node] = MappingProxyType({})) -> list[int]:
        """Start agents anew on the nodes that are gone; the ranks that must be started, none of which runs yet.

        With the head, its controller is another one too, which all ranks must meet: those of other nodes are among them.

        Args:
            timeout: seconds that the head's controller may take; the agents have `REVIVE_TIMEOUT`.
            machines: other machines in the place of some of them.

        Raises:
            ProvisionError: one is not to be reached still.
        """
        back = dict(self.gone)
        if not back:
            return []
        self.nodes = tuple(machines.get(node.index, node) for node in self.nodes)
        before = {index: self.started[index] for index in back if index in self.started}
        self._retire(back)  # an agent may live on whose controller, or forkserver, has ended
        try:
            self._relink(back)
            names = ", ".join(self.nodes[index].name for index in back)
            self._wait(lambda: all(index in self.started for index in back), REVIVE_TIMEOUT, f"the agent on {names}")
            if machines:
                self._place(self._addresses(self._node_specs[0].job_id, timeout))
            if 0 in back:
                if self._node_specs[0].address is None:
                    self._links[0].send(wire.StartController(self.nodes[0].address))
                self.wait_controller(timeout)
        except BaseException:
            with self._changed:
                self.gone = {**back, **self.gone}
                self.started = {**before, **self.started}
            self._retire(back)
            raise
        return list(self.specs) if 0 in back else [rank for index in back for rank in self.ranks_of(index)]

    def _retire(self, indices: Iterable[int]) -> None:
        run_all([self._links[index].retire for index in indices], timeout=REVIVE_TIMEOUT)

    def _relink(self, indices: Iterable[int]) -> None:
        indices = tuple(indices)
        transports = self._open(indices)
        with self._changed:
            self._trouble = None
            self._unreachable.difference_update(indices)
            if 0 in indices:
                self.controller = None
            for index in indices:
                self.ending.pop(index, None)
                self.started.pop(index, None)
                self._probe_addresses.pop(index, None)  # its ports are others now
                del self.gone[index]
        for index in indices:
            link = self._links[index] = Link(transports[index], index, self._received)
            link.send(self._node_specs[index])
            for offer in self._offers.values():
                link.send(offer)

    def _pass_on(self, index: int, message: wire.Interruption | wire.HookEnded) -> None:
        """The ranks of all nodes hear of a machine that will be taken away."""
        if isinstance(message, wire.Interruption) and message.at is not None:
            self.ending[index] = message.at
            for link in self._links:
                if link.node != index:
                    link.send(message)
        self._told(message)

    # -- events --------------------------------------------------------------------------------------------------------

    def _received(self, index: int, message: wire.Message | None) -> None:
        died: wire.RankExited | None = None
        reason = ""
        with self._changed:
            match message:
                case None if index not in self.gone:
                    said = self._links[index].complaint if index < len(self._links) else ""
                    ended = f"the agent on {self.nodes[index].name} ended"
                    reason = (f"{ended}:\n{said}" if "\n" in said else f"{ended}: {said}") if said else ended
                    self._trouble = self._trouble or reason
                case wire.AgentStarted():
                    self.started[index] = message
                case wire.ProbeReply():
                    self._calls.replied(message.number, index, message)
                case wire.ControllerUp():
                    self.controller = message
                    for link in self._links[1:]:  # their ranks wait for it
                        link.send(wire.Spawn((), message.engine))
                case wire.PoolEnded():
                    self._trouble = f"the pool ended {message.reason}"
                case wire.AgentFailed():
                    reason = self._trouble = f"{self.nodes[index].name}: {message.reason}"
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
                    died = message
                case wire.LastLines():
                    self.last_lines[message.rank] = message.text
                case wire.Reply():
                    self._calls.replied(message.number, message.rank, message.value)
            self._changed.notify_all()
        if isinstance(message, wire.Offer):
            if not message.key.partition("/")[2]:  # holds for all generations
                self._offers[message.key] = message
            for link in self._links:
                if link.node != index:
                    link.send(message)
        if self._closing:
            return
        if isinstance(message, wire.Interruption | wire.HookEnded):
            self._pass_on(index, message)
        if isinstance(message, wire.RankOutput):
            self._shown(message.rank, message.content)
        if isinstance(message, wire.AgentProblem):
            self._problem(f"{self.nodes[index].name}: {message.text}")
        if isinstance(message, wire.PoolEnded):
            self._ended(message.reason)
        if died is not None:
            self._died(died)
        if message is None or isinstance(message, wire.AgentFailed):
            self._lose(index, reason)
