"""The daemon of a node: keeps an agent alive without a connection, so that notebooks can reattach.

Only the first two processes belong to the login::

    sshd ── shell ── attach            one per connection: python -m …attach NAME
                       │ os.fork        under a lock of the run directory, unless the socket answers
                     daemon            leads a session (setsid), holds no descriptor of the login
                       │ os.fork        with all modules imported already
                     agent             leads another session; its standard streams are pipes
                       └ os.fork ────── forkserver ─ os.fork ─ ranks

This is half of a classic double fork: the daemon leads its session and so could get a terminal, but
never opens one. When attach ends, init (or a subreaper) adopts the daemon. Each attach process
relays bytes between its standard streams and the daemon's socket; `wire.session` handles the
handshake and everything after it.

attach    one connection: starts or finds the daemon (or the agent, for a reader), then relays
daemon    the event loop: owns the agent and the session
rundir    the run directory: socket, log, and the check that only this user can enter it
notebook  papermill on the head, which executes a notebook as a separate job
"""
