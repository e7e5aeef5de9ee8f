"""Machines of your own, reached over SSH: looked at, set up where they are not, and released as they were."""

from __future__ import annotations

import getpass
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from skymagic import plugins
from skymagic.bootstrap import Facts, Requirements
from skymagic.bootstrap.provision import Installation, probe, requirements_of, setup
from skymagic.cluster import Node
from skymagic.cluster.tunnel import Tunnel
from skymagic.errors import ProvisionError, RequestError
from skymagic.plan import Plan, PoolRequest, plan_over, topology
from skymagic.plan.image import Image
from skymagic.plugins import packing
from skymagic.providers import Say
from skymagic.ssh import connecting, hostlist
from skymagic.ssh.config import Endpoint, SshConfig
from skymagic.ssh.connection import Connection
from skymagic.ssh.process import Process
from skymagic.wire import processes
from skymagic.wire.transport import Transport

T = TypeVar("T")
U = TypeVar("U")


class SSH:
    """The provider of hosts that are there already."""

    def __init__(self) -> None:
        self._machines: list[Machine] = []
        self._commands: tuple[str, ...] = ()

    def plan(self, request: PoolRequest, say: Say) -> Plan:
        """Connect to all hosts and look at them; nothing is changed there."""
        endpoints = _endpoints(request)
        shape = topology(replace(request, nodes=request.nodes or len(endpoints)))
        cluster = plugins.Cluster(shape.nodes, shape.procs_per_node, request.gpu)
        image = packing.image_for(request.plugins, request.whole_image(), cluster)
        self._commands = tuple(
            command for one in plugins.resolve(request.plugins) for command in one.bootstrap(cluster)
        )
        requirements = requirements_of(image, self._commands)
        chosen = endpoints[: shape.nodes]
        self._machines = [Machine(endpoint) for endpoint in chosen]
        connections = connecting.connect_all(chosen, getpass.getpass)
        for machine, connection in zip(self._machines, connections, strict=True):
            machine.connection = connection
        found = side_by_side(lambda machine: probe(machine.connected(), requirements), self._machines)
        for machine, facts in zip(self._machines, found, strict=True):
            machine.facts = facts
        inventories = [
            replace(facts.inventory(requirements.minor), hostname=machine.name, machine=facts.boot)
            for machine, facts in zip(self._machines, found, strict=True)
        ]
        plan = plan_over(request, inventories, "ssh")
        return replace(plan, image=image, set_up=_set_up_words(self._machines, requirements))

    def acquire(self, plan: Plan, job_id: str, say: Say) -> Sequence[Node]:
        """Set up the hosts that are not, side by side."""
        del self._machines[plan.topology.nodes :]
        for machine, ready in zip(
            self._machines,
            side_by_side(lambda machine: self._set_up(machine, plan.image, say), self._machines),
            strict=True,
        ):
            machine.ready = ready
        if twice := _twice(self._machines):
            say(f"two nodes on one machine: {twice}")
        # two nodes may be one machine: each has a daemon of its own
        return [machine.node(index, f"{job_id}-{index}") for index, machine in enumerate(self._machines)]

    def _set_up(self, machine: Machine, image: Image, say: Say) -> Installation:
        return setup(
            machine.connected(),
            image,
            lambda step: say(f"{machine.name}: {step}"),
            commands=self._commands,
            facts=machine.known(),
        )

    def release(self) -> None:
        """Close all connections."""
        side_by_side(Machine.close, self._machines)


class Machine:
    """One host, and what is open to it.

    Args:
        endpoint: how it is reached.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.name = endpoint.label
        self.connection: Connection | None = None
        self.facts: Facts | None = None
        self.ready: Installation | None = None
        self._bulk: Connection | None = None
        """For what is large, so that it does not stand in the way of cells."""
        self._tunnel: Tunnel | None = None
        self._used = False
        """Whether the tunnel has gone over this connection."""
        self._lock = threading.Lock()

    def connected(self) -> Connection:
        """The connection made first."""
        assert self.connection is not None
        return self.connection

    def known(self) -> Facts:
        """What it is."""
        assert self.facts is not None
        return self.facts

    def node(self, index: int, daemon: str) -> Node:
        """The machine as a pool sees it; `daemon` names what keeps the node's agent there."""
        return Node(
            index,
            self.name,
            start_agent=lambda state: self._open(daemon, state),
            run=self._run,
            forward=lambda address, port: self._current().forward(address, port),
        )

    def _command(self, module: str, *args: str) -> str:
        assert self.ready is not None
        return self.ready.command(module, *args)

    def _open(self, daemon: str, state: Callable[[str], None]) -> Transport:
        """A new agent, and the tunnel to it, which outlives connections."""
        before, self._tunnel = self._tunnel, None
        if before is not None:
            before.close()
        command = self._command(processes.ATTACH, daemon)
        self._tunnel = Tunnel(lambda: self._line(command), state=state)
        return self._tunnel.agent()

    def _current(self) -> Tunnel:
        assert self._tunnel is not None
        return self._tunnel

    def _line(self, command: str) -> Transport:
        """A process for the tunnel: over the first connection, and each further one over a connection of its own."""
        with self._lock:
            if self._used and self.connection is not None:
                self.connection.close()  # it is lost, or hangs
                self.connection = None
            if self.connection is None:
                self.connection = connecting.connect(self.endpoint)
            self._used = True
            return Line(self.connection.open(command), self.connection)

    def _run(self, module: str, *args: str) -> Transport:
        """A process beside the agent, over a connection of its own for such."""
        with self._lock:
            if self._bulk is None or not self._bulk.alive:
                self._bulk = connecting.connect(self.endpoint)
            bulk = self._bulk
        return bulk.open(self._command(module, *args))

    def close(self) -> None:
        """End the tunnel and all connections; twice is safe."""
        if self._tunnel is not None:
            self._tunnel.close()
        for connection in (self._bulk, self.connection):
            if connection is not None:
                connection.close()


class Line:
    """A process that is left, not ended: with its connection, which may hang.

    Args:
        process: what it transports to.
        connection: what carries it.
    """

    def __init__(self, process: Process, connection: Connection) -> None:
        self.read, self.write, self.complaint = process.read, process.write, process.complaint
        self._connection = connection

    def close(self) -> None:
        """Leave it; twice is safe."""
        self._connection.close()


def _set_up_words(machines: Sequence[Machine], requirements: Requirements) -> str:
    """What `acquire` will do on each of them."""
    words: dict[str, list[str]] = {}
    for machine in machines:
        facts = machine.known()
        if not (facts.ready or requirements.prepared):
            step = f"an environment with Python {requirements.minor} is made"
        elif not facts.code:
            step = "skymagic's code is copied"
        else:
            step = "nothing to do"
        words.setdefault(step, []).append(machine.name)
    return "; ".join(f"{step} on {', '.join(names)}" for step, names in words.items())


def _endpoints(request: PoolRequest) -> list[Endpoint]:
    if not request.hosts:
        raise RequestError(
            "--provider ssh needs --hosts, as in --hosts gpu1,user@gpu2:2222 or --hosts gpu[1-4]"
        )
    config = SshConfig()
    found = [config.endpoint(spec) for spec in hostlist.expand(request.hosts)]
    if (request.nodes or 0) > len(found):
        raise RequestError(f"--nodes {request.nodes} needs as many hosts, and {len(found)} are named")
    return found


def _twice(machines: Sequence[Machine]) -> str:
    by_boot: dict[str, list[str]] = {}
    for machine in machines:
        by_boot.setdefault(machine.known().boot or machine.name, []).append(machine.name)
    return "; ".join(", ".join(names) for names in by_boot.values() if len(names) > 1)


def side_by_side(call: Callable[[T], U], items: Iterable[T]) -> list[U]:
    """The call's results for all items, each on a thread of its own; an interrupt of the caller is heard.

    Raises:
        RequestError: all mistakes, when every failure is of that kind.
        ProvisionError: all failures.
    """
    items = list(items)
    found: list[Any] = [None] * len(items)
    failed: dict[int, BaseException] = {}

    def one(index: int) -> None:
        try:
            found[index] = call(items[index])
        except BaseException as problem:
            failed[index] = problem

    threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(len(items))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    problems = [failed[index] for index in sorted(failed)]
    if len(problems) > 1 and all(isinstance(problem, ProvisionError) for problem in problems):
        raise ProvisionError("\n".join(map(str, problems))) from problems[0]
    if problems:
        raise problems[0]
    return found
