"""Who owns a name: a rank keeps what a run really bound there, whatever the cell's text looks like.

Each form of binding and values that were pulled are in the random walk of `test_walk`; here is what it cannot see: what is said, ranks
that differ, options, and that Python's own name is there again.
"""

from __future__ import annotations

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook, seen
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2")


def test_a_store_on_one_rank_alone(notebook: Notebook) -> None:
    notebook.run("data = ['first']")
    assert seen(notebook, "data") == [["first"]] * 2
    notebook.run("data = ['second']")
    notebook.run("%%sky_broadcast\nimport os\nif os.environ['RANK'] == '0':\n    data = ['own']")
    assert seen(notebook, "data") == [["own"], ["second"]]


def test_equal_constant_is_still_bound(notebook: Notebook) -> None:
    """The object 1 exists once: a name that the cell certainly binds is the rank's, even if the object is the same."""
    notebook.run("n = 1")
    assert seen(notebook, "n") == [1, 1]
    notebook.run("n = 2")
    notebook.run("%%sky_broadcast\nn = 1")
    assert seen(notebook, "n") == [1, 1]


# --------------------------------------------------------------------- what came from the ranks does not go back


def test_a_pulled_value_that_changes_here_stays_here(golden: Golden, notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -g model\nmodel = {'weights': [1, 2]}")
    notebook.run("model[0]['weights'].append(3)")
    shown = notebook.run("%%sky_broadcast -o seen\nmodel['weights']")
    assert notebook.value("seen") == [[1, 2]] * 2
    golden.line(shown.text, "model: ")
    assert "model: " not in notebook.run("%%sky_broadcast\nmodel['weights']").text


def test_typed_number_is_sent_but_not_one_from_a_pulled_list(
    notebook: Notebook,
) -> None:
    """The object 3 exists once, and the pulled list contains the number that is typed."""
    for here, there in (("n = n[0]", 50), ("n = 3", 3)):
        notebook.run("%%sky_broadcast -g n\nn = 3")
        notebook.run("%%sky_broadcast\nn = 50")
        notebook.run(here)
        shown = notebook.run("%%sky_broadcast -o seen\nn")
        assert notebook.value("seen") == [there] * 2, here
        assert ("[n: " in shown.text) == (there == 50)


def test_a_pulled_value_that_the_ranks_delete_stays_here(
    golden: Golden, notebook: Notebook
) -> None:
    notebook.run("%%sky_broadcast -g model --head\nmodel = {'weights': [1]}")
    notebook.run("%%sky_broadcast\ndel model")
    planned = notebook.run("%%sky_broadcast --dry-run\nmodel").lines
    assert next(line for line in planned if line.startswith("model")).endswith(
        "stays here; --push model sends it"
    )
    shown = notebook.finish(notebook.start("%%sky_broadcast\nmodel"))
    golden(shown.failure.text.splitlines()[-2:])
    golden.line(shown.text, "[model ")
    notebook.run("%%sky_broadcast -o seen --push model\nmodel['weights']")
    assert notebook.value("seen") == [[1]] * 2


def test_a_pulled_value_that_one_rank_deletes_stays_here(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -g model --head\nmodel = {'weights': [1]}")
    notebook.run("%%sky_broadcast -t 1\ndel model")
    assert "rank 1 has no model, which rank 0 has" in notebook.fail("%%sky_broadcast\nmodel").text
    notebook.run("model = {'weights': [2]}")
    assert seen(notebook, "model['weights']") == [[2]] * 2


def test_push_sends_a_pulled_value(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -g model --head\nmodel = {'weights': [1, 2]}")
    notebook.run("model['weights'].append(3)")
    notebook.run("%%sky_broadcast -o seen --push model\nmodel['weights']")
    assert notebook.value("seen") == [[1, 2, 3]] * 2


# ------------------------------------------------------------------------------------- names that are deleted here


def test_unshadowed_builtin_is_restored(notebook: Notebook) -> None:
    notebook.run("list = 5")
    assert seen(notebook, "list") == [5, 5]
    notebook.run("del list")
    assert seen(notebook, "list((1, 2))") == [[1, 2]] * 2


def test_deleted_name_stays_on_ranks_with_one_note(golden: Golden, notebook: Notebook) -> None:
    notebook.run("x = [1]")
    assert seen(notebook, "x") == [[1]] * 2
    notebook.run("del x")
    shown = notebook.run("%%sky_broadcast -o seen\nx")
    assert notebook.value("seen") == [[1]] * 2
    golden.line(shown.text, "[x ")
    assert "deleted" not in notebook.run("%%sky_broadcast\nx").text


def test_a_class_attribute_that_is_deleted(notebook: Notebook) -> None:
    notebook.run("class Net:\n    extra = 1\n    def size(self): return 3")
    assert seen(notebook, "hasattr(Net, 'extra'), Net().size()") == [(True, 3)] * 2
    notebook.run("del Net.extra")
    assert seen(notebook, "hasattr(Net, 'extra'), Net().size()") == [(False, 3)] * 2
