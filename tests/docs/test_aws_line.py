"""The line for EC2 that docs/how-to/aws.md begins with: its plan, its price, its question, and the pool that it rents, up to the end.

Reduced are the ranks (one for the 8 GPUs of a machine, as ``--procs-per-node 1`` has it: 32 processes with torch are too many here) and what
is installed (``--python``: the notebook's own interpreter, for its wheels are gigabytes). GPUs are what an nvidia-smi of the tests lists.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import ec2 as lab
from tests.lab.ec2 import ec2
from tests.lab.ec2_prices import EC2Market
from tests.lab.gpus import Gpu, Gpus
from tests.lab.instances import Machines, booting
from tests.lab.notebook import ROOT, Notebook, opened

pytest.importorskip("torch")
pytestmark = pytest.mark.needs("sshd")

LINE, *_ = re.findall(
    r"^    (%sky_pool .*--provider aws .*)$",
    (ROOT / "docs" / "how-to" / "aws.md").read_text(),
    re.MULTILINE,
)
REDUCED = f"--procs-per-node 1 --python {sys.executable}"
STEP = """%%sky_broadcast -o results
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
shown = torch.full((4, 3), float(dist.get_rank()))
loss = model(shown).square().mean()
loss.backward()
optimizer.step()
grad = model.module.layer.weight.grad.sum().item()
{"rank": dist.get_rank(), "world": dist.get_world_size(), "grad": grad, "gpus": os.environ["CUDA_VISIBLE_DEVICES"]}"""


@pytest.fixture
def rented(tmp_path: Path) -> Iterator[tuple[Machines, Notebook]]:
    """An account of which nothing is known but the price of p4d.24xlarge, and a notebook."""
    # the machines are hosts of this one, and a GPU is held by one pool on a machine
    gpus = Gpus(
        tmp_path / "gpus",
        [Gpu("NVIDIA A100-SXM4-40GB", f"GPU-HOME-{number}", 40_960) for number in range(8)],
    )
    with ec2() as cloud, booting(cloud, tmp_path / "machines") as machines:
        EC2Market(cloud, {"p4d.24xlarge": 21.957642})
        machines.env |= gpus.environment()
        settings = {
            "subnet": machines.subnet, "use_private_ips": True, "ssh_port": machines.port, "user": machines.user,
            "endpoint_url": cloud.url, "deadline_factor": 0.05,
        }  # fmt: skip
        env = {**lab.environment(), "HOME": str(tmp_path), "AWS_DEFAULT_REGION": lab.REGION}
        with opened(tmp_path, env=env) as notebook:
            notebook.run(f"%config SkyMagic.aws = {settings!r}")
            yield machines, notebook
    assert lab.left() == {}


def test_from_the_plan_to_the_end(rented: tuple[Machines, Notebook]) -> None:
    """The README's line on an imitation of EC2, reduced to two small machines after the question."""
    machines, notebook = rented
    plan = notebook.run(f"{LINE} --dry-run").text
    assert "aws: 4 × p4d.24xlarge (8 × A100) in us-east-1a, on demand" in plan, (
        "the line as it stands there"
    )
    assert "ranks      32 (4 × 8" in plan
    assert "$87.83 per hour" in plan
    assert "at most $150.00" in plan
    dear = notebook.fail(LINE.replace("--max-price 150", "--max-price 80")).text
    assert "$87.83" in dear
    assert lab.instances() == []

    questions, shown = notebook.answering(f"{LINE} {REDUCED}", "y")
    assert len(questions) == 1
    assert "4 × p4d.24xlarge (8 × A100)" in questions[0]
    assert "$87.83 per hour" in questions[0]
    assert "for 1d at most" in questions[0]
    (launch,) = [
        call
        for call in machines.cloud.calls
        if call.action == "RunInstances" and call.fields.get("DryRun") != "true"
    ]
    assert [launch.fields[name] for name in ("InstanceType", "MinCount", "MaxCount")] == [
        "p4d.24xlarge",
        "4",
        "4",
    ]
    assert "Placement.GroupName" in launch.fields, "machines with GPUs are near each other"
    assert "starting 4 ranks on 4 × p4d.24xlarge (8 × A100)" in shown.text

    notebook.run("import torch")
    notebook.run(
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(3, 1)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)"
    )
    notebook.run(STEP)
    results = notebook.value("results")
    assert [one["rank"] for one in results] == [0, 1, 2, 3]
    assert {one["world"] for one in results} == {4}
    assert {one["gpus"] for one in results} == {"0,1,2,3,4,5,6,7"}
    assert len({one["grad"] for one in results}) == 1, "DDP has averaged what each rank saw"

    assert "train" in notebook.run("%sky_status --cost").stdout
    notebook.run("%sky_down")
    assert [one.state for one in lab.instances()] == ["terminated"] * 4
    assert lab.left() == {}
    assert set(machines.cloud.actions()) <= lab.permitted(), "docs/how-to/aws.md lacks a permission"
