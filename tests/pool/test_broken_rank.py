"""A rank that cannot join a new process group is replaced, soon; the others keep their variables, whatever it has broken."""

from __future__ import annotations

import re

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

pytest.importorskip("torch")

SETUP = """%%sky_broadcast
import asyncio, builtins, gc, os, socket, sys, threading, time
import skymagic, torch, torch.distributed as dist
kept = rank = skymagic.instance_info().rank
threads, sockets, environ = (threading.Thread, threading.Timer), (socket.socket, socket.create_server), dict(os.environ)
plain_open, plain_import, clocks, collect = open, __import__, (time.time, time.monotonic, time.sleep), gc.collect"""
UNDO = """%%sky_broadcast
if 'kept' in globals():
    builtins.open, builtins.__import__, gc.collect = plain_open, plain_import, collect
    (threading.Thread, threading.Timer), (socket.socket, socket.create_server) = threads, sockets
    time.time, time.monotonic, time.sleep = clocks
    os.environ.update(environ)"""
GOOD = "import torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\n(t.item(), globals().get('kept'))"
BROKEN = {
    "open": "builtins.open = None",
    "socket": "socket.socket = socket.create_server = None",
    "threads": "threading.Thread = threading.Timer = None",
    "environment": "os.environ.clear()",
    "torch's functions": "dist.TCPStore = dist.PrefixStore = dist.is_initialized = dist.all_gather = None",
    "torch's group": "dist.group = dist.GroupMember = None",
    "modules of torch": "for name in [one for one in sys.modules if one.startswith('torch')]:\n        del sys.modules[name]",
    "all modules": "sys.modules.clear()",
    "imports": "builtins.__import__ = None",
    "imports that fail": "def planted(*_, **__): raise OSError('import')\n    builtins.__import__ = planted",
    "clocks": "time.time = time.monotonic = time.sleep = None",
    "event loop": "asyncio.get_event_loop().stop()",
}
HANGING = {
    "in a cell's function": "gc.collect = lambda *_: clocks[2](600)",
    "in a cell's loop": "def planted(*_):\n        while True: pass\n    gc.collect = planted",
    "in Python": "gc.collect = threading.Event().wait",
}
"""What forming a group anew needs, and which does not come back."""

notebook = borrowed("--ranks 3 --plugin torch")


def broken(notebook: Notebook, code: str, faulty: int) -> str:
    """Let a rank do this to itself and then raise; what the next cell shows, which works, and in which the others have their variables."""
    notebook.run(SETUP)
    error = notebook.fail(
        f"%%sky_broadcast\nif rank == {faulty}:\n    {code}\n    raise ValueError('planted')\ndist.barrier()"
    )
    assert re.search("planted|rank . on .* died", error.text), (
        error.text
    )  # its process may be gone before its error is here
    shown = error.text + notebook.run(f"%%sky_broadcast -o found\n{GOOD}").text
    found = notebook.value("found")
    assert [sums for sums, _ in found] == [3.0] * 3
    others = [rank for rank in range(3) if rank != faulty]
    assert [found[rank][1] for rank in others] == others, shown
    assert found[faulty][1] in (faulty, None)
    notebook.run(UNDO)
    return shown


@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("how", BROKEN)
def test_only_the_rank_that_is_broken_loses_its_variables(
    notebook: Notebook, how: str, faulty: int
) -> None:
    assert not re.search(r"within \d", broken(notebook, BROKEN[how], faulty))


@pytest.mark.parametrize("how", HANGING)
def test_a_rank_that_hangs_is_ended_before_its_time_is_over(notebook: Notebook, how: str) -> None:
    notebook.run("import skymagic.run.stall as stall\nstall.HANG_DEADLINE = 2.0")
    assert "rank 1: it hung" in broken(notebook, HANGING[how], 1)


def test_a_slow_rank_is_waited_for_when_another_cannot_join(notebook: Notebook) -> None:
    """It stands still for seconds, as on a busy machine, when the group that it was joining has failed."""
    notebook.run(SETUP)
    error = notebook.fail("""%%sky_broadcast
import signal, subprocess
if rank == 0:
    def slow(*_):
        gc.collect = collect
        subprocess.Popen(["sh", "-c", f"sleep 2.5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    gc.collect = slow
elif rank == 1:
    gc.collect = None
    raise ValueError('planted')
dist.barrier()""")
    assert "planted" in error.text
    shown = notebook.run(f"%%sky_broadcast -o found\n{GOOD}").text
    assert notebook.value("found") == [(3.0, 0), (3.0, None), (3.0, 2)], shown


@pytest.mark.parametrize(
    "name", ["dist.all_gather", "dist.all_reduce", "dist.all_gather_object", "builtins.open"]
)
def test_function_replaced_on_rank_0_affects_no_other_rank(notebook: Notebook, name: str) -> None:
    notebook.run(f"{SETUP}\nplain = {name}")
    failing = f"{name} = None\n    raise ValueError('planted')"
    assert (
        "planted"
        in notebook.fail(f"%%sky_broadcast\nif rank == 0:\n    {failing}\ndist.barrier()").text
    )
    notebook.run(f"%%sky_broadcast -o found\n{name} = plain\n{GOOD}")
    assert notebook.value("found") == [(3.0, rank) for rank in range(3)]
