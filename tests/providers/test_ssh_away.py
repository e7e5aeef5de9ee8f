"""What hosts do when the notebook of their pool was killed amid a cell: the cell has ``--max-away``, and then all of it ends."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tests.lab.desk import killed, ssh_desk

pytestmark = pytest.mark.needs("sshd")

ENDLESS = "%%sky_broadcast\nimport time\nprint('at work', flush=True)\nwhile True: time.sleep(0.05)"


def test_cell_without_a_notebook_is_stopped_and_cleaned_up(tmp_path: Path) -> None:
    """`away` counts from the end of the last cell, so a cell may run for longer."""
    with ssh_desk(tmp_path) as desk:
        name = f"lab{os.urandom(4).hex()}"  # the hosts' folders are this machine's
        desk.made = f"{desk.made.replace(' lab ', f' {name} ')} --max-away 8s"
        with desk.notebook("%config SkyMagic.away = 2", desk.made) as notebook:
            notebook.watch(notebook.start(ENDLESS), lambda seen: "at work" in seen.text)
            running = [one for host in desk.hosts for one in host.processes()]
            killed(notebook)
        assert psutil.wait_procs(running, timeout=4.0)[1], "the cell goes on"
        assert psutil.wait_procs(running, timeout=60.0)[1] == []
        assert [one for host in desk.hosts for one in host.processes()] == []
        folders = (Path("/tmp"), Path("/dev/shm"))
        assert [left for one in folders for left in one.glob(f"skymagic-*{name}*")] == []
