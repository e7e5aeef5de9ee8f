"""One run on some ranks: sent, streamed, failed fast, interrupted, reported.

What a run sends and gets back::

    Pool.run ── RunSpec ──▶ Engine.submit ── order and source (`wire.order`) ──▶ ranks
                                                                                  │
    Report ◀── Run.wait ◀── Submission.events ◀── outcome, by ipyparallel ────────┤
                                   ▲        ▲ ◀── output, by way of the agent ────┘
                  stop, by SIGINT ─┘        └──── died, from the agent

spec          what a run asks of the ranks that take part
engine        the ipyparallel client: all of ipyparallel on the notebook's side
submission    the mailbox of one run, and its events
run           the event loop of one run; the escalation from interrupt to kill
interrupt     deferred delivery of SIGINT; a stop signal for other threads
stall         stall detection: ranks whose stacks do not change
inspection    where ranks are, and what their names hold, while cells run
metrics       what ranks have reported: a table by step and rank, and how far they are
slowness      why a run is slow, in words; pure
state         how a run is, and how it has ended, as its line shows it
report        a run's timeouts, and how each rank ended
results       values in rank order, or one error that sums up what failed
raised        what a rank raised, raised again
"""
