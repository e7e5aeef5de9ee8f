"""The package does not grow: its figures stay below those of ``tests/size.tsv``, which ``python -m tests.house`` lowers."""

from __future__ import annotations

from tests import size


def test_the_package_does_not_grow() -> None:
    now, most = size.figures(), size.ceilings()
    assert {name: (value, most[name]) for name, value in now.items() if value > most[name]} == {}


def test_a_plain_cell_runs_no_more_modules() -> None:
    count, _, listed = size.plain_cell("-v")
    assert count <= size.ceilings()["modules of a plain cell"], listed


def test_ceilings_only_go_down() -> None:
    most = size.ceilings()
    assert size.lowered({name: value + 1 for name, value in most.items()}) == most
    assert size.lowered({"lines": 1})["lines"] == 1


def test_comments_are_counted_by_lines() -> None:
    assert size.commented('x = 1  # why\n# and\n"# not"\n') == 2
