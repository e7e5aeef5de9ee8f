"""Runs: execute a cell on some ranks, stream its output, fail fast, interrupt, and report.

The data flow of a run::

    Pool.run ── RunSpec ──▶ Agents.execute ── Request, one for each node ──▶ agents ──▶ ranks
                                                                                │
    Report ◀── RunLoop ◀─── Submission.events ◀── output, outcomes and deaths ──┘
                                   ▲
                  stop, by SIGINT ─┘

acknowledgements  what the user has seen of the output, as agents learn it
interrupt         deferred delivery of SIGINT; a stop signal for other threads
metrics           numbers that ranks report: a table by step and rank, progress, slowness
state             a run's request to its ranks, its limits, and the state of each rank
results           values in rank order, or one error that summarizes the failures
run               the event loop of one run; the escalation from interrupt to kill
stall             stacks of ranks; stalls in a cell and hangs while a group is formed
submission        the mailbox of one run, and its events
"""
