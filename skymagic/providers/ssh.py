"""Your own machines, reached over SSH: inspected, set up if needed, and left as they were."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, cast

from skymagic import plugins
from skymagic.bootstrap.builds import cuda_question, lines
from skymagic.bootstrap.facts import HostFacts
from skymagic.bootstrap.layers import missing_in_image
from skymagic.bootstrap.messages import explain_unusable
from skymagic.bootstrap.provision import Addition, Supply, add, probe, refuse, setup
from skymagic.bootstrap.remote import Installation
from skymagic.bootstrap.requirements import Requirements, notebook, requirements_of
from skymagic.bootstrap.wheelhouse import with_plans
from skymagic.cluster import Node
from skymagic.cluster.tunnel import AgentTunnel
from skymagic.data.capture import installed
from skymagic.display.live import secret_prompt
from skymagic.display.panel import environment_step
from skymagic.display.text import connecting_words
from skymagic.errors import ProvisionError, RequestError
from skymagic.plan import distributions, gpus
from skymagic.plan.container import container_mistakes, parse_container
from skymagic.plan.image import Image, project
from skymagic.plan.planning import plan_over
from skymagic.plan.plans import Plan, Topology, topology
from skymagic.plan.requests import PoolRequest
from skymagic.plugins import table
from skymagic.providers.environment_copy import (
    HostPlan,
    fetch_wheels_locally,
    groups,
    pass_wheels,
)
from skymagic.providers.holder import container_holder_script
from skymagic.providers.provider import Say, Survey
from skymagic.ssh import config, connecting, container
from skymagic.ssh.config import Endpoint
from skymagic.ssh.container import ContainerShells
from skymagic.ssh.host import HostConnection
from skymagic.ssh.process import Process
from skymagic.wire import processes
from skymagic.wire.codec import Transport
from skymagic.wire.threads import failures, run_all, start_all

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class HostAccess:
    """Everything another notebook needs to reach a host's daemon.

    Attributes:
        host: host name as the user writes it.
        daemon: name of the daemon on the host.
        secret: secret that the daemon expects from its notebooks.
        shells: container that its processes run in, if any.
    """

    host: str
    installation: Installation
    daemon: str
    secret: str = field(repr=False)
    shells: ContainerShells | None = None


@dataclass(frozen=True)
class Hosts(Survey):
    """Hosts of a pool, connected and inspected."""

    machines: tuple[HostMachine, ...]
    requirements: Requirements
    """Requirements that each host must meet."""

    def close(self) -> None:
        """Close all connections."""
        call_concurrently(HostMachine.close, self.machines)


class SSH:
    """Provider for existing hosts."""

    def plan(self, request: PoolRequest, say: Say) -> Hosts:
        """Connect to all hosts and inspect them. Changes nothing on them."""
        endpoints = _endpoints(request)
        shape = topology(replace(request, nodes=request.nodes or len(endpoints)))
        selected = endpoints[: shape.nodes]
        # at once: connecting, inspecting the hosts and planning their packages may take seconds
        say(connecting_words([endpoint.label for endpoint in selected]))
        image, requirements = needs(request, shape, say)
        connections = connecting.connect_all(selected, secret_prompt())
        try:
            shells = containers(connections, request, requirements, say)
            facts = with_plans(
                call_concurrently(lambda connection: probe(connection, requirements), connections),
                requirements,
            )
            machines = tuple(
                Machine(endpoint, connection, host_facts, shells=host_shells)
                for endpoint, connection, host_facts, host_shells in zip(
                    selected, connections, facts, shells, strict=True
                )
            )
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
            call_concurrently(HostConnection.close, connections)
            raise
        fresh = (
            {}
            if requirements.prepared
            else {
                machine.name: machine.facts
                for machine in machines
                if not (machine.facts.ready or _awaits_image(machine, request))
            }
        )
        confirm = "" if request.yes else cuda_question(fresh)
        plan = replace(
            plan,
            image=image,
            set_up=_set_up_words(machines, requirements, request),
            installs=lines(requirements, fresh),
            question="; ".join(filter(None, (plan.question, confirm))),
        )
        return Hosts(plan, machines, requirements)

    def acquire(self, survey: Hosts, job_id: str, say: Say) -> Sequence[Node]:
        """Set up the hosts that need it, in parallel."""
        machines = survey.machines[: survey.plan.topology.nodes]
        set_up(machines, survey.requirements, say)
        if shared := _shared(machines):
            say(f"two nodes on one machine: {shared}")
        # two nodes may be on one machine, so each has its own daemon
        return [machine.node(index, f"{job_id}-{index}") for index, machine in enumerate(machines)]

    def attach(self, plan: Plan, accesses: Sequence[HostAccess]) -> tuple[Hosts, Sequence[Node]]:
        """Return the machines of a pool that another notebook created from this plan.

        Connects to nothing yet.
        """
        resolved = config.endpoints((access.host for access in accesses), plan.request.ssh)
        machines = [
            Machine(
                endpoint,
                None,
                access.installation.facts,
                access.secret,
                access.installation,
                access.shells,
            )
            for endpoint, access in zip(resolved, accesses, strict=True)
        ]
        nodes = [
            access.node(index, accesses[index].daemon) for index, access in enumerate(machines)
        ]
        return Hosts(plan, tuple(machines), accesses[0].installation.requirements), nodes


def set_up(
    machines: Sequence[HostMachine], requirements: Requirements, say: Say, *, alone: bool = False
) -> None:
    """Set machines up in parallel, unless one of them cannot be set up.

    Among similar machines, the first one gets the wheels for all.

    Args:
        alone: True to let each machine download its own packages, if they share no slow link.
    """
    planned = with_plans([machine.facts for machine in machines], requirements)
    for machine, facts in zip(machines, planned, strict=True):
        machine.facts = facts
    named = {machine.name: machine for machine in machines}
    supplies: dict[str, Supply] = {}

    def install(target: HostPlan) -> None:
        named[target.name].set_up(requirements, say, supplies.get(target.name))

    try:
        call_concurrently(
            lambda machine: refuse(machine.name, machine.facts, requirements), machines
        )
        host_groups = groups(
            [machine.target(requirements) for machine in machines], requirements, alone=alone
        )
        for group in host_groups:
            if group[0].facts.without_index and not (group[0].facts.ready or requirements.prepared):
                supplies |= dict.fromkeys(
                    (target.name for target in group),
                    fetch_wheels_locally(
                        group, missing_in_image(requirements, group[0].facts), say
                    ),
                )
        sharing = [group for group in host_groups if len(group) > 1]
        kept = {group[0].name: threading.Event() for group in sharing}
        for name, event in kept.items():
            supplies[name] = replace(supplies.get(name, Supply()), on_kept=event.set)
        first_hosts = start_all([partial(install, group[0]) for group in host_groups])
        with contextlib.ExitStack() as passing:
            waiting = []
            for group, first in zip(host_groups, first_hosts, strict=True):
                if len(group) == 1:
                    continue
                ready = kept[group[0].name]
                first.add_done_callback(partial(_set_event, ready))
                ready.wait()
                if first.done() and first.exception() is not None:
                    continue
                supplies |= passing.enter_context(pass_wheels(group, requirements, say))
                waiting += group[1:]
            others = run_all([partial(install, target) for target in waiting])
            wait(first_hosts)
        results_of([*(first.exception() for first in first_hosts), *others])
    finally:
        for machine in machines:
            machine.runnable.set()


def _set_event(event: threading.Event, _: Future[None]) -> None:
    event.set()


def needs(request: PoolRequest, shape: Topology, say: Say) -> tuple[Image, Requirements]:
    """Return the image for a pool of this shape and the requirements for each of its machines.

    Raises RequestError.
    """
    cluster = plugins.Cluster(
        shape.nodes, shape.procs_per_node, request.accelerator, int(gpus.requests_gpus(request))
    )
    image = with_imports(
        table.image_for(request.plugins, request.whole_image(), cluster), request.imports
    )
    commands = tuple(
        command
        for plugin in plugins.resolve(request.plugins)
        for command in plugin.bootstrap(cluster)
    )
    own_image = parse_container(request.container).image if request.container else ""
    base = "" if image.python else own_image
    secrets = request.secret_values(os.environ)
    requirements = requirements_of(image, commands, secrets, say, base)
    return image, replace(requirements, any_build=request.yes)


def container_shells(request: PoolRequest, requirements: Requirements) -> ContainerShells | None:
    """Return the shells of a request's container, or None if it wants none."""
    if not request.container:
        return None
    container = parse_container(request.container, request.binds)
    # a plugin may use GPUs that nobody has asked for
    shows_gpus = request.gpu is None or gpus.requests_gpus(request)
    return ContainerShells(container, requirements.folder or "", shows_gpus)


def containers(
    connections: Sequence[HostConnection],
    request: PoolRequest,
    requirements: Requirements,
    say: Say,
) -> list[ContainerShells | None]:
    """Let the processes of these connections run in the request's container, if it wants one.

    Gets the image where it is missing. For a dry run it does not, and returns None for such a host.
    Raises HostError, or ProvisionError for several hosts.
    """
    shells = container_shells(request, requirements)
    if shells is None:
        return [None] * len(connections)

    def enter_container(connection: HostConnection) -> ContainerShells | None:
        def report(step: str) -> None:
            say(f"{connection.label}: {step}")

        if request.dry_run:
            prepared, has_image = container.find_engine(connection, shells, report)
            if not has_image:
                return None
        else:
            prepared = container.prepare(connection, shells, report)
        container.enter(connection, prepared)
        return prepared

    return call_concurrently(enter_container, connections)


def with_imports(image: Image, imports: frozenset[str]) -> Image:
    """Return the image extended by the packages that these modules come from.

    An interpreter that is used as it is stays unchanged.
    """
    if not imports or (image.python or "").startswith("/"):
        return image
    packages, _ = distributions.distributions(imports, installed.current_environment())
    named = set(map(project, image.pip))
    missing = [
        package
        for package in packages
        if package.key not in named and notebook(package.name) is not None
    ]
    return image.replace(pip=(*image.pip, *(package.name for package in missing)))


class HostMachine:
    """Host of a pool, with its connections and the tunnel to its agent.

    Args:
        name: host name as the user writes it.
        connect: opens another connection; called on any thread, raises HostError.
        connection: the first connection.
        facts: results of the inspection.
        secret: secret that the host's daemon expects from this user's notebooks; generated if
            empty.
        installation: what is already set up on the host.
        shells: container that its processes run in; the first connection is in it already.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], HostConnection],
        connection: HostConnection | None,
        facts: HostFacts,
        secret: str = "",
        installation: Installation | None = None,
        shells: ContainerShells | None = None,
    ) -> None:
        self.name, self.facts, self.shells = name, facts, shells
        self._connect = connect
        # carries the tunnel; None while it is being reopened
        self._connection: HostConnection | None = connection
        self._installation = installation
        self.runnable = threading.Event()
        """Set once modules without dependencies can run there, or once the setup has ended."""
        # for large transfers, so that they do not delay cells
        self._bulk: HostConnection | None = None
        self.tunnel = AgentTunnel(secret)
        """Tunnel to the node's agent. It outlives connections."""
        self._used = False  # True once this connection has carried the tunnel
        self._lock = threading.Lock()

    def set_up(self, requirements: Requirements, say: Say, supply: Supply | None = None) -> None:
        """Install an environment and skymagic's code where they are missing.

        Args:
            supply: source of the packages; None for the host's package indexes.
        """
        assert self._connection is not None

        def report(step: str) -> None:
            say(environment_step(self.name, step))

        def on_early(installation: Installation) -> None:
            self._installation = installation
            self.runnable.set()

        logger.info("host is set up: host=%s", self.name)
        self._installation = setup(
            self._connection, requirements, report, self.facts, supply, on_early
        )
        self.runnable.set()

    def target(self, requirements: Requirements) -> HostPlan:
        """Return this machine as a target for an environment."""
        assert self._connection is not None
        interpreters = self.facts.interpreters(requirements.minor)
        python = interpreters[0].path if interpreters else ""
        return HostPlan(self.name, self._connection, self.facts, python)

    def node(self, index: int, daemon: str) -> Node:
        """Return the `Node` that a pool uses.

        Args:
            daemon: name of the daemon that keeps the node's agent running.
        """
        assert self._installation is not None
        # only now has the node a daemon, whose name the container gets
        if self.shells is not None:
            holding = container_holder_script(daemon)
            self.shells = replace(self.shells, name=daemon, holding=holding)
            if self._connection is not None:
                container.enter(self._connection, self.shells)
        installation = replace(
            self._installation,
            requirements=replace(self._installation.requirements, hidden=frozenset()),
        )
        return Node(
            index,
            self.name,
            access=HostAccess(self.name, installation, daemon, self.tunnel.secret, self.shells),
            leave=self.leave,
            start_agent=partial(self._start_agent, daemon),
            run=self._run,
            install=None if self._has_own_interpreter else self._install,
            python=self._installation.python
            if self._installation is not None and self._has_own_interpreter
            else "",
            forward=self.tunnel.forward,
            own=self._installation.facts.own,
        )

    def _start_agent(self, daemon: str, state: Callable[[str], None]) -> Transport:
        """Start a new agent and return the tunnel to it; the node has another one's daemon if the
        tunnel takes it over.
        """
        daemon_started = threading.Event()
        if self.tunnel.takes_over:
            daemon_started.set()

        def on_state(now: str) -> None:
            if now == "connected":
                daemon_started.set()
            state(now)

        def connect() -> Transport:
            return self.attached(daemon, starts=not daemon_started.is_set())

        return self.tunnel.open(connect, on_state)

    @property
    def runs(self) -> bool:
        """True if modules can run on the host."""
        return self._installation is not None

    @property
    def _has_own_interpreter(self) -> bool:
        """True if its ranks run in an interpreter that the user named."""
        return self._installation is None or self._installation.requirements.prepared

    def connect(self) -> HostConnection:
        """Open another connection. Raises HostError."""
        connection = self._connect()
        if self.shells is not None:
            container.enter(connection, self.shells)
        return connection

    def _command(self, module: str, *args: str) -> str:
        assert self._installation is not None
        return self._installation.command(module, *args)

    def attached(self, daemon: str, *, starts: bool = True) -> Transport:
        """Connect the tunnel to a daemon.

        The first call uses the first connection; each later call opens a new one.

        Args:
            starts: True if the daemon may have to be started.
        """
        command = self._command(processes.ATTACH, daemon)
        with self._lock:
            if self._used and self._connection is not None:
                self._connection.close()  # it is lost, or hangs
                self._connection = None
            if self._connection is None:
                self._connection = self.connect()
            self._used = True
            process = self._connection.open(command, lasting=starts)
            return ConnectionProcess(process, self._connection)

    def _run(self, module: str, *args: str) -> Transport:
        """Start a process next to the agent, over a second connection kept for such processes."""
        return self._second_connection().open(self._command(module, *args))

    def _install(
        self, addition: Addition, report: Callable[[str], None], cancelled: Callable[[], bool]
    ) -> None:
        """Install more packages into the environment of the host's ranks."""
        assert self._installation is not None
        add(self._second_connection(), self._installation, addition, report, cancelled)

    def _second_connection(self) -> HostConnection:
        with self._lock:
            if self._bulk is None or not self._bulk.alive:
                self._bulk = self.connect()
            return self._bulk

    def leave(self) -> None:
        """Close the tunnel and all connections, and leave everything running there.

        Twice is safe.
        """
        self.tunnel.leave()
        self._disconnect()

    lingers = False
    """True if the end of a pool continues in the background while the machine is out of reach.

    False where a scheduler ends everything on the machine.
    """

    def close(self) -> None:
        """Close the tunnel and all connections. Twice is safe."""
        self.tunnel.close(linger=self.lingers)
        self._disconnect()

    def _disconnect(self) -> None:
        for connection in (self._bulk, self._connection):
            if connection is not None:
                connection.close()


class Machine(HostMachine):
    """A host reached over SSH.

    Args:
        endpoint: how to reach the host. For the other arguments see `HostMachine`.
    """

    lingers = True

    def __init__(
        self,
        endpoint: Endpoint,
        connection: HostConnection | None,
        facts: HostFacts,
        secret: str = "",
        installation: Installation | None = None,
        shells: ContainerShells | None = None,
    ) -> None:
        super().__init__(
            endpoint.label,
            lambda: connecting.connect(endpoint),
            connection,
            facts,
            secret,
            installation,
            shells,
        )
        self.endpoint = endpoint


class ConnectionProcess:
    """A process that is abandoned rather than ended, along with its connection, which may hang.

    Args:
        process: the process to talk to.
        connection: connection that carries it.
    """

    def __init__(self, process: Process, connection: HostConnection) -> None:
        self.read, self.write, self.complaint = process.read, process.write, process.complaint
        self._connection = connection

    def close(self) -> None:
        """Abandon the process. Twice is safe."""
        self._connection.close()


def _set_up_words(
    machines: Sequence[HostMachine], requirements: Requirements, request: PoolRequest
) -> str:
    """Describe what `acquire` will do on each host."""
    hosts_by_step, refused = dict[str, list[str]](), dict[str, list[str]]()
    for machine in machines:
        facts = machine.facts
        if machine.shells is not None:
            used = machine.shells.container
            step = f"containers of {used.image} are started by {used.engine}"
            hosts_by_step.setdefault(step, []).append(machine.name)
        if _awaits_image(machine, request):
            step = f"the image {request.container} is pulled, then inspected"
            hosts_by_step.setdefault(step, []).append(machine.name)
            continue
        if problems := explain_unusable(facts, requirements):
            refused.setdefault("; ".join(problems), []).append(machine.name)
            continue
        step = "nothing to do" if facts.code else "skymagic's code is copied"
        if not (facts.ready or requirements.prepared):
            over = " over the image's packages" if requirements.base else ""
            step = f"an environment with Python {requirements.minor} is made{over}"
            if facts.without_index:
                step += (
                    " of packages that the notebook fetches and sends, "
                    "for no index can be reached from there"
                )
        for url, why in facts.silent:
            hosts_by_step.setdefault(f"{url} does not answer ({why})", []).append(machine.name)
        hosts_by_step.setdefault(step, []).append(machine.name)
    steps = [f"{step} on {', '.join(names)}" for step, names in hosts_by_step.items()]
    return "; ".join(
        [*steps, *(f"{', '.join(names)} cannot be set up: {why}" for why, names in refused.items())]
    )


def _awaits_image(machine: HostMachine, request: PoolRequest) -> bool:
    """Return True if the machine has not got its image, which a dry run does not pull."""
    return bool(request.container) and machine.shells is None


def _endpoints(request: PoolRequest) -> list[Endpoint]:
    if not request.hosts:
        raise RequestError(
            "--provider ssh needs --hosts, as in --hosts gpu1,user@gpu2:2222 or --hosts gpu[1-4]"
        )
    if mistakes := container_mistakes(request, "ssh"):
        raise RequestError(mistakes)
    endpoints = config.endpoints(request.hosts, request.ssh)
    if (request.nodes or 0) > len(endpoints):
        raise RequestError(
            f"--nodes {request.nodes} needs as many hosts, and {len(endpoints)} are named"
        )
    return endpoints


def _shared(machines: Sequence[HostMachine]) -> str:
    by_boot: dict[str, list[str]] = {}
    for machine in machines:
        by_boot.setdefault(machine.facts.boot or machine.name, []).append(machine.name)
    return "; ".join(", ".join(names) for names in by_boot.values() if len(names) > 1)


def call_concurrently(call: Callable[[T], U], items: Iterable[T]) -> list[U]:
    """Call a function for all items, each on its own thread, and return the results.

    The caller can be interrupted.

    Raises:
        RequestError: lists all mistakes, if every failure is one.
        ProvisionError: lists all failures.
    """
    return cast("list[U]", results_of(run_all([partial(call, item) for item in items])))


def results_of(outcomes: Sequence[object]) -> Sequence[object]:
    """Return the outcomes of `run_all` if no job has failed.

    Raises:
        RequestError: lists all mistakes, if every failure is one.
        ProvisionError: lists all failures.
    """
    problems = failures(outcomes)
    refusals = [problem for problem in problems if isinstance(problem, ProvisionError)]
    if len(refusals) == len(problems) > 1:
        codes = {refusal.code for refusal in refusals}
        raise ProvisionError(
            "\n".join(map(str, refusals)),
            code=codes.pop() if len(codes) == 1 else "",
            names=filter(None, [refusal.host for refusal in refusals]),
        ) from refusals[0]
    if problems:
        raise problems[0]
    return outcomes
