"""Processes on the nodes: daemons, agents, ranks, and the servers that carry values and files.

An arrow is a fork or an exec; the text next to it describes the communication afterwards:

    notebook ── SSH ── daemon        one per pool; keeps the agent when the connection breaks
       │                 │           (session, exactly once); Unix pipes: JSON lines of wire.agent
       └── on this ── agent          starts all others, reads the ranks' output, ends everything
           machine:      │           when its link ends
           pipes         └─▶ forkserver   has torch imported, no thread, no GPU; a socket pair
                              │           to the agent
                              └─▶ rank    control socket (cells, outcomes, requests) and two
                                   │      pipes (stdout, stderr) to the agent
                                   └─▶ bash, a script    writes to the rank's own pipes

    value server     one per node and pool, started by the notebook: receives values, forwards them
    transfer_server  one per copy, started by the notebook: one end of put, get, sync
    check            one per check, started by the notebook: surveys a node

daemon/     outlives connections: attach to, or start, the daemon that keeps an agent
agent/      starts ranks, watches them, filters their output, and ends them
rank/       a rank: an ipykernel whose namespace, output and errors appear as the notebook's own
script/     a shell script that a rank starts
store/      the value server of a node
transfer_server  one end of a file copy
check       one end of a check: GPUs, kernel log, disk, clock
debug_entries  reader of the debug logs of a node's processes
relay       processes of another node for the head, where a notebook is executed
fork        building blocks of processes: a function in a forked process, signals, an event loop
proc        Linux's information about processes
network     interfaces, and the environment that frameworks read
stacks      the user's frames on a rank's main thread, read by another thread or a signal handler
"""
