"""A pool that was ended, or whose notebook was, leaves no rank, process, job or file. It is tested last at each place, because the shared pool ends with it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil

from tests.lab.notebook import opened, seen
from tests.lab.sites import Site

NAME = f"ended{os.getpid()}"
"""Of the pool, in the names of its files."""


def files_of(name: str) -> list[Path]:
    """Folders of a pool on this machine."""
    folders = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    return [path for folder in folders for path in folder.glob(f"skymagic-{name}-*")]


CHILD = """import os, time
child = os.fork()
if not child:
    os.setsid()
    time.sleep(100)
    os._exit(0)"""
"""It holds what the kernel had open, so that no pipe closes when the kernel is killed."""

BUSY = """%%sky_broadcast --only all
import signal, subprocess, time
import torch, torch.distributed as dist
child = subprocess.Popen(['sleep', '600'])
print('busy with', len(large), flush=True)
if dist.get_rank():
    dist.all_reduce(torch.ones(1))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)"""
"""Rank 0 is deaf, rank 1 waits for it in a collective, and each has a child."""


def test_a_killed_kernel_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    name = f"killed{os.getpid()}"
    start = f"%sky_pool {name} --nodes 2 --plugin torch"
    with opened(tmp_path, start, "large = b'x' * 3_000_000", CHILD) as notebook:
        child = psutil.Process(notebook.value("child"))
        cell = notebook.start(BUSY)
        notebook.watch(cell, lambda shown: shown.stdout.count("busy with 3000000") == 2)
        kernel = psutil.Process(notebook.pid)
        processes = [one for one in kernel.children(recursive=True) if one != child]
        assert files_of(name), "the value is in a file"
        try:
            kernel.kill()
            _, alive = psutil.wait_procs(processes, timeout=30)
            assert alive == []
            assert files_of(name) == []
            assert child.is_running()
        finally:
            child.kill()


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
        assert files_of(NAME) == []
        assert notebook.fail("%%sky_broadcast\n1").ename
