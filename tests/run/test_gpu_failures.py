"""What fails on a GPU, with a stand-in for torch.cuda on the ranks: whose error it is, what is freed, and who is given time."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import Pools

pytest.importorskip("torch")

STAND_IN = """
import gc, hashlib, os, time, weakref
import torch, torch.distributed as dist
class Cuda:
    pending, sticky, emptied = None, False, 0
    def query(self):
        if Cuda.sticky: raise torch.AcceleratorError("CUDA error: the context is gone")
def synchronize():
    if Cuda.pending:
        Cuda.sticky = True
        raise torch.AcceleratorError(Cuda.pending)
def empty_cache(): Cuda.emptied += 1
for name, value in {"is_initialized": lambda: True, "synchronize": synchronize, "empty_cache": empty_cache, "current_stream": Cuda,
    "device_count": lambda: 1, "mem_get_info": lambda *_: (2_000_000_000, 80_000_000_000), "memory_allocated": lambda *_: 50_000_000_000,
    "memory_reserved": lambda *_: 60_000_000_000, "utilization": lambda *_: 0}.items(): setattr(torch.cuda, name, value)
seen = globals().get("seen", {})
def remember(name, value): seen[name] = weakref.ref(value)
def alive(): return sorted(name for name, each in seen.items() if each() is not None)
rank, kept = dist.get_rank(), globals().get("kept", "kept")
"""


@pytest.fixture(scope="module")
def notebook(shared_pools: Pools) -> Iterator[Notebook]:
    with shared_pools.lent("--ranks 2 --plugin torch", "%config SkyMagic.grace = 1.0") as one:
        yield one
        one.run("%sky_restart")  # without the stand-ins


@pytest.fixture(autouse=True)
def stand_in(notebook: Notebook) -> None:
    notebook.run(f"%%sky_broadcast\n{STAND_IN}")


def values(notebook: Notebook, expression: str) -> list[object]:
    notebook.run(f"%%sky_broadcast -o found\n{expression}")
    return list(notebook.value("found"))


def test_gpu_kernel_error_fails_its_cell_and_replaces_the_rank(
    golden: Golden, notebook: Notebook
) -> None:
    failed = notebook.fail(
        "%%sky_broadcast\nmine = rank\nif rank == 1: Cuda.pending = 'CUDA error: device-side assert triggered'"
    )
    assert "device-side assert" in failed.evalue
    golden.line(failed.text, "replaced", hide=[r"rank 1 on \S+"])
    assert values(notebook, "globals().get('mine')") == [0, None]
    notebook.run(f"%%sky_broadcast\n{STAND_IN}")
    assert values(notebook, "x = torch.ones(1); dist.all_reduce(x); int(x)") == [2, 2]


def test_refused_argument_leaves_the_rank_unchanged(notebook: Notebook) -> None:
    failed = notebook.fail(
        "%%sky_broadcast\nmine = rank\nif rank: raise torch.AcceleratorError('CUDA error: invalid device ordinal')"
    )
    assert "replaced" not in failed.text
    assert values(notebook, "mine") == [0, 1]


def test_memory_of_a_failed_cell_is_freed(golden: Golden, notebook: Notebook) -> None:
    body = """
model = torch.nn.Linear(10, 10)
def step():
    batch = torch.ones(1000)
    remember(f"batch {rank}", batch)
    if rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    dist.all_reduce(torch.ones(5))
step()"""
    failed = notebook.fail(f"%%sky_broadcast\n{body}")
    figures = re.findall(r"([\d.]+) GB", failed.text)
    assert [float(figure) for figure in figures] == [80.0, 50.0, 10.0, 18.0, 2.0]
    assert values(notebook, "alive()") == [[], []]
    assert values(notebook, "Cuda.emptied > 0") == [True, True]


def test_frames_are_freed_before_groups_are_formed_again(
    notebook: Notebook,
) -> None:
    """A rank's own errors keep their frames for %debug."""
    prepare = """
plain = dist.init_process_group
def init_process_group(*args, **kwargs):
    alive_then.extend(alive())
    plain(*args, **kwargs)
alive_then = []
dist.init_process_group = init_process_group"""
    notebook.run(f"%%sky_broadcast\n{prepare}")
    body = """
def step():
    batch = torch.ones(1000)
    batch.loop = batch, lambda: batch
    remember("own batch", batch)
    if rank == 1: raise ValueError("bad batch")
    try:
        dist.all_reduce(torch.ones(5))
    except BaseException as problem:
        seen_problem = problem
        raise
step()"""
    assert notebook.fail(f"%%sky_broadcast\n{body}").ename == "ValueError"
    assert values(notebook, "alive_then") == [[], ["own batch"]]
    assert values(notebook, "alive()") == [[], []]
    notebook.run("%%sky_broadcast\ndist.init_process_group = plain")


SPIN = """
def spin(seconds):
    # as waiting for a GPU does: in native code, the interpreter let go, the processor in use
    begun, count = time.perf_counter(), 20_000
    hashlib.pbkdf2_hmac("sha256", b"", b"", count)
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(count * seconds / (time.perf_counter() - begun)))
"""


def test_a_rank_that_waits_for_its_gpu_is_given_time(notebook: Notebook) -> None:
    notebook.run(f"%%sky_broadcast\n{SPIN}\nprecious = rank")
    failed = notebook.fail("%%sky_broadcast\nif rank == 1: raise ValueError('bad')\nspin(3)")
    assert failed.ename == "ValueError"
    assert values(notebook, "precious") == [0, 1]
