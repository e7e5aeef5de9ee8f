"""The seam of clusters: nodes that a scheduler gives to a pool together, each reached by a channel and used as a host of SSH is.

A provider says what the request asks for, asks its scheduler for the nodes, waits with a reason, and gives them back; all else is here::

    plan ──▶ ClusterSurvey ──acquire──▶ ClusterNode …, one for each node ──taken──▶ HostMachine, set up ──▶ Node
                  └──close──▶ give_back, then all connections
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from skymagic.bootstrap.provision import probe
from skymagic.bootstrap.requirements import Requirements
from skymagic.cluster import Node
from skymagic.display.panel import StartStep
from skymagic.display.screen import print_note
from skymagic.errors import CloudError, HostError, HostGone, RequestError, SkyError
from skymagic.plan.accelerators import Accelerator, GpuChoice
from skymagic.plan.planning import plan_over
from skymagic.plan.plans import Plan, topology
from skymagic.plan.requests import PoolRequest
from skymagic.providers import head
from skymagic.providers.channel_key import MARK_SEEN, ChannelKey
from skymagic.providers.provider import Say, Survey
from skymagic.providers.ssh import HostAccess, HostMachine, set_up, side_by_side
from skymagic.ssh.host import ChannelConnection
from skymagic.ssh.sealed import UntrustedHost
from skymagic.wire import processes, tls
from skymagic.wire.codec import Transport
from skymagic.wire.threads import start_all

BULK: tuple[str, ...] = (processes.VALUES, processes.FILES)
"""Modules that values and files go to."""
DOOR_SECONDS = 3.0
"""For which a node may take to answer at its own address, before its channel is used instead."""


@dataclass(frozen=True)
class ClusterAccess(HostAccess):
    """What leads another notebook of this user to a node of a cluster.

    Attributes:
        where: what its provider must know besides: Slurm's number of the job, a pod's namespace, …
        channel_key: by which notebook and node know each other in the scheduler's channel; "" where that is encrypted itself.
    """

    where: tuple[str, ...] = ()
    channel_key: str = field(default="", repr=False)

    @property
    def job_id(self) -> str:
        """The pool's."""
        return self.daemon.rpartition("-")[0]


@dataclass(frozen=True)
class ClusterNode(ABC):
    """A node that a scheduler has given: where it is, for connections and for what the scheduler says of it.

    Attributes:
        name: as users know it. job_id: the pool's.
    """

    name: str
    job_id: str

    @property
    @abstractmethod
    def where(self) -> tuple[str, ...]:
        """As of `ClusterAccess`."""

    @property
    def channel_key(self) -> str:
        """As of `ClusterAccess`."""
        return ""

    @abstractmethod
    def connection(self) -> ChannelConnection:
        """Shells below the node's holder; the scheduler is not asked."""

    def address(self) -> str:
        """Where it may be reached from here, past its channel; "" where that is not tried. Raises OSError where it has none."""
        return ""

    @abstractmethod
    def fate(self) -> str:
        """Why the node is gone, as the scheduler says; "" where it is not, or nobody says."""

    def reconnected(self) -> ChannelConnection:
        """One more connection, unless the scheduler says that the node is gone. Raises HostGone."""
        if reason := self.fate():
            raise HostGone(self.name, reason)
        return self.connection()

    def node(self, machine: HostMachine, index: int, daemon: str) -> Node:
        """The node as a pool sees it; `daemon` is the name of what keeps its agent there."""
        node = machine.node(index, daemon)
        door = NodeDoor(self.address, head.NodeAccess(daemon, "", self.name), machine, node.run)
        access = ClusterAccess(**vars(node.access), where=self.where, channel_key=self.channel_key)
        return replace(
            node, access=access, fate=self.fate, run=door.run, start_agent=door.start_agent
        )

    def inspected(self, requirements: Requirements, patience: float) -> HostMachine:
        """The node over its first connection, which is closed where it cannot be inspected.

        Args:
            patience: seconds for which a node that was just given may refuse.
        """
        connection, deadline = self.connection(), time.monotonic() + patience
        while True:
            try:
                return HostMachine(
                    self.name, self.reconnected, connection, probe(connection, requirements, True)
                )
            except UntrustedHost:
                connection.close()
                raise
            except HostError as problem:
                words = self.fate()
                if words or time.monotonic() > deadline:
                    connection.close()
                    raise HostError(self.name, words) if words else problem from None
                time.sleep(1.0)
            except BaseException:
                connection.close()
                raise


class NodeDoor:
    """Processes on a node, past its channel where the node's own address leads there: by TLS to a relay that the channel has started.

    A channel through a scheduler is slow: srun and Ray's actors carry 20 and 40 MB/s, and srun holds small messages back for 40 ms.

    Args:
        address: as of `ClusterNode.address`. access: names the node and its daemon. machine: the node. run: starts a process there by its channel.
    """

    def __init__(
        self,
        address: Callable[[], str],
        access: head.NodeAccess,
        machine: HostMachine,
        run: Callable[..., Transport],
    ) -> None:
        self._address, self._access, self._machine, self._run = address, access, machine, run
        self._shut = False
        """Whether it was tried, and leads nowhere."""
        self._lock = threading.Lock()

    def start_agent(self, state: Callable[[str], None]) -> Transport:
        """A new agent, and the tunnel to it: by the channel until its daemon is there, with which a relay can live, and then by that."""
        tunnel, daemon = self._machine.tunnel, self._access.daemon
        there = threading.Event()
        if tunnel.takes_over:
            there.set()

        def connect() -> Transport:
            direct = self._direct(processes.ATTACH, daemon) if there.is_set() else None
            return direct or self._machine.attached(daemon)

        def move() -> None:
            if self._opened():
                tunnel.move()

        def changed(now: str) -> None:
            state(now)
            if now == "connected" and not there.is_set():
                there.set()
                start_all([move], name="skymagic-door")

        return tunnel.open(connect, changed)

    def run(self, module: str, *args: str) -> Transport:
        """A process of this module."""
        direct = self._direct(module, *args) if module in BULK else None
        return direct or self._run(module, *args)

    def _direct(self, *words: str) -> Transport | None:
        """None where the node does not answer there; the relay may have ended, and another one is started once."""
        with self._lock:
            for _ in range(2):
                with contextlib.suppress(OSError):
                    if self._access.port:
                        return head.Relayed(self._access, *words, timeout=DOOR_SECONDS)
                if not self._opens():
                    break
        return None

    def _opened(self) -> bool:
        with self._lock:
            return bool(self._access.port) or self._opens()

    def _opens(self) -> bool:
        """Start a relay there; whether it listens. One that cannot be reached is not tried again."""
        if self._shut:
            return False
        try:
            address = self._address()
            # nothing of a pool listens at a public address
            self._shut = not address or not ipaddress.ip_address(address).is_private
            if not self._shut:
                access = head.relay(
                    self._run, replace(self._access, address=address, pem=tls.certificate())
                )
                socket.create_connection((address, access.port), DOOR_SECONDS).close()
                self._access = access
        except (OSError, ValueError, SkyError):
            self._shut = True
        return not self._shut


@dataclass
class Gang:
    """The nodes of a pool, as far as there are any."""

    job_id: str = ""
    """The pool's, by which its scheduler knows it; "" before it is asked for, and once all is given back."""
    number: str = ""
    """The scheduler's own name of it, where that has one."""
    asked: Future[Any] | None = None
    """The order, from when it is on its way."""
    key: ChannelKey | None = None
    """Of its channels, where they go through a scheduler that does not encrypt them."""
    machines: list[HostMachine] = field(default_factory=list)
    plan: Plan | None = None
    ready: bool = False
    closing: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, order: Callable[[], Any]) -> Any:
        """Have a thread ask the scheduler: an interrupt ends the wait for its answer, and `close` knows what may come all the same."""
        (self.asked,) = start_all([order], name="skymagic-order")
        return self.asked.result()


@dataclass(frozen=True)
class ClusterSurvey(Survey):
    """What is asked for; owns what the scheduler gives."""

    requirements: Requirements
    gang: Gang = field(default_factory=Gang, kw_only=True)

    def give_back(self) -> str:
        """End what the scheduler has given: what that was, in words; "" where there is nothing. Twice is safe.

        Called by `close` alone, once the order has been answered. Raises ProvisionError with why it goes on.
        """
        raise NotImplementedError

    def leave(self) -> None:
        """Close what leads to the scheduler; twice is safe."""

    def outcome(self) -> Plan:
        """The plan with what the nodes have, and when they are taken back."""
        return self.gang.plan or self.plan

    def ready(self) -> None:
        """All ranks are up."""
        self.gang.ready = True

    def close(self) -> None:
        """Give the nodes back, and close all connections; twice is safe.

        An interrupt ends the wait for it, and nothing else: nodes are never left because somebody was impatient.
        """
        start_all([self._end], name="skymagic-cluster-end", daemon=False)[0].result()

    def _end(self) -> None:
        gang = self.gang
        with gang.closing:
            try:
                if gang.job_id:
                    if gang.asked is not None:
                        wait([gang.asked])
                    if (what := self.give_back()) and not gang.ready:
                        print_note(f"[{what}]")
                gang.job_id = ""
            finally:
                side_by_side(HostMachine.close, gang.machines)
                if gang.key is not None and not gang.job_id:
                    gang.key.drop()
                self.leave()

    def taken(
        self,
        places: Sequence[ClusterNode],
        told: str,
        say: Say,
        *,
        patience: float = 0.0,
        **known: Any,
    ) -> list[Node]:
        """The nodes that were given, once they are connected to, inspected and set up, side by side.

        Args:
            told: who has given them, before their names. patience: as of `ClusterNode.inspected`. known: fields of the plan beside what they have.
        """
        gang, names = self.gang, [place.name for place in places]
        say(StartStep(f"{told} {', '.join(names)} …", "connecting", names))
        before = gang.machines[:]
        gang.machines[:] = side_by_side(
            lambda place: place.inspected(self.requirements, patience), places
        )
        side_by_side(HostMachine.close, before)
        if gang.key is not None and (unverified := sorted(gang.key.unverified)):
            print_note(
                f"[{', '.join(unverified)}: trusted on first use, for no home folder is shared to prove the channel's key by: SECURITY.md]"
            )
        gang.plan = replace(_measured(self.plan, gang.machines, self.requirements), **known)
        set_up(gang.machines, self.requirements, say)
        return self._nodes(places, [f"{gang.job_id}-{index}" for index in range(len(places))])

    def attached(
        self, places: Sequence[ClusterNode], accesses: Sequence[ClusterAccess]
    ) -> list[Node]:
        """The nodes of a pool that another notebook of this user has made; nothing is connected to yet.

        Raises:
            CloudError: the scheduler says that all of them are gone.
        """
        if (words := places[0].fate()) and all(place.fate() for place in places[1:]):
            self.leave()
            raise CloudError("missing", "", words)
        gang = self.gang
        gang.job_id, gang.plan, gang.ready = places[0].job_id, self.plan, True
        gang.machines.extend(
            HostMachine(
                place.name,
                place.reconnected,
                None,
                one.installation.facts,
                one.secret,
                one.installation,
            )
            for place, one in zip(places, accesses, strict=True)
        )
        return self._nodes(places, [one.daemon for one in accesses])

    def _nodes(self, places: Sequence[ClusterNode], daemons: Sequence[str]) -> list[Node]:
        each = enumerate(zip(places, self.gang.machines, daemons, strict=True))
        return [place.node(machine, index, daemon) for index, (place, machine, daemon) in each]


# ------------------------------------------------------------------------------------ what is asked for


def cpus_of(request: PoolRequest) -> int:
    """CPUs of each node: one for each rank, unless more are asked for."""
    return max(int(request.cpus.amount) if request.cpus else 1, topology(request).procs_per_node)


def counted(gpu: Accelerator | GpuChoice, who: str, whole: bool = True) -> None:
    """Raises RequestError for GPUs that are named one by one, and, unless `whole`, for all of a node's: `who` chooses them."""
    if isinstance(gpu, GpuChoice) and (gpu.words or not (whole or gpu.count)):
        raise RequestError(
            f"--gpu {gpu}: {who} chooses the GPUs: write how many, as in --gpu {len(gpu.words) or 8}"
        )


def _measured(plan: Plan, machines: Sequence[HostMachine], requirements: Requirements) -> Plan:
    """A plan with the CPUs and GPUs that its nodes have. Raises RequestError where one has not what the cluster says."""
    here = [
        replace(one.facts.inventory(requirements.minor), hostname=one.name, machine=one.name)
        for one in machines
    ]
    made = plan_over(replace(plan.request, cpus=None, memory=None), here, plan.provider)
    return replace(
        plan, hosts=made.hosts, cpus=made.cpus, memory_gb=made.memory_gb, devices=made.devices, topology=made.topology,
        gpu_words=made.gpu_words,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ the holder


HOLDER_SECONDS = 3600
"""For which a job waits for its first daemon: a notebook that was killed meanwhile leaves no job for longer."""
HOLDER = r"""umask 077
find /tmp -maxdepth 1 -name 'skymagic-holder-*' -user "$(id -u)" -mtime +7 -exec rm -rf {} + 2>/dev/null
sweep() { for run in /tmp "$HOME/.skymagic/run" "${TMPDIR:-/var/tmp}"; do [ -s "$run/$name/daemon.log" ] || rm -rf "$run/$name"; done; }
running=0 ending= alone=
trap 'ending=1; echo >&3' HUP INT TERM
dir=@DIR@
if ! mkdir "$dir" 2>/dev/null; then
    # /tmp is everybody's: a name that somebody else has taken first is passed over for one that nobody can guess
    if [ -d "$dir" ] && [ -O "$dir" ] && [ ! -L "$dir" ]; then exit 1; fi
    dir=$(mktemp -d "$dir+XXXXXX") || exit 1
fi
trap 'rm -rf "$dir"; kill $alone 2>/dev/null' EXIT
@SEEN@command -v python3 >"$dir/python"
# whoever finds it can write to it at once
mkfifo "$dir/.start" && exec 3<>"$dir/.start" && mv "$dir/.start" "$dir/start" || exit 1
(trap 'kill $!; exit' TERM; sleep @SECONDS@ 3>&- & wait; echo '?' >&3) & alone=$!
for name in $(env | sed -n 's/^\(SLURM_[A-Z0-9_]*\|PMI[X_][A-Z0-9_]*\)=.*/\1/p'); do
    [ "$name" = SLURM_CONF ] || unset "$name"
done
while [ -z "$ending" ] || [ "$running" -gt 0 ]; do
    read -r name <&3 || continue
    case $name in
        '') ;;
        '?') [ "$running" -gt 0 ] || ending=1 ;;
        -) running=$((running - 1)); [ "$running" -gt 0 ] || ending=1 ;;
        *) running=$((running + 1)); (trap : HUP INT TERM; /bin/sh "$dir/$name" 3>&-; sweep; echo - >&3) & ;;
    esac
done
"""
"""What runs on each node: starts the daemons whose names come, and ends when the last of them has ended, or the job.

Signals come to all processes of a job. The holder outlives them, for what it has started ends in its own time, and nothing of a step lives
longer than its first process. A daemon that is killed before it heeds signals leaves its folder, which is removed then. Frameworks take
SLURM_* for their own launcher's (Lightning #18650), so daemons have none of it.
"""


def holder_folder(job_id: str, node: str) -> str:
    """Return the holder's folder on a node, which the channel's shell has as `SKYMAGIC_HOLDER`.

    Where another user has taken that name, the holder's is this one with a plus sign and random letters (`kernels.fork.holder`).
    """
    return f"/tmp/skymagic-holder-{job_id}-{node}"


def holder_script(folder: str, sealed_job: str = "") -> str:
    """`HOLDER` with its folder, as sh writes it.

    Args:
        sealed_job: the pool's job id, where the holder says whether it sees the pool's channel key.
    """
    seen = MARK_SEEN.replace("@JOB@", sealed_job) if sealed_job else ""
    text = HOLDER.replace("@DIR@", folder).replace("@SECONDS@", str(HOLDER_SECONDS))
    return text.replace("@SEEN@", seen)
