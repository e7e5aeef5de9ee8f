"""A pool: ranks that are ready, from acquiring their machines to releasing them.

specs    from a plan to what nodes and ranks are told
stores   where its values go
words    what is said of its ranks
mending  ranks started anew beside the user, and process groups formed again
pool     its life: acquire, run, always release
"""

from skymagic.pool.pool import Pool

__all__ = ["Pool"]
