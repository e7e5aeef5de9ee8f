"""Machines of your own, reached over SSH: inspected, set up where they are not, and released as they were."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from skymagic import plugins
from skymagic.bootstrap.builds import choose, lines, questions
from skymagic.bootstrap.facts import Facts
from skymagic.bootstrap.messages import refusals
from skymagic.bootstrap.provision import Addition, Supply, add, probe, refuse, setup
from skymagic.bootstrap.remote import Installation
from skymagic.bootstrap.requirements import Requirements, notebook, requirements_of
from skymagic.cluster import Node
from skymagic.cluster.tunnel import AgentTunnel
from skymagic.data.capture import installed
from skymagic.display.live import asks_secrets
from skymagic.display.panel import environment_step
from skymagic.errors import ProvisionError, RequestError
from skymagic.plan import distributions, gpus
from skymagic.plan.image import Image, project
from skymagic.plan.planning import plan_over
from skymagic.plan.plans import Plan, Topology, topology
from skymagic.plan.requests import PoolRequest
from skymagic.plugins import table
from skymagic.providers.passing import Target, from_here, groups, passed_on
from skymagic.providers.provider import Say, Survey
from skymagic.ssh import config, connecting
from skymagic.ssh.config import Endpoint
from skymagic.ssh.host import HostConnection
from skymagic.ssh.process import Process
from skymagic.wire import processes
from skymagic.wire.codec import Transport
from skymagic.wire.threads import failures, run_all

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class HostAccess:
    """What leads another notebook to a host's daemon.

    Attributes:
        host: as the user calls it. daemon: its name there. secret: what it knows its notebooks by.
    """

    host: str
    installation: Installation
    daemon: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class Hosts(Survey):
    """The hosts of a pool, connected to and inspected."""

    machines: tuple[HostMachine, ...]
    requirements: Requirements
    """What each of them must have."""

    def close(self) -> None:
        """Close all connections."""
        side_by_side(HostMachine.close, self.machines)


class SSH:
    """The provider of hosts that are there already."""

    def plan(self, request: PoolRequest, say: Say) -> Hosts:
        """Connect to all hosts and inspect them; nothing is changed there."""
        endpoints = _endpoints(request)
        shape = topology(replace(request, nodes=request.nodes or len(endpoints)))
        image, requirements = needs(request, shape, say)
        chosen = endpoints[: shape.nodes]
        connections = connecting.connect_all(chosen, asks_secrets())
        try:
            found = side_by_side(
                lambda connection: probe(connection, requirements, True), connections
            )
            machines = tuple(map(Machine, chosen, connections, found))
            inventories = [
                replace(
                    machine.facts.inventory(requirements.minor),
                    hostname=machine.name,
                    machine=machine.facts.boot,
                )
                for machine in machines
            ]
            plan = plan_over(request, inventories, "ssh")
        except BaseException:
            side_by_side(HostConnection.close, connections)
            raise
        fresh = (
            {}
            if requirements.prepared
            else {each.name: each.facts for each in machines if not each.facts.ready}
        )
        builds = {host: choose(requirements, facts) for host, facts in fresh.items()}
        confirm = "" if request.yes else questions(builds)
        plan = replace(
            plan,
            image=image,
            set_up=_set_up_words(machines, requirements),
            installs=lines(requirements, fresh),
            question="; ".join(filter(None, (plan.question, confirm))),
        )
        return Hosts(plan, machines, requirements)

    def acquire(self, survey: Hosts, job_id: str, say: Say) -> Sequence[Node]:
        """Set up the hosts that are not, side by side."""
        machines = survey.machines[: survey.plan.topology.nodes]
        set_up(machines, survey.requirements, say)
        if shared := _shared(machines):
            say(f"two nodes on one machine: {shared}")
        # two nodes may be one machine: each has a daemon of its own
        return [machine.node(index, f"{job_id}-{index}") for index, machine in enumerate(machines)]

    def attach(self, plan: Plan, accesses: Sequence[HostAccess]) -> tuple[Hosts, Sequence[Node]]:
        """The machines of a pool that another notebook has made from this plan; nothing is connected to yet."""
        resolved = config.endpoints((one.host for one in accesses), plan.request.ssh)
        machines = [
            Machine(endpoint, None, one.installation.facts, one.secret, one.installation)
            for endpoint, one in zip(resolved, accesses, strict=True)
        ]
        nodes = [one.node(index, accesses[index].daemon) for index, one in enumerate(machines)]
        return Hosts(plan, tuple(machines), accesses[0].installation.requirements), nodes


def set_up(
    machines: Sequence[HostMachine], requirements: Requirements, say: Say, *, alone: bool = False
) -> None:
    """Set machines up in parallel, unless one cannot be; of several of a kind the first makes the environment of all.

    Args:
        alone: whether each machine downloads its own packages: right where they share no slow link.
    """
    named = {each.name: each for each in machines}
    supplies: dict[str, Supply] = {}

    def install(target: Target) -> None:
        named[target.name].set_up(requirements, say, supplies.get(target.name))

    try:
        side_by_side(lambda one: refuse(one.name, one.facts, requirements), machines)
        found = groups([each.target(requirements) for each in machines], requirements, alone=alone)
        for group in found:
            if group[0].facts.without_index and not (group[0].facts.ready or requirements.prepared):
                supplies |= dict.fromkeys(
                    (each.name for each in group), from_here(group, requirements, say)
                )
        side_by_side(install, [group[0] for group in found])
        with contextlib.ExitStack() as copies:
            for group in filter(lambda group: len(group) > 1, found):
                supplies |= copies.enter_context(passed_on(group, requirements, say))
            side_by_side(install, [each for group in found for each in group[1:]])
    finally:
        for each in machines:
            each.runnable.set()


def needs(request: PoolRequest, shape: Topology, say: Say) -> tuple[Image, Requirements]:
    """The image of a pool of this shape, and what each of its machines must have. Raises RequestError."""
    cluster = plugins.Cluster(
        shape.nodes, shape.procs_per_node, request.accelerator, int(gpus.asked(request))
    )
    image = with_imports(
        table.image_for(request.plugins, request.whole_image(), cluster), request.imports
    )
    commands = tuple(
        command for one in plugins.resolve(request.plugins) for command in one.bootstrap(cluster)
    )
    return image, requirements_of(image, commands, request.secret_values(os.environ), say)


def with_imports(image: Image, imports: frozenset[str]) -> Image:
    """An image with what these modules are from; an interpreter that is used as it is has what it has."""
    if not imports or (image.python or "").startswith("/"):
        return image
    found, _ = distributions.distributions(imports, installed.here())
    named = set(map(project, image.pip))
    here = [one for one in found if one.key not in named and notebook(one.name) is not None]
    return image.replace(pip=(*image.pip, *(one.name for one in here)))


class HostMachine:
    """One host, with its connections and the tunnel to its agent.

    Args:
        name: as the user calls it.
        connect: one more connection to it; called on any thread, and raises HostError.
        connection: the connection made first.
        facts: what it is.
        secret: what its daemon knows this user's notebooks by; a new one unless given.
        installation: what is set up there already.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], HostConnection],
        connection: HostConnection | None,
        facts: Facts,
        secret: str = "",
        installation: Installation | None = None,
    ) -> None:
        self.name, self.connect, self.facts = name, connect, facts
        self._connection: HostConnection | None = (
            connection  # what the tunnel goes over; None while it is opened again
        )
        self._installation = installation
        self.runnable = threading.Event()
        """Set once modules that need no packages can be run there, or once nothing of it goes on."""
        self._bulk: HostConnection | None = (
            None  # for what is large, so that it does not stand in the way of cells
        )
        self.tunnel = AgentTunnel(secret)
        """To the node's agent; it outlives connections."""
        self._used = False  # whether the tunnel has gone over this connection
        self._lock = threading.Lock()

    def set_up(self, requirements: Requirements, say: Say, supply: Supply | None = None) -> None:
        """Give it an environment and skymagic's code, where it lacks them.

        Args:
            supply: what its packages come from; None for its package indexes.
        """
        assert self._connection is not None

        def report(step: str) -> None:
            say(environment_step(self.name, step))

        def early(found: Installation) -> None:
            self._installation = found
            self.runnable.set()

        self._installation = setup(
            self._connection, requirements, report, self.facts, supply, early
        )
        self.runnable.set()

    def target(self, requirements: Requirements) -> Target:
        """This machine as a host that gets an environment."""
        assert self._connection is not None
        python = next(
            (each.path for each in self.facts.interpreters(requirements.minor) if each.venv), ""
        )
        return Target(self.name, self._connection, self.facts, python)

    def node(self, index: int, daemon: str) -> Node:
        """The machine as a pool sees it.

        Args:
            daemon: names what keeps the node's agent there.
        """
        assert self._installation is not None
        known = replace(
            self._installation,
            requirements=replace(self._installation.requirements, hidden=frozenset()),
        )
        return Node(
            index,
            self.name,
            access=HostAccess(self.name, known, daemon, self.tunnel.secret),
            leave=self.leave,
            start_agent=lambda state: self.tunnel.open(lambda: self.attached(daemon), state),
            run=self._run,
            install=None if self._used_as_it_is else self._install,
            python=self._installation.python
            if self._installation is not None and self._used_as_it_is
            else "",
            forward=self.tunnel.forward,
            own=self._installation.facts.own,
        )

    @property
    def runs(self) -> bool:
        """Whether modules can be run there."""
        return self._installation is not None

    @property
    def _used_as_it_is(self) -> bool:
        """Whether its ranks run in an interpreter that the user has named."""
        return self._installation is None or self._installation.requirements.prepared

    def _command(self, module: str, *args: str) -> str:
        assert self._installation is not None
        return self._installation.command(module, *args)

    def attached(self, daemon: str) -> Transport:
        """The way to a daemon, for the tunnel: over the first connection, and each further one over a connection of its own."""
        command = self._command(processes.ATTACH, daemon)
        with self._lock:
            if self._used and self._connection is not None:
                self._connection.close()  # it is lost, or hangs
                self._connection = None
            if self._connection is None:
                self._connection = self.connect()
            self._used = True
            return ConnectionProcess(self._connection.open(command), self._connection)

    def _run(self, module: str, *args: str) -> Transport:
        """A process beside the agent, over a connection of its own for such."""
        return self._beside().open(self._command(module, *args))

    def _install(
        self, addition: Addition, words: Callable[[str], None], cancelled: Callable[[], bool]
    ) -> None:
        """Install more packages into the environment of its ranks."""
        assert self._installation is not None
        add(self._beside(), self._installation, addition, words, cancelled)

    def _beside(self) -> HostConnection:
        with self._lock:
            if self._bulk is None or not self._bulk.alive:
                self._bulk = self.connect()
            return self._bulk

    def leave(self) -> None:
        """Close the tunnel and all connections, and leave what runs there; twice is safe."""
        self.tunnel.leave()
        self._disconnect()

    lingers = False
    """Whether a pool's end goes on in the background on a machine that is out of reach; not where a scheduler ends what runs there."""

    def close(self) -> None:
        """End the tunnel and all connections; twice is safe."""
        self.tunnel.close(linger=self.lingers)
        self._disconnect()

    def _disconnect(self) -> None:
        for connection in (self._bulk, self._connection):
            if connection is not None:
                connection.close()


class Machine(HostMachine):
    """One host over SSH.

    Args:
        endpoint: how it is reached; the other arguments are `HostMachine`'s.
    """

    lingers = True

    def __init__(
        self,
        endpoint: Endpoint,
        connection: HostConnection | None,
        facts: Facts,
        secret: str = "",
        installation: Installation | None = None,
    ) -> None:
        super().__init__(
            endpoint.label,
            lambda: connecting.connect(endpoint),
            connection,
            facts,
            secret,
            installation,
        )
        self.endpoint = endpoint


class ConnectionProcess:
    """A process that is left, not ended: with its connection, which may hang.

    Args:
        process: what it transports to.
        connection: what carries it.
    """

    def __init__(self, process: Process, connection: HostConnection) -> None:
        self.read, self.write, self.complaint = process.read, process.write, process.complaint
        self._connection = connection

    def close(self) -> None:
        """Leave it; twice is safe."""
        self._connection.close()


def _set_up_words(machines: Sequence[HostMachine], requirements: Requirements) -> str:
    """What `acquire` will do on each host."""
    words, refused = dict[str, list[str]](), dict[str, list[str]]()
    for machine in machines:
        facts = machine.facts
        if problems := refusals(facts, requirements):
            refused.setdefault("; ".join(problems), []).append(machine.name)
            continue
        step = "nothing to do" if facts.code else "skymagic's code is copied"
        if not (facts.ready or requirements.prepared):
            step = f"an environment with Python {requirements.minor} is made"
            if facts.without_index:
                step += " of packages that the notebook fetches and sends, for no index can be reached from there"
        for url, why in facts.silent:
            words.setdefault(f"{url} does not answer ({why})", []).append(machine.name)
        words.setdefault(step, []).append(machine.name)
    steps = [f"{step} on {', '.join(names)}" for step, names in words.items()]
    return "; ".join(
        [*steps, *(f"{', '.join(names)} cannot be set up: {why}" for why, names in refused.items())]
    )


def _endpoints(request: PoolRequest) -> list[Endpoint]:
    if not request.hosts:
        raise RequestError(
            "--provider ssh needs --hosts, as in --hosts gpu1,user@gpu2:2222 or --hosts gpu[1-4]"
        )
    found = config.endpoints(request.hosts, request.ssh)
    if (request.nodes or 0) > len(found):
        raise RequestError(
            f"--nodes {request.nodes} needs as many hosts, and {len(found)} are named"
        )
    return found


def _shared(machines: Sequence[HostMachine]) -> str:
    by_boot: dict[str, list[str]] = {}
    for machine in machines:
        by_boot.setdefault(machine.facts.boot or machine.name, []).append(machine.name)
    return "; ".join(", ".join(names) for names in by_boot.values() if len(names) > 1)


def side_by_side(call: Callable[[T], U], items: Iterable[T]) -> list[U]:
    """The call's results for all items, each on a thread of its own; an interrupt of the caller is heard.

    Raises:
        RequestError: all mistakes, when every failure is of that kind.
        ProvisionError: all failures.
    """
    outcomes = run_all([functools.partial(call, item) for item in items])
    problems = failures(outcomes)
    if len(problems) > 1 and all(isinstance(problem, ProvisionError) for problem in problems):
        raise ProvisionError("\n".join(map(str, problems))) from problems[0]
    if problems:
        raise problems[0]
    return cast("list[U]", outcomes)
