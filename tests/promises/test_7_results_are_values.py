"""Promise 7: results are values in variables of the notebook, in rank order."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook

VALUES = {
    "None": ("None", "[None, None]"),
    "numbers": ("rank + 0.5", "[0.5, 1.5]"),
    "containers": ("{'rank': rank, 'items': (1, [2])}", "[{'rank': r, 'items': (1, [2])} for r in (0, 1)]"),
    "bytes": ("bytes([rank]) * 3", "[b'\\0' * 3, b'\\1' * 3]"),
}  # fmt: skip


@pytest.mark.parametrize("kind", VALUES)
def test_each_ranks_value_arrives_in_order(pool: Notebook, kind: str) -> None:
    cell, expected = VALUES[kind]
    pool.run(f"%%sky_broadcast -o results_7\n{cell}")
    assert pool.value(f"results_7 == {expected}")


def test_arrays_and_tensors_arrive_and_are_writable(pool: Notebook) -> None:
    pool.run(
        "%%sky_broadcast -o arrays_7\nimport numpy as np\n(np.full(300_000, rank), torch.full((3,), float(rank)))"
    )
    pool.run("arrays_7[1][0][0] = 9")
    assert pool.value("[(int(a[-1]), a.dtype.kind, t.tolist()) for a, t in arrays_7]") == [
        (0, "i", [0.0] * 3),
        (1, "i", [1.0] * 3),
    ]
    assert pool.value("int(arrays_7[1][0][0])") == 9


def test_head_stores_one_value(pool: Notebook) -> None:
    pool.run("%%sky_broadcast -o head_7 --head\nrank + 40")
    assert pool.value("head_7") == 40


def test_targets_give_as_many_values(pool: Notebook) -> None:
    pool.run("%%sky_broadcast -t 1 -o one_7\nrank")
    assert pool.value("one_7") == [1]


def test_gather_fetches_names(pool: Notebook) -> None:
    pool.run("%%sky_broadcast -g loss_7,step_7\nloss_7 = rank / 2\nstep_7 = 3")
    assert pool.value("loss_7, step_7") == ([0.0, 0.5], [3, 3])


def test_a_cell_without_an_expression_gives_none(pool: Notebook) -> None:
    pool.run("%%sky_broadcast -o nothing_7\nassigned = 1")
    assert pool.value("nothing_7") == [None, None]


def test_unreturnable_value_is_named_and_others_are_kept(pool: Notebook) -> None:
    failure = pool.fail("%%sky_broadcast -o partly_7\nopen(os.devnull) if rank else 'fine'")
    assert failure.ename == "ResultError"
    assert pool.value("partly_7[0], 'rank 1' in repr(partly_7[1])") == ("fine", True)


def test_the_class_of_a_value_is_the_notebooks(pool: Notebook) -> None:
    pool.run("class Point_7:\n    def __init__(self, x): self.x = x")
    pool.run("%%sky_broadcast -o points_7\nPoint_7(rank)")
    assert pool.value("[(type(p) is Point_7, p.x) for p in points_7]") == [(True, 0), (True, 1)]


def test_a_background_cell_has_a_result(pool: Notebook) -> None:
    pool.run("%%sky_broadcast -a -o later_7\nrank * 2")
    pool.run("handle_7 = _")
    pool.run("fetched_7 = handle_7.result()")
    assert pool.value("later_7, fetched_7") == ([0, 2], [0, 2])


def test_results_outlive_a_change_on_the_ranks(pool: Notebook) -> None:
    pool.run("%%sky_broadcast -o frozen_7\nlist_7 = [rank]\nlist_7")
    pool.run("%%sky_broadcast\nlist_7.append(99)")
    assert pool.value("frozen_7") == [[0], [1]]


def test_a_function_runs_on_the_pool(pool: Notebook) -> None:
    pool.run(
        "import skymagic as sky\n@sky.function\ndef twice_7(x):\n    return x * 2 + sky.instance_info().rank"
    )
    pool.run("called_7 = twice_7(4) @ sky.find('lab')")
    assert pool.value("called_7") == [8, 9]


def test_values_of_calls_are_in_the_order_of_the_calls(pool: Notebook) -> None:
    pool.run(
        "import time, skymagic as sky\n@sky.function\ndef later_7(seconds):\n    time.sleep(seconds)\n    return seconds"
    )
    pool.run("ordered_7 = (later_7(0.3) & later_7(0.0)) >> sky.find('lab')")
    assert pool.value("ordered_7") == (0.3, 0.0)
