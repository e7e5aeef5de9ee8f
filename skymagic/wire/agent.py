"""The protocol of the node agents: messages between notebook, daemon, agent, forkserver and ranks (`wire.codec`).

    notebook                     agent                        forkserver, rank
    AgentSpec                →   (starts forkserver, on the head the controller)
                             ←   AgentStarted
    ProbeAddresses           →   connects to them
                             ←   ProbeReply                   only where nodes do not know each other's addresses
    StartController          →   on the head
                             ←   ControllerUp
    Spawn                    →   RankSpec                 →   forkserver forks
                             ←   RankForked               ←
                             ←   RankReady or RankFailed  ←   rank, once its plugins' hooks are done
    Measure                  →                                what ranks use, while somebody looks at it
    RankRequest (stacks, …)  →   RankRequest              →   rank's control thread
                             ←   RankReply                ←
                                                          ←   BeginOutput, Publish…, EndOutput: rank, for each cell
                                 Published                →   for each Publish, which the rank waits for
                                                          ←   Reported: rank, at most twice a second
                             ←   RankExited               ←   ChildExited: forkserver
                             ←   InterruptionNotice       →   rank: this machine will be taken away
    InterruptionNotice       →   of another machine       →   rank
                             ←   HookEnded                ←   rank
    Follow                   →                                only from a notebook that has taken over
                             ←   FollowedOutput …
    Shutdown                 →   ends everything
                             ←   LastLines                    of each rank's log

The *link* joins notebook and agent (the agent's standard streams, or a tunnel), the *control socket* an agent and a rank. Cells and
their outcomes do not travel here: they are ipyparallel's.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from skymagic.wire.codec import Codec, FrozenMessage

KEPT_LINES, KEPT_CHARACTERS = 200, 20_000
"""How much of each rank's log the notebook has when its pool has ended, at most."""
HEAD_LINES, HEAD_CHARACTERS = 10_000, 1 << 20
"""The same of rank 0's, whose output is what the notebook shows."""
WHOLE_LOG = -1
"""In the place of a run's number: all that a rank's log has."""


class AgentMessage(FrozenMessage):
    """Base of this protocol's messages."""


class AgentSpec(AgentMessage):
    """Notebook → agent, first of all: what this node is to do."""

    pool: str
    job_id: str
    node: int
    head: bool
    nodes: int = 1
    """How many there are."""
    client: str = ""
    """Who started the pool, and where, for those who find it: ``ann@laptop``."""
    version: str = ""
    """skymagic's."""
    devices: tuple[int, ...] = ()
    """The GPUs that its ranks see, as their machine counts them."""
    preload: tuple[str, ...] = ()
    """Modules that the forkserver imports before it forks ranks."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of everything on the node; never logged."""
    address: str | None = "127.0.0.1"
    """Where the controller listens; None: the nodes meet first, and `StartController` says it."""
    idle_timeout: float | None = None
    """Seconds without a cell after which the agent ends everything."""
    max_lifetime: float | None = None
    """Seconds after which it does so in any case."""
    detached_timeout: float | None = None
    """Seconds without the notebook, and without a rank at work here, after which it does so; None: the link's end does."""
    max_away: float | None = None
    """Seconds without the notebook after which it stops what its ranks are at work on."""
    notices: str = ""
    """How this machine hears that it will be taken away: "ec2-spot", "slurm:120" (SIGURG so many seconds before); "" for not at all."""
    log_limit: int | None = None
    """Bytes that the log of each rank may have; of a longer one the beginning is dropped."""


class AgentStarted(AgentMessage):
    """Agent → notebook, its first message: where it runs."""

    hostname: str
    machine: str
    """Equal for agents that reach each other by 127.0.0.1."""
    directory: str
    """Where logs are."""
    store: str
    """The node store's directory."""
    addresses: dict[str, int] = field(default_factory=dict)
    """Address → port at which the head listens for probes; empty on all other nodes, and when addresses are known."""
    port: int = 0
    """A port that is free on the head, for process groups of the user's own; 0 on all other nodes."""
    secret: str = field(default="", repr=False)
    """By which the other nodes know this one when they probe it."""


class ProbeAddresses(AgentMessage):
    """Notebook → agent: connect to these addresses (address → port); the right node has `secret`."""

    addresses: dict[str, int]
    secret: str = field(repr=False)
    number: int


class ListenForProbes(AgentMessage):
    """Notebook → agent: listen for probes at this address from now on, and say at which port."""

    address: str
    number: int


class ProbeReply(AgentMessage):
    """Agent → notebook: the addresses that answered."""

    number: int
    routes: dict[str, str]
    """Address that answered → this node's own address on the way there."""
    addresses: dict[str, int] = field(default_factory=dict)
    """Address → port at which this node listens for probes, in reply to `ListenForProbes`."""


class StartController(AgentMessage):
    """Notebook → agent of the head: start ipyparallel's controller, to listen at this address."""

    address: str


class RankSpec(AgentMessage):
    """Notebook → agent → forkserver: one rank to start."""

    rank: int
    info: dict[str, Any]
    """``runtime.InstanceInfo`` as plain values."""
    plugins: tuple[dict[str, Any], ...] = ()
    """``{"name": …, "options": {…}}`` each, in the order in which their hooks run."""
    env: dict[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    """UUIDs of its GPUs, which the agent holds for the pool."""
    generation: int = 0
    """Counts process groups of the pool: a group is formed again after ranks were freed or replaced."""
    engine_file: str = ""
    """Connection file of the controller, filled in by the agent."""
    store: str = ""
    """Directory of the node store, filled in by the agent."""
    log: str = ""
    """Path of the rank's complete log, filled in by the agent."""
    profile: str = ""
    """An empty directory in the place of an IPython profile, filled in by the agent."""


class Spawn(AgentMessage):
    """Notebook → agent: start these ranks (the earlier process of the same rank, if any, is ended first)."""

    ranks: tuple[dict[str, Any], ...]
    connection: dict[str, Any] | None = None
    """The controller's connection info for engines; None on the head node, which has its own."""


class Signal(AgentMessage):
    """Notebook → agent: send a signal to ranks (SIGKILL reaches their whole process groups)."""

    ranks: tuple[int, ...]
    signum: int


class RankRequest(AgentMessage):
    """Notebook → agent → ranks' control threads: a remote call, answered by a `RankReply` with the same number."""

    ranks: tuple[int, ...]
    method: str
    number: int = 0


class Measure(AgentMessage):
    """Notebook → agent: what do these ranks of yours use? Answered by one `RankReply`, in the name of the first of them."""

    ranks: tuple[int, ...]
    devices: dict[str, tuple[str, ...]]
    """Rank → the UUIDs of its GPUs, or their numbers as the machine counts them; without ranks that have none."""
    number: int


class ReadLog(AgentMessage):
    """Notebook → agent: the last lines of a rank's log, or what follows byte `start` as soon as there is something."""

    rank: int
    number: int
    lines: int = 0
    start: int | None = None
    run: int = 0
    """Not 0: what this run wrote, a piece of it, from byte `start` on or from its beginning."""
    runs: bool = False
    """Which runs the log has instead."""


class RankReply(AgentMessage):
    """Rank → agent → notebook, or from the agent itself: the answer to `RankRequest`, `Measure` or `ReadLog`."""

    rank: int
    number: int
    value: Any = None


class LastLines(AgentMessage):
    """Agent → notebook, when the pool ends: the end of a rank's log, which is deleted then."""

    rank: int
    text: str


class RendezvousKey(AgentMessage):
    """Rank → agent → all other ranks: one key of the pool's key-value rendezvous, such as the port of rank 0's store."""

    key: str
    value: Any
    """None takes an earlier value back."""


class Shutdown(AgentMessage):
    """Notebook → agent: end everything and leave nothing."""


class NotebookDetached(AgentMessage):
    """Daemon → agent: the notebook's connection is gone; it may come back."""


class NotebookAttached(AgentMessage):
    """Daemon → agent: the notebook is there again."""


class NotebookReplaced(AgentMessage):
    """Daemon → agent: another notebook is there, which knows nothing yet; all that the first one was told is told again."""


class Follow(AgentMessage):
    """Notebook → agent: tell over the link what these ranks show in the present run, or the last one."""

    shown: dict[str, int]
    """Rank → number of the last content that was shown already; 0 for none."""


class FollowedOutput(AgentMessage):
    """Agent → notebook that follows: what a rank shows, as it stands on iopub for the notebook that began the run."""

    rank: int
    content: dict[str, Any]


class RunElsewhere(AgentMessage):
    """Notebook → agent: a run without ranks of this node has begun or is over; until then the pool is not idle."""

    run: int
    busy: bool


class PoolEnded(AgentMessage):
    """Agent → notebook: a timeout is over, or somebody else has ended the pool; everything on the node is being ended."""

    reason: str
    """The rest of a sentence about the pool: "ended after 1h without a cell"."""


class ControllerUp(AgentMessage):
    """Agent of the head node → notebook: the controller listens."""

    client: dict[str, Any]
    engine: dict[str, Any]


class AgentFailed(AgentMessage):
    """Agent → notebook: the node cannot continue."""

    reason: str


class AgentProblem(AgentMessage):
    """Agent → notebook: what went wrong on the node, and what it cost; the node continues."""

    text: str


class RankForked(AgentMessage):
    """Forkserver → agent → notebook: the rank's process exists; its engine registers under this identity."""

    rank: int
    pid: int
    ident: str
    started: int = 0
    """In the system's ticks: what tells it from a later process of that number; 0 where the system does not tell."""


class ChildExited(AgentMessage):
    """Forkserver → agent: a process that it forked has ended."""

    pid: int
    status: int
    """Exit code; negative for a signal."""


class RankReady(AgentMessage):
    """Rank → agent → notebook: registered, plugins' hooks done."""

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
    """Exit code; negative for a signal; None if nobody could tell."""
    expected: bool
    out_of_memory: bool = False
    tail: str = ""
    """The last lines of its log."""


class InterruptionNotice(AgentMessage):
    """Agent → notebook → other agents, and agent → ranks: a machine will be taken away, or may be."""

    node: int
    ranks: tuple[int, ...]
    """Ranks of that machine."""
    reason: str
    at: float | None = None
    """When, in seconds since 1970; None for a recommendation to leave it, of which no hook is told."""


class HookSet(AgentMessage):
    """Rank → agent: whether it has an `on_interruption` hook from now on."""

    rank: int
    there: bool


class HookEnded(AgentMessage):
    """Rank → agent → notebook: its `on_interruption` hook has run."""

    rank: int
    seconds: float
    error: str = ""


class BeginOutput(AgentMessage):
    """Rank → agent: what this rank prints from now on belongs to this request."""

    rank: int
    parent: dict[str, Any]
    """The header of Jupyter's request, under which output is published."""
    visible: bool
    """Whether it reaches the notebook, or the log only."""
    limit: int
    """Bytes of text that may reach the screen at once; more is paced, and complete in the log only."""
    cell: int = 0
    """The cell's number in the notebook, for the log; 0 for what is no cell."""
    run: int = 0
    """The pool's number of the run; 0 for what is none."""


class Publish(AgentMessage):
    """Rank → agent: rich output, to be put after all text written before it."""

    rank: int
    kind: str
    content: dict[str, Any]


class Reported(AgentMessage):
    """Rank → agent: numbers that the cell has reported since the last such message (`wire.metrics`)."""

    rank: int
    batches: tuple[dict[str, Any], ...]


class EndOutput(AgentMessage):
    """Rank → agent: the request is over; all of its text has been written."""

    rank: int


class Published(AgentMessage):
    """Agent → rank: acknowledges the last `Publish`, so that what the rank prints next comes after it."""


MAX_LINE = 256 << 20  # lines are this long because rich output (figures, tables) travels in a line
CODEC: Codec[AgentMessage] = Codec(*AgentMessage.__subclasses__(), max_line=MAX_LINE)
encode, decode, decoder = CODEC.encode, CODEC.decode, CODEC.decoder
