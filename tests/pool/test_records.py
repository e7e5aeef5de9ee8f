"""Records of pools on other machines: written, read by other versions, told where a notebook has gone, and forgotten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from skymagic.api.command import main
from skymagic.errors import PoolError
from skymagic.plan.planning import plan
from skymagic.plan.plans import Inventory
from skymagic.plan.requests import PoolRequest
from skymagic.plan.units import rough_duration
from skymagic.pool import keys, records
from skymagic.pool.keys import PoolKey
from skymagic.pool.records import PoolRecord
from skymagic.wire.record import identity
from tests.lab.golden import Golden
from tests.lab.raising import raises

KEY = PoolKey(plan(PoolRequest(nodes=1), Inventory("laptop", 8, 32.0)), ("secret",), (), 1)

CLAIMS = """
import sys
from skymagic.errors import PoolError
from skymagic.pool import records
print("ready", flush=True)
sys.stdin.readline()
try:
    records.claim(records.PoolRecord("lab", "lab-" + sys.argv[1], "aws", ("2 machines",), "/home/ann"))
    print("rents", flush=True)
except PoolError as problem:
    print(problem, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "skymagic" / "pools"


def record(job: str = "lab-0a1b2c3d", **changes: object) -> PoolRecord:
    hosts = ("gpu1", "gpu2")
    made = PoolRecord("lab", job, "ssh", hosts, "/home/ann/work", started=1000.0, held=1000.0)
    return replace(made, **changes)  # type: ignore[arg-type]


def with_key() -> PoolRecord:
    return record(key=KEY.saved())


def of_the_dead() -> str:
    """The identity of a process that has ended."""
    code = "from skymagic.wire.record import identity; print(identity())"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_written_read_and_removed(state: Path) -> None:
    one, two = record(started=2000.0), record("lab-00000002")
    records.write(one)
    records.write(two)
    assert records.readable_records() == [two, one]
    assert {path.stat().st_mode & 0o777 for path in state.iterdir()} == {0o600}
    assert state.stat().st_mode & 0o777 == 0o700
    records.remove(one.job_id)
    records.remove(one.job_id)
    assert records.readable_records() == [two]


def test_pool_that_ended_with_its_kernel_leaves_a_note(
    golden: Golden, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = of_the_dead()
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("first", "main")):
        made = record(f"{name}-{number}", name=name, provider="local", folder=str(tmp_path))
        records.note_local(replace(made, process=gone))
    assert [path.name for path in state.glob("*.json")] == ["main-1.json"], "the last one alone"
    assert records.readable_records() == []
    assert records.ended_with_kernel("first") == ""
    golden(records.ended_with_kernel())
    (tmp_path / "another").mkdir()
    monkeypatch.chdir(tmp_path / "another")
    assert records.ended_with_kernel() == ""
    records.forget_local("main")
    monkeypatch.chdir(tmp_path)
    assert records.ended_with_kernel("main")
    records.forget_local("main")
    assert records.ended_with_kernel() == ""


def test_damaged_records_and_those_of_other_versions(state: Path) -> None:
    records.write(record())
    values = json.loads((state / "lab-0a1b2c3d.json").read_text())
    (state / "lab-00000002.json").write_text(
        json.dumps({**values, "job_id": "lab-00000002", "colour": "red"})
    )
    for number, text in enumerate(
        ["", "{", "[]", '{"name": "x"}', json.dumps({**values, "hosts": 3})]
    ):
        (state / f"damaged-{number}.json").write_text(text)
    assert [one.job_id for one in records.readable_records()] == ["lab-0a1b2c3d", "lab-00000002"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_key_of_another_user_is_not_used(golden: Golden, state: Path) -> None:
    records.write(with_key())
    assert keys.read("lab-0a1b2c3d") == KEY
    os.chown(state / "lab-0a1b2c3d.json", 65534, -1)
    with golden.raises(PoolError):
        keys.read("lab-0a1b2c3d")


def test_a_key_that_is_not_here_has_its_own_code(state: Path) -> None:
    with raises(PoolError, "key-missing", match="lab-0a1b2c3d"):
        keys.read("lab-0a1b2c3d")


def test_a_key_that_others_can_read_is_not_used(state: Path) -> None:
    records.write(with_key())
    (state / "lab-0a1b2c3d.json").chmod(0o640)
    with raises(PoolError, "key-exposed", match="chmod 600"):
        keys.read("lab-0a1b2c3d")
    assert [one.name for one in records.readable_records()] == ["lab"], "it is listed"


def test_a_record_without_a_key_is_refused(state: Path) -> None:
    records.write(record())
    (state / "lab-0a1b2c3d.key").write_bytes(b"skymagic key 0.1.0")  # as it was once written
    with raises(PoolError, "key-missing", match="%sky_down lab-0a1b2c3d"):
        keys.read("lab-0a1b2c3d")


def test_key_is_never_shown(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = with_key()
    records.write(one)
    assert one.key is not None
    assert main(["pools", "--json"]) == main(["pools"]) == 0
    assert one.key.pickle not in capsys.readouterr().out + repr(one) + repr(one.key)


def test_a_key_is_saved_by_the_owner_alone(state: Path) -> None:
    key = with_key().key
    assert key is not None
    records.write(record())
    records.save_key("lab-0a1b2c3d", key)
    assert records.readable_records() == [with_key()]
    records.write(record(process="1 1 another"))
    records.save_key("lab-0a1b2c3d", key)
    assert records.readable_records() == [record(process="1 1 another")]
    records.hand_over(record())
    assert records.is_own("lab-0a1b2c3d")


def test_a_home_that_cannot_be_written_keeps_none(state: Path) -> None:
    state.parent.parent.mkdir(exist_ok=True)
    state.parent.write_text("not a folder")
    records.write(record())
    records.remove("lab-0a1b2c3d")
    assert records.readable_records() == []


def test_only_pools_of_dead_notebooks_are_listed(golden: Golden) -> None:
    gone = of_the_dead()
    pid, ticks, boot = record().process.split()
    there = [record(), record(process=gone, machine="another")]
    left = [
        record(process=gone),
        record(process=f"{pid} {ticks} before-the-boot"),
        record(process="nonsense"),
    ]
    if sys.platform == "linux":
        left.append(
            record(process=f"{pid} {int(ticks) - 1} {boot}")
        )  # an earlier process of the same number
    assert records.reminders(there) == []
    assert len(records.reminders([*there, *left])) == len(left)
    golden(records.reminders(left[:1]))


@pytest.mark.skipif(
    sys.platform != "linux", reason="the system does not tell a process from a later one"
)
def test_a_notebook_that_its_server_has_not_waited_for_is_gone() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        one = record(process=identity(process.pid))
        assert not records.is_left(one)
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert records.is_left(one)


def test_a_clock_that_was_changed_changes_nothing() -> None:
    """Who has a pool is told by processes and boots, not by times."""
    later = record("lab-00000002", started=time.time() + 1e7)
    records.write(later)
    records.write(record())
    assert [one.job_id for one in records.readable_records()] == ["lab-0a1b2c3d", "lab-00000002"]
    assert not records.is_left(later)
    assert records.is_left(replace(later, process=of_the_dead()))
    assert rough_duration(-1e7) == "0s"


WRITES = """
from skymagic.pool import records
from skymagic.pool.records import PoolRecord
print("ready", flush=True)
number = 0
while True:
    number += 1
    records.write(PoolRecord("lab", "lab-0a1b2c3d", "ssh", ("gpu" * 20_000, str(number)), "/home"))
"""


def test_two_notebooks_write_at_once_and_are_killed_amidst_it(state: Path) -> None:
    """A record is there as one of them has written it, whole."""
    for _ in range(2):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITES], stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        seen = set[str]()
        while len(seen) < 20:
            seen |= {host for one in records.readable_records() for host in one.hosts[1:]}
        for writer in writers:
            writer.kill()
            writer.communicate()
        assert [one.job_id for one in records.readable_records()] == ["lab-0a1b2c3d"]
    records.remove("lab-0a1b2c3d")
    assert list(state.iterdir()) == []


def test_pools_not_running_on_their_hosts_are_forgotten() -> None:
    left = record(process=of_the_dead())
    alive, elsewhere = (
        record("lab-00000002"),
        record("lab-00000003", process=left.process, hosts=("gpu1", "gpu3")),
    )
    for one in (left, alive, elsewhere):
        records.write(one)
    records.forget(["gpu1", "gpu2"], ["lab-0a1b2c3d"])
    assert len(records.readable_records()) == 3  # it runs
    records.forget(["gpu1", "gpu2"], [])
    assert {one.job_id for one in records.readable_records()} == {"lab-00000002", "lab-00000003"}


def test_of_two_notebooks_at_once_one_rents() -> None:
    both = [
        subprocess.Popen([sys.executable, "-c", CLAIMS, str(each)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for each in (1, 2)
    ]  # fmt: skip
    pipes = [
        (one.stdin, one.stdout) for one in both if one.stdin is not None if one.stdout is not None
    ]
    assert [answers.readline() for _, answers in pipes] == ["ready\n"] * 2

    def go(orders: IO[str]) -> None:
        orders.write("go\n")
        orders.flush()

    for orders, _ in pipes:
        go(orders)
    said = [answers.readline() for _, answers in pipes]
    for one in both:
        one.communicate("end\n", timeout=30)
    assert sorted(line.startswith("rents") for line in said) == [False, True]
    assert any("--take-over" in line for line in said)
