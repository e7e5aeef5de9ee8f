"""A running pool gets another number of nodes: what ranks learn of it, and what becomes of their variables."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.places import ON_HOSTS, pooled
from tests.lab.pools import KERNEL, borrowed

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
PLACE = """%%sky_broadcast -o places
import os, skymagic as sky
info = sky.instance_info()
(os.getpid(), info.rank, info.world_size, info.node, info.total_nodes, len(info.peers),
 *(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "NODE_RANK", "SKYPILOT_NUM_NODES")),
 sky.shard(list(range(12))), globals().get("kept"));"""

notebook = borrowed(KERNEL, scope="function")


def pids(notebook: Notebook) -> list[int]:
    """Of all ranks, after a look at what each knows of its place."""
    notebook.run(PLACE)
    places = notebook.value("places")
    size, nodes = len(places), places[0][4]
    for rank, place in enumerate(places):
        node = rank // (size // nodes)
        assert place[1:10] == (rank, size, node, nodes, nodes, rank, size, node, nodes)
        assert place[10] == list(range(rank, 12, size))
    return [place[0] for place in places]


def kept(notebook: Notebook) -> list[object]:
    return notebook.value("[place[-1] for place in places]")


def test_resize_keeps_variables_of_remaining_nodes(
    golden: Golden,
    notebook: Notebook,
) -> None:
    notebook.run("%sky_pool --nodes 2 --procs-per-node 2 --env A=1")
    notebook.run("shipped = [1, 2]")
    notebook.run("%%sky_broadcast\nkept = len(shipped)")
    before = pids(notebook)
    shown = notebook.run("%sky_pool --num-nodes 3")
    golden(shown.stdout)
    assert "3 nodes × 2 ranks" in shown.rich[0]["text/plain"]
    after = pids(notebook)
    assert after[:4] == before
    assert kept(notebook) == [2] * 4 + [None] * 2
    notebook.run("%%sky_broadcast -o sent\nimport os\n(shipped, os.environ['A'])")
    assert notebook.value("sent") == [([1, 2], "1")] * 6, "new ranks get what they lack"
    shown = notebook.run("%sky_pool --nodes 1")
    assert "ranks 0, 1 keep their variables, those of ranks 2–5 are gone" in shown.stdout
    assert pids(notebook) == before[:2]
    assert kept(notebook) == [2, 2]
    assert [pid for pid in after[2:] if psutil.pid_exists(pid)] == []
    status = notebook.run("%sky_status").said
    assert "2 ranks on" in status
    assert status.count("ready") == 3, "the pool, and two ranks"
    notebook.run("%%sky_sh -o ends\nexit 0")
    notebook.run("%sky_pool --nodes 2")
    notebook.run("%%sky_sh -o ends\nexit 0")
    assert notebook.value("[end.node for end in ends]") == [0, 1]


@needs_torch
def test_the_process_group_has_the_other_size(notebook: Notebook) -> None:
    reduce = """%%sky_broadcast -o sums
import torch, torch.distributed as dist
total = torch.tensor(dist.get_rank() + 1.0)
dist.all_reduce(total)
(dist.get_world_size(), total.item());"""
    train = """%%sky_broadcast -o averages
from torch.nn.parallel import DistributedDataParallel as DDP
if "model" not in globals():
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(1, 1, bias=False))
model.zero_grad()
model(torch.tensor([[dist.get_rank() + 1.0]])).sum().backward()
model.module.weight.grad.item();"""
    notebook.run("%sky_pool --nodes 2 --plugin torch")
    notebook.run(reduce)
    notebook.run(train)
    assert notebook.value("(sums, averages)") == ([(2, 3.0)] * 2, [1.5] * 2)
    notebook.run("%sky_pool --nodes 1")
    notebook.run(reduce)
    notebook.run(train)
    assert notebook.value("(sums, averages)") == ([(1, 1.0)], [1.0]), "the wrapper goes on"
    notebook.run("%sky_pool --nodes 3")
    notebook.run(reduce)
    assert notebook.value("sums") == [(3, 6.0)] * 3
    failed = notebook.fail(
        "%%sky_broadcast\nif dist.get_rank() == 2:\n    raise ValueError('planted')\ndist.barrier()"
    )
    assert "planted" in failed.text
    notebook.run(reduce)
    assert notebook.value("sums") == [(3, 6.0)] * 3


def test_restarted_ranks_are_announced(golden: Golden, notebook: Notebook) -> None:
    notebook.run(
        "import skymagic as sky\nfrom skymagic.plugins import Plugin\n"
        "pool = sky.Compute(nodes=2, name='stiff', plugins=[Plugin(name='stiff', rejoin=None)]).start()"
    )
    notebook.run("%%sky_broadcast\nkept = 5")
    before = pids(notebook)
    for nodes in (1, 3):
        shown = notebook.run(f"%sky_pool stiff --nodes {nodes}")
        golden.line(shown.stdout, ": stiff ")
        now = pids(notebook)
        assert set(now).isdisjoint(before)
        assert kept(notebook) == [None] * nodes
        before = now


def test_failed_or_stopped_resize_leaves_the_pool_intact(
    notebook: Notebook,
) -> None:
    notebook.run("%sky_pool --nodes 3")
    notebook.run("%%sky_broadcast -a -o slow\nimport time\ntime.sleep(1)\n'done'")
    notebook.run("%sky_pool --nodes 2")
    notebook.run("%%sky_broadcast -o two\n1")
    assert notebook.value("(slow, two)") == (["done"] * 3, [1] * 2)
    before = pids(notebook)
    for line in (
        "%sky_pool --nodes 100000 --cpus 1",
        "%sky_pool --nodes 3 --env B=2",
        "%sky_pool --nodes 3 --gpus L4:4",
    ):
        assert notebook.fail(line).ename == "UsageError"
        assert pids(notebook) == before
    shown = notebook.watch(
        notebook.start("%sky_pool --nodes 4"), lambda shown: "gets 4 ranks" in shown.stdout
    )
    notebook.interrupt()
    notebook.finish(shown)
    notebook.run("%sky_pool --nodes 4")
    assert pids(notebook)[:2] == before


@pytest.mark.needs("sshd")
def test_host_pool_is_restarted_with_a_note(tmp_path: Path) -> None:
    with pooled("ssh", tmp_path / "pool") as notebook:
        notebook.run("%%sky_broadcast\nkept = 5")
        before = pids(notebook)
        failed = notebook.fail(ON_HOSTS.replace("h[1-2]", "h[1-3]"))
        assert "h3" in failed.text
        assert pids(notebook) == before, "hosts that are not there change nothing"
        shown = notebook.run(ON_HOSTS.replace("h[1-2]", "h2"))
        assert re.search("pool 'main' .*1 node: .*variables", shown.stdout)
        assert len(pids(notebook)) == 2
        assert kept(notebook) == [None] * 2
