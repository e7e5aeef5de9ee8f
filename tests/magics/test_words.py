"""What a notebook is told: once, in plain words, with what to do; and what it can still read afterwards."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import Pools


@pytest.fixture(scope="module")
def notebook(shared_pools: Pools) -> Iterator[Notebook]:
    """A notebook with a pool of two ranks, without a plugin; the last test ends the pool."""
    with shared_pools.lent("--ranks 2") as one:
        yield one


def test_the_pool_is_counted_in_ranks(notebook: Notebook) -> None:
    first, *_ = notebook.run("%sky_status").said.splitlines()
    assert re.fullmatch(r"<Pool 'main': 2 ranks on \S+, plugins: none, ready>", first)


@pytest.mark.parametrize("cell", ["%%sky_broadcast -g nothere\n1", "%sky_pull nothere"])
def test_name_on_no_rank_is_reported_once(golden: Golden, notebook: Notebook, cell: str) -> None:
    golden(notebook.fail(cell).text)
    assert notebook.value("'nothere' in globals()") is False


def test_name_on_some_ranks_is_pulled_from_those(golden: Golden, notebook: Notebook) -> None:
    failed = notebook.fail(
        "%%sky_broadcast -g half,whole\nimport os\nwhole = 1\nif os.environ['RANK'] == '0':\n    half = 2"
    )
    golden(failed.text)
    assert notebook.value("(half[0], repr(half[1]), whole)") == (
        2,
        "<unavailable: rank 1: is not defined>",
        [1, 1],
    )


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize(
    "use", ["torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))", "dist.barrier()"]
)
def test_missing_group_hints_at_the_plugin(golden: Golden, notebook: Notebook, use: str) -> None:
    failed = notebook.fail(f"%%sky_broadcast -t 0\nimport torch, torch.distributed as dist\n{use}")
    golden(failed.text.splitlines()[-2])


def test_head_port_is_free_and_constant(notebook: Notebook) -> None:
    look = "%%sky_broadcast -o ports\nimport os, skymagic\n(skymagic.instance_info().head_port, int(os.environ['MASTER_PORT']))"
    notebook.run(look)
    ports = {port for pair in notebook.value("ports") for port in pair}
    (port,) = ports
    socket.create_server(("127.0.0.1", port)).close()
    for rank in (0, 1):
        notebook.fail(f"%%sky_broadcast\nif os.environ['RANK'] == '{rank}':\n    os._exit(3)")
        notebook.run(look)
        assert notebook.value("ports") == [(port, port)] * 2, f"also after rank {rank} was replaced"


def test_logs_have_cells_and_times_and_outlive_the_pool(golden: Golden, notebook: Notebook) -> None:
    notebook.run("%sky_restart")
    number = notebook.value("get_ipython().execution_count")
    notebook.run(
        "%%sky_broadcast\nfor step in range(40):\n    print('step', step, end='\\r')\nprint('\\nover', end='')"
    )
    notebook.run("%%sky_broadcast\nsilent = 1")
    notebook.run("%%sky_broadcast --only all\nimport sys\nprint('more', file=sys.stderr)")
    expected = [
        f"── cell {number}, run R, T ──",
        "step 39",
        "over",
        f"── cell {number + 2}, run R, T ──",
        "more",
    ]

    def logged(line: str) -> list[str]:
        return [
            re.sub(r"run \d+, \d\d:\d\d:\d\d", "run R, T", one) for one in notebook.run(line).lines
        ]

    assert logged("%sky_logs --rank 1 -n 5") == expected
    assert logged("%sky_logs -n 5") == [f"[{rank}] {line}" for rank in (0, 1) for line in expected]
    notebook.run("%sky_down")
    *lines, over = logged("%sky_logs --rank 1 -n 5")
    assert lines == expected
    golden(over)
    assert logged("%sky_logs --pool main -n 1") == ["[0] more", "[1] more", over]
    golden(notebook.fail("%sky_logs --pool other").text)
