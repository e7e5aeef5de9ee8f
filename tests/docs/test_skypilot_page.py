"""The page on SkyPilot: its commands, as they stand there, on a configuration as SkyPilot writes it, with local SSH servers as its machines."""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.hosts import Hosts, loopback, share_code
from tests.lab.notebook import ROOT, opened
from tests.lab.shells import pip_settings

pytestmark = pytest.mark.needs("sshd")
PAGE = (ROOT / "docs" / "how-to" / "skypilot.md").read_text()
# What `SSHConfigHelper` (sky/utils/cluster_utils.py) writes for a node, with an empty line where there is no proxy.
GENERATED = """\
# Added by sky (use `sky stop/down train` to remove)
Host {name}
  HostName {host.address}
  User {user}
  IdentityFile {key}
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile=/dev/null
  GlobalKnownHostsFile=/dev/null
  Port {host.port}
  SetEnv SKYPILOT_CLUSTER_NAME=train-8f2a

"""
# The `sky` command: a task on each node, whose lines have the node's name before them, among lines of its own.
SKY = """\
#!/bin/sh
[ "$1 $2 $3" = "exec train --num-nodes" ] || exit 2
echo "Submitting job to cluster: train"
for rank in 1 0; do
    SKYPILOT_NODE_RANK=$rank sh -c "$(printf %s "$5" | sed "s#/etc/ssh/ssh_host_ed25519_key.pub#@FOLDER@/h$((rank + 1))/hostkey.pub#")" |
        sed "s/^/(worker$rank, rank=$rank, pid=4321, ip=10.0.0.$rank) /"
done
echo "Job finished (status: SUCCEEDED)."
"""


def commands() -> list[str]:
    """The page's commands after the launch."""
    return re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1:]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with loopback(tmp_path / "hosts", 2, env=pip_settings()) as made:
        for host in made:
            share_code(host.home)
        yield made


@pytest.fixture
def env(hosts: Hosts, tmp_path: Path) -> dict[str, str]:
    """A user who has launched a cluster."""
    home, programs = tmp_path / "home", tmp_path / "bin"
    (home / ".sky" / "generated" / "ssh").mkdir(parents=True)
    (home / ".ssh").mkdir()
    text = "".join(
        GENERATED.format(name=name, host=host, user=getpass.getuser(), key=hosts.key)
        for name, host in zip(("train", "train-worker1"), hosts, strict=True)
    )
    (home / ".sky" / "generated" / "ssh" / "train").write_text(text)
    (home / ".ssh" / "config").write_text(
        f"# Added by SkyPilot for ssh config of all clusters\nInclude {home}/.sky/generated/ssh/*\n\nHost own\n  User me\n"
    )
    programs.mkdir()
    (programs / "sky").write_text(SKY.replace("@FOLDER@", str(tmp_path / "hosts")))
    (programs / "sky").chmod(0o755)
    return {"HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}"}


def test_a_cluster_of_skypilot_is_used_with_its_host_keys(
    hosts: Hosts, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "notebook").mkdir()
    pool = re.findall(r"(%sky_pool train --hosts \S+)", PAGE)[0] + f" --python {sys.executable}"
    with opened(tmp_path / "notebook", env=env) as notebook:
        refused = notebook.fail(pool, "hosts").text
        assert notebook.value("{f.code for f in __import__('sys').last_value.failures}") == {
            "host-key-unknown"
        }
        assert "StrictHostKeyChecking no" in refused
        for _ in range(2):  # a second time changes nothing
            done = subprocess.run(
                ["sh", "-eu", "-c", "\n".join(commands())], env=env, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["train", "train-worker1"]
        config = (Path(env["HOME"]) / ".ssh" / "config").read_text()
        assert config.splitlines()[0] == "Include skypilot-train.conf"
        assert (config.count("Include skypilot-train.conf"), "Host own" in config) == (1, True)
        notebook.run(pool)
        notebook.run("%%sky_broadcast -o seen\nimport skymagic as sky; sky.instance_info().node")
        assert notebook.value("seen") == [0, 1]
        notebook.run("%sky_down")
        known = Path(env["HOME"]) / ".ssh" / "known_hosts.train"
        lines = known.read_text().splitlines()
        known.write_text(
            f"{lines[0]}\ntrain-worker1 {lines[0].partition(' ')[2]}\n"
        )  # as if another machine answered there
        assert "train-worker1" in notebook.fail(pool).text
        assert notebook.value("[f.code for f in __import__('sys').last_value.failures]") == [
            "host-key-changed"
        ]
