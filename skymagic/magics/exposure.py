"""Notes on the Jupyter around a notebook: other users of this machine can read the kernel's output, which Jupyter sends unencrypted through TCP
by default; or the server executes the cells itself, and nothing moves.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from skymagic.display.live import allows_questions, says_its_cell
from skymagic.pool import records
from skymagic.wire import atomic

LINE = 'c.KernelManager.transport = "ipc"'
NOTE = (
    "other users have processes on this machine, and can read all that this kernel prints at its TCP port on 127.0.0.1 (Jupyter's default). "
    f"To use files that only you can open, add this line to ~/.jupyter/jupyter_config.py and restart Jupyter: {LINE}"
)
SERVED = (
    "this Jupyter server executes the cells itself (jupyter-server-nbmodel): JupyterLab shows what a cell prints at its end, and no buttons. "
    "To watch cells run: pip uninstall jupyter-server-nbmodel, and start JupyterLab again"
)
SERVERS = re.compile(rb"jupyter[-_]?(lab|server|notebook|hub)|singleuser")
"""In the command of a process that starts kernels for front ends in browsers; a console starts its own."""
FIRST_USER, SYSTEM = 1000, range(61_184, 65_536)
"""uids of users (login.defs), and those above them that systemd gives to services; the last one is nobody's."""
MOST_SECONDS = 0.02
"""Seconds of processor time that a look at all processes may take; each takes 3 to 12 μs, and a server has some hundreds."""


def note(kernel: Any) -> str | None:
    """What to say when the extension is loaded; None where nothing is exposed, or it was said to this user on this machine before.

    Args:
        kernel: IPython's; None where IPython runs in a terminal.
    """
    if not is_readable(getattr(kernel, "parent", None)) or not others_are_here():
        return None
    mark = records.folder().parent / f"told-of-port-{os.uname().nodename}"
    with contextlib.suppress(OSError):
        atomic.private_folder(mark.parent)
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return None
    return NOTE


def served(kernel: Any) -> str | None:
    """What to say where a server executes the cells: the request names no cell, and its sender is a user of this machine, not a page."""
    if (
        kernel is None
        or says_its_cell(kernel)
        or not allows_questions(kernel)
        or "google.colab" in sys.modules
    ):
        return None
    with contextlib.suppress(Exception):  # ipykernel's own ways; no /proc
        sender = kernel.get_parent("shell")["header"]["username"]
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        return SERVED if sender not in ("", "username") and SERVERS.search(command) else None
    return None


def is_readable(app: Any) -> bool:
    """Whether a kernel's application publishes its output at a TCP port without encryption."""
    return getattr(app, "transport", "") == "tcp" and getattr(app, "curve_secretkey", None) is None


def others_are_here(processes: Path = Path("/proc")) -> bool:
    """Whether another user has a process on this machine, as far as 20 ms of this thread's time tell: utmp knows no session of JupyterHub's."""
    deadline, own = time.thread_time() + MOST_SECONDS, os.getuid()
    with contextlib.suppress(OSError), os.scandir(processes) as found:
        for process in found:
            with contextlib.suppress(OSError):  # it has ended
                uid = process.stat().st_uid if process.name.isdigit() else own
                if uid >= FIRST_USER and uid != own and uid not in SYSTEM:
                    return True
            if time.thread_time() > deadline:
                return False
    return False
