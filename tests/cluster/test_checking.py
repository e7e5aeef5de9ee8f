"""%sky_check on separate machines, one of which has a GPU with errors."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

import pytest

from tests.lab.machines import Machines, machines
from tests.lab.notebook import Notebook, opened
from tests.lab.places import home_that_knows
from tests.lab.shells import pip_settings

pytestmark = pytest.mark.needs("sshd", "namespaces")
SMI = """#!/bin/sh
name=$(hostname)
case $1 in
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
        (programs / f"{name}.gpus").write_text(f"0, Tesla T4, 550.1, {2 if name == 'h2' else 0}\n")
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
    ecc, xid = found["h2"][-1].split("; ")
    assert "GPU 0 has 2 " in ecc
    assert "0000:00:1e: " in xid
    assert "(Xid 79)" in xid
    assert "2 ECC, Xid 79" in found["h2"]
    # the machines have one clock, the kernel's, which is the notebook's too
    assert {cells[4] for cells in found.values()} <= {
        "same",
        *(f"0.00{n} s ahead" for n in range(9)),
    }
