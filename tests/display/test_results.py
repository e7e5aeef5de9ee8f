"""Results in a notebook: a table by rank, %sky_status as text and HTML, a cell's own metrics."""

from __future__ import annotations

from collections.abc import Iterator

import IPython
import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import Pools

# ------------------------------------------------------------------------------------------ in a notebook


@pytest.fixture(scope="module")
def notebook(shared_pools: Pools) -> Iterator[Notebook]:
    setup = "%%sky_broadcast\nimport os\nimport numpy as np\nimport skymagic as sky\nrank = int(os.environ['RANK'])"
    with shared_pools.lent("--ranks 2", setup) as one:
        yield one


def test_pulled_results_are_a_list_shown_as_a_table(notebook: Notebook) -> None:
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


def test_background_cell_has_its_own_metrics(notebook: Notebook) -> None:
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
