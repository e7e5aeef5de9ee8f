"""What counts as a change of a value: its contents, and not what was done with it."""

from __future__ import annotations

import copy
import functools
import io
import random
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from matplotlib.figure import Figure

from skymagic.content.store import NodeStore
from skymagic.data.bundle import ContentIndex
from skymagic.data.shipping.bindings import Bindings
from skymagic.data.shipping.bundles import Variable
from skymagic.data.shipping.collecting import Collector
from skymagic.data.shipping.comparison import Fingerprints
from skymagic.data.values import contents, pickling
from skymagic.data.values.contents import contents_hash
from skymagic.data.values.forms import form_for
from tests.data.far import Notebook, moved, ranks
from tests.lab.golden import Golden

Look = Callable[[Any], str]


@pytest.fixture
def look(tmp_path: Path, space: dict[str, Any]) -> Look:
    """A value's fingerprint, taken by one who sees it for the first time."""
    store = NodeStore(tmp_path / "store")

    def fingerprint(value: Any) -> str:
        index = ContentIndex(store)
        variable = Variable("x", value, pickling.dumps(value, space))
        index.identify(variable.parts)
        return Fingerprints(Collector(space, str(tmp_path), Bindings()), index).take(variable, {})

    return fingerprint


@pytest.fixture
def space() -> dict[str, Any]:
    """A notebook's names."""
    return vars(types.ModuleType("__main__"))


@pytest.fixture
def run(space: dict[str, Any]) -> Callable[..., Any]:
    """Runs a cell; returns what it has bound to ``x``."""

    def cell(source: str, file: str = "<cell>") -> Any:
        exec(compile(source, file, "exec", dont_inherit=True), space)
        return space["x"]

    return cell


DAYS = pd.date_range("2024", periods=50, freq="D", name="day")


def frame() -> pd.DataFrame:
    """Columns of all kinds that pandas caches something about."""
    days = pd.date_range("2024", periods=50, freq="D")
    return pd.DataFrame(
        {
            "t": days, "v": np.arange(50.0), "w": np.arange(50.0) ** 2, "d": days - days[0], "s": ["a", "b"] * 25,
            "o": pd.Series([1, "x"] * 25, dtype=object), "p": days.to_period("M"),
            "c": pd.Categorical(["x", "y"] * 25), "z": days.tz_localize("UTC"),
            "n": pd.array([1, None] * 25, dtype="Int64"),
        },
        index=days,
    )  # fmt: skip


PANDAS: dict[str, tuple[Callable[[], Any], list[Callable[[Any], Any]]]] = {
    "dates": (lambda: DAYS.copy(), [repr, lambda x: x.is_unique, lambda x: x.year, lambda x: x.get_loc("2024-02-03")]),
    "zone": (
        lambda: DAYS.tz_localize("UTC"),
        [repr, lambda x: x.hour, lambda x: x.tz_convert("Europe/Berlin").hour, lambda x: x.max()],
    ),
    "berlin": (lambda: DAYS.tz_localize("Europe/Berlin"), [repr, lambda x: x.hour, lambda x: x[3:5]]),
    "deltas": (
        lambda: pd.timedelta_range("1h", "9h", freq="h"),
        [repr, lambda x: x.days, lambda x: x.is_monotonic_increasing],
    ),
    "periods": (
        lambda: pd.period_range("2024", periods=9, freq="M"),
        [repr, lambda x: x.year, lambda x: x.to_timestamp(), lambda x: x.get_loc("2024-03")],
    ),
    "levels": (
        lambda: pd.MultiIndex.from_product([DAYS[:3], list("ab")]),
        [repr, lambda x: x.values, lambda x: x.get_loc((DAYS[0], "a"))],
    ),
    "intervals": (lambda: pd.interval_range(0, 5), [repr, lambda x: x.get_loc(2.5), lambda x: x.mid]),
    "series": (
        lambda: pd.Series(np.arange(50), index=DAYS.copy()),
        [repr, lambda x: x["2024-01"], lambda x: x.resample("ME").sum(), lambda x: x.asof("2024-02-02")],
    ),
    "frame": (
        frame,
        [
            repr, lambda x: x.values, lambda x: x.describe(), lambda x: x["t"].dt.year, lambda x: x.loc["2024-02"],
            lambda x: x[x.v > 3], lambda x: x.groupby("s").v.sum(), lambda x: x.sort_values("t"), lambda x: x.z.max(),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PANDAS)
def test_reading_pandas_data_is_no_change(look: Look, kind: str) -> None:
    make, uses = PANDAS[kind]
    value = make()
    before = look(value)
    for use in uses:
        use(value)
        assert look(value) == before
    assert look(make()) == before
    assert look(copy.deepcopy(value)) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.loc.__setitem__(("2024-01-03", "v"), 7.0),
        lambda x: x.loc.__setitem__(("2024-01-03", "t"), pd.Timestamp("2000")),
        lambda x: x.loc.__setitem__(("2024-01-03", "s"), "c"),
        lambda x: x.loc.__setitem__(("2024-01-03", "o"), 1),
        lambda x: x.loc.__setitem__(("2024-01-03", "c"), "y"),
        lambda x: x.loc.__setitem__(("2024-01-03", "n"), 9),
        lambda x: x.insert(0, "new", 1),
        lambda x: x.pop("v"),
        lambda x: setattr(x, "columns", list("tvwdsopczm")),
        lambda x: setattr(x, "index", range(50)),
        lambda x: setattr(x, "index", x.index[::-1]),
        lambda x: setattr(x, "z", x.z.dt.tz_convert("Asia/Tokyo")),
        lambda x: setattr(x, "v", x.v.astype("f4")),
        lambda x: x.attrs.update(source="web"),
        lambda x: setattr(x.index, "name", "when"),
    ],
)
def test_a_change_of_a_frame_is_one(look: Look, change: Callable[[Any], Any]) -> None:
    value = frame()
    before = look(value)
    change(value)
    assert look(value) != before


def test_blocks_of_a_frame_do_not_matter(look: Look) -> None:
    together = pd.DataFrame(np.arange(12.0).reshape(4, 3), columns=list("abc"))
    apart = together[["a"]].copy()
    apart["b"], apart["c"] = together.b.copy(), together.c.copy()
    assert len(together._mgr.blocks) != len(apart._mgr.blocks)
    assert (
        look(together)
        == look(apart)
        == look(pd.DataFrame(np.asfortranarray(together.values), columns=list("abc")))
    )


def test_figures_are_compared_by_content(look: Look) -> None:
    figure = Figure()
    axes = figure.subplots()
    (line,) = axes.plot([1, 2, 3])
    before = [look(each) for each in (figure, axes, line)]
    figure.savefig(io.BytesIO())
    axes.get_xlim()
    axes.get_xticklabels()
    assert [look(each) for each in (figure, axes, line)] == before
    line.set_ydata([1, 2, 4])
    assert all(
        now != was
        for now, was in zip([look(each) for each in (figure, axes, line)], before, strict=True)
    )
    title = look(figure)
    axes.set_title("loss")
    assert look(figure) != title


SAME: dict[str, tuple[Any, Any]] = {  # plain values are below, at random
    "colliding": ({0, 8}, {8, 0}),
    "frozensets": ([frozenset((0, 8))], [frozenset((8, 0))]),
    "sets of objects": ({(1, None), (2, None)}, {(2, None), (1, None)}),
    "set in attributes": (types.SimpleNamespace(s={0, 8}), types.SimpleNamespace(s={8, 0})),
    "strings": (["x y"] * 2, ["x y", "".join(["x", " y"])]),
    "tuples": ([(1, "a b")] * 2, [(1, "a b"), (1, "".join("a b"))]),
    "numbers": ([10**20] * 2, [10**20, int("1" + "0" * 20)]),
    "scalars": ([np.int64(5)] * 2, [np.int64(5), np.int64(5)]),
    "stamps": ([pd.Timestamp("2024")] * 2, [pd.Timestamp("2024"), pd.Timestamp("2024")]),
    "keys": ([{"a b": 1}, {"a b": 2}], [{"a b": 1}, {"".join(["a ", "b"]): 2}]),
    "fortran": (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3))),
    "large fortran": (np.arange(600_000.0).reshape(200, 3000), np.asfortranarray(np.arange(600_000.0).reshape(200, 3000))),
    "part of an array": (np.arange(9.0)[3:5], np.arange(9.0)[3:5].copy()),
    "every second": (np.arange(9)[::2], np.arange(9)[::2].copy()),
    "backwards": (np.arange(9)[::-1], np.arange(9)[::-1].copy()),
    "part in a list": ([np.arange(90_000.0)[9:]], [np.arange(90_000.0)[9:].copy()]),
    "part of a tensor": (torch.arange(90_000.0)[9:500], torch.arange(90_000.0)[9:500].clone()),
    "columns of a tensor": (torch.arange(600.0).view(20, 30)[:, :2], torch.arange(600.0).view(20, 30)[:, :2].clone()),
    "turned": (torch.arange(6).view(2, 3).T, torch.arange(6).view(2, 3).T.contiguous()),
    "half floats": (torch.ones(4, 4, dtype=torch.bfloat16)[1:], torch.ones(3, 4, dtype=torch.bfloat16)),
    "parameter": (torch.nn.Parameter(torch.ones(9)[1:]), torch.nn.Parameter(torch.ones(8))),
    "array of objects": (np.array([["a b", 1]] * 2, dtype=object), np.array([["".join("a b"), 1], ["a b", 1]], dtype=object)),
}  # fmt: skip


@pytest.mark.parametrize("kind", SAME)
def test_equal_contents_are_the_same(look: Look, kind: str) -> None:
    one, other = SAME[kind]
    assert look(one) == look(other)


INNER: list[Any] = [1]
ARRAY = np.arange(9.0)
ZEROS = np.zeros(9)
TENSOR = torch.arange(9.0)
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "one list twice, beside an object": ([INNER, INNER, Path()], [INNER, [1], Path()]),
    "one object twice": (
        [f := types.SimpleNamespace(), f],
        [types.SimpleNamespace(), types.SimpleNamespace()],
    ),
    "one array twice": ([ARRAY, ARRAY], [ARRAY, ARRAY.copy()]),
    "views": ([ARRAY, ARRAY[2:]], [ARRAY, ARRAY[2:].copy()]),
    "other views": ([ZEROS[:4], ZEROS[2:6]], [ZEROS[:4], ZEROS[3:7]]),
    "views of a tensor": ([TENSOR, TENSOR[2:]], [TENSOR, TENSOR[2:].clone()]),
    "bytes": ([b"1"], [bytearray(b"1")]),
    "frozen": ({1, 2}, frozenset((1, 2))),
    "shape": (np.zeros((2, 3)), np.zeros((3, 2))),
    "dtype": (np.zeros(3, "i8"), np.zeros(3, "f8")),
    "record": (np.zeros(3, [("a", "f8")]), np.zeros(3, [("b", "f8")])),
    "byte order": (np.zeros(3, ">f8"), np.zeros(3, "<f8")),
    "turned": (np.arange(4).reshape(2, 2), np.arange(4).reshape(2, 2).T),
    "shape of a tensor": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "dtype of a tensor": (torch.zeros(4, dtype=torch.int32), torch.zeros(4)),
    "requires_grad": (torch.zeros(3), torch.zeros(3, requires_grad=True)),
    "parameter": (torch.zeros(3, requires_grad=True), torch.nn.Parameter(torch.zeros(3))),
    "mode": (torch.nn.Dropout().train(), torch.nn.Dropout().eval()),
    "pattern": (re.compile("a"), re.compile("a", re.I)),
    "masked": (np.ma.array([1, 2], mask=[False, True]), np.ma.array([1, 2], mask=[False, False])),
    "names of days": (DAYS, DAYS.rename("other")),
    "spacing": (DAYS, DAYS._with_freq(None)),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_other_contents_are_others(look: Look, kind: str) -> None:
    one, other = DIFFERENT[kind]
    assert look(one) != look(other)
    there = pickling.dumps(one, {})
    assert look(one) == look(pickling.loads(there.pieces, there.buffers, {}))


def test_a_gradient_is_a_change(look: Look) -> None:
    model = torch.nn.Linear(3, 2)
    before = look(model)
    model(torch.ones(3))
    assert look(model) == before
    model(torch.ones(3)).sum().backward()
    first = look(model)
    assert first != before
    model(torch.ones(3)).sum().backward()
    assert look(model) != first
    model.zero_grad()
    assert look(model) == before


def test_comments_and_lines_of_a_function_do_not_matter(
    look: Look, run: Callable[..., Any]
) -> None:
    text = "def x(a, *, b=2):\n  'Says what.'\n  def inner(): return [a for _ in range(b)]\n  return inner()"
    before = look(run(text))
    comments = text.replace("  return inner", "\n  # comment\n  return inner")
    assert look(run(f"# more\n\n{comments}", "<other>")) == before
    for changed in ("[b for", "return inner", "*, b=3", "Says why", "def inner", "x(a, c=1,"):
        old = {
            "[b for": "[a for",
            "*, b=3": "*, b=2",
            "Says why": "Says what",
            "x(a, c=1,": "x(a,",
        }.get(changed)
        if old is not None:
            assert look(run(text.replace(old, changed))) != before


def test_a_function_that_was_called_is_the_same(look: Look, run: Callable[..., Any]) -> None:
    x = run(
        "import functools\n@functools.singledispatch\ndef x(a): return 1\n"
        "@x.register\ndef _(a: int): return 2\n@functools.lru_cache\ndef y(a): return a\nx.cached = y"
    )
    before = look(x)
    x(1), x.cached(1), x(""), x.cached("")
    assert look(x) == before
    assert look(run("@x.register\ndef _(a: str): return 3\n")) != before


def test_cached_attributes_are_not_content(look: Look) -> None:
    class Data:
        def __init__(self) -> None:
            self.values = [3, 4]

        @functools.cached_property
        def total(self) -> int:
            return sum(self.values)

    data = Data()
    before = look(data)
    assert data.total == 7
    assert look(data) == before
    data.values[0] = 1
    assert look(data) != before


@pytest.mark.parametrize(
    ("value", "use"),
    [
        (re.compile("a+b"), lambda x: x.search("aab")),
        (Path("a/b"), lambda x: (x.parts, hash(x), str(x))),
        (
            scipy.sparse.csr_matrix(np.eye(3)),
            lambda x: (x.has_sorted_indices, x.has_canonical_format, x @ x),
        ),
        (
            torch.nn.Sequential(torch.nn.Linear(2, 2)),
            lambda x: (x(torch.ones(2)), list(x.parameters()), repr(x)),
        ),
        (np.random.default_rng(1), repr),
    ],
)
def test_reading_is_no_change(look: Look, value: Any, use: Callable[[Any], Any]) -> None:
    before = look(value)
    use(value)
    assert look(value) == before


def test_values_that_hold_themselves(look: Look) -> None:
    one: list[Any] = [1]
    one.append(one)
    other: dict[str, Any] = {"a": types.SimpleNamespace()}
    other["a"].owner = other
    assert look(one) == look(copy.deepcopy(one))
    assert look(other) == look(copy.deepcopy(other))


@pytest.fixture
def soon_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the objects is too many to be looked at one by one."""
    monkeypatch.setattr(contents, "_MOST_OBJECTS", 1_000)
    monkeypatch.setattr(contents, "_WIDE", contents._WIDE // 100)


def test_values_too_large_to_look_at_are_their_pickles(look: Look, soon_too_large: None) -> None:
    value = [types.SimpleNamespace(n=n) for n in range(400)]
    before = look(value)
    assert look(value) == before
    value[-1].n = 0
    assert look(value) != before


def test_shared_tuples_take_no_time(look: Look, soon_too_large: None) -> None:
    value: Any = ("a",)
    for _ in range(60):
        value = (value, value)
    assert look(value) == look(value)


class Thing:
    """Something with attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def some_value(chance: random.Random, depth: int, pool: list[Any]) -> Any:
    """A random value; what can change may be in it more than once."""
    atoms = (0, 1, True, None, 1.0, 0.0, -0.0, "", "a", b"a", b"", 2**40, 1j, "values", "again")
    kind = chance.randrange(12 if depth else 6)
    if kind < 6:
        return chance.choice(atoms)
    if kind == 6 and pool:
        return chance.choice(pool)
    if kind == 7:
        return tuple(some_value(chance, depth - 1, pool) for _ in range(chance.randrange(4)))
    if kind == 8:
        made: Any = {
            chance.choice([1, "a", (1, 2), b"x", 2.5, None]) for _ in range(chance.randrange(4))
        }
    elif kind == 9:
        made = {
            chance.choice("abcd"): some_value(chance, depth - 1, pool)
            for _ in range(chance.randrange(4))
        }
    elif kind == 10:
        made = Thing(
            **{
                chance.choice("xyz"): some_value(chance, depth - 1, pool)
                for _ in range(chance.randrange(4))
            }
        )
    else:
        made = [some_value(chance, depth - 1, pool) for _ in range(chance.randrange(4))]
    pool.append(made)
    return made


def written(value: Any, numbers: dict[int, int]) -> Any:
    """What a value contains, as text and tuples: found in another way."""
    if isinstance(value, tuple):
        return "tuple", *(written(each, numbers) for each in value)
    if not isinstance(value, (list, dict, set, Thing)):
        return type(value), repr(value)
    if id(value) in numbers:
        return "again", numbers[id(value)]
    numbers[id(value)] = len(numbers)
    if isinstance(value, set):
        return "set", *sorted(map(repr, value))
    if isinstance(value, list):
        return "list", *(written(each, numbers) for each in value)
    items = value.items() if isinstance(value, dict) else sorted(vars(value).items())
    return type(value), *((key, written(each, numbers)) for key, each in items)


def test_random_values_have_one_fingerprint_for_each_content() -> None:
    chance = random.Random(7)
    contents: dict[str, Any] = {}
    fingerprints: dict[Any, str] = {}
    for _ in range(20_000):
        value = some_value(chance, chance.randrange(1, 5), [])
        content = written(value, {})
        found = contents_hash(value, pickling.reducer({}), form_for, lambda _: None)
        assert contents.setdefault(found, content) == content
        assert fingerprints.setdefault(content, found) == found
    assert len(contents) > 2000


# what the ranks get


notebook = ranks()


DATA = """
import pandas as pd
frame = pd.DataFrame({"t": pd.date_range("2024", periods=9).tz_localize("UTC"), "n": range(9)})
"""


def test_a_frame_that_the_ranks_have_filtered_stays_theirs(notebook: Notebook) -> None:
    notebook.here(DATA)
    notebook.there("frame = frame[frame.n > 5]")
    notebook.here("repr(frame), frame.t.dt.year, frame.values")
    assert moved(notebook.there("len(frame)")) == []
    assert notebook.values("len(frame)") == [3, 3]
    notebook.here("frame.loc[0, 'n'] = 7")
    assert moved(notebook.there("len(frame)")) == ["frame"]
    assert notebook.values("len(frame)") == [9, 9]


UNSTABLE = """
import time
class Restless:
    def __getstate__(self): return {**vars(self), "looked": time.perf_counter_ns()}
r = Restless()
"""


def test_a_value_that_never_looks_the_same_stays_the_ranks_own(
    golden: Golden, notebook: Notebook
) -> None:
    notebook.here(UNSTABLE)
    notes: list[str] = []
    assert moved(notebook.there("r", note=notes.append)) == ["r", "time"]
    notebook.there("r.mine = 1")
    for _ in range(2):
        assert moved(notebook.there("r.mine", note=notes.append)) == []
    golden(notes)
    assert moved(notebook.there("r", push=["r"])) == ["r"]
    assert notebook.values("hasattr(r, 'mine')") == [False, False]
    notebook.here("r = Restless()")  # another object is a change
    assert moved(notebook.there("r", note=notes.append)) == ["r"]
    assert len(notes) == 1


def test_a_rank_that_lacks_a_restless_value_gets_it(notebook: Notebook) -> None:
    notebook.here(UNSTABLE)
    notebook.there("r")
    notebook.there("r.mine = 1")
    notebook.shipper.forget([1])
    notebook.ranks[1].run("del r")
    notebook.there("r")
    assert notebook.values("hasattr(r, 'mine')") == [True, False]
