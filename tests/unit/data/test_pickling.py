"""Values and code that are pickled and read again are what they were."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from skymagic.data.values import pickling
from skymagic.data.values.contents import contents_hash
from skymagic.data.values.forms import form_for
from skymagic.data.values.memory import SMALL

BIG = SMALL  # elements; large enough for a buffer of its own, whatever the type


def copy(value: Any, namespace: dict[str, Any] | None = None) -> Any:
    """The value after a pickle, in this process."""
    space = {} if namespace is None else namespace
    pickled = pickling.dumps(value, space)
    return pickling.loads(
        pickled.pieces, [bytearray(bytes(each)) for each in pickled.buffers], space
    )


def buffers(value: Any) -> int:
    """Bytes that travel outside the pickle."""
    return sum(len(each) for each in pickling.dumps(value, {}).buffers)


# arrays


ARRAYS = {
    "plain": np.arange(BIG, dtype="f4"),
    "fortran": np.asfortranarray(np.arange(BIG * 4.0).reshape(4, BIG)),
    "transposed": np.arange(BIG * 6.0).reshape(2, 3, BIG).transpose(1, 2, 0),
    "strided": np.arange(BIG * 6.0).reshape(BIG, 6)[:, ::3],
    "reversed": np.arange(BIG * 1.0)[::-1],
    "empty": np.empty((0, 5), "i2"),
    "scalar": np.array(7.5),
    "structured": np.zeros(BIG, dtype=[("a", "i4"), ("b", "f8", (2,)), ("c", "U3")]),
    "strings": np.array(["räuber", "x"] * BIG),
    "bytes": np.array([b"ab", b""] * BIG),
    "dates": np.arange(BIG).astype("M8[s]"),
    "spans": np.arange(BIG).astype("m8[ms]"),
    "complex": np.arange(BIG) * 1j,
    "bools": np.arange(BIG) % 3 == 0,
    "swapped": np.arange(BIG).astype(">i8"),
    "objects": np.array([None, {"a": 1}, "x"], dtype=object),
    "record": np.rec.array([(1, 2.0)] * BIG, dtype=[("a", "i4"), ("b", "f8")]),
    "matrix": np.ones((4, BIG)).view(np.matrix),
    "masked": np.ma.masked_greater(np.arange(BIG), 5),
    "half": np.arange(BIG, dtype="f2"),
    "void": np.zeros(BIG, "V3"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_arrive_as_they_were(name: str) -> None:
    array = ARRAYS[name]
    back = copy(array)
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.ma.getdata(back).tobytes() == np.ma.getdata(array).tobytes() or name == "objects"
    assert str(back) == str(array)
    assert back.flags.writeable


def test_masked_array_keeps_its_mask() -> None:
    array = np.ma.MaskedArray(
        np.arange(BIG), mask=np.arange(BIG) % 2 == 0, fill_value=-3, hard_mask=True
    )
    back = copy([array, array.data])
    assert np.array_equal(back[0].mask, array.mask)
    assert back[0].filled().tolist() == array.filled().tolist()
    assert back[0].hardmask
    assert buffers(array) == BIG * 9
    assert copy(np.ma.array([1, 2])).mask is np.ma.nomask


OUTSIDE = "plain fortran transposed structured dates record swapped void".split()


@pytest.mark.parametrize(
    "array", [*map(ARRAYS.get, OUTSIDE), torch.randn(BIG, 4)], ids=[*OUTSIDE, "tensor"]
)
def test_large_arrays_are_not_copied_into_the_pickle(array: Any) -> None:
    pickled = pickling.dumps({"a": [array]}, {})
    assert sum(len(each) for each in pickled.buffers) == array.nbytes
    assert len(pickled.header) < 1000
    assert isinstance(pickled.buffers[0], memoryview)
    assert np.shares_memory(np.frombuffer(pickled.buffers[0], "u1"), np.asarray(array))


@given(
    hnp.arrays(
        hnp.scalar_dtypes() | hnp.array_dtypes(),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6),
    ),
    st.randoms(use_true_random=False),
)
def test_any_array_and_view_survive_a_round_trip(array: Any, random: Any) -> None:
    views = [array, array.T, array.copy("F"), array[...]]
    if array.ndim:
        views.append(array[:: random.choice([1, 2, -1])])
    for view in views:
        back = copy(view)
        assert (back.dtype, back.shape) == (view.dtype, view.shape)
        assert back.tobytes() == view.tobytes()
    for back, view in zip(copy(views), views, strict=True):
        assert back.tobytes() == view.tobytes()


def test_read_only_array_arrives_writable() -> None:
    array = np.arange(BIG)
    array.flags.writeable = False
    back = copy([array, array[:3]])[0]
    back[0] = 9
    small = np.arange(3)
    small.flags.writeable = False
    copy(small)[0] = 1


def test_memory_map_becomes_an_array(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", "i4", "w+", shape=(BIG,))
    mapped[:] = 3
    back = copy(mapped)
    assert type(back) is np.ndarray
    assert (back == 3).all()


def test_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(BIG).astype(ml_dtypes.bfloat16)
    back = copy(array)
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()
    assert buffers(array) == array.nbytes


# sharing


def test_views_stay_views() -> None:
    base = np.arange(BIG * 2.0)
    parts = [base, base[5:], base.reshape(2, -1), base[::-1], base[4:9]]
    back = copy(parts)
    back[0][5] = -1
    assert back[1][0] == -1
    assert back[2][0, 5] == -1
    assert back[3][-6] == -1
    assert back[4][1] == -1
    assert buffers(parts) <= base.nbytes + 64


def test_a_view_alone_travels_alone() -> None:
    base = np.zeros(BIG * 100)
    assert buffers(base[: BIG * 2]) == BIG * 2 * 8
    assert buffers([base[:BIG], base[BIG : BIG * 2]]) == BIG * 2 * 8


def test_temporaries_do_not_look_shared() -> None:
    class Fresh:
        def __init__(self, seed: int) -> None:
            self.seed = seed

        def __reduce__(self) -> Any:
            return (np.add, (np.full(BIG, self.seed, "f8"), 0.0))

    back = copy([Fresh(n) for n in range(20)])
    assert [int(each[0]) for each in back] == list(range(20))
    assert not any(np.shares_memory(back[0], other) for other in back[1:])


# torch


def grown(tensor: torch.Tensor) -> torch.Tensor:
    (tensor * 3).sum().backward()
    return tensor


def noted(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = "kept"
    return tensor


TENSORS: dict[str, Callable[[int], torch.Tensor]] = {  # of some size
    "plain": lambda n: torch.arange(n, dtype=torch.float32),
    "half": lambda n: torch.arange(n, dtype=torch.bfloat16),
    "rows": lambda n: torch.arange(4.0 * n).reshape(4, n)[1:3],
    "columns": lambda n: torch.arange(4.0 * n).reshape(n, 4)[:, ::2],
    "transposed": lambda n: torch.arange(n * 2.0).reshape(2, n).T,
    "strided": lambda n: torch.arange(n * 2.0)[::2],
    "expanded": lambda n: torch.randn(4, 1).expand(4, n),
    "expanded in vain": lambda n: torch.randn(4, n).expand(4, n),
    "scalar": lambda n: torch.tensor(n + 0.5),
    "empty": lambda n: torch.empty(0, n),
    "bool": lambda n: torch.tensor([True, False] * n),
    "complex": lambda n: torch.ones(n, dtype=torch.complex64) * 2j,
    "conjugate": lambda n: torch.ones(n, dtype=torch.complex64).conj(),
    "negative": lambda n: torch.ones(n, dtype=torch.complex64).conj().imag,
    "leaf": lambda n: torch.ones(n, requires_grad=True),
    "leaf with a gradient": lambda n: grown(torch.ones(n, requires_grad=True)),
    "with an attribute": lambda n: noted(torch.arange(n)),
    "parameter": lambda n: torch.nn.Parameter(torch.randn(3, n)),
    "frozen parameter": lambda n: torch.nn.Parameter(torch.ones(n), requires_grad=False),
    "buffer": lambda n: torch.nn.Buffer(torch.ones(n)),
    "sparse": lambda n: torch.eye(min(n, 200)).to_sparse(),
    "compressed": lambda n: torch.eye(min(n, 200)).to_sparse_csr(),
    "of no device": lambda n: torch.empty(3, n, device="meta"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("size", [3, BIG], ids=["small", "large"])
@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_arrive_as_they_were(kind: str, size: int) -> None:
    tensor = TENSORS[kind](size)
    back = copy([tensor])[0]
    facts = [
        (type(x), x.dtype, x.shape, x.requires_grad, x.layout, vars(x), x.device)
        for x in (back, tensor)
    ]
    assert facts[0] == facts[1]
    if tensor.device.type == "meta":
        return
    if tensor.layout is not torch.strided:
        assert torch.equal(back.to_dense(), tensor.to_dense())
        return
    assert torch.equal(back, tensor)
    assert (torch.is_conj(back), torch.is_neg(back)) == (
        torch.is_conj(tensor),
        torch.is_neg(tensor),
    )
    assert size == 3 or back.stride() == tensor.stride(), "small ones have no gaps"
    assert torch.equal(*(x.grad if x.grad is not None else torch.empty(0) for x in (back, tensor)))
    contents = [
        contents_hash(x, pickling.reducer({}), form_for, lambda memory: None)
        for x in (back, tensor)
    ]
    assert contents[0] == contents[1]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_dtype_of_torch() -> None:
    names = """uint8 uint16 uint32 uint64 int8 bool bfloat16 float16 complex32 complex64 float8_e4m3fn float8_e5m2
        float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 bits8 bits16"""
    dtypes = [getattr(torch, name) for name in names.split() if hasattr(torch, name)]
    plain = (torch.arange(1 << 16) % 2).to(torch.uint8)
    values = [plain.clone().view(dtype) for dtype in dtypes]
    for dtype, (whole, part) in zip(
        dtypes, copy([(each, each[3:9]) for each in values]), strict=True
    ):
        assert whole.dtype == part.dtype == dtype
        assert whole.view(torch.uint8).equal(plain)
        assert part.data_ptr() - whole.data_ptr() == 3 * whole.element_size()


@pytest.mark.filterwarnings("ignore")  # torch's, of their end
def test_quantized_tensors() -> None:
    numbers = torch.arange(9000.0).reshape(3, 3000) / 100
    kinds = torch.qint8, torch.quint8, torch.qint32
    values = [torch.quantize_per_tensor(numbers, 0.5, 1, kind) for kind in kinds]
    values.append(
        torch.quantize_per_channel(numbers, torch.ones(3), torch.zeros(3), 0, torch.qint8)
    )
    for value, back in zip(values, copy(values), strict=True):
        assert (back.dtype, back.qscheme()) == (value.dtype, value.qscheme())
        assert back.int_repr().equal(value.int_repr())
        assert back.dequantize().equal(value.dequantize())


def test_tied_weights_and_views_stay_shared() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200))
    model[1].weight = model[0].weight
    view = model[0].weight.data[5:]
    back, part = copy([model, view])
    assert back[1].weight is back[0].weight
    part[0, 0] = 77.0
    assert back[0].weight[5, 0] == 77.0
    assert buffers([model, view]) < 200 * 200 * 4 + 4096


def test_a_small_part_of_a_large_tensor_travels_alone() -> None:
    data = torch.arange(BIG * 100.0)
    part = data[7 : 7 + BIG]
    assert buffers(part) < BIG * 4 + 64
    assert torch.equal(copy(part), part)
    one, two = copy([part, data[9 : 9 + BIG]])
    one[2] = -1
    assert two[0] == -1


def test_model_and_optimizer_travel_and_train_on() -> None:
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 100)).sum().backward()
    optimizer.step()
    model2, optimizer2 = copy((model, optimizer))
    assert optimizer2.param_groups[0]["params"][0] is model2.weight
    before = model2.weight.clone()
    model2(torch.ones(3, 100)).sum().backward()
    optimizer2.step()
    assert not torch.equal(before, model2.weight)
    assert torch.equal(
        optimizer2.state[model2.bias]["exp_avg"].sign(),
        optimizer.state[model.bias]["exp_avg"].sign(),
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=5
    )
)
def test_any_views_of_one_storage(cuts: list[tuple[int, int, int]]) -> None:
    base = torch.arange(30_000.0)
    tensors = [base[start * 500 : (start + length) * 500 : step] for start, length, step in cuts]
    arrays = [tensor.numpy() for tensor in tensors]
    back = copy([tensors, arrays])
    for made, tensor in zip(back[0], tensors, strict=True):
        assert torch.equal(made, tensor)
    for made, array in zip(back[1], arrays, strict=True):
        assert np.array_equal(made, array)
    if tensors[0].numel():
        back[0][0][0] = -9
        assert back[1][0][0] == -9


# frames and others


def test_frames_travel_out_of_band() -> None:
    frame = pd.DataFrame(
        {
            "number": np.arange(BIG * 1.0),
            "text": pd.array(["a", None] * (BIG // 2), dtype="string"),
            "day": pd.date_range("2020-01-01", periods=BIG, freq="min", tz="Europe/Berlin"),
            "kind": pd.Categorical(["x", "y"] * (BIG // 2)),
        }
    )
    pickled = pickling.dumps(frame, {})
    assert len(pickled.header) < 20_000
    pd.testing.assert_frame_equal(copy(frame), frame)


def test_column_does_not_change_with_the_frame() -> None:
    frame = pd.DataFrame({"a": np.arange(BIG * 1.0)})
    back, column = copy([frame, frame["a"]])
    back.loc[0, "a"] = 5.0
    assert column[0] == 0.0


def test_arrow_and_sparse() -> None:
    table = pa.table({"a": np.arange(BIG), "b": ["x"] * BIG})
    assert copy(table).equals(table)
    assert buffers(table) > BIG * 8
    sparse = scipy.sparse.random_array((BIG, 50), density=0.1, format="csr", rng=1)
    assert (copy(sparse) != sparse).nnz == 0
    assert buffers(sparse) > BIG * 8


def test_large_bytes_are_pieces_by_reference() -> None:
    data = bytes(3 << 20)
    pickled = pickling.dumps({"a": data, "b": 1}, {})
    assert any(piece is data for piece in pickled.pieces)
    assert copy({"a": data, "b": bytearray(data), "c": "é" * (2 << 20)})["a"] == data


def test_memoryview() -> None:
    view = np.arange(BIG).reshape(2, -1).data
    back = copy(view)
    assert (back.format, back.shape) == (view.format, view.shape)
    assert back.tobytes() == view.tobytes()


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.datetimes()
    | st.decimals(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.sets(st.integers())
        | st.builds(types.SimpleNamespace, a=inner)
    ),
)


@given(PLAIN)
def test_plain_values(value: object) -> None:
    assert copy(value) == value


def test_recursive_structures() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    back = copy(loop)
    assert back[1] is back
    table: dict[str, Any] = {}
    table["me"] = [table]
    back = copy(table)
    assert back["me"][0] is back


def test_nothing_is_kept_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        array = np.zeros(BIG)
        dead = weakref.ref(array)
        pickled = pickling.dumps([array, array[3:]], {})
        del array, pickled
        assert dead() is None
    finally:
        gc.enable()


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(Exception) as refused:
        pickling.dumps(deep, {})
    assert isinstance(refused.value, RecursionError) or "recursion" in str(refused.value)
    while deep:
        deep = deep.pop()


# everything, nested


class Held:
    """An object with attributes."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def leaf(kind: str, number: int) -> Any:
    """A value of a kind, of some size."""
    size = [0, 1, 7, SMALL][number % 4]
    data = np.random.default_rng(number).integers(0, 100, size)
    makers: dict[str, Callable[[], Any]] = {
        "array": lambda: data.astype(["f4", "i8", "c16", "M8[s]", "S3", ">u2"][number % 6]),
        "view": lambda: data[:: 1 + number % 3],
        "fortran": lambda: np.asfortranarray(np.stack([data, data])),
        "tensor": lambda: torch.from_numpy(data.copy()).to(
            [torch.float32, torch.bfloat16, torch.int8][number % 3]
        ),
        "part": lambda: torch.arange(size * 3.0)[number % 2 :: 2],
        "grad": lambda: torch.nn.Parameter(torch.from_numpy(data * 1.0)),
        "frame": lambda: pd.DataFrame({"a": data, "b": data.astype(str)}),
        "series": lambda: pd.Series(data * 0.5, name="s"),
        "table": lambda: pa.table({"a": data, "b": pa.array(data.astype(str))}),
        "sparse": lambda: scipy.sparse.coo_array((data, (data, data)), shape=(100, 100)).tocsr(),
        "bytes": lambda: data.astype("u1").tobytes(),
        "bytearray": lambda: bytearray(data.astype("u1").tobytes()),
        "text": lambda: "ü" * size,
    }
    return makers[kind]()


KINDS = "array view fortran tensor part grad frame series table sparse bytes bytearray text".split()
NESTED = st.recursive(
    st.builds(leaf, st.sampled_from(KINDS), st.integers(0, 1000)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(Held, inner)
        | inner.map(lambda each: [each, each])
    ),
    max_leaves=8,
)


def alike(one: Any, two: Any) -> bool:
    """Whether two values are the same, bit for bit, and share what they share."""
    if type(one) is not type(two):
        return False
    if isinstance(one, list | tuple):
        ids = [[[each is other for other in value] for each in value] for value in (one, two)]
        return ids[0] == ids[1] and all(map(alike, one, two)) and len(one) == len(two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(alike(one[key], two[key]) for key in one)
    if isinstance(one, Held):
        return alike(one.inner, two.inner)
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (two.dtype, two.shape, two.tobytes())
    if isinstance(one, torch.Tensor):
        form = [(each.dtype, each.shape, each.stride(), each.requires_grad) for each in (one, two)]
        return form[0] == form[1] and torch.equal(one, two)
    if isinstance(one, pd.DataFrame | pd.Series):
        return bool(one.equals(two)) and list(one.index) == list(two.index)
    if scipy.sparse.issparse(one):
        return (one != two).nnz == 0 and one.dtype == two.dtype
    return bool(one == two)


@given(NESTED)
def test_whatever_is_nested_in_whatever(value: Any) -> None:
    back = copy(value)
    assert alike(back, value)
    assert alike(copy(back), value)


# code: in one process, between two namespaces


def define(source: str) -> dict[str, Any]:
    """A namespace after a cell."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec", dont_inherit=True), space)
    return space


def carried(value: Any, space: dict[str, Any], other: dict[str, Any]) -> Any:
    pickled = pickling.dumps(value, space)
    return pickling.loads(pickled.pieces, pickled.buffers, other)


def test_function_uses_the_other_sides_names() -> None:
    here = define("k = 1\ndef f(x, y=2, *, z=3): return x + y + z + k")
    there: dict[str, Any] = {"__name__": "__main__", "k": 1000}
    f = carried(here["f"], here, there)
    assert f.__globals__ is there
    assert f(0) == 1005
    assert pickling.dumps(here["f"], here).uses == {"k": "f"}


def test_function_is_sent_with_the_origin_of_its_imports() -> None:
    here = define(
        "import math as m\nfrom operator import add\ndef f(x): return add(m.floor(x), len([x]))"
    )
    f = carried(here["f"], here, {"__name__": "__main__"})
    assert f(1.5) == 2
    own = {"__name__": "__main__", "add": lambda a, b: "own"}
    assert carried(here["f"], here, own)(1.5) == "own"


def test_function_from_a_side_with_more_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as side:
        side.setitem(sys.modules, "only_there", types.ModuleType("only_there"))
        here = define("import only_there\ndef f(): return only_there")
        pickled = pickling.dumps(here["f"], here)
    f = pickling.loads(pickled.pieces, pickled.buffers, {"__name__": "__main__"})
    with pytest.raises(NameError, match="only_there"):
        f()


def test_function_keeps_all_that_is_its_own() -> None:
    here = define('def f(a: int, b: "T" = 1) -> str:\n  "doc"\n  return str(a)\nf.note = [1]')
    f = carried(here["f"], here, {"__name__": "__main__"})
    assert (f.__doc__, f.__annotations__, f.note, f.__module__, f.__qualname__) == (
        "doc", {"a": int, "b": "T", "return": str}, [1], "__main__", "f",
    )  # fmt: skip


def test_closures_share_their_cells_and_recur() -> None:
    here = define(
        "def outer():\n"
        "  n = 0\n"
        "  def inc(): \n    nonlocal n; n += 1; return inc\n"
        "  def get(): return n\n"
        "  def fact(k): return 1 if k < 2 else k * fact(k - 1)\n"
        "  return inc, get, fact\n"
        "three = outer()"
    )
    inc, get, fact = carried(here["three"], here, {})
    assert inc()() is inc
    assert get() == 2
    assert fact(5) == 120


def test_wrapper_of_a_library_does_not_bring_the_library_along() -> None:
    here = define(
        "import contextlib, functools, torch\n"
        "@contextlib.contextmanager\ndef open_it():\n  yield 5\n"
        "@torch.no_grad()\ndef quiet(x): return (x * 2).requires_grad\n"
        "@functools.lru_cache(maxsize=7)\ndef slow(x): return x + 1\n"
    )
    pickled = pickling.dumps(here["quiet"], here)
    assert len(pickled.header) < 5000
    quiet = pickling.loads([pickled.header], [], {"__name__": "__main__"})
    assert quiet(torch.ones(1, requires_grad=True)) is False
    with carried(here["open_it"], here, {})() as got:
        assert got == 5
    slow = carried(here["slow"], here, {})
    assert slow(1) == 2
    assert slow.cache_parameters()["maxsize"] == 7


def test_functions_inside_values_are_found() -> None:
    here = define(
        "import functools\n"
        "def f(): return a\n"
        "def g(x): return b + x\n"
        "class C:\n"
        "  @property\n  def p(self): return c\n"
        "  @staticmethod\n  def s(): return d\n"
        "  @classmethod\n  def k(cls): return e\n"
        "  @functools.cached_property\n  def q(self): return h\n"
        "value = [{'x': functools.partial(g, 1)}, (f,), C()]\n"
    )
    assert set(pickling.dumps(here["value"], here).uses) == set("abcdeh")
    assert pickling.dumps(here["C"]().k, here).uses["c"] == "C.p"


def test_attributes_of_array_subclasses() -> None:
    here = define(
        "import numpy as np\n"
        "class Unit(np.ndarray):\n"
        "    def __new__(cls, data, unit):\n        made = np.asarray(data).view(cls)\n        made.unit = unit\n"
        "        return made\n"
        "    def __array_finalize__(self, other): self.unit = getattr(other, 'unit', None)\n"
        "value = [Unit(np.arange(20_000.0), 'm'), Unit([1, 2], {'of': [3]})]"
    )
    large, small = carried(here["value"], here, {"__name__": "__main__"})
    assert [large.unit, small.unit, large[3]] == ["m", {"of": [3]}, 3.0]


def test_namespace_is_the_other_sides() -> None:
    here = define("names = globals()\ndef f(): return names")
    there: dict[str, Any] = {}
    assert carried(here["names"], here, there) is there


def test_parallel_wrapper_arrives_as_its_module() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        back = copy({"model": model})["model"]
        assert type(back) is torch.nn.Linear
        assert torch.equal(back.weight, model.module.weight)
        back(torch.ones(1, 3)).sum().backward()
    finally:
        dist.destroy_process_group()


def test_open_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("secret")
    with path.open() as file, pytest.raises(Exception, match="TextIOWrapper"):
        pickling.dumps(file, {})


def test_standard_output_is_the_other_sides() -> None:
    assert copy({"log": sys.stdout})["log"] is sys.stdout


def test_packages_of_a_value_are_required() -> None:
    """A table's columns may be another package's, whose functions are compiled: a node without it must hear of that before."""
    table = pd.DataFrame({"x": pd.array(["text"], dtype="string[pyarrow]")})
    assert {"pandas", "pyarrow"} <= {
        name.partition(".")[0] for name in pickling.dumps(table, {}).required
    }
    assert "xxhash._xxhash" in pickling.dumps(xxhash.xxh3_64_hexdigest, {}).required
