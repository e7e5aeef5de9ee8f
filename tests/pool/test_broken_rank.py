"""A rank that cannot join a new process group is replaced; the others keep their variables, whatever it has broken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.notebook import Notebook, opened

pytest.importorskip("torch")

SETUP = """%%sky_broadcast
import builtins, os, socket, sys, threading, time
import skymagic, torch, torch.distributed as dist
kept = rank = skymagic.instance_info().rank
threads, sockets, environ = (threading.Thread, threading.Timer), (socket.socket, socket.create_server), dict(os.environ)
plain_open = open"""
UNDO = """%%sky_broadcast
if 'kept' in globals():
    builtins.open, (threading.Thread, threading.Timer), (socket.socket, socket.create_server) = plain_open, threads, sockets
    os.environ.update(environ)"""
GOOD = (
    "import torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\n(t.item(), globals().get('kept'))"
)
BROKEN = {
    "open": "builtins.open = None",
    "socket": "socket.socket = socket.create_server = None",
    "threads": "threading.Thread = threading.Timer = None",
    "environment": "os.environ.clear()",
    "torch's functions": "dist.TCPStore = dist.PrefixStore = dist.is_initialized = dist.all_gather = None",
    "torch's group": "dist.group = dist.GroupMember = None",
    "modules of torch": "for name in [one for one in sys.modules if one.startswith('torch')]:\n        del sys.modules[name]",
    "all modules": "sys.modules.clear()",
}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(tmp_path_factory.mktemp("broken"), "%sky_pool --nodes 3 --plugin torch") as one:
        yield one


@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("how", BROKEN)
def test_only_the_rank_that_is_broken_loses_its_variables(notebook: Notebook, how: str, faulty: int) -> None:
    notebook.run(SETUP)
    error = notebook.fail(
        f"%%sky_broadcast\nif rank == {faulty}:\n    {BROKEN[how]}\n    raise ValueError('planted')\ndist.barrier()"
    )
    assert "planted" in error.text
    shown = notebook.run(f"%%sky_broadcast -o found\n{GOOD}").text
    found = notebook.value("found")
    assert [sums for sums, _ in found] == [3.0] * 3
    others = [rank for rank in range(3) if rank != faulty]
    assert [found[rank][1] for rank in others] == others, shown
    assert found[faulty][1] in (faulty, None)
    notebook.run(UNDO)
