"""Rented machines without public addresses: reached through a jump host, and by a session of AWS Systems Manager."""

from __future__ import annotations

import os
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

pytestmark = pytest.mark.needs("sshd")
POOL = f"%sky_pool lab --provider aws --region {REGION} --nodes 1 --python {sys.executable} -y"
AWS = '''#!{python}
"""The AWS command line as far as a ProxyCommand needs it: a session that carries bytes to and from an instance's sshd."""
import os, pathlib, socket, sys, threading
words = sys.argv[1:]
assert words[:2] == ["ssm", "start-session"], words
given = dict(zip(words[2::2], words[3::2], strict=True))
assert given["--document-name"] == "AWS-StartSSHSession"
folder = pathlib.Path({machines!r}) / given["--target"]
asked = folder / "asked"
if not asked.exists():  # its agent is not there as soon as it runs
    asked.touch()
    sys.exit("An error occurred (TargetNotConnected) when calling the StartSession operation: " + given["--target"] + " is not connected.")
(folder / "session").write_text(" ".join(words))
config = dict(line.split(" ", 1) for line in (folder / "sshd_config").read_text().splitlines())
port = int(given["--parameters"].removeprefix("portNumber="))
there = socket.create_connection((config["ListenAddress"], port))
def up():
    while data := os.read(0, 65536):
        there.sendall(data)
    os._exit(0)
threading.Thread(target=up, daemon=True).start()
while data := there.recv(65536):
    while data:
        data = data[os.write(1, data):]
'''


@contextmanager
def apart(folder: Path, env: dict[str, str], **settings: str) -> Iterator[tuple[Machines, Notebook]]:
    """A notebook, and machines that it reaches only as `settings` say."""
    (folder / "notebook").mkdir()
    with ec2() as cloud, booting(cloud, folder / "machines") as machines:
        with opened(folder / "notebook", env={**lab.environment(), "HOME": str(folder), **env}) as notebook:
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


def test_by_a_session_of_systems_manager(tmp_path: Path) -> None:
    """A program in the place of AWS's own carries the bytes; nobody may connect to the machine from elsewhere."""
    programs = tmp_path / "bin"
    programs.mkdir()
    with apart(tmp_path, {"PATH": f"{programs}:{os.environ['PATH']}"}, via="ssm") as (machines, notebook):
        assert "needs programs that are not on this machine's PATH: " in notebook.fail(POOL).text
        assert rented(machines) == [], "no machine is paid for that nobody can reach"
        text = AWS.format(python=sys.executable, machines=str(machines.folder))
        for name in reaching.PROGRAMS:
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        used(notebook)
        ((name, _),) = machines.hosts.items()
        assert f"--target {name}" in (machines.folder / name / "session").read_text()
        (launch,) = rented(machines)
        assert launch.fields["NetworkInterface.1.AssociatePublicIpAddress"] == "false"
        rules = [call.fields for call in machines.cloud.calls if call.action == "AuthorizeSecurityGroupIngress"]
        assert rules
        assert not any("IpRanges" in key for fields in rules for key in fields), (
            "SSH is open to nobody outside the pool"
        )


def test_through_a_jump_host(tmp_path: Path) -> None:
    with loopback(tmp_path / "jump", names=("bastion",)) as jumps:
        (tmp_path / ".ssh").mkdir()
        shutil.copy(jumps.config, tmp_path / ".ssh/config")
        with apart(tmp_path, {}, via="bastion") as (machines, notebook):
            assert "say its address as they see it" in notebook.fail(POOL).text
            notebook.run("settings |= {'ssh_from': '127.0.0.2/32'}\n%config SkyMagic.aws = settings")
            jumps[0].stop()
            assert "bastion" in notebook.fail(POOL).text
            assert rented(machines) == []
            jumps[0].start()
            used(notebook)
            assert any("Accepted publickey" in line for line in jumps[0].log)
            (launch,) = rented(machines)
            assert launch.fields["NetworkInterface.1.AssociatePublicIpAddress"] == "false"
            sources = {
                value for call in machines.cloud.calls for key, value in call.fields.items() if key.endswith("CidrIp")
            }
            assert sources == {"127.0.0.2/32"}


def test_machines_without_a_public_address_are_reached_through_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with several network cards: the head has an Elastic IP, and the others none."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    both = [RunningInstance("i-1", REGION, "10.0.0.4", "198.51.100.7"), RunningInstance("i-2", REGION, "10.0.0.5")]
    head, other = reaching.endpoints(both, boot.make_keys("train-1"), CloudSettings())
    assert (head.hostname, head.proxy_jump) == ("198.51.100.7", ())
    assert (other.hostname, other.proxy_jump) == ("10.0.0.5", (head,))
    (later,) = reaching.endpoints(both[1:], boot.kept_keys("train-1"), CloudSettings(), head)
    assert later.proxy_jump == (head,), "and one in the place of another"


def test_a_session_is_what_aws_documents() -> None:
    one = RunningInstance("i-1", "eu-central-1", "10.0.0.4")
    assert reaching.session_command(one, CloudSettings(profile="it's", via="ssm")) == (
        "aws ssm start-session --target i-1 --document-name AWS-StartSSHSession --parameters portNumber=22 "
        "--region eu-central-1 --profile 'it'\"'\"'s'"
    )


def test_a_jump_host_needs_an_address_that_may_connect() -> None:
    assert CloudSettings(via="bastion").use_private_ips
    assert reaching.jump(CloudSettings()) == reaching.jump(CloudSettings(via="ssm")) == ()
    with pytest.raises(RequestError, match="ssh_from="):
        reaching.jump(CloudSettings(via="bastion"))
    assert [one.hostname for one in reaching.jump(CloudSettings(via="ann@b:2222", ssh_from="10.0.0.5/32"))] == ["b"]


def test_one_that_never_opens_ssh(tmp_path: Path) -> None:
    one = RunningInstance("i-1", REGION, "127.0.0.9")
    reached = Endpoint(one.id, one.private, free_port(one.private), "ubuntu", known_hosts=(str(tmp_path / "none"),))
    with pytest.raises(HostError, match=r"no SSH within 0 s of its start: .*\n.*internet gateway") as failed:
        reaching.connect(AwsClients(deadline_factor=0.05), [one], [reached], lambda text: None, seconds=0.2)
    assert failed.value.host == "i-1"
