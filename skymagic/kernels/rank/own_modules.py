"""The modules that a rank's kernel is made of: put back where a cell has taken them out, for the kernel would answer nobody."""

from __future__ import annotations

import sys

PACKAGES = {"skymagic", "IPython", "ipykernel", "ipyparallel", "jupyter_client", "tornado", "traitlets", "zmq"}
"""They import some of their own modules, and of Python's, only when those are used."""


class OwnModules:
    """Keeps the kernel's modules, and Python's, that were imported at the time it is made."""

    def __init__(self) -> None:
        wanted = PACKAGES | sys.stdlib_module_names
        self._modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in wanted}

    def restore(self) -> None:
        """Put back what ``sys.modules`` lacks; a module of the user's own that has taken a place stays."""
        if not self._modules.keys() <= sys.modules.keys():
            for name, module in self._modules.items():
                sys.modules.setdefault(name, module)
