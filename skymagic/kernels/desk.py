"""What the kernel of this process works with."""

from __future__ import annotations

from skymagic import runtime
from skymagic.kernels.control import Control
from skymagic.kernels.hooks import Hooks


class Desk:
    """What the kernel of this process works with; set by the entry before the engine starts."""

    control: Control
    hooks: Hooks
    info: runtime.InstanceInfo
    store: str
    freed = False
    """This run was let out of a collective, or is being stopped, because of something else: its own error is of no interest."""
