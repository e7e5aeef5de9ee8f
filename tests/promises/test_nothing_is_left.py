"""A pool that was ended leaves no rank, no process and no job. It is tested last at each place, because the shared pool ends with it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil

from tests.lab.notebook import seen
from tests.lab.sites import Site

NAME = f"ended{os.getpid()}"
"""Of the pool, in the names of its files."""


def test_down_leaves_nothing(site: Site) -> None:
    site.notebook.run("%sky_down --all")
    with site.another(site.place.before, f"%sky_pool {NAME} {site.place.options}") as notebook:
        ranks = seen(notebook, "import os\nos.getpid()")
        notebook.run("%sky_down")
        if "--provider" not in site.place.options:  # elsewhere a process has other numbers
            _, alive = psutil.wait_procs(
                [psutil.Process(pid) for pid in ranks if psutil.pid_exists(pid)], timeout=10
            )
            assert alive == []
        assert site.place.left() == []
        folders = (Path(tempfile.gettempdir()), Path("/dev/shm"))
        assert [path for folder in folders for path in folder.glob(f"skymagic-{NAME}-*")] == []
        assert notebook.fail("%%sky_broadcast\n1").ename
