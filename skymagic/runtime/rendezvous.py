"""A key-value store of the pool's ranks, for values needed before a process group exists.

Values go rank → agent → all ranks, so that no port has to be guessed. The keys of each process
group include its generation, so that a late rank does not read values of an earlier group.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

TIMEOUT = 60.0
"""Seconds that a rank waits for a value."""
EPHEMERAL = 32768
"""First ephemeral port of Linux, unless configured otherwise."""
TRIES = 50
"""Number of ports to try."""


class ValueExchange(Protocol):
    """Connection to all ranks of the pool, implemented in `kernels.rank.context`."""

    def put(self, key: str, value: Any) -> None:
        """Set a value on all ranks; None deletes it."""

    def get(self, key: str, timeout: float) -> Any:
        """Return a value once some rank has set it. Raises TimeoutError."""


@dataclass
class _State:
    """State of this process: its connection, the current group, and the number of waits."""

    control: ValueExchange | None = None
    """Connection to all ranks; None in a process that is not a rank."""
    generation: int = 0
    prefix: str = ""
    waits: int = 0

    @property
    def exchange(self) -> ValueExchange:
        """Connection to all ranks.

        Raises:
            RuntimeError: this process is not a rank.
        """
        if self.control is None:
            raise RuntimeError("this process is not a rank of a pool")
        return self.control


_state = _State()


def attach(control: ValueExchange, generation: int) -> None:
    """Bind this process to its control socket; called once, before any hook."""
    _state.control = control
    _state.generation = generation


def attached() -> bool:
    """Return True if this process is a rank, or was forked from one."""
    return _state.control is not None


def set_generation(generation: int) -> None:
    """Set the generation of the next process group."""
    _state.generation = generation


def generation() -> int:
    """Return the number of the process group that is being formed."""
    return _state.generation


@contextlib.contextmanager
def subgroup(name: str) -> Iterator[None]:
    """Add a prefix to keys, so that the ranks of a smaller group see only each other's values."""
    before = _state.prefix
    _state.prefix = f"{name}/"
    try:
        yield
    finally:
        _state.prefix = before


def _key(name: str) -> str:
    return f"{_state.prefix}{name}/{generation()}"


def put(name: str, value: Any) -> None:
    """Set a plain value on all ranks of the pool in this generation."""
    _state.exchange.put(_key(name), value)


def delete(name: str) -> None:
    """Delete a value that every rank has read."""
    _state.exchange.put(_key(name), None)


def get(name: str, timeout: float = TIMEOUT) -> Any:
    """Return the value that some rank sets in this generation.

    Raises TimeoutError after `timeout` seconds.
    """
    with waiting():
        return _state.exchange.get(_key(name), timeout)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Mark this rank as waiting for others.

    While groups are formed again, a rank that sleeps anywhere else counts as hanging.
    """
    _state.waits += 1
    try:
        yield
    finally:
        _state.waits -= 1


def waits() -> bool:
    """Return True if this rank is waiting for others. Safe on any thread."""
    return _state.waits > 0


def free_port(address: str) -> int:
    """Return a free port of this machine, on the address that other nodes use for it.

    Prefers ports below the ephemeral range: the port is only used later, and meanwhile the system
    could give an ephemeral port to another program. Falls back to the system's choice if none of
    these is free.

    Raises:
        OSError: no port is free.
    """
    below = range(EPHEMERAL // 2, _first_ephemeral_port())
    for port in [*random.SystemRandom().sample(below, min(len(below), TRIES)), 0]:
        for host in (address, ""):
            with contextlib.suppress(OSError), socket.create_server((host, port)) as server:
                return int(server.getsockname()[1])
    raise OSError(f"there is no free port on {socket.gethostname()}")


def _first_ephemeral_port() -> int:
    with (
        contextlib.suppress(OSError, ValueError),
        open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file,
    ):
        return int(file.read().split()[0])
    return EPHEMERAL


active_plugins: list[Any] = []
"""The rank's `plugins.Plugin`s, in hook order."""
