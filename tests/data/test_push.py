"""`--push` and `%sky_push` replace what the ranks have, whatever the ranks did to it."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", scope="function")

CHANGES = {
    "assignment": ("x = 1", "x = 2"),
    "same value twice": ("x = [1]", "x = [1, 2]"),
    "change in place": ("x = [1]", "x.append(2)"),
    "deletion": ("x = 1", "del x"),
    "function": ("def x(): return 1", "def x(): return 2"),
    "gathered": ("x = {'a': 1}", "x['a'] = 2"),
}


@pytest.mark.parametrize("how", ["--push", "%sky_push"])
@pytest.mark.parametrize("change", CHANGES)
def test_push_replaces_the_ranks_value(notebook: Notebook, change: str, how: str) -> None:
    here, there = CHANGES[change]
    notebook.run(here)
    notebook.run("%%sky_broadcast\nx;")
    notebook.run(f"%%sky_broadcast\n{there}")
    plan = notebook.run("%%sky_broadcast --push x --dry-run\npass").text
    assert "travels" in plan
    if how == "--push":
        notebook.run("%%sky_broadcast --push x\npass")
    else:
        notebook.run("%sky_push x")
    shown = "x() if callable(x) else x"
    notebook.run(f"%%sky_broadcast --no-push -o got\n{shown}")
    assert notebook.value("got") == [notebook.value(shown)] * 2


def test_pushed_object_keeps_references_to_it(notebook: Notebook) -> None:
    notebook.run("model = [1]; optimizer = {'model': model}; other = [5]")
    notebook.run("%%sky_broadcast\nmodel.append(2); optimizer; other.append(6)")
    notebook.run("%%sky_broadcast --push model -o got\n(model, optimizer['model'] is model, other)")
    assert notebook.value("got") == [([1], True, [5, 6])] * 2
