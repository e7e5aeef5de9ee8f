"""``--profile``: torch's profiler around a cell, its trace beside the notebook, and whom the ranks waited for."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.jobs.profiles import Profile, operations_table, waiting_rank_lines
from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import Pools

pytest.importorskip("torch")


def test_the_table_of_operations() -> None:
    profile = Profile((("aten::mm", 50, 0.3), ("aten::relu", 7, 0.1)), seconds=0.4)
    assert operations_table(profile).splitlines() == [
        "operation   calls  time      share",
        "aten::mm    50     300.0 ms  75%",
        "aten::relu  7      100.0 ms  25%",
    ]


def test_profile_shows_which_rank_waited(golden: Golden) -> None:
    assert waiting_rank_lines({0: (3.0, 10.0)}) == [], "one rank alone is compared with nobody"
    golden(waiting_rank_lines({0: (3.0, 10.0), 1: (0.1, 10.0), 2: (0.3, 10.0)}))
    assert waiting_rank_lines({0: (0.05, 0.1), 1: (0.0, 0.1)}) == [], (
        "a tenth of a second is nothing"
    )


@pytest.fixture(scope="module")
def notebook(shared_pools: Pools) -> Iterator[Notebook]:
    with shared_pools.lent("--ranks 2 --plugin torch", "import os\nfolder = os.getcwd()") as one:
        yield one


def test_a_trace_for_each_rank_and_the_one_that_was_waited_for(
    golden: Golden, notebook: Notebook
) -> None:
    shown = notebook.run(
        "%%sky_broadcast --profile all -o sums --only all\nimport time, torch, torch.distributed as dist\n"
        "for step in range(3):\n    time.sleep(0.4 * dist.get_rank())\n    a = torch.ones(4)\n    dist.all_reduce(a)\na[0].item()"
    )
    assert notebook.value("sums") == [2.0, 2.0]
    golden.line(shown.stdout, "rank 0 ", "rank 1", hide=[r"\d\.\d s"])
    traces = sorted(Path(notebook.value("folder")).glob("profile-cell*-rank*.json.gz"))
    assert [trace.name.partition("-rank")[2] for trace in traces] == ["0.json.gz", "1.json.gz"]
    names = {
        event.get("name")
        for event in json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    }
    assert "gloo:all_reduce" in names
    assert shown.stderr == "", "the profiler says nothing of its own"


def test_profile_is_of_the_head_with_longest_operations(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast --profile\nimport torch\na = torch.ones(300, 300)\nfor _ in range(20):\n    a = a @ a / 300"
    )
    [_, heading, *rows] = shown.stdout.splitlines()
    assert heading.split() == ["operation", "calls", "time", "share"]
    assert any(row.startswith("aten::mm ") and row.split()[1] == "20" for row in rows)
    assert len(rows) <= 10
    assert shown.stdout.startswith("rank 0, ")
    assert "profile-cell" in shown.stdout.splitlines()[0]


def test_a_cell_that_fails_keeps_its_traces(notebook: Notebook) -> None:
    cell = "%%sky_broadcast --profile all\nimport torch.distributed as dist\nif dist.get_rank() == 1:\n    raise ValueError('bad batch')\ndist.barrier()"
    shown = notebook.finish(notebook.start(cell))
    assert shown.failure.ename == "ValueError"
    named = re.findall(r"the trace is (profile-cell\d+-rank\d\.json\.gz)", shown.stdout)
    assert [name.partition("-rank")[2] for name in named] == ["0.json.gz", "1.json.gz"]
    for name in named:
        assert json.loads(gzip.decompress((Path(notebook.value("folder")) / name).read_bytes()))[
            "traceEvents"
        ]


def test_ranks_that_take_no_part_are_refused(golden: Golden, notebook: Notebook) -> None:
    golden(notebook.fail("%%sky_broadcast -t 0 --profile 1\npass").text)
    golden(notebook.fail("%%sky_broadcast --profile 7\npass").text)
