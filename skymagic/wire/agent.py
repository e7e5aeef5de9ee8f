"""Protocol of the node agents: messages between notebook, daemon, agent, forkserver and ranks.

The main messages, in the usual order::

    notebook                     agent                        forkserver, rank
    AgentSpec                →   (starts the forkserver)
                             ←   AgentStarted
    ProbeAddresses           →   connects to them
                             ←   ProbeReply                   only if nodes need to find addresses
    HeadAddress              →   on the head
    Spawn                    →   RankSpec                 →   forkserver forks
                             ←   RankForked               ←
                             ←   RankReady or RankFailed  ←   rank, once its plugins' hooks are done
    Request                  →   Request                  →   rank carries out its order
                             ←   Output…                  ←   BeginOutput, Publish…, EndOutput
                                 Published                →   for each Publish; its rank waits
    Shown                    →                                while a run goes on
                                                          ←   MetricsReport: twice a second at most
    Credit                   →                                as output is read
                             ←   OrderFinished            ←   once all of its output is written
    Delivered                →                                once the user has its results
    LogLevel                 →   LogLevel                 →   level of the debug logs
    Measure                  →                                resource use, while it is displayed
    RankRequest (stacks, …)  →   RankRequest              →   rank's control thread
                             ←   RankReply                ←
                             ←   RankExited               ←   ChildExited: forkserver
                             ←   InterruptionNotice       →   rank: this machine will be reclaimed
    InterruptionNotice       →   of another machine       →   rank
                             ←   HookEnded                ←   rank
                             ←   Delivered                    only to a notebook that took over
    Follow                   →
                             ←   Output…, OrderFinished
    Shutdown                 →   ends everything
                             ←   LastLines                    of each rank's log

The *link* joins notebook and agent (the agent's standard streams, or a tunnel); the *control
socket* joins an agent and a rank. Messages are encoded by `wire.codec`.

**Ordering.** A rank carries out its requests in their order of arrival. Its output has
numbers (`Output.seq`), from 1 in each request, arrives in their order, and ends with
`OutputComplete`. All other messages of an agent arrive in the order of sending, and
may overtake output. Output of different ranks is not ordered.

**Acknowledgement.** The notebook reports up to which number it has shown the output of each rank
(`Shown`). The agent keeps the beginning and the end of the rest until the next request. A notebook
that takes over gets that rest; what its predecessor had received without acknowledging it comes
again, after an `OutputRepeated`.

**Back pressure.** An agent starts with a credit of `window` for output; each `Credit` adds what the
notebook has read, and text is sent in short pieces. A flood of output therefore delays another
message by no more time than the link needs for one window. Output that has to wait is bounded
(`kernels.agent.uplink`), and no rank ever waits for a notebook.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from skymagic.wire.codec import Codec, FrozenMessage
from skymagic.wire.metrics import MetricBatch
from skymagic.wire.output import AgentMessage as AgentMessage
from skymagic.wire.output import Output as Output
from skymagic.wire.typed import JsonObject

WINDOW, LEAST_WINDOW, POOL_WINDOW = 256 << 10, 32 << 10, 2 << 20
"""Credit of an agent at its start: at most, at least, and of all agents of a pool together.

At 10 Mbit/s, 256 KiB take 0.2 s.
"""
OUTPUT_COST = 100
"""Cost of a piece of output, in addition to its size in bytes."""


def window(nodes: int) -> int:
    """Return an agent's credit at its start, in a pool of this many nodes."""
    # All agents' output shares the link of the notebook's machine, and a message of any of them
    # waits for what all have in transit. The minimum keeps output moving in a pool of 256 nodes.
    return max(LEAST_WINDOW, min(WINDOW, POOL_WINDOW // nodes))


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
    """Address of this node for the other nodes; None if the nodes look for a common network first,
    and `HeadAddress` then carries the address of the head.
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
    """Notebook → agent: probe these addresses (address → port) of a node that knows `secret`."""

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


class HeadAddress(AgentMessage):
    """Notebook → agent of the head: all other nodes reach it at this address."""

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


class Request(AgentMessage):
    """Notebook → agent → ranks: carry out an order.

    Each node gets one message, which its agent passes on to the ranks.
    """

    ranks: tuple[int, ...]
    request: str
    """Identity of the request; `Output` and `OrderFinished` carry it too."""
    run: int
    """Number of the run in the pool; 0 if the request is not a run."""
    # Plain values rather than an `Order`: the agent passes them on without reading them.
    order: list[Any]
    """The order, as packed by `wire.order.packed_order`."""
    source: str
    """Source code for the rank to execute; "" for orders without code."""


class OrderFinished(AgentMessage):
    """Rank → agent → notebook: a rank has carried out an order, and its output is complete."""

    rank: int
    request: str
    outcome: JsonObject
    """A `wire.outcome.Outcome` as plain values; checked when the notebook reads it, because a cell
    may have broken it.
    """


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
    """Notebook → agent: measure the resource use of these ranks; answered by one `Measurement`."""

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

    The agent repeats everything that it sent to the previous one.
    """


class Follow(AgentMessage):
    """Notebook that took over → agent: send the outcomes of an earlier request, and the output that
    was not acknowledged.
    """

    request: str
    ranks: tuple[int, ...]


class Shown(AgentMessage):
    """Notebook → agent: the user has seen a request's output up to these numbers."""

    request: str
    last: dict[int, int]
    """Rank → number (`Output.seq`) of the last piece that was shown."""


class Delivered(AgentMessage):
    """Notebook → agent: the user has the results of a request, or its error.

    Agent → notebook that took over: the same, if it is the latest request of these ranks.
    """

    request: str
    ranks: tuple[int, ...]


class RequestUnknown(AgentMessage):
    """Agent → notebook, in reply to `Follow`: the rank never got this request."""

    rank: int
    request: str


class Credit(AgentMessage):
    """Notebook → agent: output of this cost was read, and as much more may be sent."""

    cost: int


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


class AgentFailed(AgentMessage):
    """Agent → notebook: the node cannot continue."""

    reason: str


class AgentProblem(AgentMessage):
    """Agent → notebook: something went wrong on the node, with its consequences; the node
    continues.
    """

    text: str


class RankForked(AgentMessage):
    """Forkserver → agent → notebook: the rank's process exists."""

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
    """Rank → agent → notebook: the rank takes requests, and its plugins' hooks have run."""

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
    request: str
    """Identity of the request."""
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
    """Content of the Jupyter message of this kind."""


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
# `__subclasses__` lists direct subclasses only, and `Output` is a base that is never sent itself.
CODEC: Codec[AgentMessage] = Codec(
    *(kind for kind in AgentMessage.__subclasses__() if kind is not Output),
    *Output.__subclasses__(),
    max_line=MAX_LINE,
)
encode, decode, decoder = CODEC.encode, CODEC.decode, CODEC.decoder
