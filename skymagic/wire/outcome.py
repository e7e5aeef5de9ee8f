"""Outcomes of orders: a rank's replies, and its memory of its last runs."""

from __future__ import annotations

from dataclasses import field

from skymagic.wire.codec import FrozenMessage
from skymagic.wire.order import RunCell
from skymagic.wire.queries import Query, StackFrame
from skymagic.wire.values import LentNames, PackedValue


class MissingFiles(FrozenMessage):
    """Paths that a cell looked for in vain. Relative ones start at `folder`."""

    paths: tuple[str, ...]
    folder: str
    """The rank's working directory."""
    home: str


class Failure(FrozenMessage):
    """Error that ended an order."""

    ename: str
    evalue: str
    traceback: tuple[str, ...] = ()
    exception: PackedValue | None = None
    """The exception itself; None if it is too long to be sent."""
    missing: str = ""
    """Name that the cell did not find on the rank."""
    missing_files: MissingFiles | None = None
    freed: bool = False
    """True if the rank was released from a collective."""
    cause_timeout: float = 0.0
    """Seconds to wait for the root cause on another rank; 0 for the default."""


class NamesRead(FrozenMessage):
    """Global names that the code of a rank reads."""

    digest: str
    names: dict[str, tuple[str, ...]] | None
    """Function or class → names; None if the notebook knows the digest."""


class NameChanges(FrozenMessage):
    """Changes to a rank's names and objects since the last report."""

    rebound: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    unlinked: tuple[str, ...] = ()
    """Names that no longer hold the value that the notebook sent."""
    lost: tuple[tuple[int, int], ...] = ()
    """References of released objects: table and number."""
    reads: NamesRead | None = None


class Outcome(FrozenMessage):
    """Result of an order on one rank. Fields that do not apply to the order have their defaults."""

    failure: Failure | None = None
    """Error of the order; None if it was carried out."""
    interrupted: bool = False
    """True if an interrupt reached the cell, or ended it."""
    bound: bool = False
    """True if the sent variables were bound."""
    joined: bool = True
    """False if the cell has destroyed something that a plugin had set up."""
    gpu_lost: bool = False
    """True if the rank can no longer use its GPU."""
    changes: NameChanges | None = None
    values: dict[str, PackedValue] = field(default_factory=dict)
    """Values that the rank sends back, by name."""
    profile: PackedValue | None = None
    """Profile of the cell, if the order requested one."""
    stopped_at: tuple[StackFrame, ...] = ()
    """Place of the interrupt: the user's innermost frame, and the innermost one of all."""
    collectives: dict[str, int] = field(default_factory=dict)
    """Process group → number of collectives that the rank has begun."""
    notes: tuple[str, ...] = ()
    """Lines for the user on state that was lost when the process group was formed again."""
    lent: LentNames | None = None
    inspectable: bool = False
    """True if the frames of the last error can still be inspected."""

    @property
    def succeeded(self) -> bool:
        """True if the order was carried out."""
        return self.failure is None

    @property
    def freed(self) -> bool:
        """True if the order failed because the rank was released from a collective."""
        return self.failure is not None and self.failure.freed


class Recollection(FrozenMessage):
    """A rank's memory of its current or latest run."""

    order: RunCell | None = None
    """The run's order without its manifest; None before the first run."""
    outcome: Outcome | None = None
    """Outcome of the run; None while it is in progress."""
    ended_at: float = 0.0
    """Seconds since 1970 by the node's clock."""
    seconds: float = 0.0
    """Duration of the run, or seconds since it began if it is in progress."""
    step: float | None = None
    """Last step that the cell reported."""
    generation: int = 0
    """Number of the process group."""

    @property
    def run(self) -> int:
        """Number of the run; 0 before the first one."""
        return self.order.run if self.order is not None else 0


RECALL: Query[Recollection | None] = Query("recall", Recollection | None)
