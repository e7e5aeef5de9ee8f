"""The modules that a rank's kernel and its plugins are made of: put back where a cell has taken them out.

The kernel would answer nobody without its own; native code such as torch's cannot be imported twice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType

PACKAGES = {"skymagic", "IPython", "ipykernel", "ipyparallel", "jupyter_client", "tornado", "traitlets", "zmq"}
"""They import some of their own modules, and of Python's, only when those are used."""


class OwnModules:
    """Keeps the kernel's modules, and Python's, that are imported when it is told to remember them.

    Args:
        preloaded: modules that the pool's plugins have imported before the ranks were forked; kept with the rest of their packages.
    """

    def __init__(self, preloaded: Iterable[str] = ()) -> None:
        self._packages = PACKAGES | sys.stdlib_module_names | {name.partition(".")[0] for name in preloaded}
        self._modules: dict[str, ModuleType] = {}
        self._count = 0
        """How many modules there were when it looked last."""
        self.remember()

    def remember(self) -> None:
        """Keep what has been imported since the last time, too."""
        if len(sys.modules) == self._count:
            return
        self._count = len(sys.modules)
        for name, module in list(sys.modules.items()):
            if name not in self._modules and name.partition(".")[0] in self._packages:
                self._modules[name] = module

    def restore(self) -> None:
        """Put back what ``sys.modules`` lacks; a module of the user's own that has taken a place stays."""
        if not self._modules.keys() <= sys.modules.keys():
            for name, module in self._modules.items():
                sys.modules.setdefault(name, module)
