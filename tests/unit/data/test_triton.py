"""Kernels of ``triton.jit`` that a plain cell has defined travel by their source; triton itself where it is installed, else a stand-in."""

from __future__ import annotations

import inspect
import linecache
import sys
import threading
import types
from importlib.util import find_spec
from typing import Any

import pytest

from skymagic.data.values import pickling

CELL = """
import triton
@triton.jit(do_not_specialize=["n"])
def add(x, out, n, B):
    i = triton.language.program_id(0) * B
    triton.language.store(out + i, twice(x))
"""


class JITFunction:
    """What of triton 3.9's matters here: it reads its source when it is made, and holds a lock."""

    def __init__(self, fn: Any, do_not_specialize: Any = None, repr: Any = None) -> None:
        self.fn, self.do_not_specialize, self._repr = fn, do_not_specialize or [], repr
        self.src = "".join(inspect.getsourcelines(fn)[0])
        self._hash_lock = threading.RLock()

    def __call__(self, *args: Any) -> None:
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")


JITFunction.__module__ = "triton.runtime.jit"


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    if find_spec("triton") is not None:
        return pytest.importorskip("triton")
    standin = types.ModuleType("triton")
    standin.__dict__["jit"] = lambda fn=None, **options: (
        JITFunction(fn, **options) if fn else lambda function: JITFunction(function, **options)
    )
    runtime = types.ModuleType("triton.runtime.jit")
    runtime.__dict__["JITFunction"] = JITFunction
    monkeypatch.setitem(sys.modules, "triton", standin)
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", runtime)
    return standin


def test_a_kernel_of_a_cell_travels_by_its_source(
    triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        linecache.cache, "<cell>", (len(CELL), None, CELL.splitlines(keepends=True), "<cell>")
    )
    cell = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", cell)
    exec(compile(CELL, "<cell>", "exec"), vars(cell))
    pickled = pickling.dumps(cell.add, vars(cell), folder="/nowhere")
    assert dict(pickled.uses) == {"triton": "add", "twice": "add"}
    assert pickled.files == frozenset({"<cell>"})
    there: dict[str, Any] = {"__name__": "__main__"}
    back = pickling.loads(pickled.pieces, pickled.buffers, there)
    assert back is not cell.add
    assert type(back) is type(cell.add)
    assert (back.src, back.do_not_specialize, back.fn.__globals__) == (cell.add.src, ["n"], there)


def test_a_kernel_of_a_module_travels_by_its_name(
    triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        linecache.cache, "<module>", (len(CELL), None, CELL.splitlines(keepends=True), "<module>")
    )
    module = types.ModuleType("kernels_of_mine")
    monkeypatch.setitem(sys.modules, "kernels_of_mine", module)
    exec(compile(CELL, "<module>", "exec"), vars(module))
    pickled = pickling.dumps(module.add, {"__name__": "__main__"}, folder="/nowhere")
    assert pickling.loads(pickled.pieces, pickled.buffers, {}) is module.add
    assert "kernels_of_mine" in pickled.required
