"""Names travel once, when they have changed, together with what they share; and come back."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skymagic.data.shipping.shipper import Manifest
from skymagic.errors import CaptureError
from skymagic.wire.typed import plain
from tests.data.far import Far, FarError, Notebook, moved, ranks
from tests.data.walk import walk
from tests.lab.golden import Golden

BIG = 300_000  # float64 elements: 2.4 MB


notebook = ranks()


RICH = f"""
import numpy as np, pandas as pd, torch
class C:
  k = 1
  def __init__(self): self.n = 1; self.inner = type(self).__new__(C); self.inner.values = np.zeros({BIG})
a, b, s, o = np.zeros({BIG}), {{'x': [1]}}, 'text', C()
frame = pd.DataFrame({{'p': np.zeros({BIG})}})
tensor = torch.zeros({BIG})
model = torch.nn.Linear(1000, 1000)
big = b'x' * 3_000_000
array_of_objects = np.array([[], {{}}], dtype=object)
numbers = {{1}}
def f(): return 1
"""
RICH_CELL = "C, a, b, s, o, frame, tensor, model, f, big, array_of_objects, numbers"


rich = ranks(scope="module", cell=RICH)


# what travels, and when


def test_only_names_used_by_the_cell_are_sent(notebook: Notebook) -> None:
    notebook.here(
        "import threading\na = 1\nb = threading.Lock()\ndef unused(): return b\nclass Nested:\n  x = b"
    )
    manifest = notebook.there("a + 1")
    assert [(item.name, item.why, item.type) for item in manifest.items] == [
        ("a", "the cell", "int")
    ]


def test_reasons(notebook: Notebook) -> None:
    notebook.here(
        "k = 3\nclass Net:\n  def forward(self): return helper() * k\ndef helper(): return w\nw = 2\nnet = Net()\nd = {1: net}"
    )
    manifest = notebook.there("y = d[1].forward()", push=["k"])
    assert {item.name: item.why for item in manifest.items} == {
        "d": "the cell",
        "helper": "used by Net.forward",
        "w": "used by helper",
        "k": "--push",
    }
    assert notebook.values("y") == [6, 6]


def test_unchanged_values_stay(notebook: Notebook) -> None:
    notebook.here(
        f"import numpy as np\na = np.zeros({BIG})\nb = {{'x': [1, 2]}}\nc = 'text'\ndef f(): return a"
    )
    assert moved(notebook.there("f(); b; c")) == ["a", "b", "c", "f"]
    again = notebook.there("f(); b; c")
    assert moved(again) == []
    assert again.nbytes == 0
    assert again.orders.bundles == ()


@pytest.mark.parametrize(
    "change",
    [
        "a[123456] += 1", "b['x'].append(3)", "o.n += 1", "o.inner.values[0] = 5", "frame.loc[3, 'p'] = 9",
        "tensor[7] = 1", "model.weight.data[0, 0] += 1", "s = 'other'", "def f(): return 2", "big = b'y' + big[1:]",
        "C.k = 2", "f.note = 1", "array_of_objects[0].append(1)", "numbers.add(5)",
    ],
)  # fmt: skip
def test_changes_are_seen(rich: Notebook, change: str) -> None:
    rich.there(RICH_CELL)
    assert moved(rich.there(RICH_CELL)) == []
    rich.here(change)
    name = (
        change.split("=")[0].split("[")[0].split(".")[0].split("(")[0].replace("def ", "").strip()
    )
    assert name in moved(rich.there(RICH_CELL))
    assert moved(rich.there(RICH_CELL)) == []


def test_manifest_that_was_not_bound_is_sent_again(notebook: Notebook) -> None:
    notebook.here(f"import numpy as np\na = np.ones({BIG})")
    lost = notebook.shipper.prepare("a", [0, 1])
    assert moved(lost) == ["a"]
    again = notebook.there("a.sum()")
    assert moved(again) == ["a"]
    assert again.nbytes < 1000  # the bytes are in the store already
    assert notebook.values("a.sum()") == [BIG, BIG]


def test_fresh_sends_all_again(notebook: Notebook) -> None:
    notebook.here("a = [1]")
    notebook.there("a.append(2)")
    assert notebook.values("a") == [[1, 2]] * 2
    assert moved(notebook.there("a", fresh=True)) == ["a"]
    assert notebook.values("a") == [[1]] * 2


def test_dry_run_writes_nothing(notebook: Notebook) -> None:
    notebook.here(f"import numpy as np\na = np.ones({BIG})")
    manifest = notebook.shipper.prepare("a", [0, 1], dry_run=True)
    assert (manifest.items[0].name, manifest.items[0].moved) == ("a", True)
    assert manifest.items[0].nbytes > BIG * 8
    assert notebook.files() == []
    notebook.there("a")
    assert not notebook.shipper.prepare("a", [0, 1], dry_run=True).items[0].moved


def test_push_and_no_push(golden: Golden, notebook: Notebook) -> None:
    notebook.here("a = 1; b = 2\ndef f(): return a")
    assert moved(notebook.there("0", push=["a"])) == ["a"]
    with pytest.raises(FarError, match="'b' is not defined"):
        notebook.there("b", no_push=True)
    assert moved(notebook.shipper.prepare("f, b", [0, 1], no_push=["b", "a"])) == ["f"]
    with golden.raises(CaptureError) as refused:
        notebook.there("0", push=["nonsense"])
    assert refused.value.names == ("nonsense",)


def test_history_and_missing_names_are_left_out(notebook: Notebook) -> None:
    notebook.here("In = ['x']; Out = {}; _ = 5; _i1 = 'y'; _3 = 4; _mine = 1")
    manifest = notebook.shipper.prepare("In, Out, _, _i1, _3, _mine, print, nowhere", [0])
    assert [item.name for item in manifest.items] == ["_", "_3", "_mine"]


# the rule of state


def test_name_that_cannot_travel_and_that_the_cell_makes(notebook: Notebook) -> None:
    notebook.here("import threading\nlock = threading.Lock()")
    notebook.there("import threading\nlock = threading.Lock()")
    notebook.there("free = lock.acquire()")
    assert notebook.values("free") == [True, True]
    notebook.here("lock = threading.Lock()")
    with pytest.raises(CaptureError, match="lock"):
        notebook.there("lock")


# sharing


SHARED: dict[
    str, tuple[list[str], list[Any], range]
] = {  # cells, those with > on the ranks → `x` there, and the bytes of the last
    "two names for one array": (
        [
            f"import numpy as np\na = np.zeros({BIG}); b = a; v = a[5:]; box = [a]",
            "> a[5] = 7\nx = [b is a, float(v[0]), box[0] is a]",
        ],
        [True, 7.0, True],
        range(BIG * 8, BIG * 8 + 2000),
    ),
    "a second name for what a rank has": (
        [
            f"import numpy as np\na = np.zeros({BIG})",
            "> a[0] = 1",
            "c = a",
            "> a; x = [c is a, float(c[0])]",
        ],
        [True, 1.0],
        range(1000),
    ),
    "an alias of what a rank has rebound": (
        ["a = [1]", "> a", "> a = 'own'", "b = a", "> x = [a, b]"],
        ["own", [1]],
        range(1000),
    ),
    "equal arrays are sent once and stay apart": (
        [
            f"import numpy as np\na = np.ones({BIG}); b = a.copy(); box = {{'p': a.copy(), 'q': a.copy()}}",
            "> a[0] = 5; box['p'][1] = 6\nx = [float(b[0]), float(box['q'][1]), float(box['p'][0])]",
        ],
        [1.0, 1.0, 1.0],
        range(BIG * 8, BIG * 8 + 5000),
    ),
    "a renamed value is not sent again": (
        [
            f"import numpy as np\na = np.arange({BIG} * 1.0)",
            "> a",
            "b = a; del a",
            "> x = [float(b[7])]",
        ],
        [7.0],
        range(1000),
    ),
    "a change of one does not bring the other back": (
        [
            "shared = [0]\na = {'s': shared, 'n': 1}\nb = {'s': shared, 'n': 2}",
            "> a['n'] = b['n'] = 'trained'",
            "a['n'] = 100",
            "> x = [a['n'], b['n']]",
        ],
        [100, "trained"],
        range(1000),
    ),
}


@pytest.mark.parametrize("what", SHARED)
def test_shared_objects_are_found(notebook: Notebook, what: str) -> None:
    cells, expected, nbytes = SHARED[what]
    for cell in cells:
        if cell.startswith("> "):
            shipped = notebook.there(cell[2:])
        else:
            notebook.here(cell)
    assert notebook.values("x") == [expected] * 2
    assert shipped.nbytes in nbytes


def test_shared_objects(notebook: Notebook) -> None:
    notebook.here(
        "class Config: pass\ncfg = Config(); inner = [1]; cfg.inner = inner\n"
        "one = {'cfg': cfg}; two = (inner, cfg)\nother = [inner[:]]"
    )
    manifest = notebook.there(
        "x = [one['cfg'] is two[1], cfg.inner is two[0], inner is two[0], other]"
    )
    assert notebook.values("x") == [[True, True, True, [[1]]]] * 2
    assert ("other",) in [bundle.names for bundle in manifest.orders.bundles]


# isolation and the store


def test_ranks_are_isolated_and_share_pages(notebook: Notebook) -> None:
    notebook.here("import numpy as np\na = np.ones(5_000_000)")
    notebook.there("a[0]")
    notebook.ranks[0].run("a[0] = 100")
    assert notebook.values("float(a[0])") == [100.0, 1.0]
    assert notebook.namespace["a"][0] == 1.0
    for far in notebook.ranks:
        line = next(
            part
            for part in Path(f"/proc/{far.pid}/smaps").read_text().split("VmFlags")
            if notebook.directory in part and "Size:              39064 kB" in part
        )
        # copied pages; Private_Dirty would count those of the file, too, that it alone has mapped so far
        (copied,) = (
            int(each.split()[1]) for each in line.splitlines() if each.startswith("Anonymous")
        )
        assert copied <= 8


def test_files_go_when_the_value_changes(notebook: Notebook) -> None:
    notebook.here(f"import numpy as np\na = np.zeros({BIG})")
    notebook.there("a")
    first = notebook.files()
    assert len(first) == 1
    notebook.here("a[0] = 1")
    notebook.there("a")
    gc.collect()
    second = notebook.files()
    assert len(second) == 1
    assert second != first
    notebook.here("del a")
    for _ in range(3):
        notebook.there("1")
    assert notebook.files() == []
    assert notebook.values("float(a.sum())") == [1.0, 1.0]


def test_value_lives_on_in_a_rank_without_its_file(notebook: Notebook) -> None:
    notebook.here(f"import numpy as np\na = np.ones({BIG})")
    notebook.there("a")
    notebook.shipper.store.close()
    assert notebook.values("float(a.sum())") == [BIG, BIG]
    notebook.here("b = a")
    notebook.there("x = float(b.sum())")
    assert notebook.values("x") == [BIG, BIG]


def test_the_same_cell_again_and_again_grows_nothing(notebook: Notebook) -> None:
    def state() -> list[int]:
        return notebook.values(
            "len(__import__('os').listdir('/proc/self/fd')), __import__('threading').active_count()"
        )

    notebook.here(f"import numpy as np\na = [np.zeros({BIG // 2}) for _ in range(20)]")
    notebook.there("a[0][0] += 1")
    before, here = state(), len(list(Path("/proc/self/fd").iterdir()))
    for number in range(20):
        notebook.here(f"a[{number}][0] += 1")
        notebook.there("a[0][0] += 1")
    gc.collect()
    assert state() == before
    assert len(list(Path("/proc/self/fd").iterdir())) == here
    assert len(notebook.files()) <= 21


def test_client_holds_nothing_after_shipping(notebook: Notebook) -> None:
    notebook.here(
        f"import numpy as np\nclass Box: pass\nbox = Box()\nbox.a = np.zeros({BIG})\nbox.b = box.a[3:]"
    )
    gc.collect()
    gc.disable()
    try:
        notebook.there("box, box.a[0]")
        dead = weakref.ref(notebook.namespace["box"])
        del notebook.namespace["box"]
        assert dead() is None
    finally:
        gc.enable()


def test_two_cells_ship_the_same_value_at_once(notebook: Notebook) -> None:
    notebook.here(f"import numpy as np\na = np.ones({BIG})")
    manifests: list[Manifest] = []
    threads = [
        threading.Thread(target=lambda: manifests.append(notebook.shipper.prepare("a", [0, 1])))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for manifest in manifests:
        for far in notebook.ranks:
            far.bind(manifest.orders)
            notebook.shipper.bound(manifest, far.rank, completed=True)
    assert notebook.values("float(a.sum())") == [BIG, BIG]
    assert len(notebook.files()) == 1


def test_value_changed_by_a_thread_is_sent_again(notebook: Notebook) -> None:
    notebook.here(f"import numpy as np\na = np.zeros({BIG * 10})")
    array = notebook.namespace["a"]
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            array[::1000] += 1

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(5):
            notebook.there("a")
    finally:
        stop.set()
        thread.join()
    notebook.there("a")
    notebook.ranks[0].run("s = float(a.sum())")
    assert notebook.values("float(a.sum())") == [float(array.sum())] * 2


def test_rank_killed_during_a_manifest_gets_missing_values(notebook: Notebook) -> None:
    notebook.here(f"import numpy as np\na = np.ones({BIG})\nb = [2]\ndef f(): return a.sum()")
    manifest = notebook.shipper.prepare("f()", [0, 1])
    notebook.ranks[1].kill()
    notebook.ranks[1] = Far(notebook.directory, 1)
    notebook.shipper.forget([1])
    notebook.ranks[0].bind(manifest.orders)
    notebook.shipper.bound(manifest, 0, completed=True)
    manifest = notebook.there("x = f(), b")
    found = {bundle.names: bundle.ranks for bundle in manifest.orders.bundles}
    assert found.pop(("b",)) is None, "all"
    assert [*found.values()] == [(1,)] * len(found)
    assert manifest.nbytes < 2000, "the array is in the store already"
    assert notebook.values("x") == [[BIG, [2]]] * 2
    del manifest
    gc.collect()
    notebook.here("a = 1")
    notebook.there("a")
    notebook.there("a")
    assert notebook.files() == []


def test_a_thousand_small_values_need_no_files(notebook: Notebook) -> None:
    notebook.here("for n in range(1000): globals()[f'x{n}'] = [n]")
    cell = "total = " + " + ".join(f"x{n}[0]" for n in range(1000))
    manifest = notebook.there(cell)
    assert notebook.files() == []
    assert len(manifest.items) == 1000
    assert notebook.values("total") == [499500] * 2
    json.dumps(plain(manifest.orders))


def test_many_small_values_share_one_file(notebook: Notebook) -> None:
    notebook.here("for n in range(100): globals()[f'x{n}'] = bytes([n]) * 30_000")
    notebook.there("total = " + " + ".join(f"x{n}[0]" for n in range(100)))
    assert len(notebook.files()) == 1
    assert notebook.values("total") == [4950] * 2


def test_progress(notebook: Notebook) -> None:
    told: list[tuple[dict[str, int], int]] = []
    notebook.here(
        f"import numpy as np\na = np.ones({BIG})\nb = [np.zeros({BIG}), np.arange({BIG})]"
    )
    notebook.shipper.prepare(
        "a, b", [0, 1], progress=lambda weights, done: told.append((dict(weights), done))
    )
    [weights] = {tuple(weights.items()) for weights, _ in told}
    assert dict(weights) == pytest.approx({"a": 8 * BIG, "b": 16 * BIG}, rel=0.01)
    assert [done for _, done in told] == sorted(done for _, done in told)
    assert 0.99 * 24 * BIG < told[-1][1] <= sum(told[-1][0].values())


def test_large_bytes_and_text(notebook: Notebook) -> None:
    notebook.here("data = {'b': b'x' * 3_000_000, 'a': bytearray(2_000_000), 's': 'é' * 2_000_000}")
    notebook.there("x = [len(data['b']), len(data['a']), len(data['s'])]\ndata['a'][0] = 1")
    assert notebook.values("x") == [[3_000_000, 2_000_000, 2_000_000]] * 2
    assert notebook.fetch("data") == {
        "b": b"x" * 3_000_000,
        "a": b"\1" + bytes(1_999_999),
        "s": "é" * 2_000_000,
    }


# what cannot travel


BAD = """
import socket, threading, sqlite3, asyncio, contextvars, weakref, subprocess, sys, mmap
sock = socket.socket()
lock = threading.Lock()
gen = (i for i in range(3))
file = open("/dev/null")
base = sqlite3.connect(":memory:")
thread = threading.Thread()
var = contextvars.ContextVar("v")
area = mmap.mmap(-1, 10)
class Holder:
  def __init__(self): self.deep = {"key": [1, threading.RLock()]}
holder = Holder()
def closing():
  s = socket.socket()
  def inner(): return s
  return inner
inner = closing()
def default(l=lock): pass
class Raises:
  def __reduce__(self): raise RuntimeError("I will not go")
class Static:
  l = threading.Lock()
raises = Raises()
deep = []
for _ in range(100_000): deep = [deep]
def uses(): return sock
fine = 1
"""

REFUSED = {
    "sock": ["socket", "connection", "connect in the cell"],
    "lock": ["lock", "make it in the cell"],
    "gen": ["is a generator, whose progress stays in this process; pass list(gen)"],
    "file": ["TextIOWrapper", "open file", "open it in the cell"],
    "base": ["sqlite3.Connection", "connect in the cell"],
    "thread": ["threading.Thread", "start it in the cell"],
    "var": ["ContextVar"],
    "area": ["mmap"],
    "holder": ["Holder", "holder.deep['key'][1]", "RLock", "__getstate__"],
    "inner": ["function", "inner.<closure>.s", "socket", "make it inside the function"],
    "default": ["default.<default>", "lock"],
    "raises": ["Raises", "RuntimeError: I will not go", "--no-push raises"],
    "Static": ["Static.l", "lock"],
    "deep": ["list", "nested too deep"],
}


def test_refusals_name_all_at_once(golden: Golden, notebook: Notebook) -> None:
    notebook.here(BAD)
    try:
        with pytest.raises(CaptureError) as caught:
            notebook.there("fine, " + ", ".join(REFUSED))
        first, *lines = str(caught.value).splitlines()
        assert set(caught.value.names) == set(REFUSED)
        golden(first)
        for name, words in REFUSED.items():
            (line,) = [line for line in lines if line.startswith(f"  {name} (")]
            for word in words:
                assert word in line, (word, line)
        assert notebook.files() == []
        with pytest.raises(CaptureError, match="used by uses"):
            notebook.there("uses()")
        notebook.there("fine", push=["fine"])
        notebook.there("def f():\n  fine")
    finally:
        deep = notebook.namespace["deep"]
        while deep:
            deep = deep.pop()
        for name in ("sock", "file", "base", "area"):
            notebook.namespace[name].close()
        notebook.namespace["inner"]().close()


def test_custom_reduce_result_is_respected(notebook: Notebook) -> None:
    notebook.here("class Liar:\n  def __reduce__(self): return (int, ('7',))\nliar = Liar()")
    notebook.there("x = liar + 1")
    assert notebook.values("x") == [8, 8]


def test_missing_package_is_named_with_the_version_here(
    golden: Golden, notebook: Notebook, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "lib/site-packages/onlyhere").mkdir(parents=True)
    (tmp_path / "lib/site-packages/onlyhere/__init__.py").write_text(
        "__version__ = '3.1'\nclass C: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "lib/site-packages")
    notebook.here("import onlyhere\nthing = onlyhere.C()")
    with pytest.raises(FarError) as caught:
        notebook.there("thing")
    assert caught.value.attributes["package"] == "onlyhere"
    golden.line(str(caught.value), "onlyhere 3.1")
    with pytest.raises(FarError, match="onlyhere"):
        notebook.there("onlyhere")


def test_version_skew_is_named(notebook: Notebook, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "lib/site-packages").mkdir(parents=True)
    path = tmp_path / "lib/site-packages/skewed.py"
    path.write_text("__version__ = '2'\nclass New: pass\n")
    monkeypatch.syspath_prepend(tmp_path / "lib/site-packages")
    notebook.here("import skewed\nthing = skewed.New()")
    for far in notebook.ranks:
        far.run(
            "import sys, types\nsys.modules['skewed'] = types.ModuleType('skewed')\nsys.modules['skewed'].__version__ = '1'"
        )
    with pytest.raises(FarError, match=r"versions differ: skewed 2 there and 1 here"):
        notebook.there("thing")


def test_code_of_another_python_is_refused(notebook: Notebook) -> None:
    notebook.here("def f(): pass\nx = [1]")
    manifest = notebook.shipper.prepare("f", [0])
    with pytest.raises(FarError, match=r"f cannot be rebuilt.*2\.7\.1 there, 3\.") as caught:
        notebook.ranks[0].bind(replace(manifest.orders, python="2.7.1"))
    assert caught.value.attributes["package"] == "python"
    manifest = notebook.shipper.prepare("x", [0])
    notebook.ranks[0].bind(replace(manifest.orders, python="2.7.1"))


def test_all_values_that_fail_to_rebuild_are_named(notebook: Notebook) -> None:
    notebook.here(
        "class Bad:\n  def __reduce__(self): return (int, ('x',))\none, two, three = Bad(), Bad(), 3"
    )
    with pytest.raises(FarError, match="one, two .*: ValueError") as caught:
        notebook.there("one, two, three")
    assert set(caught.value.attributes["name"].split(", ")) == {"one", "two"}
    assert notebook.values("'three' in globals()") == [False, False]


def test_full_store_is_explained(notebook: Notebook, monkeypatch: Any) -> None:
    def full(*args: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(notebook.shipper.store, "_directory_for", full)
    notebook.here(f"import numpy as np\na = np.ones({BIG})")
    with pytest.raises(CaptureError, match=r"do not fit.*No space left.*a \(2 MB\).*--no-push"):
        notebook.there("a")


# and back


def test_results_are_ordinary_and_outlive_the_pool(notebook: Notebook) -> None:
    notebook.there(
        "import numpy as np, pandas as pd, torch\n"
        f"r = {{'a': np.arange({BIG}), 'f': pd.DataFrame({{'x': np.ones({BIG})}}), 't': torch.ones({BIG}), 'n': 1}}\n"
        "r['v'] = r['a'][3:]"
    )
    result = notebook.fetch("r")
    assert notebook.files() == []
    notebook.close()
    result["a"][3] = -1
    assert result["v"][0] == -1
    result["f"].loc[0, "x"] = 2
    result["t"].add_(1)
    assert result["t"].sum() == 2 * BIG
    assert type(result["a"]) is np.ndarray
    notebook.__init__(notebook.folder)  # type: ignore[misc]


def test_results_by_name_and_their_errors(notebook: Notebook) -> None:
    notebook.there(
        f"import threading\nok = list(range(10))\nbad = threading.Lock()\nlarge = 'x' * {BIG}"
    )
    refs = notebook.ranks[1].pack("ok", "bad", "large")
    assert refs["bad"].type == "thread.lock"
    assert "cannot pickle" in refs["bad"].error
    assert refs["ok"].file is None
    assert notebook.shipper.unpack(refs["ok"]) == list(range(10))
    assert notebook.shipper.unpack(refs["large"]) == "x" * BIG


def test_results_that_share_something_still_do(notebook: Notebook) -> None:
    notebook.there(
        f"import numpy as np\na = np.zeros({BIG}); v = a[2:]; box = [a]; other = [1]; twin = other; alone = 5"
    )
    refs = notebook.ranks[0].pack("a", "v", "box", "other", "twin", "alone")
    back = {name: notebook.shipper.unpack(refs[name]) for name in refs}
    assert back["box"][0] is back["a"]
    back["a"][2] = 8
    assert back["v"][0] == 8
    assert back["twin"] is back["other"]
    assert back["alone"] == 5
    assert notebook.files() == []
    with pytest.raises(FileNotFoundError):
        notebook.shipper.unpack(refs["a"])


@pytest.mark.parametrize("wanted", [(), ("a",), ("v", "box")])
def test_discarded_results_leave_nothing_and_take_nothing(
    notebook: Notebook, wanted: tuple[str, ...]
) -> None:
    notebook.there(
        f"import numpy as np\na = np.zeros({BIG}); v = a[2:]; box = [a]; alone = np.ones({BIG})"
    )
    refs = notebook.ranks[0].pack("a", "v", "box", "alone")
    for name in refs:
        if name not in wanted:
            notebook.shipper.discard(refs[name])
    for name in wanted:
        notebook.shipper.unpack(refs[name])
    assert notebook.files() == []
    notebook.shipper.discard(refs["alone"])


def test_source_of_a_cell_is_known_on_the_ranks(notebook: Notebook) -> None:
    import linecache

    text = "def f():\n    return 1 / zero\nzero = 0\n"
    name = "/tmp/ipykernel_1/12345.py"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec", dont_inherit=True), notebook.namespace)
    notebook.there("import inspect\nsource = inspect.getsource(f)")
    assert notebook.values("source") == ["def f():\n    return 1 / zero\n"] * 2
    assert notebook.there("f").orders.sources == {}


# a long random walk


@pytest.mark.parametrize("seed", range(2))
def test_ranks_hold_the_predicted_values(notebook: Notebook, seed: int) -> None:
    walk(notebook, seed, 300)
