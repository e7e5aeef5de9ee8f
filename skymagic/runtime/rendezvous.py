"""How plugins on different ranks tell each other a value, such as the port that rank 0's store was given.

Values go rank → agent → all ranks, so that no port has to be guessed. Each process group formed has a generation of its own.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Protocol

TIMEOUT = 60.0
MASTER_PORT = "master port"
"""Key of an offer that holds for all generations."""
_state: dict[str, Any] = {"control": None, "generation": 0, "aside": ""}


class Control(Protocol):
    """The way to all ranks of the pool: `kernels.rank.control`."""

    def offer(self, key: str, value: Any) -> None:
        """Tell all ranks a value; None takes back what was told."""

    def wait_for(self, key: str, timeout: float) -> Any:
        """A value that some rank offers; raises TimeoutError."""


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
def aside(name: str) -> Iterator[None]:
    """Inside, some ranks meet by themselves: what they tell is heard inside a meeting of the same name alone."""
    before = _state["aside"]
    _state["aside"] = f"{name}/"
    try:
        yield
    finally:
        _state["aside"] = before


def _key(name: str) -> str:
    return f"{_state['aside']}{name}/{generation()}"


def tell(name: str, value: Any) -> None:
    """Tell all ranks of the pool a plain value, for this generation."""
    _state["control"].offer(_key(name), value)


def withdraw(name: str) -> None:
    """Take back what was told: everyone who needed it has it."""
    _state["control"].offer(_key(name), None)


def hear(name: str, timeout: float = TIMEOUT) -> Any:
    """The value that another rank tells in this generation.

    Raises:
        TimeoutError: nobody told it within `timeout` seconds.
    """
    return _state["control"].wait_for(_key(name), timeout)


def master_port(rank: int, address: str) -> int:
    """A port for process groups of the user's own, free on the head when rank 0 chose it; the same in the whole life of a pool.

    Args:
        rank: this rank; 0 chooses, unless it has been started anew and finds the choice.
        address: the head's.
    """
    control = _state["control"]
    if rank != 0:
        return int(control.wait_for(MASTER_PORT, TIMEOUT))
    try:
        return int(control.wait_for(MASTER_PORT, 0.0))
    except TimeoutError:
        with socket.create_server((address, 0)) as free:
            port = int(free.getsockname()[1])
        control.offer(MASTER_PORT, port)
        return port
