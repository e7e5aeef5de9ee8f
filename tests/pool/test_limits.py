"""Pools where something is short: open files, shared memory, a home that cannot be written; and where the clock is set."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.golden import Golden

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import resource, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()

def cell(text):
    done = shell.run_cell(text)
    done.raise_error()

def fails(text):
    done = shell.run_cell(text)
    return str(done.error_in_exec or done.error_before_exec)

cell("%load_ext skymagic")
cell("%config SkyMagic.view_after = 600.0")
"""


def script(folder: Path, body: str, *before: str, apart: bool = False) -> str:
    """What a script prints that runs IPython cells in a shell where these commands come first.

    Args:
        apart: let the shell have mounts of its own.
    """
    path = folder / "script.py"
    path.write_text(SCRIPT + body)
    last = "exec " + shlex.join([sys.executable, "-P", str(path)])
    done = subprocess.run(
        [*(["unshare", "-Urm"] if apart else []), "/bin/sh", "-ec", "\n".join([*before, last])],
        cwd=folder, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / ".ipython")},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


LIMIT = "%%sky_broadcast -o limits\nimport resource\nresource.getrlimit(resource.RLIMIT_NOFILE)[0]"


def test_open_file_limit_is_raised_to_the_maximum(tmp_path: Path) -> None:
    body = f"""
cell("%sky_pool --ranks 2")
cell({LIMIT!r})
print("at work:", shell.user_ns["limits"])
cell("%sky_down")
"""
    assert "at work: [2000, 2000]" in script(tmp_path, body, "ulimit -Sn 140; ulimit -Hn 2000")


def test_too_few_open_files_are_reported_before_the_start(golden: Golden, tmp_path: Path) -> None:
    body = "print(fails('%sky_pool --ranks 2'))\nprint(fails('%sky_pool --ranks 100 -y'))"
    said = script(tmp_path, body, "ulimit -n 140")
    golden.line(said, "2 ranks ", " 144 ")
    golden.line(said, "100 ranks ", " 830 ")


def test_a_clock_that_is_set_ends_no_pool(tmp_path: Path) -> None:
    """The notebook asks for its limits when its agent is gone: had they been over, that were the reason."""
    body = """
import os, signal, time
cell("pool = %sky_pool --ranks 1 --max-lifetime 1h --idle 1h")
true = time.time
time.time = lambda: true() + 100_000
os.kill(shell.user_ns["pool"].pool.resources.agents._links[0]._transport._child.pid, signal.SIGKILL)
print(fails("%%sky_broadcast\\n1"))
cell("%sky_status --cost")
cell("%sky_restart")
cell("%%sky_broadcast -o seen\\n1")
print("seen:", shell.user_ns["seen"])
cell("%sky_down")
"""
    said = script(tmp_path, body)
    assert "SIGKILL" in said
    assert "max-lifetime" not in said
    assert "1d" not in said
    assert "seen: [1]" in said


@pytest.mark.needs("mounts")
def test_little_shared_memory_and_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    body = """
import os
assert not os.access(os.path.expanduser("~"), os.W_OK)
cell("import numpy\\nbig = numpy.ones(12_000_000)")
cell("%sky_pool --ranks 2")
cell("%%sky_broadcast -o back\\nbig[0] = 5\\nbig")
print("came back:", [float(each.sum()) for each in shell.user_ns["back"]])
cell("%sky_down")
"""
    home = shlex.quote(str(tmp_path / "home"))
    before = (
        f"mount --bind {home} {home}; mount -o remount,ro,bind {home} {home}; export HOME={home}"
    )
    said = script(tmp_path, body, "mount -t tmpfs -o size=64m none /dev/shm", before, apart=True)
    assert "came back: [12000004.0, 12000004.0]" in said
    assert re.search("96 MB .*/dev/shm: .*disk", said)
