"""A node's agent: starts ranks, watches them, filters what they print, and ends them.

    notebook   ◀── link: messages of wire.agent ──▶  Agent   one event loop, one thread
    forkserver ◀── RankSpec with descriptors; RankForked, ChildExited ──▶  Ranks
    rank       ◀── control socket: Request, Offer, Published; Reply, BeginOutput, Publish, EndOutput ──▶  Ranks
    rank       ─── stdout, stderr: pipes ──▶  RankOutput ──▶ its log, and iopub through a token bucket

agent         the process: the link to the notebook, and what it asks
loop          the event loop: readable descriptors and timers
ranks         all ranks of the node: started, watched, replaced, ended
rank          one of them: its process, its control socket and its output
readers       notebooks and terminals that see what ranks do, and change nothing
record        what it tells others on its machine, on disk
directories   its folders: locked, removed, and swept where an agent was killed
children      the owners of the two child processes, controller and forkserver
controller    what runs as ipyparallel's controller
forkserver    what runs as the forkserver
orphans       what ranks have started, ended with them
discovery     by which addresses the nodes reach each other
output        a rank's output: pipes → complete log → what the screen may see
away          what ranks display while the notebook is away, and what they report
kept          what ranks have shown in their last run, for a notebook that takes over
unattended    the end of a run whose notebook has been away for too long
ending        the end by a signal: hooks of ranks run first
notices       notices of EC2 that this machine will be taken away
iopub         the agent's place on ipyparallel's iopub channel
rank_logs     the logs of the node's ranks: which runs stand in them, and who follows them
logs          the last lines of a rank's log, and what follows
trimming      ranks' logs kept within their limit
resources     what the ranks use: processors, memory, GPUs
oom           the system's out-of-memory kills, and GPUs in use
"""
