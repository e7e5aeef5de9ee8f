"""SECURITY.md: what other users of this machine can read of a kernel's output, by Jupyter's default and with the line that the page gives."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager
from traitlets.config import Config

PAGE = Path(__file__).parents[2] / "SECURITY.md"
NOBODY = 65534
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
def test_documented_setting_hides_output_from_other_users(short_path: Path) -> None:
    """By default, Jupyter lets everybody on the machine read it."""
    (line,) = re.findall(r"^c\.KernelManager\..*$", PAGE.read_text(), re.MULTILINE)
    with kernel(short_path, line) as manager:
        assert not heard_by_another_user(manager, waits=False)
    with kernel(short_path, "") as manager:
        assert heard_by_another_user(manager, waits=True)
