"""What skymagic keeps on a host's disk: listed and removed by a real shell, in a home of the test's own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.bootstrap.running import (
    DAY,
    Disk,
    DiskItem,
    Running,
    clean_script,
    disk_script,
    parse_clean,
    parse_disk,
    removable,
)
from skymagic.wire.record import RECORD, AgentRecord, identity

NOW = 1_000_000_000.0


def sh(script: str, home: Path) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home)}
    return subprocess.run(
        ["/bin/sh", "-s"], input=script, env=env, capture_output=True, text=True, check=True
    ).stdout


def environment(home: Path, name: str, days: float, ready: bool = True) -> Path:
    """One that was used so many days ago."""
    made = home / ".skymagic/env" / name
    (made / "lib/python3.11/site-packages/torch-2.13.0.dist-info").mkdir(parents=True)
    (made / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.7\n")
    (made / "payload").write_bytes(b"x" * 200_000)
    stamp = made / ".ready" if ready else made
    stamp.touch()
    os.utime(stamp, (time.time() - days * DAY,) * 2)
    return made


def code(home: Path, name: str, days: float) -> Path:
    made = home / ".skymagic/code" / name
    made.mkdir(parents=True)
    os.utime(made, (time.time() - days * DAY,) * 2)
    return made


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """With old and new things, one of them in use by an agent that lives."""
    home = tmp_path / "a home"
    environment(home, "old", 40)
    environment(home, "new", 2)
    environment(home, "used", 50)
    environment(home, "half", 0.1, ready=False)
    environment(home, "cut-off", 60, ready=False)
    (home / ".skymagic/env/new.lock").touch()
    code(home, "c1", 31)
    code(home, "c2", 1)
    run = home / ".skymagic/run" / f"skymagic-daemon-{os.getuid()}-lab-0a1b2c3d-0"
    run.mkdir(parents=True, mode=0o700)
    with subprocess.Popen(["sleep", "1000"]) as agent:
        uses = (str(home / ".skymagic/env/used"),)
        record = AgentRecord(
            "0.1", "lab", "lab-0a1b2c3d", 0, 1, "ann@laptop", "gpu1", "b", agent.pid, 1.0, uses=uses
        )
        (run / "record").write_bytes(f"{identity(agent.pid)}\n".encode() + RECORD.encode(record))
        yield home
        agent.kill()


def names(home: Path) -> set[str]:
    """What is on the disk."""
    folder = home / ".skymagic"
    return {f"{kind}/{path.name}" for kind in ("env", "code") for path in (folder / kind).glob("*")}


def test_disk_items_are_listed_with_sizes(home: Path) -> None:
    disk = parse_disk(sh(disk_script(), home))
    found = {item.path: item for item in disk.items}
    envs = {f"env/{name}" for name in ("old", "new", "used", "half", "cut-off")}
    assert set(found) == {*envs, "code/c1", "code/c2"}
    assert disk.folder == str(home / ".skymagic")
    assert disk.free > 0
    new = found["env/new"]
    assert new.contents == "Python 3.11, torch 2.13.0"
    assert 200_000 <= new.nbytes < 400_000
    assert abs(disk.running.clock - new.used - 2 * DAY) < 60
    assert [item.name for item in disk.items if not item.ready] == ["cut-off", "half"]
    assert disk.users(found["env/used"]) == ["lab"]
    assert disk.users(new) == []


def test_unused_files_are_removed(home: Path) -> None:
    before = names(home)
    disk = parse_disk(sh(disk_script(), home))
    gone = parse_clean(sh(clean_script(removable(disk, include_all=False)), home))
    assert gone == {"env/old", "env/cut-off", "code/c1"}
    assert before - names(home) == {"env/old", "env/cut-off", "code/c1"}
    assert not list((home / ".skymagic").glob(".removing*"))


def test_all_files_that_are_not_in_use_are_removed(home: Path) -> None:
    disk = parse_disk(sh(disk_script(), home))
    gone = parse_clean(sh(clean_script(removable(disk, include_all=True)), home))
    assert gone == {"env/old", "env/new", "env/cut-off", "code/c1", "code/c2"}
    assert names(home) == {"env/used", "env/half", "env/new.lock"}


def test_an_empty_home(tmp_path: Path) -> None:
    disk = parse_disk(sh(disk_script(), tmp_path))
    assert disk.items == ()
    assert parse_clean(sh(clean_script(removable(disk, include_all=True)), tmp_path)) == set()


@pytest.mark.parametrize(
    "name", ["$(touch hacked)`touch hacked`;'\"", "with blanks", "$HOME", "-rf", "a\nb"]
)
def test_files_with_other_names_are_not_removed(tmp_path: Path, name: str) -> None:
    environment(tmp_path, name, 40)
    environment(tmp_path, "0123-Linux-x86_64-gpu1.lab", 40)
    disk = parse_disk(sh(disk_script(), tmp_path))
    gone = parse_clean(sh(clean_script(removable(disk, include_all=False)), tmp_path))
    assert (
        {"env/0123-Linux-x86_64-gpu1.lab"}
        <= set(gone)
        <= {"env/0123-Linux-x86_64-gpu1.lab", "env/-rf"}
    )
    assert not list(tmp_path.rglob("hacked"))


@pytest.mark.parametrize(
    ("kinds", "every", "chosen"),
    [
        (("python", "cache"), False, set()),
        (("python", "cache"), True, {"python", "cache"}),
        (("python", "cache", "env"), True, {"cache"}),
    ],
)
def test_interpreters_stay_with_the_last_environment(
    kinds: tuple[str, ...], every: bool, chosen: set[str]
) -> None:
    items = tuple(DiskItem(kind, 1, NOW - 90 * DAY, kind != "env", kind) for kind in kinds)
    fresh = tuple(
        DiskItem(item.kind, 1, NOW, item.ready, item.name) if item.kind == "env" else item
        for item in items
    )
    assert {one.kind for one in removable(Disk("/f", 1, fresh, Running(NOW, ())), every)} == chosen
