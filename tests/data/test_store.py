"""The node store where shared memory is full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def small_memory() -> bool:
    """Whether this user may mount a file system of its own."""
    probe = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
    return probe.returncode == 0


FULL = """
import os, sys
from pathlib import Path
from skymagic.content.store import OVERFLOW, NodeStore, create, overflow, remove
directory = create(sys.argv[1])
said = []
# The share says yes, the file system says no: another process has filled it meanwhile.
store = NodeStore(directory, share=1.5, notify=said.append)
key = store.put(None, [bytes(40_000_000)], 40_000_000)
key2 = store.put(None, [b"x" * 40_000_000], 40_000_000)
assert store.path(store.name(key)).parent == Path(directory), said
assert store.path(store.name(key2)).parent == overflow(directory), said
assert set(os.listdir(directory)) == {store.name(key), OVERFLOW}
assert store.map(store.name(key2))[39_999_999] == ord("x")
remove(directory)
print("ok")
"""


def test_shared_memory_of_64_mb_that_fills_up(tmp_path: Path) -> None:
    if not small_memory():
        pytest.skip("this machine does not let users mount a tmpfs")
    command = f"mount -t tmpfs -o size=64m none {tmp_path} && exec {sys.executable} -c '{FULL}' {tmp_path}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, check=False
    )
    assert done.stdout == "ok\n", done.stderr
