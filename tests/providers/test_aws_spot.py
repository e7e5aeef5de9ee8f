"""Spot machines that EC2 takes back: seen on the machine, told at once, time for a checkpoint, and another one in their place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.kernels.agent import ending
from tests.lab import ec2 as lab
from tests.lab.ec2 import REGION, ec2, error
from tests.lab.ec2_prices import EC2Market
from tests.lab.instances import Machines, booting
from tests.lab.metadata import Metadata, metadata
from tests.lab.notebook import ROOT, Notebook, opened

pytestmark = pytest.mark.needs("sshd")
POOL = f"%sky_pool lab --provider aws --region {REGION} --nodes 2 --spot --replace --python {sys.executable}"
TRAIN = """%%sky_broadcast
import os, time, skymagic as sky
kept = rank = sky.instance_info().rank
saved = []

@sky.on_interruption
def save(notice):
    with open(os.path.join(folder, f"checkpoint-{rank}"), "w") as file:
        file.write(f"{notice.mine} {notice.ranks} {notice.seconds_left > 60}")
    saved.append(notice)

open(os.path.join(folder, f"begun-{rank}"), "w").close()
while not all(os.path.exists(os.path.join(folder, f"begun-{one}")) for one in range(2)):
    time.sleep(0.01)
print("begun")
while not saved:
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machines, Metadata, Notebook]]:
    folder = tmp_path_factory.mktemp("spot")
    (home := folder / "home").mkdir()
    with (
        ec2() as cloud,
        metadata() as service,
        booting(cloud, folder / "machines", service) as machines,
    ):
        with opened(folder, env={**lab.environment(), "HOME": str(home)}) as notebook:
            notebook.run(machines.settings)
            yield machines, service, notebook
        assert lab.left() == {}


def running() -> list[str]:
    """The ids of the instances that run, the oldest first."""
    return [one.id for one in lab.instances() if one.state == "running"]


def taken(machines: Machines, instance: str) -> None:
    """EC2 takes an instance back."""
    one = next(one for one in lab.instances() if one.id == instance)
    lab.set_state(one, "terminated", "Server.SpotInstanceTermination")
    machines.end(instance)


def counted(notebook: Notebook) -> int:
    """How many machines are counted as running."""
    count = "sum(one.machines for one in __import__('skymagic.providers.aws.ledger', fromlist=['_']).all_rents() if one.ended is None)"
    return int(notebook.value(count))


def test_a_machine_is_taken_back_and_replaced(
    both: tuple[Machines, Metadata, Notebook], tmp_path: Path
) -> None:
    """EC2's metadata service announces a reclaim, and then the machine loses its power."""
    machines, service, notebook = both
    plan = notebook.run(f"{POOL} --dry-run").text
    assert "spot" in plan
    assert "replaced" in plan
    notebook.run(f"{POOL} -y")
    first, second = running()
    assert set(machines.cloud.actions()) <= lab.permitted()
    machines.cloud.calls.clear()
    notebook.run(f"folder = {str(tmp_path)!r}")
    run = notebook.start(TRAIN)
    notebook.watch(run, lambda shown: "begun" in shown.text)
    service.say(first, ending.REBALANCE, {"noticeTime": "2026-11-22T20:00:00Z"})
    service.take_back(second, time.time() + 120)
    said = notebook.finish(run).text
    assert re.search(rf"node 1 \({second}\): EC2 .*\(terminate\) in 1", said)
    assert "rank 1 is lost then" in said
    assert (tmp_path / "checkpoint-1").read_text() == "True (1,) True"
    assert (tmp_path / "checkpoint-0").read_text() == "False (1,) True", (
        "the others may have what is worth keeping"
    )
    assert "reclaimed" in notebook.run("%sky_status").said
    assert machines.cloud.calls == [], "nobody asks EC2 while a pool runs"

    machines.cloud._rules.insert(
        0,
        lab.Rule(
            "RunInstances", error("InsufficientInstanceCapacity", "none left"), 2, lab.any_call
        ),
    )
    hangs = notebook.start(
        "%%sky_broadcast\nimport time\nprint('hangs')\nwhile True:\n    time.sleep(0.01)"
    )
    notebook.watch(hangs, lambda shown: "hangs" in shown.text)
    taken(machines, second)
    failed = notebook.finish(hangs).error
    assert failed is not None
    assert f"{second} is terminated" in failed.text
    assert "rank 0 keeps its variables" in failed.text
    assert "%sky_restart" not in failed.text, "another machine comes by itself"
    shown = notebook.run(
        "%%sky_broadcast -o found\nimport os\n(os.environ['HOME'], 'kept' in globals())"
    )
    third = running()[-1]
    assert "replacement of node 1" in shown.text or f"node 1 is {third} now" in shown.text
    homes = notebook.value("found")
    assert [(Path(home).parent.name, kept) for home, kept in homes] == [
        (first, True),
        (third, False),
    ]
    assert re.search("rank 1 .*variables", shown.text)
    assert counted(notebook) == 2, "the machine that was taken is not counted on"

    taken(machines, first)  # with the controller, and so with all ranks
    shown = notebook.finish(notebook.start("%%sky_broadcast\nwhile True:\n    pass"))
    assert f"{first} is terminated" in shown.failure.text
    notebook.run("%%sky_broadcast -o found\nimport os\n(os.environ['HOME'], 'kept' in globals())")
    homes = notebook.value("found")
    assert [(Path(home).parent.name, kept) for home, kept in homes] == [
        (running()[-1], False),
        (third, False),
    ]
    notebook.run("%sky_down")
    assert lab.left() == {}
    assert set(machines.cloud.actions()) <= lab.permitted(), "docs/how-to/aws.md lacks a permission"


def test_missing_spot_machines_are_not_rented_on_demand(
    both: tuple[Machines, Metadata, Notebook],
) -> None:
    machines, _, notebook = both
    none = lab.Rule(
        "RunInstances", error("InsufficientInstanceCapacity", "none"), 1 << 30, lab.any_call
    )
    machines.cloud._rules.insert(0, none)
    try:
        refused = notebook.fail(f"{POOL} -y".replace("lab", "dear")).text
    finally:
        none.times = 0
    assert notebook.fields()["code"].startswith("cloud-")
    assert "InsufficientInstanceCapacity" in refused
    assert "without --spot" in refused
    asked = [call for call in machines.cloud.calls if call.action == "RunInstances"]
    assert asked[-1].fields["InstanceMarketOptions.MarketType"] == "spot"
    assert lab.left() == {}


def test_first_attempt_keeps_the_limit_and_leaves_nothing(tmp_path: Path) -> None:
    """Runs benchmarks/try_aws.py against an imitation of EC2: without permission, above the limit, and completely."""

    def tried(*argv: str) -> subprocess.CompletedProcess[str]:
        settings = {
            "subnet": machines.subnet, "use_private_ips": True, "ssh_port": machines.port, "user": machines.user,
            "endpoint_url": cloud.url, "deadline_factor": 0.05,
        }  # fmt: skip
        given = (
            "--region",
            REGION,
            "--python",
            sys.executable,
            "--settings",
            json.dumps(settings),
            *argv,
        )
        env = {**os.environ, **lab.environment(), "HOME": str(tmp_path)}
        command = [sys.executable, str(ROOT / "benchmarks/try_aws.py"), *given]
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=100, check=False
        )

    with ec2() as cloud, booting(cloud, tmp_path / "machines") as machines:
        EC2Market(cloud, {"m6a.large": 0.0864})
        cloud.on("DescribeRegions", lab.regions(REGION), times=9)
        refused = tried()
        assert (refused.returncode, "--limit" in refused.stderr) == (2, True)
        refused = tried("--limit", "0.01", "--minutes", "60", "--rent")
        assert refused.returncode == 2
        assert "refused" in refused.stdout or "--max-price" in refused.stdout
        planned = tried("--limit", "1")
        assert planned.returncode == 0, planned.stdout + planned.stderr
        assert "at most $0.11 within 30m, and the limit is $1.00" in planned.stdout
        assert lab.instances() == []
        done = tried("--limit", "1", "--rent")
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(lab.instances()) == 2
        assert lab.left() == {}
