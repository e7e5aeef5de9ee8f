"""What all parts of a pool share: its plan, where it is in its life, and the notes for its user."""

from __future__ import annotations

import getpass
import secrets
import socket
import time

from skymagic import plugins
from skymagic.errors import PoolStateError
from skymagic.plan.limits import Lifetime
from skymagic.plan.plans import Plan
from skymagic.plan.requests import Defaults
from skymagic.plugins import table
from skymagic.pool import states
from skymagic.pool.keys import DisplayRecord
from skymagic.pool.states import Event, State


def now() -> float:
    """Seconds on a clock that nobody sets and that goes on while the machine sleeps, unlike `time.monotonic` on Linux."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Status:
    """The shared state of one pool: `Pool` is one, with what it holds."""

    def __init__(self, name: str, plan: Plan, defaults: Defaults, job_id: str = "") -> None:
        self.name = name
        self.plan = plan
        """What it was made from; another one after it was resized."""
        self.defaults = defaults
        """Limits of its runs; the magics set them before each cell, so that %config counts at once."""
        self.job_id = job_id or f"{name}-{secrets.token_hex(4)}"
        self.shown = DisplayRecord(self.job_id if plan.outlives else None)
        """How far its runs were shown, for another notebook."""
        self.client = f"{getpass.getuser()}@{socket.gethostname()}"
        """Who started it, and where."""
        self.plugins = plugins.resolve(plan.request.plugins)
        for plugin in self.plugins:
            table.packed_plugin(plugin)  # one that cannot travel is refused before anything starts
        self.state = State.NEW
        """Where it is in its life."""
        self.ended: str | None = None
        """Why it has ended by itself; such a pool stays known until it is stopped or made anew."""
        self.lifetime = Lifetime(plan.request.idle, plan.request.max_lifetime, now())
        """What the agents know too, for the time when they are out of reach."""
        self.runs = 0
        """How many runs have begun."""
        self.unreached: tuple[str, ...] = ()
        """After the end: machines that could not be told of it."""
        self._notes: list[str] = []

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.plan.topology.world_size

    @property
    def inseparable(self) -> list[str]:
        """Plugins that need all ranks started anew when one has died, or when their number changes."""
        return [plugin.name for plugin in self.plugins if plugin.rejoin is None]

    def move(self, event: Event) -> None:
        """Something has happened to the pool. Raises PoolStateError where it is not allowed."""
        self.state = states.move(self.state, event, self.name)

    def check(self, event: Event) -> None:
        """Raises PoolStateError if this may not happen to the pool now."""
        states.move(self.state, event, self.name)

    def check_ended(self) -> None:
        """Raises PoolStateError if the pool has ended by itself, with the reason and what to do."""
        if self.ended is not None:
            raise PoolStateError(f"{self.ended}: %sky_pool makes it anew")

    def missing(self) -> PoolStateError:
        """The error for what a pool in this state does not have."""
        return PoolStateError(f"pool {self.name!r} is {self.state.value}: {self.state.sentence}")

    def note(self, text: str) -> None:
        """Show this to the user before the next run; the same text twice is shown once."""
        if text not in self._notes:
            self._notes.append(text)

    def take_notes(self) -> list[str]:
        """The notes that were not shown yet."""
        notes, self._notes = self._notes, []
        return notes
