"""``%sky_auto on``: every plain cell is broadcast, so that cells stay plain Python and the editor goes on helping."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from IPython.core.interactiveshell import InteractiveShell

NOTEBOOK_PREFIXES = ("%%", "%sky_", "%load_ext", "%unload_ext", "%reload_ext", "%config")
"""A cell that begins with one of these runs in the notebook."""


class Auto:
    """Owns the input transformer that puts ``%%sky_broadcast`` above a shell's plain cells."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._list: list[Callable[[list[str]], list[str]]] = shell.input_transformers_cleanup
        self._paused = False

    @property
    def on(self) -> bool:
        """Whether plain cells are broadcast."""
        return self._transform in self._list

    def switch(self, on: bool) -> None:
        """Turn it on or off; twice is safe."""
        if on and not self.on:
            self._list.append(self._transform)
        elif not on and self.on:
            self._list.remove(self._transform)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, code is transformed as ever."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _transform(self, lines: list[str]) -> list[str]:
        first = next((line.lstrip() for line in lines if line.strip()), "")
        if self._paused or not first or first.startswith(NOTEBOOK_PREFIXES):
            return lines
        return ["%%sky_broadcast\n", *lines]
