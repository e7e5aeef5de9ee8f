"""What another user of this machine gets from a pool: nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import traces
from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

NOBODY = 65534
LOOK = """
import json, os, socket, sys
nobody, paths, pids = json.load(sys.stdin)
os.setgroups([]), os.setgid(nobody), os.setuid(nobody)  # now: the other user may not be allowed to start this Python
got = []
def attempt(what, call):
    try:
        call()
    except OSError:
        return
    got.append(what)
def connect(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)
def write(path):
    os.close(os.open(os.path.join(path, "x") if os.path.isdir(path) else path, os.O_WRONLY | os.O_CREAT))
for path in paths:
    for name, call in ("list", os.listdir), ("read", lambda path: open(path, "rb").close()), ("write", write), ("connect", connect):
        attempt(f"{name} {path}", lambda: call(path))
for pid in pids:
    for name in "environ", "mem", "maps":
        attempt(f"{name} of {pid}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
    attempt(f"descriptors of {pid}", lambda: os.listdir(f"/proc/{pid}/fd"))
    attempt(f"signal {pid}", lambda: os.kill(pid, 0))
print(json.dumps([os.geteuid(), got]))
"""
notebook = borrowed("--ranks 2")


def ports(notebook: Notebook) -> dict[int, str]:
    """Ports on which processes of the pool listen, with the address."""
    family = psutil.Process(notebook.pid).children(recursive=True)
    found = [
        each
        for process in family
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    ]
    return {each.laddr.port: each.laddr.ip for each in found}


def test_a_pool_listens_on_no_port(notebook: Notebook) -> None:
    """Cells, output and control use sockets without names, which nobody else can open."""
    notebook.run("%%sky_broadcast -o sums\nprint('shown')\n1 + 1")
    assert notebook.value("sums") == [2, 2]
    assert ports(notebook) == {}


@pytest.mark.needs("root")
def test_another_user_reads_no_file_and_no_process(notebook: Notebook) -> None:
    """Its folders, values in shared memory, sockets and connection files, and what its processes have in their environments."""
    notebook.run("import os\nsecret = os.urandom(4_000_000)")
    notebook.run("%%sky_broadcast\nlen(secret);")
    family = [psutil.Process(notebook.pid), *psutil.Process(notebook.pid).children(recursive=True)]
    # the pool's, by its name and by what its processes have mapped: other tests run on this machine too
    mapped = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in family)
    job_id = notebook.value("__import__('skymagic').find().pool.job_id")
    places = {place for place in traces() if job_id in place.name or f"{place}/" in mapped}
    assert {str(place.parent) for place in places} >= {"/dev/shm"}
    paths = [str(path) for place in places for path in (place, *place.rglob("*"))]
    looked = subprocess.run(
        [sys.executable, "-c", LOOK], input=json.dumps([NOBODY, paths, [process.pid for process in family]]), cwd="/",
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    who, got = json.loads(looked.stdout)
    assert who == NOBODY
    assert got == []
    assert len(paths) > 5
    assert len(family) > 3
