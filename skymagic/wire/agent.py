"""Protocol of the node agents: messages between notebook, daemon, agent, forkserver and ranks.

The main messages, in the usual order::

    notebook                     agent                        forkserver, rank
    AgentSpec                →   (starts forkserver, on the head the controller)
                             ←   AgentStarted
    ProbeAddresses           →   connects to them
                             ←   ProbeReply                   only if nodes need to find addresses
    StartController          →   on the head
                             ←   ControllerUp
    Spawn                    →   RankSpec                 →   forkserver forks
                             ←   RankForked               ←
                             ←   RankReady or RankFailed  ←   rank, once its plugins' hooks are done
    LogLevel                 →   LogLevel                 →   level of the debug logs
    Measure                  →                                resource use, while it is displayed
    RankRequest (stacks, …)  →   RankRequest              →   rank's control thread
                             ←   RankReply                ←
                                                          ←   BeginOutput, Publish…, EndOutput:
                                                              rank, for each cell
                                 Published                →   for each Publish; its rank waits
                                                          ←   MetricsReport: at most twice
                                                              a second
                             ←   RankExited               ←   ChildExited: forkserver
                             ←   InterruptionNotice       →   rank: this machine will be reclaimed
    InterruptionNotice       →   of another machine       →   rank
                             ←   HookEnded                ←   rank
    Follow                   →                                only from a notebook that took over
                             ←   Output…: see `wire.output`
    Shutdown                 →   ends everything
                             ←   LastLines                    of each rank's log

The *link* joins notebook and agent (the agent's standard streams, or a tunnel); the *control
socket* joins an agent and a rank. Cells and their outcomes do not travel here: ipyparallel carries
them. Messages are encoded by `wire.codec`.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from skymagic.wire.codec import Codec, FrozenMessage
from skymagic.wire.metrics import MetricBatch
from skymagic.wire.output import AgentMessage as AgentMessage
from skymagic.wire.output import Output as Output
from skymagic.wire.typed import JsonObject

KEPT_LINES, KEPT_CHARACTERS = 200, 20_000
"""Most lines and characters of each rank's log that the notebook receives when its pool ends."""
HEAD_LINES, HEAD_CHARACTERS = 10_000, 1 << 20
"""The same limits for rank 0, whose output the notebook shows."""
WHOLE_LOG = -1
"""Passed instead of a run's number to read the whole log of a rank."""


class AgentSpec(AgentMessage):
    """Notebook → agent, the first message: the node's configuration."""

    pool: str
    job_id: str
    node: int
    head: bool
    nodes: int = 1
    """Number of nodes in the pool."""
    client: str = ""
    """User and machine that started the pool, such as ``ann@laptop``; shown to anyone who looks it
    up.
    """
    version: str = ""
    """Version of skymagic."""
    devices: tuple[int, ...] = ()
    """GPUs that the node's ranks see, numbered as their machine numbers them."""
    preload: tuple[str, ...] = ()
    """Modules that the forkserver imports before it forks ranks."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of every process on the node; never logged."""
    address: str | None = "127.0.0.1"
    """Address on which the controller listens; None if the nodes look for a common network first,
    and `StartController` then carries the address.
    """
    idle_timeout: float | None = None
    """Seconds without a cell after which the agent ends everything."""
    max_lifetime: float | None = None
    """Seconds after which the agent ends everything in any case."""
    detached_timeout: float | None = None
    """Seconds without the notebook and without a busy rank on this node after which the agent ends
    everything; None: the agent ends when the link is lost.
    """
    max_away: float | None = None
    """Seconds without the notebook after which the agent stops its ranks' current work."""
    notices: str = ""
    """Source of this machine's interruption notices: "ec2-spot", "slurm:120" (Slurm sends SIGURG
    120 s before the end), or "" for none.
    """
    log_limit: int | None = None
    """Maximum number of bytes of each rank's log; beyond that the beginning is dropped."""
    log_level: str = ""
    """Level of the debug logs of the node's processes (`wire.debug_log`)."""


class AgentStarted(AgentMessage):
    """Agent → notebook, its first message: the process and its machine."""

    hostname: str
    machine: str
    """Equal for agents that reach each other by 127.0.0.1."""
    directory: str
    """Directory of the logs."""
    store: str
    """The node store's directory."""
    addresses: dict[str, int] = field(default_factory=dict)
    """Address → port on which the head listens for probes; empty on all other nodes, and if
    addresses are known.
    """
    port: int = 0
    """A free port on the head, for process groups that the user's code creates; 0 on all other
    nodes.
    """
    secret: str = field(default="", repr=False)
    """Secret that identifies this node to the other nodes when they probe it."""


class ProbeAddresses(AgentMessage):
    """Notebook → agent: probe these addresses (address → port); the right node has `secret`."""

    addresses: dict[str, int]
    secret: str = field(repr=False)
    number: int


class ListenForProbes(AgentMessage):
    """Notebook → agent: listen for probes at this address and reply with the port."""

    address: str
    number: int


class ProbeReply(AgentMessage):
    """Agent → notebook: the addresses that answered."""

    number: int
    routes: dict[str, str]
    """Address that answered → this node's own address on that route."""
    addresses: dict[str, int] = field(default_factory=dict)
    """Address → port on which this node listens for probes, in reply to `ListenForProbes`."""


class StartController(AgentMessage):
    """Notebook → agent of the head: start ipyparallel's controller, to listen at this address."""

    address: str


class RankSpec(AgentMessage):
    """Notebook → agent → forkserver: one rank to start."""

    rank: int
    info: JsonObject
    """``runtime.InstanceInfo`` as plain values, as also stored in ``COMPUTE_POOL``."""
    plugins: tuple[JsonObject, ...] = ()
    """A ``{"name": …, "options": {…}}`` for each plugin, in hook order."""
    env: dict[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    """UUIDs of its GPUs, which the agent has locked for the pool."""
    generation: int = 0
    """Number of the pool's process group. It grows each time that ranks are released from a
    collective, or replaced.
    """
    engine_file: str = ""
    """Connection file of the controller, filled in by the agent."""
    store: str = ""
    """Directory of the node store, filled in by the agent."""
    log: str = ""
    """Path of the rank's complete log, filled in by the agent."""
    profile: str = ""
    """An empty directory that serves as the IPython profile, filled in by the agent."""
    log_level: str = ""
    """Level of its debug log, filled in by the agent."""


class Spawn(AgentMessage):
    """Notebook → agent: start these ranks, after ending any earlier process of the same rank."""

    ranks: tuple[RankSpec, ...]
    connection: JsonObject | None = None
    """The controller's connection info for engines; None on the head node, which has its own."""


class Signal(AgentMessage):
    """Notebook → agent: send a signal to ranks (SIGKILL reaches their whole process groups)."""

    ranks: tuple[int, ...]
    signum: int


class RankRequest(AgentMessage):
    """Notebook → agent → ranks' control threads: a remote call, answered by a `RankReply` with the
    same number.
    """

    ranks: tuple[int, ...]
    method: str
    number: int = 0


class LogLevel(AgentMessage):
    """Notebook → agent → ranks: change the level of the debug logs (`wire.debug_log`)."""

    level: str


class Measure(AgentMessage):
    """Notebook → agent: measure the resource use of these ranks.

    One `Measurement` answers.
    """

    ranks: tuple[int, ...]
    devices: dict[int, tuple[str, ...]]
    """Rank → the UUIDs of its GPUs, or their numbers on the machine; ranks without GPUs are left
    out.
    """
    number: int


class ReadLog(AgentMessage):
    """Notebook → agent: read a rank's log, in one of four ways.

    With `runs`: the list of runs. Else with `run`: a piece of this run's output. Else with `start`:
    wait for bytes after it. Else: the last `lines`.
    """

    rank: int
    number: int
    lines: int = 0
    start: int | None = None
    run: int = 0
    """If not 0: read a piece of this run's output, from byte `start` or from its beginning."""
    runs: bool = False
    """List the runs in the log instead."""


class RankUsage(FrozenMessage):
    """Resources that a running rank uses."""

    cpu_seconds: float
    memory: int
    """Bytes."""
    gpu: tuple[float, ...] = ()
    """Utilization of its GPUs (0 to 1), their bytes in use and in total; empty if unknown."""


class Measurement(AgentMessage):
    """Agent → notebook: the answer to `Measure`."""

    rank: int
    """The first rank of the request; identifies the request together with `number`."""
    number: int
    at: float
    """Seconds by the node's monotonic clock."""
    memory: int
    """Bytes of memory that the node's processes may use; 0 if unknown."""
    ranks: dict[int, RankUsage]


class LogPiece(FrozenMessage):
    """Text of a rank's log."""

    text: str
    end: int
    """Position after the text, in bytes."""
    more: bool = False
    """True if the log already has more text of the run after this piece."""
    known: bool = True
    """False if the log no longer has the run."""
    over: bool = False
    """True if the run has ended."""


class LogReply(AgentMessage):
    """Agent → notebook: the answer to `ReadLog`."""

    rank: int
    number: int
    piece: LogPiece


class LoggedRuns(AgentMessage):
    """Agent → notebook: the answer to `ReadLog` with `runs`."""

    rank: int
    number: int
    runs: tuple[tuple[int, int], ...]
    """Run and its cell's number, the oldest first."""


class RankReply(AgentMessage):
    """Rank → agent → notebook, or from the agent itself: the answer to `RankRequest`."""

    rank: int
    number: int
    value: Any = None


class LastLines(AgentMessage):
    """Agent → notebook, when the pool ends: the end of a rank's log. The log itself is deleted."""

    rank: int
    text: str


class RendezvousKey(AgentMessage):
    """Rank → agent → all other ranks: one key of the pool's key-value rendezvous, such as the port
    of rank 0's store.
    """

    key: str
    value: Any
    """Value of the key; None withdraws an earlier value."""


class Shutdown(AgentMessage):
    """Notebook → agent: end everything and clean up the node."""


class NotebookDetached(AgentMessage):
    """Daemon → agent: the notebook's connection is lost; it may come back."""


class NotebookAttached(AgentMessage):
    """Daemon → agent: the notebook is connected again."""


class NotebookReplaced(AgentMessage):
    """Daemon → agent: another notebook has taken over.

    The agent repeats everything that it sent to the first one.
    """


class Follow(AgentMessage):
    """Notebook → agent: send over the link the output of these ranks in the current run, or in the
    last one.
    """

    shown: dict[str, int]
    """Rank → number of the last content that the notebook has already shown; 0 for none."""


class RunElsewhere(AgentMessage):
    """Notebook → agent: a run that uses no rank of this node has started or finished; meanwhile the
    pool is not idle.
    """

    run: int
    busy: bool


class PoolEnded(AgentMessage):
    """Agent → notebook: a timeout expired, or the pool was ended from elsewhere; the agent is
    ending everything on the node.
    """

    reason: str
    """Predicate of a sentence about the pool: "ended after 1h without a cell"."""


class ControllerUp(AgentMessage):
    """Agent of the head node → notebook: the controller listens."""

    client: JsonObject
    engine: JsonObject


class AgentFailed(AgentMessage):
    """Agent → notebook: the node cannot continue."""

    reason: str


class AgentProblem(AgentMessage):
    """Agent → notebook: something went wrong on the node, with its consequences; the node
    continues.
    """

    text: str


class RankForked(AgentMessage):
    """Forkserver → agent → notebook: the rank's process exists; its engine registers under this
    identity.
    """

    rank: int
    pid: int
    ident: str
    started: int = 0
    """Start time in the system's ticks, which distinguishes the process from a later one with the
    same pid; 0 if the system does not report it.
    """


class ChildExited(AgentMessage):
    """Forkserver → agent: one of its child processes has ended."""

    pid: int
    status: int
    """Exit code; negative for a signal."""


class RankReady(AgentMessage):
    """Rank → agent → notebook: the rank is registered and its plugins' hooks have run."""

    rank: int


class RankFailed(AgentMessage):
    """Rank → agent → notebook: a plugin's hook raised at start."""

    rank: int
    ename: str
    evalue: str
    traceback: str


class RankExited(AgentMessage):
    """Agent → notebook: the rank's process ended."""

    rank: int
    pid: int
    status: int | None
    """Exit code; negative for a signal; None if unknown."""
    expected: bool
    """True if the notebook or the agent ended the process."""
    out_of_memory: bool = False
    tail: str = ""
    """The last lines of its log."""


class InterruptionNotice(AgentMessage):
    """Agent → notebook → other agents, and agent → ranks: a machine will or may be reclaimed."""

    node: int
    ranks: tuple[int, ...]
    """Ranks of that machine."""
    reason: str
    at: float | None = None
    """Time of the interruption in seconds since 1970; None for a mere recommendation to leave the
    machine, which is not passed to hooks.
    """


class HookPresence(AgentMessage):
    """Rank → agent: report if the rank now has an `on_interruption` hook."""

    rank: int
    is_present: bool


class HookEnded(AgentMessage):
    """Rank → agent → notebook: its `on_interruption` hook has run."""

    rank: int
    seconds: float
    error: str = ""


class BeginOutput(AgentMessage):
    """Rank → agent: attribute everything that this rank prints from now on to this request."""

    rank: int
    parent: JsonObject
    """The header of Jupyter's request, under which output is published."""
    visible: bool
    """True if the output reaches the notebook, False for the log only."""
    limit: int
    """Maximum number of bytes of text that may reach the screen at once; beyond that, output is
    paced, and only the log is complete.
    """
    cell: int = 0
    """Number of the cell in the notebook, for the log; 0 if the request is not a cell."""
    run: int = 0
    """Number of the run in the pool; 0 if the request is not a run."""


class Publish(AgentMessage):
    """Rank → agent: rich output, to be placed after all text written before it."""

    rank: int
    kind: str
    content: JsonObject
    """Jupyter's content of such a message."""


class MetricsReport(AgentMessage):
    """Rank → agent: numbers that the cell reported since the last such message (`wire.metrics`)."""

    rank: int
    batches: tuple[MetricBatch, ...]


class EndOutput(AgentMessage):
    """Rank → agent: the request is over; all of its text has been written."""

    rank: int


class Published(AgentMessage):
    """Agent → rank: acknowledges the last `Publish`, so that what the rank prints next comes after
    it.
    """


# Rich output (figures, tables) travels in a line, so lines may be this long.
MAX_LINE = 256 << 20
CODEC: Codec[AgentMessage] = Codec(
    *(kind for kind in AgentMessage.__subclasses__() if kind is not Output),
    *Output.__subclasses__(),
    max_line=MAX_LINE,
)
encode, decode, decoder = CODEC.encode, CODEC.decode, CODEC.decoder
