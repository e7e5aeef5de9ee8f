"""A machine of a pool, as its provider gives it, and what is known of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skymagic.wire import agent as wire
from skymagic.wire.codec import Transport

if TYPE_CHECKING:
    from skymagic.bootstrap.additions import Addition


@dataclass
class RankState:
    """What is known of one rank."""

    hostname: str
    """Its machine, as users call it."""
    pid: int | None = None
    ident: str | None = None
    """Identity under which its engine registers."""
    ready: bool = False
    exited: wire.RankExited | None = None
    failed: wire.RankFailed | None = None


@dataclass(frozen=True)
class Node:
    """A machine of a pool, as its provider gives it.

    Attributes:
        index: its number among the machines, 0 for the head.
        name: what users call it.
        start_agent: starts its node agent, and is a link to it; its argument is called with the link's state:
            "connected", "reconnecting" or "lost".
        run: ``run(module, *arguments)`` starts ``python -m module arguments`` on that machine, in the environment of
            its ranks, and is a link to it; each call another process, which ends when the link is closed.
        forward: an address and port on that machine → a port of 127.0.0.1 here that leads there; None where the
            machine is this one.
        address: where the other nodes reach it; empty until the nodes have met.
        install: ``install(addition, words, cancelled)`` installs packages into the environment of its ranks; `words` gets each
            line that the installer prints, and it ends soon once `cancelled` says so. None where the environment is the
            notebook's own, or an interpreter that is used as it is.
        python: that interpreter; empty where there is none.
        access: what its provider needs to reach its agent again from another notebook; None where an agent ends with its notebook.
        leave: closes what leads to its agent, and leaves that running; twice is safe. None where it would end.
        alive: whether who gives the machine says that it runs; None where nobody says it.
        hostname: its own name for itself; empty until the nodes have met.
        own: name → digest of the notebook's own distributions in the environment of its ranks.
    """

    index: int
    name: str
    start_agent: Callable[[Callable[[str], None]], Transport] = field(repr=False, compare=False)
    run: Callable[..., Transport] = field(repr=False, compare=False)
    forward: Callable[[str, int], int] | None = field(default=None, repr=False, compare=False)
    install: Callable[[Addition, Callable[[str], None], Callable[[], bool]], None] | None = field(
        default=None, repr=False, compare=False
    )
    python: str = ""
    access: Any = field(default=None, repr=False, compare=False)
    leave: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    alive: Callable[[], bool | None] = field(default=lambda: None, repr=False, compare=False)
    address: str = ""
    hostname: str = ""
    own: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        return f"node {self.index} ({self.name})"
