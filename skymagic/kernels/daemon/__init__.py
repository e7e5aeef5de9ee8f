"""A node's daemon keeps an agent alive without its connection, and lets the notebook attach again.

Who starts what; only the first two processes belong to the login::

    sshd ── shell ── attach            one for each connection: python -m …attach NAME
                       │ os.fork        under a lock of the run directory, unless the daemon's socket answers
                     daemon            leads a session of its own (setsid), holds no descriptor of the login
                       │ os.fork        finds all modules imported
                     agent             leads another session; its standard streams are the daemon's pipes
                       ├ os.fork ────── forkserver ─ os.fork ─ ranks
                       └ on the head ── ipyparallel's controller

It is half of a classic double fork: the daemon leads its session and so could get a terminal, but never opens one. When attach ends,
init (or a subreaper) adopts the daemon. Each attach process relays between its standard streams and the daemon's socket, byte by
byte as they come; the handshake and all after it are `wire.session`'s.

attach    one connection: finds or starts the daemon, or leads a reader past it to the agent; then relays
daemon    the event loop: owns the agent and the session
rundir    the run directory: socket, log, and whether it is ours alone
notebook  papermill on the head, which executes a notebook as a job of its own
"""
