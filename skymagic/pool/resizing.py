"""Another number of nodes for a pool on this machine: ranks are added or released, and those that stay form a new group."""

from __future__ import annotations

import threading

from skymagic.plan.plans import Plan
from skymagic.pool.messages import variables_then
from skymagic.pool.recovery import Recovery
from skymagic.pool.resources import Resources
from skymagic.pool.scheduling import Scheduler
from skymagic.pool.states import Event
from skymagic.pool.status import Status


def resize(status: Status, resources: Resources, scheduler: Scheduler, recovery: Recovery, plan: Plan) -> str:
    """See `Pool.resize`."""
    status.check(Event.RECOVER)
    before, after = status.world_size, plan.topology.world_size
    # The wait may be interrupted. What follows may not, and so goes on by itself when the user does not wait for it.
    reservation = scheduler.request(range(max(before, after)))
    scheduler.acquire(reservation)
    problems: list[Exception] = []

    def work() -> None:
        try:
            recovery.check()
            status.plan = plan
            recovery.regroup(resources.reshape(), range(before, after))
        except Exception as problem:
            problems.append(problem)
        finally:
            scheduler.release(reservation)

    thread = threading.Thread(target=work, name="skymagic-resize", daemon=True)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
    return variables_then(before, after, status.inseparable)
