"""Who owns a name: a rank keeps what a run really bound there, whatever the cell's text looks like."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook, seen
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2")


# ------------------------------------------------------------------------- a store that never ran is no store


def test_a_store_on_one_rank_alone(notebook: Notebook) -> None:
    notebook.run("data = ['first']")
    assert seen(notebook, "data") == [["first"]] * 2
    notebook.run("data = ['second']")
    notebook.run("%%sky_broadcast\nimport os\nif os.environ['RANK'] == '0':\n    data = ['own']")
    assert seen(notebook, "data") == [["own"], ["second"]]


# ---------------------------------------------------------------------------- what is bound without plain syntax

BOUND = {
    "%%time": "%%time\nmodel = ['trained']",
    "%time": "%time model = ['trained']",
    "%%capture": "%%capture\nmodel = ['trained']",
    "%run": "%run train_it.py",
    "import *": "from trained_module import *",
    "globals": "globals().update(model=['trained'])",
    "setattr": "import sys\nsetattr(sys.modules['__main__'], 'model', ['trained'])",
    "exec": "exec('mod' + 'el = [' + repr('trained') + ']')",
    "get_ipython": "get_ipython().push({'model': ['trained']})",
    "a function": "def bind(name, value):\n    globals()[name] = value\nbind('mod' + 'el', ['trained'])",
}


@pytest.mark.parametrize("cell", BOUND.values(), ids=BOUND)
def test_a_binding_in_other_words(notebook: Notebook, cell: str) -> None:
    for file in ("train_it.py", "trained_module.py"):
        (notebook.folder / file).write_text("model = ['trained']\n")
    notebook.run("model = ['untrained']")
    assert seen(notebook, "model") == [["untrained"]] * 2
    notebook.run(f"%%sky_broadcast\n{cell}")
    assert seen(notebook, "model") == [["trained"]] * 2
    notebook.run("model = ['new']")
    assert seen(notebook, "model") == [["new"]] * 2


@pytest.mark.parametrize("way", BOUND)
def test_a_name_that_has_not_travelled_before(notebook: Notebook, way: str) -> None:
    name = f"net{list(BOUND).index(way)}"
    for file in ("train_it.py", f"trained_{name}.py"):
        (notebook.folder / file).write_text(f"{name} = ['trained']\n")
    cell = (
        BOUND[way]
        .replace("trained_module", f"trained_{name}")
        .replace("model", name)
        .replace("'mod' + 'el'", f"'ne' + 't{name[3:]}'")
    )
    notebook.run(f"{name} = ['untrained']")
    notebook.run(
        f"%%sky_broadcast\n{cell.replace('mod', 'ne').replace('el = [', f't{name[3:]} = [') if way == 'exec' else cell}"
    )
    assert seen(notebook, name) == [["trained"]] * 2


def test_an_equal_constant_is_bound_all_the_same(notebook: Notebook) -> None:
    """1 is one object: what a cell surely binds is its own also where the object is the same."""
    notebook.run("n = 1")
    assert seen(notebook, "n") == [1, 1]
    notebook.run("n = 2")
    notebook.run("%%sky_broadcast\nn = 1")
    assert seen(notebook, "n") == [1, 1]


# --------------------------------------------------------------------- what came from the ranks does not go back


def test_a_pulled_value_that_changes_here_stays_here(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -g model\nmodel = {'weights': [1, 2]}")
    notebook.run("model[0]['weights'].append(3)")
    shown = notebook.run("%%sky_broadcast -o seen\nmodel['weights']")
    assert notebook.value("seen") == [[1, 2]] * 2
    assert shown.text.count("model: the ranks keep their own (dict); --push model sends the notebook's") == 1
    assert "keep their own" not in notebook.run("%%sky_broadcast\nmodel['weights']").text


def test_a_number_that_is_typed_goes_and_one_of_the_list_that_came_does_not(notebook: Notebook) -> None:
    """3 is one object: the list that came holds what is typed."""
    for here, there in (("n = n[0]", 50), ("n = 3", 3)):
        notebook.run("%%sky_broadcast -g n\nn = 3")
        notebook.run("%%sky_broadcast\nn = 50")
        notebook.run(here)
        shown = notebook.run("%%sky_broadcast -o seen\nn")
        assert notebook.value("seen") == [there] * 2, here
        assert ("n: the ranks keep their own (int); --push n" in shown.text) == (there == 50)


def test_a_pulled_value_that_the_ranks_delete_stays_here(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -g model --head\nmodel = {'weights': [1]}")
    notebook.run("%%sky_broadcast\ndel model")
    planned = notebook.run("%%sky_broadcast --dry-run\nmodel").lines
    assert next(line for line in planned if line.startswith("model")).endswith("stays here; --push model sends it")
    shown = notebook.finish(notebook.start("%%sky_broadcast\nmodel"))
    assert shown.failure.text.splitlines()[-2:] == [
        "the notebook has model: --push model", "NameError: name 'model' is not defined",
    ]  # fmt: skip
    assert "[model came from the ranks, and none of them has it now; --push model sends the notebook's]" in shown.text
    notebook.run("%%sky_broadcast -o seen --push model\nmodel['weights']")
    assert notebook.value("seen") == [[1]] * 2


def test_a_pulled_value_that_one_rank_deletes_stays_here(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -g model --head\nmodel = {'weights': [1]}")
    notebook.run("%%sky_broadcast -t 1\ndel model")
    assert "rank 1 has no model, which rank 0 has" in notebook.fail("%%sky_broadcast\nmodel").text
    notebook.run("model = {'weights': [2]}")
    assert seen(notebook, "model['weights']") == [[2]] * 2


def test_an_item_of_a_pulled_value_stays_here(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -g model\nmodel = {'weights': [1, 2]}")
    notebook.run("model = model[0]\nmodel['weights'].append(3)")
    assert seen(notebook, "model['weights']") == [[1, 2]] * 2


def test_push_sends_a_pulled_value(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -g model --head\nmodel = {'weights': [1, 2]}")
    notebook.run("model['weights'].append(3)")
    notebook.run("%%sky_broadcast -o seen --push model\nmodel['weights']")
    assert notebook.value("seen") == [[1, 2, 3]] * 2


def test_an_assignment_of_something_else_is_sent(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -g model --head\nmodel = {'weights': [1, 2]}")
    notebook.run("model = {'weights': [9]}")
    assert seen(notebook, "model['weights']") == [[9]] * 2


def test_what_equals_a_pulled_value_that_had_changed_is_sent(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -g model --head\nmodel = {'weights': [1]}")
    notebook.run("model['weights'].append(2)")
    assert seen(notebook, "model['weights']") == [[1]] * 2
    notebook.run("model = {'weights': [1, 2]}")
    assert seen(notebook, "model['weights']") == [[1, 2]] * 2


def test_a_value_that_was_pulled_without_a_cell(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nmodel = {'weights': [1, 2]}")
    notebook.run("%sky_pull model --head")
    notebook.run("model['weights'].append(3)")
    assert seen(notebook, "model['weights']") == [[1, 2]] * 2


# ------------------------------------------------------------------------------------- names that are deleted here


def test_a_builtin_that_was_shadowed_is_there_again(notebook: Notebook) -> None:
    notebook.run("list = 5")
    assert seen(notebook, "list") == [5, 5]
    notebook.run("del list")
    assert seen(notebook, "list((1, 2))") == [[1, 2]] * 2


def test_a_builtin_that_a_rank_shadows_itself_stays_shadowed(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nmax = 7")
    assert seen(notebook, "max") == [7, 7]
    notebook.run("%%sky_broadcast\ndel max")


def test_a_builtin_that_the_rank_shadows_in_the_cell_that_lets_go_of_it(notebook: Notebook) -> None:
    notebook.run("hash = 5")
    assert seen(notebook, "hash") == [5, 5]
    notebook.run("del hash")
    notebook.run("%%sky_broadcast\nhash = ['own']")
    notebook.run("%sky_pull hash --head")
    notebook.run("del hash")
    notebook.run("%%sky_broadcast\npass")
    assert seen(notebook, "hash") == [["own"]] * 2
    notebook.run("%%sky_broadcast\ndel hash")


def test_a_deleted_name_stays_there_and_is_told_once(notebook: Notebook) -> None:
    notebook.run("x = [1]")
    assert seen(notebook, "x") == [[1]] * 2
    notebook.run("del x")
    shown = notebook.run("%%sky_broadcast -o seen\nx")
    assert notebook.value("seen") == [[1]] * 2
    assert shown.text.count("x is deleted here, the ranks still hold it") == 1
    assert "deleted" not in notebook.run("%%sky_broadcast\nx").text


def test_a_class_attribute_that_is_deleted(notebook: Notebook) -> None:
    notebook.run("class Net:\n    extra = 1\n    def size(self): return 3")
    assert seen(notebook, "hasattr(Net, 'extra'), Net().size()") == [(True, 3)] * 2
    notebook.run("del Net.extra")
    assert seen(notebook, "hasattr(Net, 'extra'), Net().size()") == [(False, 3)] * 2
