"""What a pool holds while it lives: machines, agents, engine and store, brought up in this order and released in reverse."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from skymagic.cluster import Agents, Node
from skymagic.display.panel import passing_step
from skymagic.display.proxies import Proxies
from skymagic.pool import specs
from skymagic.pool.release import Step
from skymagic.pool.status import Status
from skymagic.wire import agent as wire
from skymagic.wire import processes
from skymagic.wire.codec import Transport

if TYPE_CHECKING:
    from skymagic.data.remote.remote_store import RemoteStore
    from skymagic.data.shipping.shipper import Shipper
    from skymagic.data.store.store import NodeStore
    from skymagic.files.upload import DataPlane
    from skymagic.providers import Provider, Survey
    from skymagic.run.engine import Engine

START_TIMEOUT = 120.0
"""Seconds that each step of a start may take."""
KEPT_ON_NODES = 4 << 30
"""Bytes of values that each node keeps for the user's later pools, unless he wants none."""


@dataclass(eq=False, repr=False)
class Resources:
    """Owns them."""

    _status: Status
    _provider: Provider
    _survey: Survey
    """Closed with the rest."""
    _namespace: dict[str, Any]
    """The notebook's variables."""
    _detached_timeout: float | None
    """Seconds without the notebook after which agents on other machines end everything."""
    _agents: Agents | None = None
    _engine: Engine | None = None
    _shipper: Shipper | None = None

    def __post_init__(self) -> None:
        self.widgets = Proxies(lambda message: self.agents.pass_on(message))
        """Those of the ranks that the notebook shows."""

    @property
    def agents(self) -> Agents:
        """The agents of a started pool."""
        if self._agents is None:
            raise self._status.missing()
        return self._agents

    @property
    def engine(self) -> Engine:
        """The connection to the ranks' kernels."""
        if self._engine is None:
            raise self._status.missing()
        return self._engine

    @property
    def shipper(self) -> Shipper:
        """What knows which values the ranks hold."""
        if self._shipper is None:
            raise self._status.missing()
        return self._shipper

    @property
    def replacing(self) -> Callable[[Sequence[int], Callable[[str], None], threading.Event], Mapping[int, Node]] | None:
        """Rents other machines in the place of these, where the pool asks for that and its provider can (`Replaceable`)."""
        from skymagic.providers import Replaceable

        if not self._status.plan.request.replace or not isinstance(self._provider, Replaceable):
            return None
        return partial(self._provider.replace, self._survey)

    @property
    def started(self) -> bool:
        """Whether there are agents."""
        return self._agents is not None

    def start(self, connect: Callable[[Sequence[Node]], Agents], say: Callable[[str], None]) -> None:
        """Acquire the machines and bring up all ranks. What came up before a failure is released by `close`.

        Args:
            connect: makes the agents of the machines.
        """
        status = self._status
        nodes = self._provider.acquire(self._survey, status.job_id, say)
        status.plan = self._survey.outcome()
        agents = self._agents = connect(nodes)
        say(passing_step("starting the agents"))
        agents.start(specs.of_agents(status, nodes, self._detached_timeout, os.environ))
        # these import ipyparallel, while the agents start
        import skymagic.data.shipping.shipper  # noqa: F401
        from skymagic.run.engine import Engine

        say(passing_step("starting the forkservers"))
        nodes = agents.meet(START_TIMEOUT)
        agents.order(specs.of_ranks(status, nodes, agents.started[0].port))
        names = ", ".join(plugin.name for plugin in status.plugins if plugin.preload)
        say(passing_step(f"importing {names}" if names else "starting the controller"))
        controller = agents.wait_controller(START_TIMEOUT)
        self._engine = Engine(controller.client, nodes[0].forward)
        self._shipper = self._new_shipper()
        say(passing_step("starting the ranks"))
        self.take_up(range(status.world_size))

    def ready(self) -> None:
        """All ranks are up."""
        self._survey.ready()

    def _new_shipper(self) -> Shipper:
        from skymagic.data.shipping.shipper import Shipper

        status = self._status
        keep = KEPT_ON_NODES if status.defaults.keep_values else 0
        store = open_store(self.agents, status.plan.remote, status.note, keep=keep)
        return Shipper(store, self._namespace, str(Path.cwd()))

    def attach(self, nodes: Sequence[Node], connect: Callable[[Sequence[Node]], Agents], port: int) -> list[int]:
        """Take up what another notebook has started, as it is; after a failure `leave` closes what was opened.

        Args:
            nodes: the machines, which have met.
            connect: makes their agents.
            port: of the head, free for process groups.

        Returns:
            The ranks that have died meanwhile.
        """
        from skymagic.run.engine import Engine

        status = self._status
        agents = self._agents = connect(nodes)
        ranks = specs.of_ranks(status, nodes, port)
        controller = agents.attach(
            specs.of_agents(status, nodes, self._detached_timeout, os.environ), ranks, START_TIMEOUT
        )
        self._engine = Engine(controller.client, nodes[0].forward)
        self._shipper = self._new_shipper()
        dead = [rank for rank, state in agents.ranks.items() if not state.ready]
        self.take_up([rank for rank in agents.ranks if rank not in dead])
        return dead

    def leave(self) -> None:
        """Close all connections, and leave what runs on the machines; twice is safe."""
        self.widgets.close()
        self._close_store()
        self._close_engine()
        if self._agents is not None:
            self._agents.leave()

    def take_up(self, ranks: Sequence[int]) -> None:
        """Wait for ranks that are starting, and bind them to the engine."""
        self.agents.wait_ready(START_TIMEOUT, ranks)
        idents = {rank: self.agents.ranks[rank].ident for rank in ranks}
        self.engine.bind({rank: ident for rank, ident in idents.items() if ident is not None}, START_TIMEOUT)

    def replace(self, ranks: Sequence[int], generation: int) -> None:
        """End what is left of these ranks and begin to start them anew; what they held is forgotten."""
        self._forget(ranks)
        self.agents.respawn(ranks, generation)

    def reshape(self) -> dict[int, Mapping[str, Any]]:
        """End the ranks that the pool's plan has no more; the new ones are not started yet.

        Returns:
            Rank → its new place (``InstanceInfo.plain()``), for those that stay.
        """
        before, after = len(self.agents.ranks), self._status.world_size
        self.agents.signal(range(after, before), signal.SIGKILL)
        ranks = specs.of_ranks(self._status, self.agents.nodes, self.agents.started[0].port)
        self.agents.reshape(ranks, START_TIMEOUT)
        self._forget(range(after, before))
        return {rank: ranks[rank][1].info for rank in range(min(before, after))}

    def _forget(self, ranks: Sequence[int]) -> None:
        self.widgets.forget(ranks)
        self.engine.forget(ranks)
        self.shipper.forget(ranks)

    def lose_node(self, index: int, ranks: Sequence[int]) -> None:
        """A machine is gone, with these ranks, and the values in its store."""
        self.widgets.forget(ranks)
        if (store := self._remote_store()) is not None:
            store.lose(index)

    def exchange(self, machines: Mapping[int, Node]) -> tuple[list[int], dict[int, Mapping[str, Any]]]:
        """Go on with other machines in the place of those that are gone.

        Returns:
            The ranks that must be started; rank → its place from now on, for all of them.

        Raises:
            ProvisionError: one is not to be reached.
        """
        return self.revive(machines), self.reshape()

    def revive(self, machines: Mapping[int, Node] = MappingProxyType({})) -> list[int]:
        """Try again to reach the machines that are gone; the ranks that belong there.

        Args:
            machines: others in the place of some of them.

        Raises:
            ProvisionError: one is not to be reached still.
        """
        gone, old = tuple(self.agents.gone), self.agents.started.get(0)
        back = self.agents.revive(START_TIMEOUT, machines)
        if (store := self._remote_store()) is not None:
            for index in gone:
                store.regain(self.agents.nodes[index])
        if 0 in gone:
            self._take_up_head(old)
        return back

    def _take_up_head(self, old: wire.AgentStarted | None) -> None:
        """Another agent runs on the head: the ranks will be found at its controller, and their values in its store."""
        from skymagic.run.engine import Engine

        controller = self.agents.wait_controller(START_TIMEOUT)
        self._close_engine()
        self._engine = Engine(controller.client, self.agents.nodes[0].forward)
        if not self._status.plan.remote:
            cast("NodeStore", self.shipper.store).move(self.agents.started[0].store)
            _remove_folders(old)

    def _remote_store(self) -> RemoteStore | None:
        if self._shipper is None or not self._status.plan.remote:
            return None
        return cast("RemoteStore", self._shipper.store)

    def plane(self) -> DataPlane | None:
        """What carries files to several nodes at once; None where there is one node, or all are this machine."""
        from skymagic.files.upload import DataPlane

        store = self._remote_store() if len(self.agents.nodes) > 1 else None
        if store is None:
            return None
        return DataPlane(store, lambda node: self.agents.started[node.index].store)

    # -- release -----------------------------------------------------------------------------------------------------

    def release_steps(self) -> list[Step]:
        """What releases everything, step by step; each of them twice is safe."""
        return [
            ("the ranks' widgets", self.widgets.close),
            ("the values on the nodes", self._close_store),
            ("the connection to the ranks", self._close_engine),
            ("the node agents", self._close_agents),
            ("the agents' folders", self._remove_folders),
            ("the machines", self._survey.close),
        ]

    def _close_store(self) -> None:
        if (store := self._remote_store()) is not None:
            store.close()

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _close_agents(self) -> None:
        if self._agents is not None:
            self._agents.close()
            self._status.unreached = tuple(self._agents.unreached)

    def _remove_folders(self) -> None:
        if self._agents is not None and not self._status.plan.remote:
            _remove_folders(self._agents.started.get(0))


def _remove_folders(agent: wire.AgentStarted | None) -> None:
    """Delete what an agent of this machine has left: one that was killed could not."""
    if agent is not None:
        from skymagic.data.store import store

        store.remove(agent.store)
        shutil.rmtree(agent.directory, ignore_errors=True)


def open_store(agents: Agents, remote: bool, tell: Callable[[str], None], *, keep: int) -> NodeStore | RemoteStore:
    """Where the values of a pool go whose agents have said hello: into this machine's memory, or to a value server on each node.

    Args:
        remote: whether its nodes are other machines.
        tell: what the user must hear.
        keep: bytes of values that each node keeps for the user's later pools; 0: none.
    """
    if not remote:
        from skymagic.data.store.store import NodeStore

        return NodeStore(agents.started[0].store, notify=tell)
    from skymagic.data.remote.remote_store import RemoteStore

    def start_server(node: Node) -> Transport:
        # an agent that was started anew has another folder, so this is looked up each time
        return node.run(processes.VALUES, agents.started[node.index].store)

    return RemoteStore(agents.nodes, start_server, tell, keep=keep)
