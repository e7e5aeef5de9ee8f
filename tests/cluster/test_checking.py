"""%sky_check on separate machines: one has a GPU with errors, one a stranger on its GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.machines import Machine, Machines, machines
from tests.lab.notebook import Notebook, opened
from tests.lab.places import home_that_knows
from tests.lab.shells import pip_settings

pytestmark = pytest.mark.needs("sshd", "namespaces")
SMI = """#!/bin/sh
name=$(hostname)
case $1 in
    --query-compute-apps*) cat "{folder}/$name.pids" 2>/dev/null ;;
    --query-gpu=name) echo "Tesla T4" ;;
    --query-gpu=index*) cat "{folder}/$name.gpus" ;;
esac
"""
DMESG = """#!/bin/sh
cat "{folder}/$(hostname).kernel"
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machines, Notebook]]:
    """Two machines with a pool; h2's GPU has ECC errors and has fallen off the bus."""
    folder = tmp_path_factory.mktemp("check")
    scratch, programs = folder / "tmp", folder / "programs"
    for each in (scratch, programs, folder / "notebook"):
        each.mkdir()
    for name, text in (("nvidia-smi", SMI), ("dmesg", DMESG)):
        (programs / name).write_text(text.format(folder=programs))
        (programs / name).chmod(0o755)
    for name in ("h1", "h2"):
        (programs / f"{name}.gpus").write_text(
            f"0, Tesla T4, 550.1, 3, 0, {2 if name == 'h2' else 0}\n"
        )
        (programs / f"{name}.kernel").write_text("[ 0.1] Linux version 6.8\n")
    (programs / "h2.kernel").write_text(
        "[ 9.1] NVRM: Xid (PCI:0000:00:1e): 79, pid=7, GPU has fallen off the bus.\n"
    )
    env = {**pip_settings(), "TMPDIR": str(scratch), "PATH": f"{programs}:{os.environ['PATH']}"}
    with machines(folder / "machines", 2, env=env) as hosts:
        home = home_that_knows(hosts, folder / "client")
        with opened(folder / "notebook", env={"HOME": str(home)}) as notebook:
            notebook.run(f"%sky_pool lab --provider ssh --hosts h[1-2] --python {sys.executable}")
            yield hosts, notebook


def checked(notebook: Notebook, name: str = "") -> dict[str, list[str]]:
    """The table of %sky_check: node → its cells, as the notebook shows them."""
    [shown] = notebook.run(f"%sky_check {name}").rich
    assert "<table>" in shown["text/html"]
    rows = [re.split(r"\s{2,}", line) for line in shown["text/plain"].splitlines()[1:]]
    return {row[0]: row[1:] for row in rows}


def test_broken_nodes_are_named(lab: tuple[Machines, Notebook]) -> None:
    found = checked(lab[1])
    assert found["h1"][-1] == "good"
    assert found["h1"][:2] == ["1 × Tesla T4", "550.1"]
    assert (
        found["h2"][-1]
        == "GPU 0 has 2 uncorrected ECC errors; GPU at 0000:00:1e: fallen off the bus (Xid 79)"
    )
    assert "2 ECC, Xid 79" in found["h2"]
    # the machines have one clock, the kernel's, which is the notebook's too
    assert {cells[4] for cells in found.values()} <= {
        "same",
        *(f"0.00{n} s ahead" for n in range(9)),
    }


def test_processes_on_a_gpu_are_the_pools_or_strangers(
    lab: tuple[Machines, Notebook], tmp_path: Path
) -> None:
    hosts, notebook = lab
    programs = hosts[0].folder.parent.parent / "programs"
    notebook.run(
        "%%sky_broadcast -o pids\nimport os, subprocess\nchild = subprocess.Popen(['sleep', '600'])\n[os.getpid(), child.pid]"
    )
    own = notebook.value("pids")
    machine = hosts[0]
    assert isinstance(machine, Machine)
    (programs / "h1.pids").write_text("".join(f"{each}\n" for each in own[0]))
    assert checked(notebook, "lab")["h1"][-1] == "good"
    with subprocess.Popen(
        [*machine.space.enter, "sh", "-c", "echo $$; exec sleep 600"],
        stdout=subprocess.PIPE,
        text=True,
    ) as stranger:
        assert stranger.stdout is not None
        pid = stranger.stdout.readline().strip()
        try:
            (programs / "h1.pids").write_text(f"{own[0][0]}\n{pid}\n")
            assert checked(notebook, "lab")["h1"][-1] == f"its GPUs are in use: process {pid}"
        finally:
            subprocess.run([*machine.space.enter, "kill", pid], check=True)
    notebook.run("%%sky_broadcast\nchild.kill(), child.wait()")
