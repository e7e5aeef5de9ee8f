"""The watchdog, as the real script on a real host: the command that ends the machine is the only thing that is replaced."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skymagic.kernels.daemon.rundir import make
from skymagic.providers.aws import boot
from skymagic.providers.aws.boot import WatchdogBounds
from skymagic.wire.record import RECORD, AgentRecord, identity
from tests.lab.golden import Golden
from tests.lab.hosts import Host, closing
from tests.lab.instances import start_watchdog

NEVER = WatchdogBounds(
    idle=9999, lifetime=9999, bootstrap=9999, absent_after=9999, margin=0, interval=0.2
)
END = 30.0
"""Seconds that an end may take which is due after one."""


class Watched:
    """A host with its watchdog, and an agent of which only the record is written."""

    def __init__(self, host: Host) -> None:
        self.host, self.job = host, f"dog-{uuid.uuid4().hex[:8]}"
        self.user = (
            os.environ.get("USER") or subprocess.check_output(["id", "-un"], text=True).strip()
        )
        self._dogs: list[subprocess.Popen[bytes]] = []
        self._agents: list[subprocess.Popen[bytes]] = []
        self.directory = make(f"{self.job}-0")

    def start(self, bounds: WatchdogBounds) -> subprocess.Popen[bytes]:
        dog = start_watchdog(boot.watchdog_script(self.job, self.user, bounds), self.host)
        self._dogs.append(dog)
        return dog

    def agent(self, busy_since: float = 0.0, idle_since: float = 0.0) -> subprocess.Popen[bytes]:
        """A process that lives, and its record."""
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self._agents.append(process)
        self.record(process.pid, busy_since, idle_since)
        return process

    def record(self, pid: int, busy_since: float = 0.0, idle_since: float = 0.0) -> None:
        record = AgentRecord(
            "1",
            "train",
            self.job,
            0,
            1,
            "ann@laptop",
            "h",
            "boot",
            pid,
            1.0,
            busy_since,
            idle_since,
        )
        path = Path(self.directory.record)
        part = path.with_suffix(".part")
        part.write_bytes(f"{identity(pid)}\n".encode() + RECORD.encode(record))
        part.replace(path)

    def reason(self) -> str:
        return (self.host.folder / "watchdog" / "reason").read_text()

    def close(self) -> None:
        for process in (*self._dogs, *self._agents):
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self.directory.remove()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    host = Host("h1", "127.0.0.2", tmp_path / "h1", tmp_path / "key.pub")
    with closing([host]):
        made = Watched(host)
        try:
            yield made
        finally:
            made.close()


def test_bootstrap_that_never_ends(watched: Watched) -> None:
    watched.start(replace(NEVER, bootstrap=1)).wait(END)
    assert "no agent within 1 s" in watched.reason()
    assert "shutdown -P now" in (watched.host.folder / "watchdog" / "off").read_text()


def test_lifetime_holds_at_work_too(watched: Watched) -> None:
    watched.agent(busy_since=5.0)
    watched.start(replace(NEVER, lifetime=1)).wait(END)
    assert "lifetime of 1 s is over" in watched.reason()


def test_idle(watched: Watched) -> None:
    watched.agent(idle_since=5.0)
    watched.start(replace(NEVER, idle=1)).wait(END)
    assert "no cell for 1 s" in watched.reason()


def test_a_running_cell_is_not_idle(watched: Watched) -> None:
    """It goes on for several times --idle; then it ends, and the machine some time later."""
    agent = watched.agent(busy_since=5.0)
    dog = watched.start(replace(NEVER, idle=1))
    with pytest.raises(subprocess.TimeoutExpired):
        dog.wait(4)
    watched.record(agent.pid, idle_since=6.0)
    dog.wait(END)
    assert "no cell" in watched.reason()


def test_an_agent_that_is_gone(watched: Watched) -> None:
    agent = watched.agent(busy_since=5.0)
    dog = watched.start(replace(NEVER, absent_after=1))
    with pytest.raises(subprocess.TimeoutExpired):
        dog.wait(2)
    agent.kill()
    agent.wait()
    dog.wait(END)
    assert "no agent for 1 s" in watched.reason()


def test_the_record_of_another_boot_is_no_agent(watched: Watched) -> None:
    agent = watched.agent(busy_since=5.0)
    path = Path(watched.directory.record)
    path.write_text(path.read_text().replace(identity(agent.pid).split()[2], "another-boot"))
    watched.start(replace(NEVER, bootstrap=1)).wait(END)
    assert "no agent within" in watched.reason()


@pytest.mark.needs("root")
@pytest.mark.parametrize("part", ["folder", "file"])
def test_the_record_of_another_user_is_no_agent(watched: Watched, part: str) -> None:
    """Anybody can name a process that lives in a folder of /tmp, and keep the machine from ending."""
    watched.agent(busy_since=5.0)
    path = Path(watched.directory.record)
    os.chown(path.parent if part == "folder" else path, 65534, -1)
    watched.start(replace(NEVER, bootstrap=1)).wait(END)
    assert "no agent within" in watched.reason()


def test_time_continues_when_the_script_restarts(watched: Watched) -> None:
    """systemd starts it again; the lifetime counts from the first time."""
    dog = watched.start(replace(NEVER, lifetime=3))
    with pytest.raises(subprocess.TimeoutExpired):
        dog.wait(1)
    dog.kill()
    dog.wait()
    state = watched.host.folder / "watchdog"
    begun = (state / "begun").read_text()
    again = start_watchdog(
        boot.watchdog_script(watched.job, watched.user, replace(NEVER, lifetime=3)), watched.host
    )
    try:
        again.wait(END)
    finally:
        again.kill()
    assert (state / "begun").read_text() == begun


def test_all_limits_restart_at_a_second_boot(watched: Watched) -> None:
    """A machine that was stopped boots again: its files are there, but for /run, and its agent is not."""
    agent = watched.agent(busy_since=5.0)
    dog = watched.start(replace(NEVER, lifetime=2, absent_after=1))
    dog.wait(END)
    path = Path(watched.directory.record)
    path.write_text(path.read_text().replace(identity(agent.pid).split()[2], "another-boot"))
    shutil.rmtree(watched.host.folder / "watchdog")
    again = watched.start(replace(NEVER, lifetime=30, bootstrap=3, absent_after=1))
    again.wait(END)
    assert "no agent within 3 s" in watched.reason(), (
        "neither what the first boot saw counts nor its time"
    )


def test_the_unit_is_enabled_and_the_timer_is_of_each_boot(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cloud-init carries out ``runcmd`` at the first boot alone, and ``bootcmd`` at each."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    text = boot.cloud_config(
        boot.make_keys("boots-1"), "boots-1", "ubuntu", 22, WatchdogBounds(1800, 7200)
    )
    config = json.loads(text.partition("\n")[2])
    assert ["systemctl", "enable", "--now", boot.WATCHDOG_UNIT] in config["runcmd"]
    golden(boot.watchdog_unit())
    assert config["bootcmd"][0] == ["systemd-run", "--on-active=7200s", "systemctl", "poweroff"]


def test_the_text_is_safe_and_small() -> None:
    hostile = "x'; touch /tmp/owned; '"
    text = boot.watchdog_script(hostile, "ubuntu", WatchdogBounds(1800, 86400))
    assert """job='x'"'"'; touch /tmp/owned; '"'"''""" in text
    assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0
    assert len(json.dumps(text)) < 6000
    assert not [word for word in ("aws ", "curl", "wget", "AWS_") if word in text]
