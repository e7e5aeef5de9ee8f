"""Output control of `skymagic.runtime`, looked at from outside the process, where it counts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import skymagic as sky
from skymagic.kernels.network import interfaces
from skymagic.runtime import info as runtime
from skymagic.runtime import rendezvous
from skymagic.runtime.info import InstanceInfo
from tests.unit.runtime.test_runtime import THIRD

ROOT = Path(__file__).resolve().parents[2]


def said(body: str, *, rank: int = 0, cwd: Path = ROOT) -> tuple[list[str], list[str]]:
    """The lines that a process of `rank` out of 4 writes to stdout and to stderr while it runs `body`."""
    info = InstanceInfo(node=rank, total_nodes=4, rank=rank, world_size=4)
    header = "import ctypes, os, subprocess, sys, threading, asyncio, skymagic as sky\n"
    environment = {**os.environ, "COMPUTE_POOL": info.to_json(), "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONUNBUFFERED", None)  # buffers are where text goes astray
    result = subprocess.run(
        [sys.executable, "-c", header + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines(), result.stderr.splitlines()


def test_enter_reaches_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPUTE_POOL", "")
    runtime.enter(THIRD)
    assert sky.instance_info() == THIRD
    code = (
        "import skymagic as sky; info = sky.instance_info(); print(info.rank, info.peers[1].addr)"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert child.stdout == "2 10.0.0.2\n"


# ---------------------------------------------------------------------------------------- who is heard


HEARD = {
    '"head"': [0], '"all"': [0, 1, 2], "1": [1], "[0, 2]": [0, 2], "range(2)": [0, 1], "{2}": [2],
    "(r for r in (1, 2))": [1, 2],
    "lambda info: info.node < 2": [0, 1],
    "lambda info: info.rank == info.world_size - 2": [2],
}  # fmt: skip


def test_only() -> None:
    body = "".join(
        f"@sky.stdout(only={only})\ndef f(): print({number})\nf()\n"
        for number, only in enumerate(HEARD)
    )
    found = [[int(line) for line in said(body, rank=rank)[0]] for rank in range(3)]
    heard = [[rank for rank in range(3) if number in found[rank]] for number in range(len(HEARD))]
    assert dict(zip(HEARD, heard, strict=True)) == HEARD


# ---------------------------------------------------------------------------------- what is silenced

LOUD = """
def loud(word):
    print(word, "print")
    os.write(1, f"{word} write\\n".encode())
    subprocess.run([sys.executable, "-c", f"print('{word} child')"], check=True)
    ctypes.CDLL(None).puts(f"{word} C".encode())
    print(word, "err", file=sys.stderr)
    os.write(2, f"{word} err write\\n".encode())
    sys.stdout.buffer.write(f"{word} bytes\\n".encode())
    sys.stdout.buffer.flush()
"""
KINDS = {"print", "write", "child", "C", "bytes"}


def words(lines: list[str]) -> set[tuple[str, str]]:
    return {(first, rest) for first, _, rest in (line.partition(" ") for line in lines)}


def everything(word: str) -> set[tuple[str, str]]:
    return {(word, kind) for kind in KINDS}


def complaints(word: str) -> set[tuple[str, str]]:
    return {(word, "err"), (word, "err write")}


def test_stdout_down_to_the_descriptor_and_stderr_left_alone() -> None:
    out, err = said(
        f"{LOUD}\nloud('before')\nsky.stdout(only='head')(loud)('during')\nloud('after')", rank=1
    )
    assert words(out) == everything("before") | everything("after")
    assert words(err) == complaints("before") | complaints("during") | complaints("after")


@pytest.mark.parametrize("rank", [0, 1])
def test_silent_is_both_on_all_ranks(rank: int) -> None:
    out, err = said(f"{LOUD}\nwith sky.silent:\n    loud('during')\nloud('after')", rank=rank)
    assert words(out) == everything("after")
    assert words(err) == complaints("after")


SILENCED = r"""
## blocks nest and overlap: rank 1, all back, stderr is back
outer = sky.stdout(only=0)
with outer:
    with sky.silent, outer:
        print("both silenced")
        print("both silenced", file=sys.stderr)
    print("outer silenced")
    print("stderr is back", file=sys.stderr)
print("all back")
## a bare decorator means the head: rank 1, said, -
@sky.stderr
def f():
    print("of the head alone", file=sys.stderr)
f()
print("said")
## a heard rank calls nothing: rank 0, here, -
before = sys.stdout
with sky.stdout(only="head"):
    assert sys.stdout is before
    print("here")
## an exception ends it: rank 0, seen, -
@sky.silent
def fails():
    print("hidden")
    raise ValueError("seen")
try:
    fails()
except ValueError as problem:
    print(problem)
## two threads end in any order: rank 0, after | below, -
inside, first_is_done = threading.Barrier(2), threading.Event()
@sky.silent
def first():
    inside.wait()
    print("hidden 1")
@sky.silent
def second():
    inside.wait()
    first_is_done.wait()
    print("hidden 2")
    os.write(1, b"hidden 3\n")
threads = [threading.Thread(target=f) for f in (first, second)]
for thread in threads:
    thread.start()
threads[0].join()
first_is_done.set()
threads[1].join()
print("after", flush=True)
os.write(1, b"below\n")
## text in C's buffers stays on its side: rank 0, before | after, -
libc = ctypes.CDLL(None)
libc.printf(b"before\n")
with sky.silent:
    libc.printf(b"during\n")
libc.printf(b"after\n")
## who kept the stream goes on with it: rank 0, -, seen
import logging
with sky.silent:
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    logging.warning("hidden")
logging.warning("seen")
with sky.silent:
    logging.warning("hidden again")
## other redirections keep their place: rank 0, 'outer\nouter again\n' 'inner\n', -
import contextlib, io
buffer = io.StringIO()
with contextlib.redirect_stdout(buffer):
    print("outer")
    with sky.silent:
        print("hidden")
        inner = io.StringIO()
        with contextlib.redirect_stdout(inner):
            print("inner")
    print("outer again")
print(repr(buffer.getvalue()), repr(inner.getvalue()))
## without streams: rank 0, -, seen
os.close(1)
sys.stdout = None
with sky.silent:
    print("nowhere")
    os.write(2, b"hidden")
os.write(2, b"seen")
## a kernel can end what was left open: rank 0, seen | seen too, -
from skymagic.runtime import silence
block = sky.silent
block.__enter__()
print("hidden")
silence.end_all()
print("seen")
block.__exit__(None, None, None)
print("seen too")
## forked children stay silent and come back: rank 0, seen, -
def fork_and(say):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        say()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
with sky.silent:
    fork_and(lambda: print("hidden"))
fork_and(lambda: print("seen"))
## many blocks use no descriptors: rank 0, 0, -
def count():
    return len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))
with sky.silent:
    pass
before = count()
for _ in range(500):
    with sky.silent:
        print("hidden")
print(count() - before)
"""
"""What each body does: the rank that runs it, and what is left of it on stdout and on stderr."""
BODIES = dict(part.split("\n", 1) for part in SILENCED.strip().removeprefix("## ").split("\n## "))


@pytest.mark.parametrize("heading", BODIES)
def test_silenced_output(heading: str) -> None:
    rank, *left = heading.partition(": rank ")[2].split(", ")
    expected = tuple([] if one == "-" else one.split(" | ") for one in left)
    assert said(BODIES[heading], rank=int(rank)) == expected


def test_silenced_output_reaches_the_sink(tmp_path: Path) -> None:
    body = """
    from skymagic.runtime import silence
    sys.stdout.reconfigure(line_buffering=True)  # as a rank's
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    silence.sinks.update(stdout=log, stderr=log)
    with sky.silent:
        print("a")
        os.write(1, b"b\\n")
        print("c", file=sys.stderr)
        subprocess.run(["echo", "d"], check=True)
    print("seen")
    """
    assert said(body, cwd=tmp_path) == (["seen"], [])
    assert (tmp_path / "log").read_text() == "a\nb\nc\nd\n"


def test_in_a_notebook_without_a_pool() -> None:
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_code_cell("import os, sys, subprocess, skymagic as sky\nprint('before')"),
        nbformat.v4.new_code_cell(
            "with sky.silent:\n    print('hidden')\n    subprocess.run(['echo', 'hidden'])\n    os.write(1, b'hidden')\n"
            "    await __import__('asyncio').sleep(0)\nprint('after')"
        ),
    ]
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert [output["text"] for cell in notebook.cells for output in cell.outputs] == [
        "before\n",
        "after\n",
    ]


# ------------------------------------------------------------------------------------------ ports


def test_a_free_port_is_none_that_the_system_gives_to_others() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {rendezvous.free_port("127.0.0.1") for _ in range(20)}
    assert len(ports) > 1
    assert not [port for port in ports if first <= port <= last]
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_free_port_without_a_known_own_address() -> None:
    socket.create_server(("", rendezvous.free_port("192.0.2.1"))).close()


def test_interface_name_is_matched_exactly() -> None:
    info = InstanceInfo(head_addr="127.0.0.1")
    assert interfaces(info, {}) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert interfaces(info, {"NCCL_SOCKET_IFNAME": "eth"}) == {"GLOO_SOCKET_IFNAME": "lo"}
