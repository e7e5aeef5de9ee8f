"""What is said of values that travel, or cannot; and values of which nothing need be said."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.data.capture.loaded import ImportedTexts
from skymagic.data.shipping.bindings import Bindings, Sources
from skymagic.errors import CaptureError
from tests.data.far import Notebook, ranks
from tests.lab.golden import Golden

notebook = ranks(1, scope="module")


def said(notebook: Notebook, cell: str) -> list[str]:
    """What a broadcast cell is told."""
    notes: list[str] = []
    notebook.there(cell, note=notes.append)
    return notes


# frames

FRAMES = """
import pandas as pd
train = pd.DataFrame({'a': [1, 2], 's': ['x', 'y'], 'c': pd.Categorical(['p', 'q'])})
test = train[['a', 's']].copy()
other, series, view = train.drop(columns='a'), train['s'], train[['c']]
many = train.set_index(['a', 's'])
same = many.copy()
"""


def test_frames_with_a_common_index_are_separate_values(notebook: Notebook) -> None:
    notebook.here(FRAMES)
    assert said(notebook, "train = train.assign(z=1); same = same.assign(z=1)") == []
    assert said(notebook, "seen = len(test), len(other), len(series), len(view), len(many)") == []
    assert notebook.values("[list(seen), list(train), list(same)]") == [
        [[2] * 5, ["a", "s", "c", "z"], ["c", "z"]]
    ]


# what travels now

PARAMETERS = """
import functools
from typing import Callable, Generic, ParamSpec, TypeVar, TypeVarTuple
P, R, Ts = ParamSpec('P'), TypeVar('R'), TypeVarTuple('Ts')
def twice(f: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(f)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R: return f(*args, **kwargs) * 2
    return inner
@twice
def plus(x: int) -> int: return x + 1
def many(*args: *Ts) -> tuple[*Ts]: return args
class Task(Generic[P]): pass
"""


def test_functions_and_classes_with_parameters_of_types(notebook: Notebook) -> None:
    notebook.here(PARAMETERS)
    said(
        notebook,
        "seen = [plus(1), list(many(1, 2)), Task[int]() is not None, Task.__parameters__[0] is P, P.__module__]",
    )
    assert notebook.values("seen") == [[4, [1, 2], True, True, "__main__"]]


DELEGATING = """
class Wrapped:
    def __init__(self, inner): self.inner = inner
    def __getattr__(self, name): return getattr(self.inner, name)
wrapped = Wrapped([1, 1, 2])
wrapped.me = wrapped
import tqdm
bar = tqdm.tqdm(range(3), disable=False)
bar.close()
"""


def test_delegating_objects_are_pickled(notebook: Notebook) -> None:
    notebook.here(DELEGATING)
    said(notebook, "seen = [wrapped.count(1), wrapped.me is wrapped, bar.total]")
    assert notebook.values("seen") == [[2, True, 3]]


SCHEDULE = """
import torch
from torch.optim.lr_scheduler import StepLR
net = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = StepLR(opt, 1)
"""
STEP = """
import warnings
def step():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        net(torch.ones(1, 2)).sum().backward(); opt.step(); schedule.step()
    return [str(each.message) for each in found]
"""


@pytest.mark.parametrize("first", ["", "opt.zero_grad()"])
def test_a_scheduler_knows_that_its_optimizer_has_made_a_step(
    notebook: Notebook, first: str
) -> None:
    notebook.here(SCHEDULE)
    if first:
        said(notebook, first)
    said(
        notebook,
        f"import torch\n{STEP}\nseen = step(), schedule.optimizer is opt, opt.param_groups[0]['lr']",
    )
    assert notebook.values("list(seen)") == [[[], True, pytest.approx(0.01)]]


def test_scheduler_step_before_optimizer_step_still_warns(notebook: Notebook) -> None:
    notebook.here(SCHEDULE)
    cell = "import warnings\nwith warnings.catch_warnings(record=True) as found:\n    warnings.simplefilter('always')\n    schedule.step()"
    said(notebook, f"{cell}\nseen = [str(each.message) for each in found]")
    [[warning]] = notebook.values("seen")
    assert "before `optimizer.step()`" in warning


# refusals


@pytest.mark.parametrize(
    "raised", ["SystemExit('no')", "KeyboardInterrupt('no')", "GeneratorExit('no')"]
)
def test_exception_while_pickling_names_the_value(notebook: Notebook, raised: str) -> None:
    notebook.here(f"class Bad:\n    def __reduce__(self): raise {raised}\nbad = [Bad()]")
    with pytest.raises(
        CaptureError, match=rf"bad\[0\] \(Bad\) cannot be pickled: {raised.partition('(')[0]}: no"
    ):
        notebook.there("bad")


def test_endless_recursion_is_not_reported_as_a_deep_value(
    golden: Golden, notebook: Notebook
) -> None:
    notebook.here("class Bad:\n    def __reduce__(self): return self.__reduce__()\nbad = Bad()")
    with golden.raises(CaptureError):
        notebook.there("bad")


# modules

MODULE = '"""Helps."""\nimport os\nscale = {scale}\n\ndef f(x):\n    return x * {scale}\n\nclass A:\n    def g(self):\n        return {scale}\n'


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "helps_here.py"
    path.write_text(MODULE.format(scale=1))
    yield path
    sys.modules.pop("helps_here", None)


def stale(imported: ImportedTexts, path: Path) -> bool:
    found = Sources(str(path.parent), Bindings(), remote=False).find(["helps_here"], [0])
    return bool(imported.stale(found.values()))


def test_reloaded_module_is_not_reported_as_outdated(module: Path) -> None:
    there, imported = importlib.import_module("helps_here"), ImportedTexts()
    assert not stale(imported, module)
    module.write_text(MODULE.format(scale=22))
    exec(
        compile(module.read_text(), str(module), "exec", dont_inherit=True), vars(there)
    )  # not by importlib.reload
    assert not stale(imported, module)
    module.write_text(MODULE.format(scale=333))
    assert stale(imported, module)


def test_module_newer_than_its_pyc_file_is_read_from_source(module: Path) -> None:
    importlib.import_module("helps_here")
    sys.modules.pop("helps_here")
    module.write_text(MODULE.format(scale=22))
    keep, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # the earlier text's file stays
    try:
        importlib.import_module("helps_here")
    finally:
        sys.dont_write_bytecode = keep
    assert not stale(ImportedTexts(), module)
