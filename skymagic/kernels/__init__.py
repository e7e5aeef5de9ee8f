"""What runs on the nodes: who starts ranks and keeps them, the ranks themselves, and what carries values and files to them.

Processes of one node; an arrow is a fork or an exec, and what is at its side says how the two talk afterwards:

    notebook ── SSH ── daemon        one for each pool; keeps the agent when the connection breaks (session, exactly once)
       │                 │           Unix pipes: messages of wire.agent, lines of JSON
       └── on this ── agent          starts all others, reads what ranks print, ends everything when its link ends
           machine:      ├─▶ controller          ipyparallel's, on the head only: cells and outcomes, notebook ↔ ranks (ZeroMQ)
           pipes         └─▶ forkserver          has torch imported, no thread, no GPU; one socket pair to the agent
                              └─▶ rank           control socket and two pipes (stdout, stderr) to the agent; ZeroMQ to the controller
                                   └─▶ bash, a script                       writes to the rank's own pipes

    value server     one for each node and pool, started by the notebook: values come, and go on to the next node
    files            one for each copy, started by the notebook: an end of put, get, sync
    check            one for each check, started by the notebook: looks, and sends bytes to another node's

daemon/     outlives connections: attach, or start, the daemon that keeps an agent
agent/      starts ranks, watches them, filters what they print, and ends them
rank/       a rank: an ipykernel whose namespace, output and errors the notebook sees as its own
script/     a shell script beside a rank
store/      a node's value server
files       a node's end of copying files
check       a node's end of a check: hardware, clock, links
relay       processes of another node for the head, where a notebook is executed
fork        what processes are made of: a function in a forked process, signals, an event loop
proc        what Linux tells of processes
network     interfaces, and the environment that frameworks read
stacks      the user's frames on a rank's main thread, read from another thread or from a signal handler
"""
