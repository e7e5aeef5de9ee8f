"""How plugins on different ranks tell each other a value, such as the port that rank 0's store was given.

Values go rank → agent → all ranks, so that no port has to be guessed. Each process group formed has a generation of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skymagic.kernels.control import Control

TIMEOUT = 60.0
_state: dict[str, Any] = {"control": None, "generation": 0}


def attach(control: Control, generation: int) -> None:
    """Bind this process to its control socket; called once, before any hook."""
    _state.update(control=control, generation=generation)


def set_generation(generation: int) -> None:
    """The process group that is formed next."""
    _state["generation"] = generation


def generation() -> int:
    """Number of the process group that is being formed."""
    return int(_state["generation"])


def tell(name: str, value: Any) -> None:
    """Tell all ranks of the pool a plain value, for this generation."""
    _state["control"].offer(f"{name}/{generation()}", value)


def hear(name: str, timeout: float = TIMEOUT) -> Any:
    """The value that another rank tells in this generation.

    Raises:
        TimeoutError: nobody told it within `timeout` seconds.
    """
    return _state["control"].wait_for(f"{name}/{generation()}", timeout)
