"""What it costs an empty cell that all connections of a pool are encrypted: the same pool from a copy of skymagic without it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import peers
from benchmarks.figures import RANKS, Figure, alternate, median, say

ROUNDS = 9
CELLS = f"""
from benchmarks import cells
from benchmarks.figures import median, timed
shell = cells.shell_of_its_own()
cells.do(shell, "%sky_pool bench --ranks {RANKS} -y")
from skymagic.pool import registry
key = registry.pools()[0].resources.agents.controller.client.get("curve_serverkey")
for _ in range(10):
    cells.do(shell, "%%sky_broadcast\\npass")
took = [1000 * timed(lambda: cells.do(shell, "%%sky_broadcast\\npass")) for _ in range(60)]
print("encrypted", int(bool(key)))
print("milliseconds", median(took))
cells.do(shell, "%sky_down bench")
"""
WITHOUT = {
    "kernels/agent/children.py": {
        "--IPController.enable_curve=True": "--IPController.enable_curve=False"
    },
    "kernels/agent/output.py": {
        "socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()": "",
        'socket.curve_serverkey = engine["curve_serverkey"].encode()': "",
    },
}
"""What is replaced in the copy."""


def figures() -> Iterator[Figure]:
    """Fresh processes in turn."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        plain = without_encryption(Path(name))
        say(f"an empty cell on {RANKS} ranks: encrypted, not encrypted")
        ours, open_ = alternate(ROUNDS, lambda: cell(peers.ROOT, True), lambda: cell(plain, False))
    yield Figure("encryption of an empty cell", median(ours) - median(open_), "ms", limit=0.5)
    yield Figure("  … the cell", median(ours), "ms", median(open_), "not encrypted")


def without_encryption(folder: Path) -> Path:
    """A copy of the package below `folder` whose pools let in whoever comes."""
    shutil.copytree(
        peers.ROOT / "skymagic", folder / "skymagic", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, changes in WITHOUT.items():
        file = folder / "skymagic" / name
        text = file.read_text()
        for old, new in changes.items():
            if old not in text:
                raise RuntimeError(f"{name} has no {old!r} to replace")
            text = text.replace(old, new)
        file.write_text(text)
    return folder


def cell(place: Path, encrypted: bool) -> float:
    """Milliseconds of an empty cell with the skymagic that is at `place`."""
    path = os.pathsep.join(dict.fromkeys([str(place), str(peers.ROOT)]))
    ran = peers.python(CELLS, env={"PYTHONPATH": path})
    if bool(ran.number("encrypted")) is not encrypted:
        raise RuntimeError(f"the pool of {place} is {'not ' if encrypted else ''}encrypted")
    return ran.number("milliseconds")
