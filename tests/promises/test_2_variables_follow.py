"""Promise 2: the names that a cell uses are sent, once, and never stale; a rank keeps its own value until the notebook's changes."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook, seen


def test_names_of_the_cells_text_travel(pool: Notebook) -> None:
    pool.run("followed = {'lr': 0.1, 'layers': [1, 2]}")
    assert seen(pool, "followed") == [{"lr": 0.1, "layers": [1, 2]}] * 2


def test_names_behind_functions_and_methods_travel(pool: Notebook) -> None:
    pool.run(
        "factor = 3\ndef inner(x): return x * factor\nclass Model:\n    def call(self, x): return inner(x)\nmodel_2 = Model()"
    )
    assert seen(pool, "model_2.call(2)") == [6, 6]
    pool.run("factor = 5")
    assert seen(pool, "model_2.call(2)") == [10, 10]


def test_names_that_functions_of_the_ranks_read_travel(pool: Notebook) -> None:
    pool.run("%%sky_broadcast\ndef scaled_2(x): return x * rate_2")
    pool.run("rate_2 = 3")
    assert seen(pool, "scaled_2(2)") == [6, 6]
    pool.run("rate_2 = 4")
    assert seen(pool, "scaled_2(2)") == [8, 8]


def test_modules_travel_as_imports(pool: Notebook) -> None:
    pool.run("import collections as containers")
    assert seen(pool, "containers.OrderedDict(a=1)['a']") == [1, 1]


CHANGES = {
    "rebound": ("value_2 = [1]", "value_2 = [2]", "value_2", [2]),
    "appended": ("value_2 = [1]", "value_2.append(2)", "value_2", [1, 2]),
    "nested": ("value_2 = {'a': {'b': [1]}}", "value_2['a']['b'][0] = 9", "value_2", {"a": {"b": [9]}}),
    "array": (
        "import numpy as np\nvalue_2 = np.zeros(300_000)", "value_2[123_456] = 7",
        "float(value_2.sum())", 7.0,
    ),
    "attribute": (
        "class Thing:\n    size = 1\nvalue_2 = Thing()", "value_2.size = 4", "value_2.size", 4,
    ),
    "tensor": ("import torch\nvalue_2 = torch.zeros(4)", "value_2 += 1", "value_2.sum().item()", 4.0),
    "function": ("def value_2(): return 1", "def value_2(): return 2", "value_2()", 2),
    "parameter": (
        "import torch\nvalue_2 = torch.nn.Linear(2, 1, bias=False)",
        "with torch.no_grad(): value_2.weight.fill_(2.0)", "value_2.weight.sum().item()", 4.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_the_notebook_is_seen(pool: Notebook, change: str) -> None:
    made, changed, read, expected = CHANGES[change]
    pool.run(made)
    seen(pool, read)
    pool.run(changed)
    assert seen(pool, read) == [expected] * 2


def test_a_rank_keeps_its_own_value_until_the_notebooks_changes(pool: Notebook) -> None:
    pool.run("kept_2 = 1")
    pool.run("%%sky_broadcast\nkept_2 = kept_2 + 10 + rank")
    assert seen(pool, "kept_2") == [11, 12]
    pool.run("kept_2 = 2")
    assert seen(pool, "kept_2") == [2, 2]


def test_value_changed_back_is_sent(pool: Notebook) -> None:
    pool.run("back = 1")
    seen(pool, "back")
    pool.run("back = 2")
    seen(pool, "back")
    pool.run("back = 1")
    assert seen(pool, "back") == [1, 1]


def test_an_unchanged_value_is_not_sent_again(pool: Notebook) -> None:
    pool.run("import numpy as np\nlarge = np.ones(500_000)")
    first = pool.run("%%sky_broadcast --dry-run\nlarge.sum()").said
    pool.run("%%sky_broadcast\nlarge.sum();")
    again = pool.run("%%sky_broadcast --dry-run\nlarge.sum()").said
    assert "large" in first
    assert first != again
    # a change on the ranks lives on: nothing was sent over it
    pool.run("%%sky_broadcast\nlarge[0] = 5")
    assert seen(pool, "float(large[0])") == [5.0, 5.0]


def test_shared_objects_stay_shared_on_ranks(pool: Notebook) -> None:
    pool.run("shared = [1]\nholder = {'shared': shared}")
    assert seen(pool, "holder['shared'] is shared") == [True, True]


def test_equal_arrays_stay_distinct(pool: Notebook) -> None:
    pool.run("import numpy as np\npair_2 = [np.zeros(300_000), np.zeros(300_000)]")
    pool.run("%%sky_broadcast\npair_2[0][:] = 1")
    assert seen(pool, "[float(part.mean()) for part in pair_2]") == [[1.0, 0.0]] * 2


def test_push_replaces_a_value_of_the_ranks(pool: Notebook) -> None:
    pool.run("mine = 'notebook'")
    pool.run("%%sky_broadcast\nmine; mine = 'rank'")
    pool.run("%%sky_broadcast --push mine\npass")
    assert seen(pool, "mine") == ["notebook", "notebook"]


def test_no_push_leaves_the_ranks_as_they_are(pool: Notebook) -> None:
    pool.run("unsent = 1")
    pool.run("%%sky_broadcast\nunsent = 7")
    pool.run("unsent = 2")
    pool.run("%%sky_broadcast --no-push -o before\nunsent")
    assert pool.value("before") == [7, 7]
    assert seen(pool, "unsent") == [2, 2]


def test_fresh_sends_unchanged_values(pool: Notebook) -> None:
    pool.run("again_2 = [1]")
    pool.run("%%sky_broadcast\nagain_2.append(2)")
    pool.run("%%sky_broadcast --fresh -o sent\nagain_2")
    assert pool.value("sent") == [[1], [1]]


def test_sky_push_and_sky_pull_move_variables(pool: Notebook) -> None:
    pool.run("pushed_2 = 'here'")
    pool.run("%sky_push pushed_2")
    pool.run("%%sky_broadcast --no-push\npulled_2 = (rank, pushed_2)")
    pool.run("%sky_pull pulled_2")
    assert pool.value("pulled_2") == [(0, "here"), (1, "here")]
    pool.run("%sky_pull pulled_2 --head -o first_2")
    assert pool.value("first_2") == (0, "here")


def test_clone_copies_from_one_rank_to_another(pool: Notebook) -> None:
    pool.run("%%sky_broadcast\nweights_2 = torch.full((3,), float(rank))")
    pool.run("%sky_clone 1 --from 0 weights_2")
    assert seen(pool, "weights_2.tolist()") == [[0.0] * 3] * 2


def test_a_cloned_value_is_kept_as_a_ranks_own(pool: Notebook) -> None:
    pool.run("cloned_2 = 'notebook'")
    pool.run("%%sky_broadcast -t 0\ncloned_2 = cloned_2 + ', rank 0'")
    pool.run("%sky_clone 1 --from 0 cloned_2")
    assert seen(pool, "cloned_2") == ["notebook, rank 0"] * 2


def test_a_value_that_cannot_travel_is_named_and_nothing_runs(pool: Notebook) -> None:
    pool.run("import threading\nlock_2 = threading.Lock()")
    pool.run("%%sky_broadcast\nran_2 = False")
    failure = pool.fail("%%sky_broadcast\nran_2 = True\nlock_2")
    assert (failure.ename, "lock_2" in failure.text) == ("CaptureError", True)
    assert seen(pool, "ran_2") == [False, False]


def test_values_of_the_ranks_are_writable_and_isolated(pool: Notebook) -> None:
    pool.run("import numpy as np\nisolated = np.zeros(400_000)")
    pool.run("%%sky_broadcast\nisolated[:] = rank + 1")
    assert seen(pool, "float(isolated.mean())") == [1.0, 2.0]
    assert pool.value("float(isolated.sum())") == 0.0
