"""A pool: ranks that are ready, from acquiring their machines to releasing them.

`Pool` composes the parts; each owns its own state, and all share its `Status`::

    magics, api → Pool ─┬─ Runs ── Scheduler   reserve ranks, ship, carry out
                        ├─ Dispatch            orders under way ←──┐ a rank's death reaches its run
                        ├─ Packages            what a run needs is installed before it is sent
                        ├─ Recovery            ranks anew     ←────┤ between runs
                        ├─ AgentEvents ────────────────────────────┘ ← agents, on their links' threads
                        └─ Resources           machines, agents, engine, store

agent_events  what agents report: deaths, lost nodes, notes, limits
attaching     a pool taken up as another notebook has left it
checking      how its nodes are
cloning       names of one rank copied to others
debugging     commands of a debugger to a rank whose cell has failed
kept_logs     what rank 0 of pools that have ended wrote last, on disk
dispatch      orders on their way to ranks, and who waits for them
following     how the ranks of a run end that another notebook began
hanging       ranks for which others would wait in vain while a process group is formed anew
keys          what another notebook must know of a pool, and how far this one has shown its runs, on disk
making        from a request to a pool: the one that runs, one that was left, or a new one
messages      what is shown of its ranks
notebooks     notebooks that are executed on pools' heads, or were, until they are taken: on disk
packages      which packages the nodes have, and how they get more
pool          the public class
reader        a pool that another notebook has, seen and not changed
readers       the pools of other notebooks that are read here
recovery      ranks started anew, process groups formed again, another number of nodes
records       which pools on other machines were started from here, on disk
registry      all pools of this process, by name
release       what is given back, step by step, whatever fails
replacement   other machines in the place of lost ones, rented beside the user
replaced      what ranks that were started anew lack, in words
reuse         a rented pool that was left is found again, and none is rented twice
resources     machines, agents, engine and store, where values go, and their release
runs          runs on its ranks
scheduling    which run gets which ranks, first in first out
specs         from its plan to the specification of agents and ranks
stopped       rented pools whose machines are stopped, surveyed to be started again
surveys       from a request to a plan: its provider is asked, and the user, where it costs something
states        the table of moves in its life
view          a pool as it is shown
status        what all parts share: the pool itself, without what it holds
"""

from skymagic.pool.pool import Pool

__all__ = ["Pool"]
