"""One run on some ranks: sent, streamed, failed fast, interrupted, reported.

What a run sends and gets back::

    Pool.run ── RunSpec ──▶ RankEngine.submit ── order and source (`wire.order`) ──▶ ranks
                                                                                  │
    Report ◀── RunLoop ◀─── Submission.events ◀── outcome, by ipyparallel ────────┤
                                   ▲        ▲ ◀── output, by way of the agent ────┘
                  stop, by SIGINT ─┘        └──── died, from the agent

engine      the ipyparallel client: all of ipyparallel on the notebook's side
interrupt   deferred delivery of SIGINT; a stop signal for other threads
metrics     what ranks report: a table by step and rank, how far they are, and why they are slow
report      what a run asks of its ranks, its limits, and how each rank ended
results     values in rank order, or one error that sums up what failed
run         the event loop of one run; the escalation from interrupt to kill
stall       where ranks are; those that make no progress in a cell, or hang while a process group is formed
submission  the mailbox of one run, and its events
"""
