"""A key-value store of the pool's ranks, for what must be agreed on before there is a process group, such as its store's port.

Values go rank → agent → all ranks, so that no port has to be guessed. Each process group formed has a generation of its own,
which is part of a key: a rank that is late does not read what belonged to the group before.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from typing import Any, Protocol

TIMEOUT = 60.0
"""Seconds that a rank waits for a value."""
EPHEMERAL = 32768
"""The first port that Linux gives by itself to whoever connects, where it is not told otherwise."""
TRIES = 50
"""Ports that are looked at."""
_state: dict[str, Any] = {"control": None, "generation": 0, "prefix": "", "waits": 0}


class ValueExchange(Protocol):
    """The way to all ranks of the pool: `kernels.rank.context`."""

    def put(self, key: str, value: Any) -> None:
        """Set a value on all ranks; None deletes it."""

    def get(self, key: str, timeout: float) -> Any:
        """A value, once some rank has put it; raises TimeoutError."""


def attach(control: ValueExchange, generation: int) -> None:
    """Bind this process to its control socket; called once, before any hook."""
    _state.update(control=control, generation=generation)


def attached() -> bool:
    """Whether this process is a rank, or was forked from one."""
    return _state["control"] is not None


def set_generation(generation: int) -> None:
    """The process group that is formed next."""
    _state["generation"] = generation


def generation() -> int:
    """Number of the process group that is being formed."""
    return int(_state["generation"])


@contextlib.contextmanager
def subgroup(name: str) -> Iterator[None]:
    """Inside, keys have a prefix: the ranks of a smaller group see each other's values, and no others."""
    before = _state["prefix"]
    _state["prefix"] = f"{name}/"
    try:
        yield
    finally:
        _state["prefix"] = before


def _key(name: str) -> str:
    return f"{_state['prefix']}{name}/{generation()}"


def put(name: str, value: Any) -> None:
    """Set a plain value on all ranks of the pool, for this generation."""
    _state["control"].put(_key(name), value)


def delete(name: str) -> None:
    """Delete a value, once every rank that needs the value has it."""
    _state["control"].put(_key(name), None)


def get(name: str, timeout: float = TIMEOUT) -> Any:
    """The value that some rank puts in this generation. Raises TimeoutError when nobody did within `timeout` seconds."""
    with waiting():
        return _state["control"].get(_key(name), timeout)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Inside, this rank waits for others. While groups are formed anew, one that sleeps anywhere else counts as hanging."""
    _state["waits"] += 1
    try:
        yield
    finally:
        _state["waits"] -= 1


def waits() -> bool:
    """Whether this rank waits for others. Safe on any thread."""
    return bool(_state["waits"])


def free_port(address: str) -> int:
    """A port that is free on this machine, at the address that others reach it by where the machine knows it.

    One that the system does not give to whoever connects or asks for any port: it is used later, by others, and would
    be taken in between now and then. Where none is found below those, the system's choice.

    Raises OSError when there is none.
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
"""The rank's `plugins.Plugin`s, in the order in which their hooks run."""
