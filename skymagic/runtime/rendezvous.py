"""A key-value store of the pool's ranks, for values needed before a process group exists.

A rank sends a value to its agent, and the agents pass it on to all ranks. Rank 0 publishes the
port of its process group's store this way, so nothing has to be agreed on beforehand. Keys include
the generation of the process group, so that a late rank does not read values of an earlier group.
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
    """State of this process: its connection, the next process group, and the nesting of waits."""

    connection: ValueExchange | None = None
    """Connection to all ranks; None in a process that is not a rank."""
    generation: int = 0
    prefix: str = ""
    """Prefix of all keys, while `key_prefix` is entered."""
    wait_depth: int = 0
    """Number of entered `waiting` contexts."""


_state = _State()


def attach(connection: ValueExchange, generation: int) -> None:
    """Make this process a rank: called once, before the hooks of its plugins run."""
    _state.connection = connection
    _state.generation = generation


def is_attached() -> bool:
    """Return True if this process is a rank, or was forked from one."""
    return _state.connection is not None


def set_generation(generation: int) -> None:
    """Set the generation of the next process group."""
    _state.generation = generation


def generation() -> int:
    """Return the generation of the next process group, also while it is being formed."""
    return _state.generation


@contextlib.contextmanager
def key_prefix(name: str) -> Iterator[None]:
    """Prefix keys with `name`, so that the ranks of a subgroup see only each other's values."""
    before = _state.prefix
    _state.prefix = f"{name}/"
    try:
        yield
    finally:
        _state.prefix = before


def _connection() -> ValueExchange:
    if _state.connection is None:
        raise RuntimeError("this process is not a rank of a pool")
    return _state.connection


def _key(name: str) -> str:
    return f"{_state.prefix}{name}/{generation()}"


def belongs_to(key: str, generation: int) -> bool:
    """Return True if a key is of this generation; names and prefixes may contain slashes."""
    return key.rpartition("/")[2] == str(generation)


def put(name: str, value: Any) -> None:
    """Set a value of this generation on all ranks of the pool.

    The value consists of plain types that `wire.codec` encodes: numbers, strings, lists, and so on.
    Raises RuntimeError if this process is not a rank.
    """
    _connection().put(_key(name), value)


def delete(name: str) -> None:
    """Delete a value that every rank has read."""
    _connection().put(_key(name), None)


def get(name: str, timeout: float = TIMEOUT) -> Any:
    """Return the value that some rank sets in this generation.

    Raises TimeoutError after `timeout` seconds.
    """
    with waiting():
        return _connection().get(_key(name), timeout)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Mark this rank as waiting for others.

    While process groups are formed again, a rank that blocks outside this context is considered
    to be hanging.
    """
    _state.wait_depth += 1
    try:
        yield
    finally:
        _state.wait_depth -= 1


def is_waiting() -> bool:
    """Return True if this rank is waiting for others. Safe on any thread."""
    return _state.wait_depth > 0


def free_port(address: str) -> int:
    """Return a free port of this machine, on the address that other nodes use for it.

    Prefers ports below the ephemeral range: the port is only used later, and meanwhile the system
    could give an ephemeral port to another program. Falls back to the system's choice if none of
    these is free.

    Raises:
        OSError: no port is free.
    """
    candidates = range(EPHEMERAL // 2, _first_ephemeral_port())
    for port in [*random.SystemRandom().sample(candidates, min(len(candidates), TRIES)), 0]:
        # all addresses, if this one does not belong to an interface of the machine (NAT)
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
