"""Pools: from acquiring the machines, through ranks that are ready for cells, to the release.

`Pool` composes the parts; each part owns its state, and all share the pool's `SharedStatus`::

    magics, api → Pool ─┬─ PoolRuns ── Scheduler  reserve ranks (dispatch), ship, execute
                        ├─ Dispatch               orders in flight ←─┐ a death reaches its run
                        ├─ Packages               install what a run needs before it is sent
                        ├─ Recovery               restart ranks ←────┤ between runs
                        ├─ AgentEvents (failures) ───────────────────┘ ← agents, on link threads
                        └─ PoolResources          machines, agents, store

debugging   debug log of the notebook's process, and the level of its pools' other processes
dispatch    orders in flight, the queue before them, and the run that waits for each
keys        files that let another notebook attach to a pool and continue its display
failures    rank deaths, lost nodes and limits as agents report them; replacement machines
launch      carries out what `start` decides, and asks before it spends money
messages    the pool panel, status rows and sentences about ranks; pure
packages    which packages the nodes have, and installs missing ones
pool        the public class
records     files: pools started from this machine, and the last lines of pools that have ended
recovery    restarted ranks, new process groups, another number of nodes
registry    all pools of this process, by name
resources   machines, agents and store, from the plan to their release
runs        cells and other orders; runs left by another notebook
slow_start  what delays slow ranks, and how a restart gets past it
start       decides whether a request reuses, resizes, attaches to or makes a pool; pure
status      the transitions of a pool's life, and what all its parts share
"""

from skymagic.pool.pool import Pool

__all__ = ["Pool"]
