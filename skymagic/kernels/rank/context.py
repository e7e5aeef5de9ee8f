"""What the kernel of this process works with."""

from __future__ import annotations

from skymagic.kernels.rank.control import Control
from skymagic.kernels.rank.plugin_hooks import Hooks
from skymagic.runtime import info as runtime


class Context:
    """What the kernel of this process works with; set by the entry before the engine starts."""

    control: Control
    hooks: Hooks
    info: runtime.InstanceInfo
    store: str
    log: str
    """Path of this rank's complete output."""
    base: dict[str, str]
    """The environment that this process had before it became a rank, with what the pool adds."""
    apart = False
    """What runs here takes no part in the rank's process groups: there is nothing to free."""
    last_script = 0
    """The run in which this rank told the port of a script."""
    freed = False
    """This run was let out of a collective, or is being stopped, because of something else: its own error is of no interest."""
