"""Results as a table by rank, and the status of a pool, as text and HTML."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from skymagic.display import inspection as results


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
def test_nan_is_counted_beside_the_range(place: int) -> None:
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
