"""The machines of a pool as a provider gives them, where they are among each other, and what is known of their ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from skymagic.wire import agent as wire
from skymagic.wire.transport import Transport


@dataclass
class RankState:
    """What is known of one rank."""

    node: int
    hostname: str
    """Its machine, as users call it."""
    pid: int | None = None
    ident: str | None = None
    """Identity under which its engine registers."""
    ready: bool = False
    exited: wire.RankExited | None = None
    failed: wire.RankFailed | None = None


@dataclass(frozen=True)
class Member:
    """A machine of the cluster, as a provider gives it.

    Attributes:
        name: what users call it.
        address: where the others reach it; None: they find out when they meet.
        open: a new link to its node agent; it is told when the link is "connected", and when it is "reconnecting".
        run: ``run(module, *arguments)`` starts ``python -m module arguments`` on that machine, in the environment of
            its ranks, and is a link to it; each call another process, which ends when the link is closed.
        forward: an address and port on that machine → a port of 127.0.0.1 here that leads there; None where the
            machine is this one.
    """

    name: str
    address: str | None
    open: Callable[[Callable[[str], None]], Transport] = field(repr=False, compare=False)
    run: Callable[..., Transport] = field(repr=False, compare=False)
    forward: Callable[[str, int], int] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Place:
    """Where a node is, once the nodes have met: its own hostname, and its address among them."""

    hostname: str
    address: str
