"""What other users of this machine read of the kernel's own output, by TCP and by Jupyter's line for ipc; and the note about it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from jupyter_client.manager import KernelManager
from traitlets.config import Config

from skymagic.magics import exposure

ANOTHER, NOBODY = 4242, 65534
LISTEN = """
import json, os, sys, zmq
address, nobody = json.load(sys.stdin)
context = zmq.Context()
os.setgroups([]), os.setgid(nobody), os.setuid(nobody)
hearing = context.socket(zmq.SUB)
hearing.subscribe(b"")
hearing.connect(address)
print("connected", flush=True)
heard = []
while hearing.poll(60_000 if not heard else 500):
    heard.append(b"".join(hearing.recv_multipart()).decode(errors="replace"))
    if "a secret word" in heard[-1]:
        break
print(json.dumps("".join(heard)))
"""
DEADLINE = 60.0


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder of this user's alone, in which a socket's path has room."""
    path = Path(tempfile.mkdtemp(prefix="sky-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def kernel(folder: Path, line: str) -> Iterator[KernelManager]:
    """A kernel of Jupyter's own, configured by this line; its home is in `folder`."""
    config = Config()
    exec(line, {"c": config})
    env = {**os.environ, "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700, exist_ok=True)
    manager = KernelManager(config=config, connection_file=str(runtime / "kernel-1.json"))
    manager.start_kernel(env=env, cwd=str(folder))
    try:
        yield manager
    finally:
        manager.shutdown_kernel(now=True)


def printed(manager: KernelManager, code: str) -> str:
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=DEADLINE)
        texts: list[str] = []

        def hear(message: dict[str, dict[str, str]]) -> None:
            texts.append(message["content"].get("text", ""))

        assert (
            client.execute_interactive(code, output_hook=hear, timeout=DEADLINE)["content"][
                "status"
            ]
            == "ok"
        )
        return "".join(texts)
    finally:
        client.stop_channels()


def heard_by_another_user(manager: KernelManager, *, waits: bool) -> bool:
    """Whether another user reads at the kernel's own port what it prints; where he will, it may take a while."""
    listening = subprocess.Popen(
        [sys.executable, "-c", LISTEN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    with listening:
        assert listening.stdin is not None
        assert listening.stdout is not None
        listening.stdin.write(json.dumps([manager._make_url("iopub"), NOBODY]))
        listening.stdin.close()
        listening.stdin = None
        assert listening.stdout.readline() == "connected\n"
        for _ in range(10):  # a subscription takes its time
            assert printed(manager, "print('a secret', 'word')") == "a secret word\n"
            if listening.poll() is not None:
                break
            time.sleep(0.1)  # another process: nothing tells when it is there
        if not waits:
            listening.kill()
        return "a secret word" in listening.stdout.read()


@pytest.mark.needs("root")
def test_where_other_users_are_they_read_a_kernels_own_port_and_the_note_is_shown_once(
    short_path: Path,
) -> None:
    """Jupyter's default lets everybody on the machine read; the line that the note shows does not."""
    load = "%reload_ext skymagic"
    with subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, user=ANOTHER
    ) as other:  # is there until this block ends
        with kernel(short_path, exposure.LINE) as manager:
            assert exposure.LINE not in printed(manager, load)
            assert not heard_by_another_user(manager, waits=False)
        with kernel(short_path, "") as manager:
            assert exposure.LINE in printed(manager, load)
            assert exposure.LINE not in printed(manager, load)
            assert heard_by_another_user(manager, waits=True)
        with kernel(short_path, "") as manager:
            assert exposure.LINE not in printed(manager, load)
        assert other.poll() is None


def test_who_else_is_here(tmp_path: Path) -> None:
    """Services and one's own processes do not count."""
    (tmp_path / "1").mkdir()
    (tmp_path / "meminfo").mkdir()
    assert not exposure.others_are_here(tmp_path)
    if os.geteuid() == 0:
        for uid, counts in [
            (0, False),
            (33, False),
            (61_500, False),
            (NOBODY, False),
            (1000, True),
            (1_200_345, True),
        ]:
            os.chown(tmp_path / "1", uid, -1)
            assert exposure.others_are_here(tmp_path) is counts, uid
        os.chown(tmp_path / "1", 0, -1)
        os.chown(tmp_path / "meminfo", 1000, -1)
        assert not exposure.others_are_here(tmp_path)


def test_a_look_ends_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pid in range(1, 5):
        (tmp_path / str(pid)).mkdir()
    looks = iter(range(10))
    monkeypatch.setattr(time, "thread_time", lambda: exposure.MOST_SECONDS * next(looks) / 2)
    assert not exposure.others_are_here(tmp_path)
    assert next(looks) == 4, "it looked at three processes of four"


@pytest.mark.parametrize(
    ("app", "is_readable"),
    [
        (None, False),
        (SimpleNamespace(transport="ipc"), False),
        (SimpleNamespace(transport="tcp"), True),  # ipykernel 6
        (SimpleNamespace(transport="tcp", curve_secretkey=None), True),
        (SimpleNamespace(transport="tcp", curve_secretkey=b"k"), False),
    ],
)
def test_which_kernels_can_be_read(app: object, is_readable: bool) -> None:
    assert exposure.is_readable(app) is is_readable
