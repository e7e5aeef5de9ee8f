"""What a cell that goes wrong is told: its magic has one per cent sign or stands too low; a name of it is on the ranks."""

from __future__ import annotations

import pytest

from skymagic.magics.transformers import explain_misplaced
from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import Pools, borrowed

notebook = borrowed("--ranks 2")


@pytest.mark.parametrize(
    ("cell", "magic"),
    [
        ("%sky_broadcast -o r\nx = 1", "sky_broadcast"),
        ("\n%sky_broadcast\n# why\nx = 1", "sky_broadcast"),
        ("x = 1\n%%sky_broadcast -o r\nx", "sky_broadcast"),
        ("# a comment\n%%sky_sh\nls", "sky_sh"),
        ("x = 1\n%sky_broadcast --rank 1\nx", "sky_broadcast"),
        ("if True:\n    %sky_broadcast\n    y = 2", "sky_broadcast"),
    ],
)
def test_code_that_would_not_run_on_the_ranks_is_refused(
    golden: Golden, cell: str, magic: str
) -> None:
    refusal = explain_misplaced(cell.splitlines(keepends=True))
    golden(refusal)


@pytest.mark.parametrize(
    "cell",
    [
        "",
        "%sky_broadcast -o r",
        "%sky_broadcast -o r\n# no code",
        "%sky_broadcast --ranks 2\n%sky_status",
        "%%sky_broadcast -o r\nx = 1",
        "\n%%sky_broadcast -o r\nx = 1",
        "%%capture\n%%sky_broadcast -o r\nx = 1",
        "%%writefile cells.txt\nx = 1\n%%sky_broadcast\n",
        "text = '''\n%%sky_broadcast\nx\n'''",
        "%sky_pool main --ranks 2\nx = 1",
        "a = (5\n%sky_broadcast)",
    ],
)
def test_other_cells_run(cell: str) -> None:
    assert explain_misplaced(cell.splitlines(keepends=True)) == ""


def test_nothing_of_a_cell_with_one_per_cent_sign_runs(golden: Golden, notebook: Notebook) -> None:
    failed = notebook.fail("%sky_broadcast -o r\nhere = 1")
    golden(failed.text)
    assert notebook.fail("here = 1\n%%sky_broadcast\nhere").ename == "UsageError"
    assert not notebook.value("'here' in globals() or 'r' in globals()")


@pytest.mark.parametrize(
    "cell",
    [
        "%sky_broadcast print(1)",
        "%%sky_broadcast print('a b')\n1",
        "%%sky_broadcast import torch\n1",
        "%%sky_broadcast -o r x = 1\n1",
        "%%sky_broadcast model[0]\n1",
    ],
)
def test_code_on_the_line_of_the_magic(golden: Golden, notebook: Notebook, cell: str) -> None:
    golden(notebook.fail(cell).text)


@pytest.mark.parametrize("line", ["%%sky_broadcast", "%%sky_broadcast -o r\n", "%%sky_sh"])
def test_a_cell_with_nothing_below_its_magic(golden: Golden, notebook: Notebook, line: str) -> None:
    golden(notebook.fail(line).text)


def test_a_unit_after_a_blank_is_no_pool(notebook: Notebook) -> None:
    body = "import time\ntime.sleep(60)"
    failed = notebook.fail(f"%%sky_broadcast --timeout 1 sec\n{body}", "run-timeout")
    assert "1 s" in failed.text


def test_missing_pool_is_explained(golden: Golden, notebook: Notebook) -> None:
    golden(notebook.fail("%%sky_broadcast --pool nowhere\n1").text)
    golden(notebook.fail("%%sky_broadcast --pool mian\n1").text)


def test_a_name_to_push_is_compared_with_the_users_own(golden: Golden, notebook: Notebook) -> None:
    for name in ("nope", "exits", "get_python"):  # near open, exit and get_ipython
        assert "did you mean" not in notebook.fail(f"%sky_push {name}").text
        assert notebook.fields()["names"] == (name,)
    notebook.run("weights = [1]")
    golden(notebook.fail("%sky_push weihgts").text)


def said_below(notebook: Notebook, cell: str) -> str:
    """What a cell that fails shows beside its error."""
    shown = notebook.finish(notebook.start(cell))
    assert shown.error is not None
    return shown.stdout


def test_name_of_the_ranks_in_a_plain_cell_gets_a_hint(golden: Golden, notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nmodel = [1]\nimport json")
    said = said_below(notebook, "model[0]")
    golden(said)
    notebook.run("%sky_pull model --head")
    assert notebook.value("model") == [1]
    assert said_below(notebook, "nowhere") == ""
    assert said_below(notebook, "def f():\n    return model2\nf()") == ""
    assert said_below(notebook, "raise TypeError('of mine')") == ""


def test_list_by_rank_used_as_a_value_gets_a_hint(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast -g net\nclass Net:\n    def __call__(self): return 5\n    def eval(self): return self\nnet = Net()"
    )
    hint = "net is a list by rank: net[0] is rank 0's; --head brings that one alone\n"
    assert said_below(notebook, "print(1)\nnet()") == "1\n" + hint
    assert said_below(notebook, "net.eval()") == hint
    notebook.run("mine = []")
    assert said_below(notebook, "mine()") == ""
    notebook.run("%%sky_broadcast -t 1 -g net\nnet")
    assert "net[0] is rank 1's" in said_below(notebook, "net()")


def test_pulled_ddp_notes_once_that_it_is_unwrapped(shared_pools: Pools) -> None:
    pytest.importorskip("torch")
    with shared_pools.lent("--ranks 2 --plugin torch") as notebook:
        cell = "%%sky_broadcast -g model --head\nimport torch\nmodel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))"
        words = "model: DDP unwrapped; what was model.module on the ranks is model here\n"
        assert [notebook.run(cell).stdout for _ in range(2)] == [words, ""]
        assert notebook.value("type(model).__name__") == "Linear"


NOTEBOOK_ONLY = """from IPython.core.magic import register_line_magic, register_cell_magic
@register_line_magic
def mine(line): return 5
@register_cell_magic
def mine_of_cells(line, cell): return 5
%alias greet echo hello %s"""
SAYS = {
    "%mine 3": "%mine is a magic of the notebook, and magics do not travel",
    "x = %mine 3": "%mine is a magic of the notebook, and magics do not travel",
    "%greet you": "%greet is a magic of the notebook, and magics do not travel",
    "%%mine_of_cells\n1": "%%mine_of_cells is a magic of the notebook, and magics do not travel",
    "mine 3": "mine is a magic or an alias of the notebook, which ranks do not have",
    "greet you": "greet is a magic or an alias of the notebook, which ranks do not have",
    "ls /tmp": "automagic works in plain cells only: write %ls",
    "cd /tmp": "automagic works in plain cells only: write %cd",
    "print 3": "autocall works in plain cells only: write print(…)",
}


@pytest.mark.parametrize("cell", SAYS)
def test_magics_aliases_and_autocall_of_the_notebook_are_named(
    notebook: Notebook, cell: str
) -> None:
    notebook.run(NOTEBOOK_ONLY + "\n%autocall 1")
    try:
        error = notebook.fail(f"%%sky_broadcast\n{cell}")
    finally:
        notebook.run("%autocall 0\n%unalias greet")
    assert SAYS[cell] in error.text
    assert error.text.count(SAYS[cell]) == 1
