"""A node's agent: starts ranks, watches them, filters what they print, and ends them.

    notebook   ◀── link: messages of wire.agent ──▶  Agent   one event loop, one thread
    forkserver ◀── RankSpec with descriptors; RankForked, ChildExited ──▶  Ranks
    rank       ◀── control socket: Request, Offer, Published; Reply, BeginOutput, Publish, EndOutput ──▶  Ranks
    rank       ─── stdout, stderr: pipes ──▶  OutputFilter ──▶ its log, and iopub through a token bucket

agent         the process: the link to the notebook, and what it asks
ranks         all ranks of the node: started, watched, replaced, ended
readers       what the notebook and readers ask of ranks, and who sees what they show
directories   what the agent has on disk: its folders, swept where an agent was killed, and its record for others
children      the owners of the two child processes, controller and forkserver
controller    what runs as ipyparallel's controller
forkserver    what runs as the forkserver, and ends what ranks have started
discovery     by which addresses the nodes reach each other
output        a rank's output: pipes → complete log → what the screen may see → iopub
kept          what ranks show and report while the notebook is away, and in their last run for one that takes over
logs          the logs of ranks: bounded, read and followed; which runs stand in them
ending        ends that nobody asked for: signals with ranks' hooks first, EC2's notices, runs without a notebook
resources     what the ranks use: processors, memory, GPUs; out-of-memory kills
"""
