"""What ranks tell each other through a process group: nothing that is unpickled, nothing that needs numpy, nothing to a stranger."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.lab.notebook import ROOT, opened

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install torch"
)

MEMBERS = """
import os, sys, torch.distributed as dist
from skymagic.plugins._torch import membership
folder, *groups = sys.argv[1:]

def join(path, rank, secrets):
    sys.stdout = open(f"{path}-{rank}", "w")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=len(secrets))
    try:
        membership.verify(secrets[rank], rank)
        told = membership.all_gather_pairs([("model", "1.0"), ("ö", "nan")][: rank])
        name = membership.digest("model")
        print("told", [table.get(name) == membership.digest("1.0") for table in told], [len(table) for table in told])
    except RuntimeError as problem:
        print("refused", problem)

for group in groups:  # torch is imported once for all of them
    secrets = group.split(",")
    for rank in range(len(secrets)):
        if not os.fork():
            join(f"{folder}/{group}", rank, secrets)
            sys.stdout.close()
            os._exit(0)  # the group, which outlives the function, waits for the others when the interpreter ends
    assert not any(os.wait()[1] for _ in secrets)
"""


def test_members_detect_a_rank_outside_the_group(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMBERS, str(tmp_path), "s,s,s", "s,guessed,s"]
    subprocess.run(command, check=True, timeout=60)
    for rank in range(3):
        assert (tmp_path / f"s,s,s-{rank}").read_text() == "told [False, True, True] [0, 1, 2]\n"
    first, stranger, last = ((tmp_path / f"s,guessed,s-{rank}").read_text() for rank in range(3))
    for said in (first, last):
        assert re.match(r"refused .*\brank 1: ", said)
    assert "rank 0, 2" in stranger


TRAINING = """%%sky_broadcast -o losses
import os, torch, torch.distributed as dist
try:
    import numpy
except ImportError as problem:
    numpy = None
from torch.nn.parallel import DistributedDataParallel as DDP
if "net" not in globals():
    net = DDP(torch.nn.Linear(2, 1))
    pid = os.getpid()
assert pid == os.getpid() and numpy is None
if FAIL and dist.get_rank() == 1:
    raise ValueError("a bad batch")
net(torch.ones(3, 2)).sum().backward()
[net.module.weight.grad.sum().item(), pid]"""


def test_rank_without_numpy_fails(tmp_path: Path) -> None:
    """torch does not require it, and a pool's own environment may have none."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "numpy.py").write_text(
        "raise ModuleNotFoundError('there is no numpy here', name='numpy')\n"
    )
    cells = ("%sky_pool --nodes 2 --plugin torch", "FAIL = False", TRAINING, "FAIL = True")
    with opened(tmp_path, *cells, env={"PYTHONPATH": f"{hidden}{os.pathsep}{ROOT}"}) as notebook:
        before = notebook.value("[pid for _, pid in losses]")
        failed = notebook.fail(TRAINING)
        assert (failed.ename, failed.evalue.partition("\n")[0][:11]) == (
            "ValueError",
            "a bad batch",
        )
        notebook.run("FAIL = False")
        notebook.run(TRAINING)
        assert notebook.value("[pid for _, pid in losses]") == before
        notebook.run("%sky_restart")


JOINED = """
import json, os, sys, torch, torch.distributed as dist
from dataclasses import asdict
from skymagic.plugins._torch.backends import RankHardware
from skymagic.plugins._torch.groups import Group
from skymagic.runtime import rendezvous
from skymagic.runtime.info import InstanceInfo
reader, writer = os.pipe()
stranger = os.fork()
if not stranger:
    store = dist.TCPStore("127.0.0.1", int(os.read(reader, 16)), is_master=False)
    dist.PrefixStore("backend", store).set("1", json.dumps(asdict(RankHardware("here"))))
    dist.init_process_group("gloo", store=dist.PrefixStore("skymagic-0", store), rank=1, world_size=2)
    dist.all_gather([torch.empty(32, dtype=torch.uint8) for _ in range(2)], torch.zeros(32, dtype=torch.uint8))
    os._exit(0)
class Control:
    def put(self, key, value):
        os.write(writer, str(value[0]).encode())  # the port alone: whoever looks finds it
rendezvous.attach(Control(), 0)
try:
    Group("gloo").form(InstanceInfo(rank=0, world_size=2))
    print("formed")
except RuntimeError as problem:
    print("refused", problem)
finally:
    os.kill(stranger, 9)
    os.waitpid(stranger, 0)
"""


def test_a_group_that_a_stranger_has_joined_is_not_used() -> None:
    """What a rank sends is unpickled by the others' `broadcast_object_list`: none may begin before all have shown the secret."""
    done = subprocess.run(
        [sys.executable, "-c", JOINED], check=True, timeout=60, capture_output=True, text=True
    )
    assert re.match(r"refused .*\brank 1\b", done.stdout), done.stdout
