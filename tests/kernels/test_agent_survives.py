"""One rank's trouble, or one message that makes no sense, costs that rank or that request: never the node's agent and the pool."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kernels.filters import output_filter
from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import KERNEL, borrowed

module_notebook = borrowed(KERNEL, "pool = %sky_pool --ranks 2")


@pytest.fixture
def notebook(module_notebook: Notebook) -> Notebook:
    module_notebook.run("%%sky_broadcast\nmine = 'kept'")
    return module_notebook


def works_with_variables_of(notebook: Notebook, ranks: list[int]) -> None:
    notebook.run("%%sky_broadcast -o found\nglobals().get('mine');")
    found = notebook.value("found")
    assert [rank for rank in range(2) if found[rank] == "kept"] == ranks


DELETE_AND_DIE = """%%sky_broadcast
import glob, os, signal, tempfile, skymagic
if skymagic.instance_info().rank == 1:
    (log,) = glob.glob(f"{tempfile.gettempdir()}/skymagic-{skymagic.instance_info().job_id}-*/rank-1.log")
    print("last words", flush=True)
    os.remove(log)
    os.kill(os.getpid(), signal.SIGKILL)"""


def test_a_log_that_somebody_deleted(notebook: Notebook) -> None:
    died = notebook.fail(DELETE_AND_DIE)
    assert died.ename == "RankDied"
    assert "last words" in died.text
    works_with_variables_of(notebook, [0])


SEND_NONSENSE = """%%sky_broadcast
import skymagic, time
from skymagic.kernels.rank import context
if skymagic.instance_info().rank == 1:
    context.current().control._socket.sendall(b"nonsense" + bytes([10]))
    time.sleep(60)"""


def test_a_rank_that_sends_nonsense(notebook: Notebook) -> None:
    shown = notebook.finish(notebook.start(SEND_NONSENSE))
    assert shown.failure.ename == "RankDied"
    assert "rank 1 is killed because it cannot be served" in shown.text
    works_with_variables_of(notebook, [0])


def test_a_request_that_cannot_be_carried_out(notebook: Notebook) -> None:
    notebook.run("pool.pool.resources.agents.signal([0], 9999)")
    shown = notebook.run("%%sky_broadcast -o found\nglobals().get('mine');")
    assert "the agent could not run Signal: OSError: [Errno 22] Invalid argument" in shown.text
    works_with_variables_of(notebook, [0, 1])


def test_unwritable_log_is_reported_once(golden: Golden, tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "log").symlink_to("/dev/full")
    reader, writer = os.pipe()
    output = output_filter(3, tmp_path / "log", {"stdout": reader}, tell=told.append)
    for text in (b"one\n", b"two\n"):
        os.write(writer, text)
        output.drain(0.0)
    golden(told)
    os.close(writer)
    output.close()
