"""The plugins of one rank: their hooks are entered once per process, in order, and left in reverse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from skymagic.plugins import table
from skymagic.runtime import rendezvous
from skymagic.runtime.info import InstanceInfo


class Hooks:
    """Owns the contexts that the plugins opened in this process."""

    def __init__(self, specs: Sequence[dict[str, Any]], info: InstanceInfo) -> None:
        self.info = info
        self.plugins = rendezvous.active_plugins
        self.plugins[:] = [table.unpacked_plugin(spec) for spec in specs]
        self._stack = contextlib.ExitStack()

    def enter(self) -> None:
        """Open each plugin's ``around_app``; the first that raises closes those before it."""
        with contextlib.ExitStack() as opening:
            for plugin in self.plugins:
                try:
                    opening.enter_context(plugin.around_app(self.info))
                except Exception as problem:
                    problem.add_note(f"raised by the plugin {plugin.name!r} in around_app")
                    raise
            self._stack = opening.pop_all()

    @contextlib.contextmanager
    def around_run(self) -> Iterator[None]:
        """Each plugin's ``around_run``, for one cell."""
        with contextlib.ExitStack() as stack:
            for plugin in self.plugins:
                stack.enter_context(plugin.around_run())
            yield

    def release(self) -> int:
        """Free the main thread from a blocked collective; called on the control thread. Returns what was shut down."""
        count = 0
        for plugin in self.plugins:
            with contextlib.suppress(Exception):  # the others' connections must be freed all the same
                count += plugin.release()
        return count

    def rejoin(self, generation: int) -> list[str]:
        """Form new process groups with all ranks; what could not be carried over, in words."""
        rendezvous.set_generation(generation)
        return [note for plugin in self.plugins if plugin.rejoin is not None for note in plugin.rejoin(self.info)]

    def settle(self) -> list[str]:
        """Put in order what a failed cell has left half-done, with all ranks; what the user must know, in words."""
        return [note for plugin in self.plugins if plugin.settle is not None for note in plugin.settle()]

    def sequence(self) -> dict[str, int]:
        """By group, how many collectives this rank has begun."""
        found: dict[str, int] = {}
        for plugin in self.plugins:
            try:
                found |= {f"{plugin.name} {name}": count for name, count in plugin.sequence().items()}
            except Exception:  # a cell has broken what it needs
                found[f"{plugin.name} groups"] = -1  # differs from the others' count, so that groups are formed anew
        return found

    def joined(self) -> bool:
        """Whether each plugin still has what it set up (the user may have destroyed a group)."""
        try:
            return all(plugin.joined() for plugin in self.plugins)
        except Exception:  # a plugin that cannot tell may as well set it up again
            return False

    def leave(self) -> None:
        """Close them; twice is safe."""
        self._stack.close()
