"""Slurm's programs on a login node: where they are found, what they are told, and how many connections lead there."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import skymagic as sky
from skymagic.errors import HostError, ProvisionError, RequestError
from skymagic.plan import planning
from skymagic.plan.requests import PoolRequest
from skymagic.providers import slurm, slurm_jobs
from skymagic.providers.slurm_jobs import LoginNode
from skymagic.ssh.process import Process
from skymagic.ssh.programs import HostPrograms
from tests.lab.hosts import Hosts, loopback, masters
from tests.lab.notebook import opened, seen
from tests.lab.raising import raises
from tests.lab.slurm import cluster

PROGRAM = """#!/bin/sh
echo "$0 $*"
env | grep -c TOKEN
cat
"""


SALLOC = """#!/bin/sh
echo "salloc: Pending job allocation 77
salloc: Granted job allocation 77"
echo $$ >"$HOME/pid"
exec sleep 600
"""


def test_login_options_are_parsed() -> None:
    there = sky.Slurm(login="me@cluster", client="openssh")
    assert dict(there.fields) == {"login": "me@cluster", "ssh": "openssh"}
    assert (
        slurm._meaningless_options(PoolRequest(provider="slurm", login="me@cluster", ssh="openssh"))
        == []
    )
    assert "--login" in slurm._meaningless_options(PoolRequest(provider="slurm", ssh="openssh"))[0]
    request = PoolRequest(login="me@cluster", ssh="openssh")
    assert [
        mistake.partition(" is for")[0] for mistake in planning._meaningless_options(request)
    ] == [
        "--ssh",
        "--login",
    ]
    with pytest.raises(RequestError, match="one login"):
        HostPrograms("login[1-2]", "auto", "sbatch", "")


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """A login node that lets two processes run on a connection, and where only a login shell finds Slurm."""
    programs = tmp_path / "opt" / "slurm"
    programs.mkdir(parents=True)
    for name in ("sbatch", "srun"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    (programs / "salloc").write_text(SALLOC)
    (programs / "salloc").chmod(0o755)
    for name in ("sh", "env", "cat", "grep", "sleep", "setsid", "mktemp", "sed", "head", "rm"):
        (tmp_path / "opt" / name).symlink_to(shutil.which(name) or "")
    shell = tmp_path / "opt" / "shell"
    shell.write_text('#!/bin/sh\n. "$HOME/.profile"\nexec sh -c "$2"\n')
    shell.chmod(0o755)
    env = {
        "SHELL": str(shell),
        "PATH": str(tmp_path / "opt"),
        "API_TOKEN": "of the login node",
        "SLURM_CONF": "/etc/here.conf",
    }
    with (
        loopback(
            tmp_path / "hosts", 1, env=env, options=["MaxSessions 2"], names=["login"]
        ) as made,
        masters(made) as client,
    ):
        for name, value in client.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def login(hosts: Hosts, tmp_path: Path) -> Iterator[HostPrograms]:
    (hosts[0].home / ".profile").write_text(
        f"echo welcome; export PATH={tmp_path}/opt/slurm:$PATH\n"
    )
    made = HostPrograms("login", "auto", "sbatch", slurm_jobs.KEPT)
    made.open(None)
    yield made
    made.close()


@pytest.mark.needs("sshd")
def test_a_login_shell_knows_where_they_are(login: HostPrograms, tmp_path: Path) -> None:
    text = "#!/bin/sh\n#SBATCH --comment='a \"b\" $HOME `c`'\n"
    done = login.run("sbatch", "--comment=a 'b' $HOME", text=text)
    assert (
        done.stdout == f"{tmp_path}/opt/slurm/sbatch --comment=a 'b' $HOME\n0\n{text}\n"
    )  # no token reaches a job
    assert "/etc/here.conf" in login.run("sh", "-c", "echo $SLURM_CONF").stdout


@pytest.mark.needs("sshd")
def test_a_node_that_has_no_slurm(hosts: Hosts) -> None:
    (hosts[0].home / ".profile").touch()
    login = HostPrograms("login", "auto", "sbatch", slurm_jobs.KEPT)
    with raises(ProvisionError, "program-missing", r"--login: login .*sbatch"):
        login.open(None)
    login.close()


def wait_until_lost(login: HostPrograms) -> None:
    """Until it has noticed that its connections have ended."""
    connections: Any = login._connections
    for connection in connections:
        connection._transport.join(5.0)


@pytest.mark.needs("sshd")
def test_connections_are_opened_as_they_are_needed(hosts: Hosts, login: HostPrograms) -> None:
    words = ["sh", "-c", 'exec /bin/sh -c "$0"']
    variables = {"MINE": "it's $HOME"}
    running = [
        Process(
            login.channel(words, variables, 5.0),
            "n1",
            'echo "$MINE"; cat',
            lambda pid: None,
            lambda: True,
            "",
        )
        for _ in range(5)
    ]
    assert [one.read() for one in running] == [b"it's $HOME\n"] * 5
    assert len(login._connections) == 3
    # lost ones are replaced, and what ran over them has ended
    hosts[0].kill_sessions()
    assert [one.read() for one in running] == [b""] * 5
    for one in running:
        one.close()
    wait_until_lost(login)
    assert login.run("sh", "-c", "echo on").stdout == "on\n"
    hosts[0].stop()
    hosts[0].kill_sessions()
    wait_until_lost(login)
    failed = login.run("squeue")
    assert (failed.returncode, "refused" in failed.stderr) == (-1, True)
    with pytest.raises(HostError):
        login.channel(words, {}, 5.0)
    hosts[0].start()


@pytest.mark.needs("sshd")
def test_salloc_outlives_the_connection_that_it_was_asked_by(
    hosts: Hosts, login: HostPrograms
) -> None:
    words = slurm_jobs.allocation({"nodes": "2", "output": "/dev/null"}, "lab-1")
    assert LoginNode(login).submit(words, "", "lab-1") == "77"
    salloc = psutil.Process(int((hosts[0].home / "pid").read_text()))
    assert salloc.is_running()
    login.close()
    hosts[0].kill_sessions()
    with pytest.raises(psutil.TimeoutExpired):
        salloc.wait(0.5)
    salloc.kill()
    salloc.wait()


@pytest.mark.needs("slurm", "root", "sshd")
def test_pool_of_a_login_node_is_attached_and_ended_elsewhere(
    tmp_path: Path,
) -> None:
    """One notebook runs on the login node, the other one on a laptop that reaches it by SSH."""
    for folder in ("slurm", "there", "here"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bin").mkdir()
    pool = f"%sky_pool lab --provider slurm --time 10m --python {sys.executable}"
    with (
        cluster(tmp_path / "slurm", 1) as slurm,
        loopback(tmp_path / "hosts", 1, env=slurm.env, names=["login"]) as hosts,
        masters(hosts) as client,
    ):
        home = {"HOME": str(hosts[0].home), "XDG_STATE_HOME": ""}
        laptop = {
            **client,
            "PATH": str(tmp_path / "bin"),
            "XDG_STATE_HOME": str(tmp_path / "state"),
        }
        with (
            opened(tmp_path / "there", env={**slurm.env, **home}) as there,
            opened(tmp_path / "here", env=laptop) as notebook,
        ):
            there.run(pool)
            there.run("%%sky_broadcast\nkept = 7")
            ((number, _, job_id),) = slurm.jobs()
            place = "--provider slurm --login login"
            listed = notebook.run(f"%sky_status {place}").text
            assert f"pool 'lab' ({job_id}): Slurm job {number} on" in listed
            assert "--take-over" in notebook.fail(f"%sky_attach lab {place}").text
            there.restart()
            notebook.run(f"%sky_attach {place}")
            assert seen(notebook, "kept") == [7]
            assert "'lab'" not in there.run("%load_ext skymagic\n%sky_attach").text
            # what this notebook leaves in its turn is ended through the login node, by its record and by Slurm's list
            notebook.restart()
            notebook.run("%load_ext skymagic\n%sky_down lab")
            slurm.wait_empty()
            there.run(pool)
            there.restart()
            assert "pool 'lab' (lab-" in notebook.run(f"%sky_down lab {place}").text
            slurm.wait_empty()
