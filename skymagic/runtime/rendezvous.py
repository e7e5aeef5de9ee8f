"""A key-value store of the pool's ranks, for what must be agreed on before there is a process group, such as its store's port.

Values go rank → agent → all ranks, so that no port has to be guessed. Each process group formed has a generation of its own,
which is part of a key: a rank that is late does not read what belonged to the group before.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Protocol

TIMEOUT = 60.0
"""Seconds that a rank waits for a value."""
MASTER_PORT = "master port"
"""A key of all generations."""
_state: dict[str, Any] = {"control": None, "generation": 0, "prefix": ""}


class Control(Protocol):
    """The way to all ranks of the pool: `kernels.rank.control`."""

    def put(self, key: str, value: Any) -> None:
        """Set a value on all ranks; None deletes it."""

    def get(self, key: str, timeout: float) -> Any:
        """A value, once some rank has put it; raises TimeoutError."""


def attach(control: Control, generation: int) -> None:
    """Bind this process to its control socket; called once, before any hook."""
    _state.update(control=control, generation=generation)


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
    """Delete a value: everyone who needed it has it."""
    _state["control"].put(_key(name), None)


def get(name: str, timeout: float = TIMEOUT) -> Any:
    """The value that some rank puts in this generation. Raises TimeoutError when nobody did within `timeout` seconds."""
    return _state["control"].get(_key(name), timeout)


def master_port(rank: int, address: str) -> int:
    """A port for process groups of the user's own, free on the head when rank 0 chose it; the same in the whole life of a pool.

    Args:
        rank: this rank; 0 chooses, unless it has been started anew and finds the choice.
        address: the head's.
    """
    control = _state["control"]
    if rank != 0:
        return int(control.get(MASTER_PORT, TIMEOUT))
    try:
        return int(control.get(MASTER_PORT, 0.0))
    except TimeoutError:
        with socket.create_server((address, 0)) as free:
            port = int(free.getsockname()[1])
        control.put(MASTER_PORT, port)
        return port
