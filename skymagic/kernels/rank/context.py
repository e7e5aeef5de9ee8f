"""The state of this rank's process that its kernel, its shell and its scripts share: one `Context` per process."""

from __future__ import annotations

from dataclasses import dataclass

from skymagic.kernels.rank.control import Control
from skymagic.kernels.rank.plugin_hooks import Hooks
from skymagic.runtime.info import InstanceInfo


@dataclass
class Context:
    """What the kernel of this process works with; made by the entry before the engine starts.

    Attributes:
        control: the socket to the agent.
        hooks: the plugins' hooks.
        info: this rank's place in its pool; another one after the pool was resized.
        store: directory of the node's store.
        log: path of this rank's complete output.
        base_env: the environment that this process had before it became a rank, with what the pool adds.
        outside_groups: what runs now takes no part in the rank's process groups, so there is nothing to release.
        last_script_run: the run in which this rank last published the port of a script.
        freed: this run was let out of a collective, or is being stopped, because of something else: its own error is of
            no interest.
    """

    control: Control
    hooks: Hooks
    info: InstanceInfo
    store: str
    log: str
    base_env: dict[str, str]
    outside_groups: bool = False
    last_script_run: int = 0
    freed: bool = False


_contexts: list[Context] = []


def enter(context: Context) -> None:
    """Make it this process's context; called once, before the engine starts (ipyparallel makes the kernel itself)."""
    _contexts[:] = [context]


def current() -> Context:
    """This process's context."""
    return _contexts[0]
