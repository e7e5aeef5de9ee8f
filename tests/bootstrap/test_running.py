"""The sh that finds and ends agents, run by a real shell in folders of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.bootstrap.running import end_script, list_script, parse_end, parse_list
from skymagic.wire import processes
from skymagic.wire.record import RECORD, AgentRecord, identity
from tests.lab.golden import Golden

UID = os.getuid()


def record(job: str = "lab-0a1b2c3d", node: int = 0, pid: int = 1) -> AgentRecord:
    return AgentRecord(
        "0.1", "lab", job, node, 2, "ann@laptop", "gpu1", "boot", pid, 1000.0, ranks={"0": 7}
    )


def left(
    folder: Path, job: str, node: int, who: str, line: bytes | None = None, mode: int = 0o700
) -> Path:
    """What an agent has written."""
    home = folder / f"skymagic-daemon-{UID}-{job}-{node}"
    home.mkdir(parents=True)
    pid = int(who.split()[0])
    (home / "record").write_bytes(
        f"{who}\n".encode() + (line or RECORD.encode(record(job, node, pid)))
    )
    home.chmod(mode)
    return home


def sh(script: str, folder: Path) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "TMPDIR": str(folder)}
    return subprocess.run(
        ["/bin/sh", "-s"],
        input=script,
        env=env,
        capture_output=True,
        text=True,
        check=True,
        errors="replace",
    ).stdout


def jobs(folder: Path) -> list[tuple[str, int]]:
    """The jobs found in this folder; /tmp, which the script reads too, may hold others'."""
    found = parse_list(sh(list_script(), folder)).records
    return sorted(
        (one.job_id, one.node) for one in found if one.pool == "lab" and one.boot == "boot"
    )


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a group, as an agent does."""
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        yield process
        process.kill()


def test_agents_that_live_are_found(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    left(tmp_path, "lab-0a1b2c3d", 1, identity(sleeper.pid))
    left(tmp_path / "home/.skymagic/run", "lab-0a1b2c3d", 0, identity())
    assert jobs(tmp_path) == [("lab-0a1b2c3d", 0), ("lab-0a1b2c3d", 1)]


def test_removed_process_is_not_found(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    pid, ticks, boot = identity(sleeper.pid).split()
    left(tmp_path, "lab-00000001", 0, f"{2**22 - 1} {ticks} {boot}")
    left(tmp_path, "lab-00000003", 0, f"{pid} {ticks} 0000-another-boot")
    if sys.platform == "linux":
        left(
            tmp_path, "lab-00000002", 0, f"{pid} {int(ticks) + 1} {boot}"
        )  # the number is another process's now
    assert jobs(tmp_path) == []


def test_folders_of_others_are_passed_over(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    elsewhere = left(tmp_path / "elsewhere", "lab-00000001", 0, identity(sleeper.pid))
    (tmp_path / elsewhere.name).symlink_to(elsewhere)
    assert jobs(tmp_path) == []
    if UID == 0:
        theirs = left(tmp_path, "lab-00000002", 0, identity(sleeper.pid))
        os.chown(theirs, 12345, 12345)
        assert jobs(tmp_path) == []


def test_records_of_other_versions(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    more = RECORD.encode(record("lab-00000001")).replace(b'"pool"', b'"colour":"red","pool"')
    left(tmp_path, "lab-00000001", 0, identity(sleeper.pid), more)
    left(
        tmp_path,
        "lab-00000002",
        0,
        identity(sleeper.pid),
        b'["AgentRecord",{"job":"lab-00000002"}]\n',
    )
    left(tmp_path, "lab-00000003", 0, identity(sleeper.pid), b"\x80$(touch hacked)`touch hacked`\n")
    assert jobs(tmp_path) == [("lab-00000001", 0)]
    assert parse_list(sh(list_script(), tmp_path)).unread >= 2
    assert not list(tmp_path.rglob("hacked"))


def test_one_job_is_ended_and_no_other(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as other:
        left(tmp_path, "lab-00000001", 0, identity(sleeper.pid))
        left(tmp_path, "lab-00000001x", 0, identity(other.pid))
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
        script = end_script(["lab-00000001"], "`skymagic down` on desk")
        with subprocess.Popen(
            ["/bin/sh", "-c", script], stdout=subprocess.PIPE, env=env, text=True
        ) as ending:
            assert (
                sleeper.wait(30) == -15
            )  # a process is gone when its parent, this test, has waited for it
            out, _ = ending.communicate(timeout=30)
        assert parse_end(out) == (1, 0)
        assert other.poll() is None
        other.kill()


def test_the_daemon_of_an_agent_ends_with_it(tmp_path: Path) -> None:
    keeps = "import subprocess; agent = subprocess.Popen(['sleep', '1000']); print(agent.pid, flush=True); agent.wait(); input()"
    daemon = [sys.executable, "-c", keeps, processes.ATTACH]
    with subprocess.Popen(
        daemon, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as process:
        assert process.stdout is not None
        left(tmp_path, "lab-00000001", 0, identity(int(process.stdout.readline())))
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
        script = end_script(["lab-00000001"], "`skymagic down` on desk")
        subprocess.run(
            ["/bin/sh", "-c", script], stdout=subprocess.PIPE, env=env, text=True, check=True
        )
        assert process.wait(30) == -15


def test_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    with subprocess.Popen(
        [sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"deaf\n"
        left(tmp_path, "lab-00000001", 0, identity(process.pid))
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
        script = end_script(["lab-00000001"], "`skymagic down` on desk")
        assert "[ $n -lt 50 ]" in script, "ten seconds"
        script = script.replace("[ $n -lt 50 ]", "[ $n -lt 5 ]")
        with subprocess.Popen(
            ["/bin/sh", "-c", script], stdout=subprocess.PIPE, env=env, text=True
        ) as ending:
            assert process.wait(60) == -9
            assert parse_end(ending.communicate(timeout=30)[0]) == (1, 0)


def test_truncated_shell_output_is_reported(golden: Golden) -> None:
    with golden.raises(ValueError):
        parse_list("@sky clock 12\n")
