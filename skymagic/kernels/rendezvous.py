"""How plugins on different ranks tell each other a value, such as the port that rank 0's store was given.

Values go rank → agent → all ranks, so that no port has to be guessed. Each process group formed has a generation of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skymagic.kernels.control import Control

TIMEOUT = 60.0
_state: dict[str, Any] = {"control": None, "generation": 0, "aside": ""}


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
