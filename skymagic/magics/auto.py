"""``%sky_auto on``: every plain cell is broadcast, so that cells stay plain Python and the editor goes on helping.

A cell that begins with a magic runs in the notebook, and so does one that is marked ``%%local``, which is allowed at any time. Of a
cell that was broadcast by itself a line says on which ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from IPython.core.interactiveshell import InteractiveShell

MAGIC = "%"
LOCAL = "%%local"
"""The first line of a cell that runs in the notebook whatever is switched on."""


class Auto:
    """The input transformer that puts ``%%sky_broadcast`` above a shell's plain cells.

    Attributes:
        on: whether plain cells are broadcast.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        transformers = shell.input_transformers_cleanup
        transformers[:] = [one for one in transformers if not isinstance(getattr(one, "__self__", None), Auto)]
        transformers.append(self._transform)
        self.on = False
        self._paused = False
        self._executing = False
        """Whether what is transformed is no cell, but code that one runs, as ``%time`` does."""
        shell.events.register("pre_execute", self._begin)
        shell.events.register("post_execute", self._end)

    def switch(self, on: bool) -> None:
        """Turn it on or off; twice is safe."""
        self.on = on

    def takes(self, cell: str) -> bool:
        """Whether a cell as it was typed is broadcast by itself."""
        return self.on and bool(cell.strip()) and not cell.lstrip().startswith(MAGIC)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, code is transformed as ever; on other threads than that of cells too."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _begin(self) -> None:
        self._executing = True

    def _end(self) -> None:
        self._executing = False

    def _transform(self, lines: list[str]) -> list[str]:
        if self._paused or self._executing:
            return lines
        if self.takes("".join(lines)):
            return ["%%sky_broadcast\n", *lines]
        if lines and lines[0].strip() == LOCAL:
            return [f"# {lines[0]}", *lines[1:]]
        return lines
