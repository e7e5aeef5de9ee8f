"""Pools on EC2 from end to end: a real notebook, moto behind HTTP, and real sshd's where its instances are."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab import ec2 as lab
from tests.lab.ec2 import EC2, REGION, ec2, error
from tests.lab.instances import Machines, booting
from tests.lab.notebook import Notebook, opened

pytestmark = pytest.mark.needs("sshd")
POOL = f"%sky_pool lab --provider aws --region {REGION} --nodes 2 --python {sys.executable}"
DOCS = Path(__file__).resolve().parents[2] / "docs/aws.md"


@pytest.fixture(scope="module")
def server() -> Iterator[EC2]:
    with ec2() as made:
        yield made


@contextmanager
def rented(cloud: EC2, folder: Path) -> Iterator[tuple[Machines, Notebook]]:
    """An EC2 whose instances boot, and a notebook with credentials for it."""
    cloud.forget()
    home = folder / "home"
    home.mkdir()
    with booting(cloud, folder / "machines") as machines:
        env = {**lab.environment(), "HOME": str(home)}
        with opened(folder, env=env) as notebook:
            settings = {
                "subnet": machines.subnet, "use_private_ips": True, "ssh_port": machines.port, "user": machines.user,
                "endpoint_url": cloud.url, "patience": 0.05,
            }  # fmt: skip
            notebook.run(f"%config SkyMagic.aws = {settings!r}")
            yield machines, notebook
    assert lab.left() == {}


@pytest.fixture
def aws(server: EC2, tmp_path: Path) -> Iterator[tuple[Machines, Notebook]]:
    with rented(server, tmp_path) as made:
        yield made


def test_from_a_line_to_terminated(aws: tuple[Machines, Notebook]) -> None:
    machines, notebook = aws
    cloud = machines.cloud
    shown = notebook.run(f"{POOL} -y")
    assert "asking for 2 ×" in shown.said
    notebook.run(
        "scale = 3\n",
    )
    notebook.run(
        "%%sky_broadcast -o found\nimport os\n(int(os.environ['RANK']) * scale, os.environ['HOME'], dict(os.environ))"
    )
    found = notebook.value("[(a, b) for a, b, _ in found]")
    homes = [str(host.home) for host in machines.hosts.values()]
    assert [value for value, _ in found] == [0, 3]
    assert [home for _, home in found] == homes, "ranks are in the order of the machines"
    assert not notebook.value("[name for _, _, env in found for name in env if name.startswith('AWS_')]")
    # the connection was verified by the key that was put there: nobody was asked, and no file of the user's has it
    assert not list((Path(notebook.value("__import__('os').environ['HOME']"))).glob(".ssh/*"))
    notebook.run("%sky_down")
    assert {one.state for one in lab.instances()} == {"terminated"}
    assert lab.left() == {}
    assert not notebook.value("list(__import__('pathlib').Path.home().rglob('skymagic/keys/*/key'))")
    assert set(cloud.actions()) <= permissions(), "docs/aws.md lacks a permission"


def permissions() -> set[str]:
    """What the minimal policy of the docs allows."""
    return {"sts:GetCallerIdentity", *re.findall(r'"((?:ec2|ssm|pricing|servicequotas|sts):\w+)"', DOCS.read_text())}


def test_without_a_yes_nothing_is_rented(aws: tuple[Machines, Notebook]) -> None:
    machines, notebook = aws
    shown = notebook.finish(notebook.start(POOL))
    assert shown.error is not None
    assert "add -y" in shown.text
    plan = notebook.run(f"{POOL} --dry-run").text
    assert "per hour" in plan or "price unknown" in plan
    assert "without a cell" in plan
    assert "RunInstances" not in [call.action for call in machines.cloud.calls]
    assert lab.instances() == []


def test_a_machine_with_another_host_key_is_refused(aws: tuple[Machines, Notebook]) -> None:
    machines, notebook = aws
    machines.wrong_key = (1,)
    shown = notebook.finish(notebook.start(f"{POOL} -y"))
    assert shown.error is not None
    assert "it is not the key that this machine was given" in shown.error.text
    assert {one.state for one in lab.instances()} == {"terminated"}


def test_a_machine_that_ends_before_it_is_reached(aws: tuple[Machines, Notebook]) -> None:
    machines, notebook = aws
    machines.silent = (1,)
    run = notebook.start(f"{POOL} -y")
    deadline = time.monotonic() + 60
    while len(machines.hosts) < 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    lab.set_state(lab.instances()[1], "terminated", "Server.SpotInstanceTermination")
    shown = notebook.finish(run)
    assert shown.error is not None
    assert "has ended while it was starting" in shown.error.text
    assert {one.state for one in lab.instances()} == {"terminated"}


def test_an_interrupt_while_it_waits_for_sshd(aws: tuple[Machines, Notebook]) -> None:
    machines, notebook = aws
    machines.silent = (0, 1)
    run = notebook.start(f"{POOL} -y")
    deadline = time.monotonic() + 60
    while len(lab.instances()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    notebook.interrupt()
    assert notebook.finish(run).error is not None
    assert {one.state for one in lab.instances()} == {"terminated"}
    assert lab.left() == {}


def test_down_all_from_another_process_without_local_state(
    aws: tuple[Machines, Notebook], server: EC2, tmp_path: Path
) -> None:
    """The notebook is killed; a machine that knows nothing of it ends what it has left, by its tags."""
    _, notebook = aws
    notebook.run(f"{POOL} -y")
    os.kill(notebook.value("__import__('os').getpid()"), signal.SIGKILL)
    other = tmp_path / "other"
    other.mkdir()
    import subprocess

    said = subprocess.run(
        [sys.executable, "-m", "skymagic.api.command", "down", "--all"],
        env={**os.environ, **lab.environment(), "HOME": str(other), "AWS_ENDPOINT_URL": server.url}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert "all of it is terminated" in said.stdout
    assert lab.left() == {}


def test_machines_end_themselves_when_nobody_is_left(aws: tuple[Machines, Notebook]) -> None:
    """The notebook dies by SIGKILL: the watchdog holds the lifetime, and EC2 terminates what shuts itself down."""
    machines, notebook = aws
    notebook.run(f"{POOL} --max-lifetime 25s -y")
    os.kill(notebook.value("__import__('os').getpid()"), signal.SIGKILL)
    for thread in machines._threads:
        thread.join(timeout=60)
    assert {one.state for one in lab.instances()} == {"terminated"}
    assert {one.state_reason.code for one in lab.instances()} == {"Client.InstanceInitiatedShutdown"}
    for one in lab.backend().describe_security_groups():
        if one.name.startswith("skymagic"):
            lab.backend().delete_security_group(group_id=one.id)  # free of charge, and found by `down --all`


def test_what_is_denied_is_named(aws: tuple[Machines, Notebook]) -> None:
    machines, notebook = aws
    machines.cloud._rules.clear()
    machines.cloud.on("RunInstances", error("UnauthorizedOperation", "You are not authorized", 403))
    shown = notebook.finish(notebook.start(f"{POOL} -y"))
    assert shown.error is not None
    assert "may not call ec2:RunInstances" in shown.error.text
    assert lab.left() == {}
