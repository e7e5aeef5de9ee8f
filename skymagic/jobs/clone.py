"""Names of one rank copied to others: from a call to what was copied, or one error."""

from __future__ import annotations

from collections.abc import Sequence

from skymagic.jobs import cell
from skymagic.pool import Pool
from skymagic.pool.cloning import Cloned
from skymagic.run import interrupt
from skymagic.run.report import Limits


def clone(pool: Pool, ranks: Sequence[int], names: Sequence[str], source: int) -> Cloned:
    """See `Pool.clone`.

    Raises:
        RunError: a rank died, or could not rebuild the values.
    """
    with interrupt.deferred():
        cloned = pool.clone(ranks, names, source=source)
        if cloned.report is not None:
            raise cell.failure(cloned.report, pool, Limits())
        return cloned
