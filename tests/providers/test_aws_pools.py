"""Pools on EC2 from end to end: a real notebook, moto behind HTTP, and real sshd's where its instances are."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skymagic.plan.requests import CloudSettings
from skymagic.providers.aws import boot
from skymagic.providers.aws.boot import WatchdogBounds
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.lease import Lease
from skymagic.providers.aws.selection import MachineOffer
from skymagic.providers.aws.tags import Label
from tests.lab import ec2 as lab
from tests.lab.ec2 import EC2, REGION, Rule, after, ec2, error
from tests.lab.instances import Machines, booting
from tests.lab.notebook import Notebook, opened
from tests.lab.shells import pip_settings

pytestmark = pytest.mark.needs("sshd")
POOL = f"%sky_pool lab --provider aws --region {REGION} --nodes 2 --python {sys.executable}"


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
            notebook.run(machines.settings)
            yield machines, notebook
    assert lab.left() == {}


@pytest.fixture(scope="module")
def both(
    server: EC2, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Machines, Notebook]]:
    with rented(server, tmp_path_factory.mktemp("aws")) as made:
        yield made


@pytest.fixture
def aws(both: tuple[Machines, Notebook]) -> Iterator[tuple[Machines, Notebook]]:
    both[0].forget()
    yield both
    assert lab.left() == {}


ASKING = """[
    frame.f_code.co_filename
    for thread in sys._current_frames().values()
    for frame, _ in traceback.walk_stack(thread)
    if 'providers/aws' in frame.f_code.co_filename
]"""
"""Where the threads of the notebook are, as far as that is in what calls AWS."""


def test_from_a_line_to_terminated(aws: tuple[Machines, Notebook]) -> None:
    machines, notebook = aws
    cloud = machines.cloud
    shown = notebook.run(f"{POOL} -y")
    assert "asking for 2 ×" in shown.said
    rented = len(cloud.calls)
    notebook.run("scale = 3")
    notebook.run(
        "%%sky_broadcast -o found\nimport os\n(int(os.environ['RANK']) * scale, os.environ['HOME'], dict(os.environ))"
    )
    found = notebook.value("[(a, b) for a, b, _ in found]")
    homes = [str(host.home) for host in list(machines.hosts.values())[-2:]]
    assert [value for value, _ in found] == [0, 3]
    assert [home for _, home in found] == homes, "ranks are in the order of the machines"
    assert not notebook.value(
        "[name for _, _, env in found for name in env if name.startswith('AWS_')]"
    )
    # the connection was verified by the key that was put there: nobody was asked, and no file of the user's has it
    assert not list((Path(notebook.value("__import__('os').environ['HOME']"))).glob(".ssh/*"))
    ticker = notebook.run("%sky_status").rich[0]["text/html"]
    assert re.search(r"\$\d+\.\d\d per hour, about \$\d+\.\d\d so far", ticker)
    notebook.run("%sky_status --cost")
    notebook.run("import sys, traceback")
    assert notebook.value(ASKING) == [], "no thread is there to ask EC2 from time to time"
    assert cloud.calls[rented:] == [], "nor does it cost a call to run cells and to look"
    notebook.run("%sky_down")
    assert lab.instances()
    assert lab.left() == {}
    assert not notebook.value(
        "list(__import__('pathlib').Path.home().rglob('skymagic/keys/*/key'))"
    )
    assert set(cloud.actions()) <= lab.permitted(), "docs/how-to/aws.md lacks a permission"


def test_a_machine_with_another_host_key_is_refused(aws: tuple[Machines, Notebook]) -> None:
    machines, notebook = aws
    machines.wrong_key = (1,)
    notebook.fail(f"{POOL} -y", "host-key-changed")
    assert {one.state for one in lab.instances()} == {"terminated"}


SMI = """#!/bin/sh
# the GPU of the first machine that looks has errors
mkdir "{folder}/asked" 2>/dev/null && echo "$HOME" >"{folder}/bad"
errors=0; [ "$(cat "{folder}/bad")" = "$HOME" ] && errors=3
case $1 in
    --query-gpu=index,uuid*) echo "0, GPU-0, Tesla T4, 15360, Default, [N/A]" ;;
    --query-gpu=index*) echo "0, Tesla T4, 550.1, $errors" ;;
esac
"""


def test_a_broken_machine_is_named_and_replaced(
    aws: tuple[Machines, Notebook], tmp_path: Path
) -> None:
    machines, notebook = aws
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI.format(folder=tmp_path))
    program.chmod(0o755)
    machines.env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    before = len(lab.instances())
    try:
        shown = notebook.run(f"{POOL} -y")
    finally:
        del machines.env["PATH"]
    bad = Path((tmp_path / "bad").read_text().strip()).parent.name
    assert re.search(rf"{bad}: GPU 0 .*\b3\b.* ECC ", shown.text)
    states = {one.id: one.state for one in lab.instances()[before:]}
    assert sorted(states.values()) == ["running", "running", "terminated"]
    assert states[bad] == "terminated"
    notebook.run("%%sky_broadcast -o homes\nimport os\nos.environ['HOME']")
    assert bad not in str(notebook.value("homes"))
    notebook.run("%sky_down")


ASKED = """#!/bin/sh
case $1 in
    --query-gpu=index,uuid*) echo "0, GPU-0, Tesla T4, 15360, Default, [N/A]" ;;
    --query-gpu=index*) : >"$HOME/asked"; echo "0, Tesla T4, 550.1, 0" ;;
esac
"""
MOVE = """#!/bin/sh
# the last step of an environment: not before its machine was looked at
case $* in */env/*/.ready)
    for tenth in $(seq 300); do [ -e "$HOME/asked" ] && break; sleep 0.1; done
    [ -e "$HOME/asked" ] || : >"$HOME/late" ;;
esac
exec /bin/mv "$@"
"""


def test_machines_are_checked_while_packages_are_installed(
    aws: tuple[Machines, Notebook], tmp_path: Path
) -> None:
    """Their environments are not ready before each of them was looked at."""
    machines, notebook = aws
    for name, text in {"nvidia-smi": ASKED, "mv": MOVE}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    given = {**pip_settings(), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    machines.env |= given
    before = set(machines.hosts)
    try:
        notebook.run(f"%sky_pool fresh --provider aws --region {REGION} --nodes 1 -y")
    finally:
        for name in given:
            del machines.env[name]
    homes = [host.home for name, host in machines.hosts.items() if name not in before]
    assert [(home / "asked").exists() for home in homes] == [True]
    assert not [home for home in homes if (home / "late").exists()]
    notebook.run("%%sky_broadcast -o found\nimport sys\nsys.executable")
    assert all(
        f"{home}/.skymagic/env/" in path
        for home, path in zip(homes, notebook.value("found"), strict=True)
    )
    notebook.run("%sky_down fresh")


def launched(cloud: EC2) -> list[str]:
    """The ids of the next launch, once its answer has been sent."""
    seen, event = [one.id for one in lab.instances()], threading.Event()
    by_id = Rule(
        "DescribeInstances",
        after(lambda call: event.set()),
        1 << 30,
        lambda call: "instance-id" in call.fields.values(),
    )
    cloud._rules.insert(0, by_id)
    assert event.wait(60)
    return [one.id for one in lab.instances() if one.id not in seen]


def test_a_machine_that_ends_before_it_is_reached(aws: tuple[Machines, Notebook]) -> None:
    machines, notebook = aws
    machines.silent = (1,)
    run = notebook.start(f"{POOL} -y")
    ids = launched(machines.cloud)
    lab.set_state(
        next(one for one in lab.instances() if one.id == ids[1]),
        "terminated",
        "Server.SpotInstanceTermination",
    )
    shown = notebook.finish(run)
    assert ids[1] in shown.failure.text
    assert {one.state for one in lab.instances()} == {"terminated"}


def test_an_interrupt_while_it_waits_for_sshd(aws: tuple[Machines, Notebook]) -> None:
    machines, notebook = aws
    machines.silent = (0, 1)
    run = notebook.start(f"{POOL} -y")
    launched(machines.cloud)
    notebook.interrupt()
    assert notebook.finish(run).error is not None
    assert {one.state for one in lab.instances()} == {"terminated"}
    assert lab.left() == {}


def test_denied_calls_are_named(aws: tuple[Machines, Notebook]) -> None:
    machines, notebook = aws
    machines.cloud._rules.clear()  # the first rule counts
    machines.cloud.on("RunInstances", error("UnauthorizedOperation", "You are not authorized", 403))
    assert "ec2:RunInstances" in notebook.fail(f"{POOL} -y", "cloud-permission").text
    assert lab.left() == {}


def test_lazy_pool_is_rented_by_its_first_cell(
    aws: tuple[Machines, Notebook],
) -> None:
    machines, notebook = aws
    line = POOL.replace("lab", "later").replace("--nodes 2", "--nodes 1")
    assert "pool 'later' is declared" in notebook.run(f"{line} --lazy --idle 4s -y").said
    assert "RunInstances" not in [call.action for call in machines.cloud.calls]
    notebook.run("%%sky_broadcast\nkept = 7")
    notebook.run(
        "import time\nfrom skymagic.pool import registry\npool = registry.pool_named('later', ended=True)"
    )
    notebook.run("while pool.state.value != 'stopped':\n    time.sleep(0.05)")
    assert lab.left() == {}, "nothing is paid for between two cells"
    notebook.run("%sky_down later")


def test_machines_end_themselves_and_ec2_terminates_them(
    server: EC2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is left: the watchdog shuts down, with no call of anybody's."""
    for name, value in {**lab.environment(), "XDG_STATE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    server.forget()
    with booting(server, tmp_path / "machines") as machines:
        settings = CloudSettings(subnet=machines.subnet, use_private_ips=True, deadline_factor=0.05)
        job = f"alone-{os.getpid()}"
        bounds = WatchdogBounds(1800, 2, interval=0.2)
        text = boot.cloud_config(boot.make_keys(job), job, machines.user, machines.port, bounds)
        label = Label("alone", job, "me", "ann@laptop", time.time())
        lease = Lease(
            AwsClients(endpoint_url=server.url, deadline_factor=0.05),
            settings,
            label,
            text,
            lambda said: None,
        )
        lease.acquire([MachineOffer(REGION, f"{REGION}a", "m5.large")], 2)
        server.calls.clear()
        machines.wait_ended(60)
        assert {one.state for one in lab.instances()} == {"terminated"}
        assert {one.state_reason.code for one in lab.instances()} == {
            "Client.InstanceInitiatedShutdown"
        }
        assert server.calls == []
        lease.release()
    assert lab.left() == {}


def test_pool_is_listed_and_ended_from_another_machine(server: EC2, tmp_path: Path) -> None:
    """The notebook is killed; a machine that knows nothing of it lists what it has left by its tags, and ends it."""
    other = tmp_path / "other"
    other.mkdir()

    def command(*words: str) -> tuple[int, str, str]:
        said = subprocess.run(
            [sys.executable, "-c", "import sys; from skymagic.api.command import main; sys.exit(main())", *words],
            env={
                **os.environ, **lab.environment(), "HOME": str(other), "XDG_STATE_HOME": str(other / "state"),
                "AWS_ENDPOINT_URL": server.url,
            },
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        return said.returncode, said.stdout, said.stderr

    with rented(server, tmp_path) as (machines, notebook):
        notebook.run(f"{POOL.replace('--nodes 2', '--nodes 1')} -y")
        server.on("DescribeRegions", lab.regions(REGION, "us-west-2"), times=1 << 30)
        os.kill(notebook.value("__import__('os').getpid()"), signal.SIGKILL)
        code, out, err = command("status", "--provider", "aws", "--json")
        assert code == 0, err
        (pool,) = json.loads(out)["pools"]
        assert (pool["name"], pool["where"]) == ("lab", REGION)
        assert {(one["id"], one["state"]) for one in pool["nodes"]} == {
            (one, "running") for one in machines.hosts
        }
        code, out, err = command("down", "train", "--provider", "aws")
        assert (code, out) == (2, "")
        assert re.search("'train' .*; available: lab", err)
        code, out, err = command("down", "lab", "--provider", "aws", "--json")
        assert code == 0, err
        assert json.loads(out) == {"done": [f"pool 'lab' ({pool['job_id']}) is down"]}
        assert {one.state for one in lab.instances()} == {"terminated"}
        code, out, err = command("down", "--all")
        assert (code, err) == (0, "")
        assert pool["job_id"] not in out
        assert set(server.actions()) <= lab.permitted(), "docs/how-to/aws.md lacks a permission"
