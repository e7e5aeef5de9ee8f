"""A pool: ranks that are ready, from acquiring their machines to releasing them.

`Pool` composes the parts; each owns its own state, and all share its `SharedStatus`::

    magics, api → Pool ─┬─ PoolRuns ── Scheduler   reserve ranks (dispatch), ship, carry out
                        ├─ Dispatch                orders under way ←──┐ a rank's death reaches its run
                        ├─ Packages                what a run needs is installed before it is sent
                        ├─ Recovery                ranks started again ←┤ between runs
                        ├─ AgentEvents (losses) ───────────────────────┘ ← agents, on their links' threads
                        └─ PoolResources           machines, agents, engine, store

dispatch   orders on their way to ranks, the queue before them, and who waits for them
keys       on disk: what another notebook must know of a pool, how far its runs were shown
losses     deaths, lost nodes and limits as agents report them; other machines in the place of lost ones
making     carries out what `start` decides, and asks where it costs something
messages   a pool as it is shown, and its sentences; pure
packages   which packages the nodes have, and how they get more
pool       the public class
records    on disk: which pools were started from here, and the last lines of those that have ended
recovery   ranks started again, process groups formed again, another number of nodes
registry   all pools of this process, by name
resources  machines, agents, engine and store, from the plan to their release
runs       cells, and other orders to its ranks; runs that another notebook has left
slow_start  what holds up ranks that are slow to start, and how a restart gets past it
start      whether a pool is reused: what a request becomes, as a value, by `plan.planning.fits`; pure
status     the table of moves in a pool's life, and what all its parts share
"""

from skymagic.pool.pool import Pool

__all__ = ["Pool"]
