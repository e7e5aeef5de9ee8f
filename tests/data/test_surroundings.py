"""What a notebook has beside its names: variables of the environment travel, what is set in modules is said."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.data.capture import assignments
from tests.data.far import Notebook


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setitem(os.environ, "V2_THERE", "before")
    monkeypatch.setattr(assignments, "_environment_before", dict(os.environ))
    made = Notebook(tmp_path, 2)
    made.here("import os")
    yield made
    made.close()


def test_environment_variables_of_the_notebook_reach_ranks(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "V2_BACKEND", "jax")
    monkeypatch.delitem(os.environ, "V2_THERE")
    notebook.there("import os")
    assert (
        notebook.values("[os.environ.get('V2_BACKEND'), os.environ.get('V2_THERE')]")
        == [["jax", None]] * 2
    )
    # theirs stays until it is changed here
    notebook.there("os.environ['V2_BACKEND'] = 'torch'")
    notebook.there("1")
    assert notebook.values("os.environ['V2_BACKEND']") == ["torch"] * 2
    monkeypatch.setitem(os.environ, "V2_BACKEND", "tensorflow")
    notebook.there("1")
    assert notebook.values("os.environ['V2_BACKEND']") == ["tensorflow"] * 2


def test_secret_and_machine_variables_are_not_sent(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("V2_API_KEY", "RANK", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"):
        monkeypatch.setitem(os.environ, name, "v2")
    said: list[str] = []
    notebook.there("import os", note=said.append)
    assert (
        notebook.values("[name for name, value in os.environ.items() if value == 'v2']") == [[]] * 2
    )
    assert [line.partition(" is ")[0] for line in said] == ["V2_API_KEY"]
    notebook.there("import os", note=said.append)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("cell", "what"),
    [
        ("cfg.lr = 0.5", "cfg.lr"),
        ("cfg.lr += 1", "cfg.lr"),
        ("cfg.table['x'] = 1", "cfg.table"),
        ("cfg.Net.depth = 3", "cfg.Net"),
        ("np.random.mine = 1", "numpy.random.mine"),
        ("np.v2 = lambda: 1", "numpy.v2"),
    ],
)
def test_assignments_to_modules_are_noted(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, cell: str, what: str
) -> None:
    (notebook.folder / "cfg.py").write_text("lr = 0.1\ntable = {}\nclass Net:\n    depth = 1\n")
    monkeypatch.syspath_prepend(notebook.folder)
    monkeypatch.delitem(__import__("sys").modules, "cfg", raising=False)
    notebook.here("import cfg, numpy as np")
    notebook.here(cell)
    notebook.here("box = type('Box', (), {})()\nbox.x = 1")
    said: list[str] = []
    notebook.there("1", note=said.append)
    assert said == []
    notebook.there("cfg, np, np.random", note=said.append)
    assert [line.partition(":")[0] for line in said] == [what]
    notebook.there("cfg, np", note=said.append)
    assert len(said) == 1
    monkeypatch.delattr("numpy.v2", raising=False)
    monkeypatch.delattr("numpy.random.mine", raising=False)
