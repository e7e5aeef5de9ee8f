"""The agent of a node: starts ranks, watches them, filters their output, and ends them.

    notebook   ◀── link: messages of wire.agent ──▶  Agent   one event loop, one thread
    forkserver ◀── RankSpec with descriptors; RankForked, ChildExited ──▶  Ranks
    rank       ◀── control socket: Request, RankRequest, Published ── Ranks
    rank       ─── control socket: BeginOutput, Publish, EndOutput, OrderFinished ──▶ Ranks
    rank       ─── stdout, stderr: pipes ──▶  OutputFilter ──▶ its log, and Uplink (token bucket)

agent          the process: the link to the notebook and the dispatch of its messages
ranks          all ranks of the node: start, watch, replace and end them
readers        requests of the notebook and of log readers, and the states of ranks for them
uplink         writes that never block: control before output, and output within its credit
directories    folders on disk, the sweep of abandoned ones, and the agent's public record
children       owner of the child process, the forkserver
forkserver     entry point of the forkserver, which also ends processes that ranks leave behind
discovery      find the addresses by which the nodes reach each other
output         the output of a rank: pipes → complete log → text for the screen → uplink
crash_reports  shorten Python's reports of crashes to the user's frames
replay_buffer  bounded buffers of output and metrics for a notebook that is away or takes over
logs           log files of ranks: bounded, read and followed, with the position of each run
ending         unrequested ends: signals (after ranks' hooks), EC2 notices, runs without a notebook
resources      resource use of ranks: processors, memory, GPUs; out-of-memory kills
"""
