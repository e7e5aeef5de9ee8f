"""What came back, as a table by rank: pure, and in a notebook whose lists stay lists; %sky_status as text and HTML; a cell's own metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import IPython
import numpy as np
import pytest

from skymagic.display import inspection as results
from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import Pools


class Loud:
    """Its repr is the user's own code."""

    def __repr__(self) -> str:
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ([1, 0.5], [("0", "int", "1"), ("1", "float", "0.5")]),
        (
            [{"rank": 0, "loss": 0.203}, {"rank": 1, "loss": 0.2}],
            [("0", "dict", "{'rank': 0, 'loss': 0.203}"), ("1", "dict", "{'rank': 1, 'loss': 0.2}")],
        ),
        ([np.zeros((64, 10)), list(range(1000))], [("0", "ndarray", "(64, 10) float64"), ("1", "list", f"[{', '.join(map(str, range(22)))}, …] 1000 items")]),
        (["x" * 500, Loud()], [("0", "str", f"{'x' * 40!r} … 500 characters"), ("1", "Loud", "…")]),
        (
            [{"rank": 0, "strategy": "DDPStrategy", "batches": 16, "weights": 6.094713, "accuracy": 0.9}, ("x" * 100, 1)],
            [
                ("0", "dict", "{'rank': 0, 'strategy': 'DDPStrategy', 'batches': 16, 'weights': 6.094713, …} 5 items"),
                ("1", "tuple", "2 items"),
            ],
        ),
        ([{"loss": [0.5] * 99, "accuracy": [1] * 99}], [("0", "dict", "{'loss': …, 'accuracy': …}")]),
        ([None, [np.zeros(1000)]], [("0", "NoneType", "None"), ("1", "list", "1 item")]),
        ([5] * 64, [("0–63", "int", "5")]),
        ([0.25 + rank for rank in range(64)], [("0–63", "float", "0.25 … 63.2, mean 31.8")]),
        ([1.0] * 20 + [math.nan] + [3.0] * 20, [("0–40", "float", "1 … 3, mean 2; 1 × nan")]),
        ([math.nan] * 64, [("0–63", "float", "nan")]),
        (
            ["ok"] * 63 + [None],
            [("0–62", "str", "'ok'"), ("63", "NoneType", "None")],
        ),
    ],
)  # fmt: skip
def test_rows(values: list[Any], rows: list[tuple[str, str, str]]) -> None:
    assert results.rows(range(len(values)), values) == rows


@pytest.mark.parametrize("place", range(5))
def test_nan_is_shown_beside_the_range(place: int) -> None:
    shown = ["2.0", "1.0", "4.0", "3.0"]
    shown.insert(place, "nan")
    names = {rank: {"loss": {"type": "float", "value": value}} for rank, value in enumerate(shown)}
    assert results.variables(names).splitlines()[1].split()[2:] == [
        "1.0",
        "…",
        "4.0,",
        "nan",
        "all",
    ]


def test_values_that_all_differ_are_folded_too() -> None:
    found = results.rows(range(256), [f"run-{rank}" for rank in range(256)])
    assert len(found) == results.MAX_FOLDED_ROWS + 1
    assert found[-1] == ("8–255", "…", "248 other values")


def test_the_tables_rows_are_of_the_ranks_that_were_asked() -> None:
    assert results.as_text([2, 3], [1, 2]).splitlines()[1].split() == ["2", "int", "1"]
    assert "&lt;b&gt;" in results.as_html([0], ["<b>"])
    assert "<style" not in results.as_html([0], [1])


# ------------------------------------------------------------------------------------------ in a notebook


@pytest.fixture(scope="module")
def notebook(shared_pools: Pools) -> Iterator[Notebook]:
    setup = "%%sky_broadcast\nimport os\nimport numpy as np\nimport skymagic as sky\nrank = int(os.environ['RANK'])"
    with shared_pools.lent("--ranks 2", setup) as one:
        yield one


def test_what_came_back_is_a_list_that_is_shown_as_a_table(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast -o results -g batch\nbatch = np.full((64, 10), rank)\n{'rank': rank}"
    )
    assert notebook.value("type(results) is list and results == [{'rank': 0}, {'rank': 1}]") is True
    (short,) = notebook.run("results").rich
    assert short["text/plain"] == "[{'rank': 0}, {'rank': 1}]"
    assert "<td style='text-align:left'>{&#x27;rank&#x27;: 1}</td>" in short["text/html"]
    (arrays,) = notebook.run("batch").rich
    lines = [line.split(maxsplit=2) for line in arrays["text/plain"].splitlines()]
    assert [heading.split()[0] for heading in lines[0]] == ["rank", "type", "shape"]
    assert lines[1:] == [
        ["0", "ndarray", "(64, 10) int64"],
        ["1", "ndarray", "(64, 10) int64"],
    ]


@pytest.mark.parametrize(
    "cell", ["[batch]", "list(results)", "results = [1, 2]; results = results + [3]; results"]
)
def test_other_lists_are_shown_as_ever(notebook: Notebook, cell: str) -> None:
    notebook.run("%%sky_broadcast -o results -g batch\nbatch = rank\nrank")
    (shown,) = notebook.run(cell).rich
    assert shown.keys() == {"text/plain"}
    assert shown["text/plain"].startswith("[")


def test_one_ranks_value_is_itself(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -o results --head\n[1, 2]")
    (shown,) = notebook.run("results").rich
    assert shown == {"text/plain": "[1, 2]"}


def test_status_reads_at_a_glance(notebook: Notebook) -> None:
    (shown,) = notebook.run("%sky_status").rich
    assert shown["text/plain"].startswith("<Pool 'main': 2 ranks on ")
    assert "background:" in shown["text/html"]
    assert "<details><summary>processes</summary>" in shown["text/html"]
    assert "<style" not in shown["text/html"]


def test_status_is_an_object_with_completion(golden: Golden, notebook: Notebook) -> None:
    (shown,) = notebook.run("%sky_status -o status").rich
    (again,) = notebook.run("status").rich
    assert again.keys() == {"text/plain", "text/html"}
    assert again == shown
    (pool,) = notebook.run("status['main']").rich
    assert pool == shown, "there is one pool"
    assert notebook.value("[one.state for one in status['main'].values()]") == ["ready", "ready"]
    assert notebook.value("status['main'][1].use.memory > 1e6") is True
    notebook.run("import warnings; warnings.simplefilter('ignore')")
    offered = "[one.text for one in get_ipython().Completer.completions({0!r}, len({0!r}))]"
    notebook.run("of_main = status['main']; second = of_main[1]")
    if IPython.version_info >= (8,):
        assert notebook.value(offered.format("status['")) == ["main"]
        assert notebook.value(offered.format("of_main[")) == ["0", "1"]
    else:  # which offers all names beside a key, and no numbers
        assert "main" in notebook.value(offered.format("status['"))
    assert notebook.value(offered.format("second.ho")) == ["host"]
    golden(notebook.fail("%sky_status mani").text)


def test_a_cell_beside_the_notebook_has_metrics_of_its_own(notebook: Notebook) -> None:
    pytest.importorskip("pandas")
    notebook.run("%%sky_broadcast\nsky.report(loss=0.0)")
    notebook.run(
        "%%sky_broadcast -a\nfor step in range(5):\n    sky.report(step=step, loss=1 / (rank + 1))"
    )
    notebook.run("run = _\nrun.wait()")
    assert notebook.value("run.metrics.loss.unstack().to_dict('list')") == {
        0: [1.0] * 5,
        1: [0.5] * 5,
    }
    assert notebook.value("len(run.metrics) < len(run.pool.metrics)") is True
    assert notebook.value("type(run.metrics.loss.unstack().plot()).__name__") == "Axes"
