"""Rented machines without public addresses: reached through a jump host."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skymagic.errors import HostError, RequestError
from skymagic.plan.requests import CloudSettings
from skymagic.providers.aws import boot, reaching
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.launch import RunningInstance
from skymagic.runtime.rendezvous import free_port
from skymagic.ssh.config import Endpoint
from tests.lab import ec2 as lab
from tests.lab.ec2 import REGION, ec2
from tests.lab.hosts import loopback
from tests.lab.instances import Machines, booting
from tests.lab.notebook import Notebook, opened
from tests.lab.raising import raises

pytestmark = pytest.mark.needs("sshd")
POOL = f"%sky_pool lab --provider aws --region {REGION} --nodes 1 --python {sys.executable} -y"


@contextmanager
def apart(
    folder: Path, env: dict[str, str], **settings: str
) -> Iterator[tuple[Machines, Notebook]]:
    """A notebook, and machines that it reaches only as `settings` say."""
    (folder / "notebook").mkdir()
    with ec2() as cloud, booting(cloud, folder / "machines") as machines:
        with opened(
            folder / "notebook", env={**lab.environment(), "HOME": str(folder), **env}
        ) as notebook:
            known = {
                "subnet": machines.subnet, "ssh_port": machines.port, "user": machines.user, "endpoint_url": cloud.url,
                "deadline_factor": 0.05, **settings,
            }  # fmt: skip
            notebook.run(f"settings = {known!r}\n%config SkyMagic.aws = settings")
            yield machines, notebook
        assert lab.left() == {}


def used(notebook: Notebook) -> None:
    """A pool is made, runs a cell, and ends."""
    notebook.run(POOL)
    notebook.run("%%sky_broadcast -o found\n6 * 7")
    assert notebook.value("found") == [42]
    notebook.run("%sky_down")


def rented(machines: Machines) -> list[lab.Call]:
    return [call for call in machines.cloud.calls if call.action == "RunInstances"]


def test_through_a_jump_host(tmp_path: Path) -> None:
    with loopback(tmp_path / "jump", names=("bastion",)) as jumps:
        (tmp_path / ".ssh").mkdir()
        shutil.copy(jumps.config, tmp_path / ".ssh/config")
        with apart(tmp_path, {}, via="bastion") as (machines, notebook):
            assert "ssh_from" in notebook.fail(POOL).text
            notebook.run(
                "settings |= {'ssh_from': '127.0.0.2/32'}\n%config SkyMagic.aws = settings"
            )
            jumps[0].stop()
            assert "bastion" in notebook.fail(POOL).text
            assert rented(machines) == []
            jumps[0].start()
            used(notebook)
            assert any("Accepted publickey" in line for line in jumps[0].log)
            (launch,) = rented(machines)
            assert launch.fields["NetworkInterface.1.AssociatePublicIpAddress"] == "false"
            sources = {
                value
                for call in machines.cloud.calls
                for key, value in call.fields.items()
                if key.endswith("CidrIp")
            }
            assert sources == {"127.0.0.2/32"}


def test_machines_without_public_address_use_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several network cards, only the head gets an Elastic IP."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    both = [
        RunningInstance("i-1", REGION, "10.0.0.4", "198.51.100.7"),
        RunningInstance("i-2", REGION, "10.0.0.5"),
    ]
    head, other = reaching.endpoints(both, boot.make_keys("train-1"), CloudSettings())
    assert (head.hostname, head.proxy_jump) == ("198.51.100.7", ())
    assert (other.hostname, other.proxy_jump) == ("10.0.0.5", (head,))
    (later,) = reaching.endpoints(both[1:], boot.kept_keys("train-1"), CloudSettings(), head)
    assert later.proxy_jump == (head,), "and one in the place of another"


def test_a_jump_host_needs_an_address_that_may_connect() -> None:
    assert CloudSettings(via="bastion").use_private_ips
    assert reaching.jump(CloudSettings()) == ()
    with pytest.raises(RequestError, match="ssh_from="):
        reaching.jump(CloudSettings(via="bastion"))
    assert [
        one.hostname
        for one in reaching.jump(CloudSettings(via="ann@b:2222", ssh_from="10.0.0.5/32"))
    ] == ["b"]


def test_one_that_never_opens_ssh(tmp_path: Path) -> None:
    one = RunningInstance("i-1", REGION, "127.0.0.9")
    reached = Endpoint(
        one.id, one.private, free_port(one.private), "ubuntu", known_hosts=(str(tmp_path / "none"),)
    )
    with raises(HostError, "host-no-ssh", r" 0 s .*\n.*internet gateway") as failed:
        reaching.connect(
            AwsClients(deadline_factor=0.05), [one], [reached], lambda text: None, seconds=0.2
        )
    assert failed.value.host == "i-1"
