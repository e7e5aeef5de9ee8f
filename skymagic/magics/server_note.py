"""Note for Jupyter servers that execute the cells themselves.

JupyterLab then shows no output while a cell runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from skymagic.display.live import allows_questions, names_parent_cell

SERVED = (
    "this Jupyter server executes the cells itself (jupyter-server-nbmodel): JupyterLab "
    "shows what a cell prints at its end, and no buttons. "
    "To watch cells run: pip uninstall jupyter-server-nbmodel, and start JupyterLab again"
)
SERVERS = re.compile(rb"jupyter[-_]?(lab|server|notebook|hub)|singleuser")
"""Pattern in the command of a process that starts kernels for browser front ends.

A console starts its own kernel.
"""


def note_if_served(kernel: Any) -> str | None:
    """Return the note if a server executes the cells, else None.

    The request then names no cell, and its sender is a user of this machine instead of a page.

    Args:
        kernel: IPython's kernel; None if IPython runs in a terminal.
    """
    if (
        kernel is None
        or names_parent_cell(kernel)
        or not allows_questions(kernel)
        or "google.colab" in sys.modules
    ):
        return None
    with contextlib.suppress(Exception):  # ipykernel internals may differ; there may be no /proc
        sender = kernel.get_parent("shell")["header"]["username"]
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        return SERVED if sender not in ("", "username") and SERVERS.search(command) else None
    return None
