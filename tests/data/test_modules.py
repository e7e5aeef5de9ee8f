"""Modules of the notebook's folder travel as source, once, and again when they are edited."""

from __future__ import annotations

import contextlib
import importlib
import importlib.resources
import inspect
import os
import pkgutil
import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from skymagic.data.capture.modules import MAX_DATA_BYTES, is_inside, locate, search
from skymagic.data.shipping.bindings import Bindings, Sources
from skymagic.errors import CaptureError
from skymagic.kernels.rank.importer import RemoteImporter
from skymagic.wire.values import ModuleSource
from tests.data.far import FarError, Notebook, moved
from tests.lab.golden import Golden


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A notebook's folder, first on the path."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def notebook(folder: Path) -> Iterator[Notebook]:
    with contextlib.closing(Notebook(folder, 2)) as made:
        yield made


def write(path: Path, text: str) -> None:
    """Write a module so that its change is seen, however fast."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_only_local_modules_are_sources(folder: Path) -> None:
    write(folder / "mine.py", "x = 1")
    write(folder / ".venv/lib/python3.11/site-packages/theirs.py", "x = 1")
    sys.path.insert(1, str(folder / ".venv/lib/python3.11/site-packages"))
    assert locate("mine", str(folder))
    others = (
        "theirs os sys numpy skymagic skymagic.data.shipping.shipper __main__ nothing_of_this_name"
    )
    assert [other for other in others.split() if locate(other, str(folder))] == []
    sys.path.remove(str(folder))
    assert not locate("mine", str(folder / "sub"))


def test_a_folder_that_holds_skymagic_or_python_itself() -> None:
    assert not locate("skymagic.errors", "/")
    assert not locate("json", "/")
    assert not locate("pytest", "/")
    assert not is_inside(os.__file__, sys.prefix)


FOLLOWED = {  # files → the modules that travel with the first
    "imports that never ran": (
        {
            "top.py": "import numpy\nfrom pkg import part\nimport pkg.deep.leaf as leaf\ndef f():\n  import late",
            "late.py": "",
            "pkg/__init__.py": "from . import sibling",
            "pkg/part.py": "from .sibling import y\nfrom .deep import *",
            "pkg/sibling.py": "y = 1",
            "pkg/deep/__init__.py": "",
            "pkg/deep/leaf.py": "from ..sibling import y\nfrom ... import nothing",
            "unrelated.py": "",
        },
        "top late pkg pkg.part pkg.sibling pkg.deep pkg.deep.leaf",
    ),
    "circles": ({"one.py": "import two", "two.py": "import one"}, "one two"),
    "calls": (
        {
            "one.py": "import importlib\nimportlib.import_module('two')\n__import__('three')\nimport_module(name)",
            "two.py": "",
            "three.py": "",
        },
        "one two three",
    ),
}


@pytest.mark.parametrize("what", FOLLOWED)
def test_imports_of_a_module_are_sent_with_it(folder: Path, what: str) -> None:
    files, modules = FOLLOWED[what]
    for name, text in files.items():
        write(folder / name, text)
    first = next(iter(files)).removesuffix(".py")
    found = search([first], str(folder)).sources
    assert {*found} == set(modules.split())
    assert {name for name, one in found.items() if one.package} == {
        "pkg",
        "pkg.deep",
    } & found.keys()
    assert first not in sys.modules


def test_parents_and_namespace_packages_travel_too(folder: Path) -> None:
    write(folder / "space/a/mod.py", "x = 5")
    found = search(["space.a.mod"], str(folder)).sources
    assert {*found} == {"space", "space.a", "space.a.mod"}
    assert (found["space"].source, found["space"].package) == ("", True)


def test_unreadable_module_is_left_to_the_rank(folder: Path) -> None:
    write(folder / "broken.py", "def f(:")
    (folder / "binary.py").write_bytes(b"\xff\xfe\x00")
    (folder / "compiled.cpython-311-x86_64-linux-gnu.so").write_bytes(b"")
    assert search(["broken", "binary", "compiled", ""], str(folder)).sources == {}


def test_invalid_module_is_reported_with_file_and_line(folder: Path) -> None:
    write(folder / "broken.py", "x = 1\ndef f(:")
    write(folder / "late.py", "x = 1\n\nreturn x")
    write(folder / "user.py", "import broken")
    found = search(["user", "late"], str(folder))
    assert {*found.sources} == {"user"}
    assert found.problems == {
        "broken": f"{folder}/broken.py, line 2: invalid syntax",
        "late": f"{folder}/late.py, line 3: 'return' outside function",
    }


def test_modules_from_folders_that_were_added_to_the_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those directly in the added folder; not installed ones below it, nor those of the original path."""
    notebooks, src = folder / "notebooks", folder / "src"
    notebooks.mkdir()
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(folder)])
    write(src / "lib.py", "from libs.part import x")
    write(src / "libs/part.py", "x = 1")
    write(src / ".venv/lib/python3.11/site-packages/theirs.py", "x = 1")
    write(folder / "editable/src/edited.py", "x = 1")
    monkeypatch.syspath_prepend(folder / "editable/src")
    monkeypatch.setenv("PYTHONPATH", str(folder / "editable/src"))
    assert search(["lib"], str(notebooks)).sources == {}
    monkeypatch.chdir(notebooks)
    sys.path.append("../src")
    sys.path.append(str(folder))
    sys.path.append(str(src / ".venv/lib/python3.11/site-packages"))
    assert {
        *search(["lib", "edited", "theirs", "json", "pytest", "skymagic"], str(notebooks)).sources
    } == {
        "lib",
        "libs",
        "libs.part",
    }


def test_encoding_declarations(folder: Path) -> None:
    (folder / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nx = 'é'".encode("latin-1"))
    assert "é" in search(["latin"], str(folder)).sources["latin"].source


def test_edit_changes_the_hash(folder: Path) -> None:
    write(folder / "mod.py", "x = 1")
    first = search(["mod"], str(folder)).sources["mod"]
    assert search(["mod"], str(folder)).sources["mod"] == first
    write(folder / "mod.py", "x = 2")
    assert search(["mod"], str(folder)).sources["mod"].hash != first.hash


# data files


def test_data_files_of_a_package_travel_to_other_machines(
    folder: Path, importer: RemoteImporter
) -> None:
    write(
        folder / "pack/__init__.py",
        "import importlib.resources\ndef text(): return importlib.resources.files('pack')",
    )
    write(folder / "pack/sub/names.txt", "one")
    write(folder / "pack/part.py", "x = 1")
    write(folder / "pack/.hidden", "no")
    sources = Sources(str(folder), Bindings(), remote=True)
    [sent] = sources.missing_modules(sources.find(["pack"], [0]), [0])
    shutil.rmtree(folder / "pack")
    importer.install([sent.module])
    where = importlib.import_module("pack").text()
    assert sorted(each.name for each in where.iterdir()) == ["sub"]
    assert (where / "sub" / "names.txt").read_text() == "one"
    assert pkgutil.get_data("pack", "sub/names.txt") == b"one"
    with importlib.resources.as_file(where / "sub" / "names.txt") as path:
        assert path.read_text() == "one"


def test_edited_data_files_are_sent_again(folder: Path) -> None:
    write(folder / "pack/__init__.py", "import pkgutil")
    hashes = []
    for text in ("one", "one", "two"):
        write(folder / "pack/names.txt", text)
        sources = Sources(str(folder), Bindings(), remote=True)
        hashes.append(sources.missing_modules(sources.find(["pack"], [0]), [0])[0].module.hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_large_data_files_are_skipped_with_a_note(golden: Golden, folder: Path) -> None:
    write(folder / "pack/__init__.py", "import pkgutil")
    (folder / "pack/weights.bin").write_bytes(bytes(MAX_DATA_BYTES + 1))
    sources, said = Sources(str(folder), Bindings(), remote=True), list[str]()
    for _ in range(2):
        assert sources.find(["pack"], [0], note=said.append)["pack"].data == ""
    golden(said)
    assert (
        Sources(str(folder), Bindings(), remote=False)
        .find(["pack"], [0], note=said.append)["pack"]
        .data
        == ""
    )


# edited after the notebook's import


def test_a_module_that_was_edited_after_its_import(
    golden: Golden, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "helped.py"
    write(path, "x = 1")
    module = importlib.import_module("helped")
    sources, said = Sources(str(folder), Bindings(), remote=False), list[str]()
    sources.find(["helped"], [0], note=said.append)
    write(path, "x = 22")
    sources.find(["helped"], [0], dry_run=True, note=said.append)
    assert said == []
    for _ in range(2):
        sources.find(["helped"], [0], note=said.append)
    golden(said)
    importlib.reload(module)
    sources.find(["helped"], [0], note=said.append)
    assert len(said) == 1
    write(path, "x = 333")
    sources.find(["helped"], [0], note=said.append)
    assert len(said) == 2


def test_edit_before_the_first_cell_is_found_in_the_pyc_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    write(folder / "helped.py", "x = 1")
    importlib.import_module("helped")
    write(folder / "helped.py", "x = 22")
    said = list[str]()
    Sources(str(folder), Bindings(), remote=False).find(["helped"], [0], note=said.append)
    assert len(said) == 1


# served


@pytest.fixture
def importer() -> Iterator[RemoteImporter]:
    before = set(sys.modules)
    made = RemoteImporter()
    yield made
    made.remove()
    for name in set(sys.modules) - before:
        del sys.modules[name]


def source(name: str, text: str, package: bool = False) -> ModuleSource:
    return ModuleSource(
        name, text, package, f"/nowhere/{name.replace('.', '/')}.py", str(hash(text))
    )


def test_served_module_imports_shows_its_source_and_its_file(importer: RemoteImporter) -> None:
    importer.install([source("zed_mod", "def f():\n    return 1 / 0\n")])
    module = importlib.import_module("zed_mod")
    assert module.__file__ == "/nowhere/zed_mod.py"
    assert inspect.getsource(module.f).startswith("def f()")
    with pytest.raises(ZeroDivisionError) as caught:
        module.f()
    assert "return 1 / 0" in "".join(traceback.format_exception(caught.value))


def test_served_package_with_relative_imports(importer: RemoteImporter) -> None:
    importer.install(
        [
            source("zed", "from .a import x", package=True),
            source("zed.a", "from . import b\nx = b.y"),
            source("zed.b", "y = 7"),
        ]
    )
    assert importlib.import_module("zed").x == 7
    assert importlib.import_module("zed.b").__package__ == "zed"


def test_changed_module_is_executed_again_in_place(importer: RemoteImporter) -> None:
    importer.install([source("zed_mod", "x = 1\nkept = []")])
    module: ModuleType = importlib.import_module("zed_mod")
    importer.install([source("zed_mod", "x = 2")])
    assert module.x == 2
    assert module.kept == []
    assert sys.modules["zed_mod"] is module


def test_same_source_is_not_executed_again(importer: RemoteImporter) -> None:
    for _ in range(2):
        importer.install(
            [source("zed_mod", "import sys\nsys.zed_count = getattr(sys, 'zed_count', 0) + 1")]
        )
        importlib.import_module("zed_mod")
    assert vars(sys).pop("zed_count") == 1


def test_dependencies_are_executed_again_before_their_users(importer: RemoteImporter) -> None:
    text = "from zed_low import x\ny = x + {}"
    importer.install([source("zed_top", text.format(1)), source("zed_low", "x = 1")])
    top = importlib.import_module("zed_top")
    importer.install([source("zed_top", text.format(10)), source("zed_low", "x = 100")])
    assert top.y == 110


def test_users_of_an_edited_module_follow(importer: RemoteImporter) -> None:
    low = "K = {0}\ndef f(x=1): return {0}\nclass C:\n  def m(self): return {0}\n"
    importer.install(
        [
            source("zed_top", "from zed_low import K, f, C\ndef g(): return K, f(), C().m()"),
            source("zed_low", low.format(1)),
        ]
    )
    top, lower = importlib.import_module("zed_top"), importlib.import_module("zed_low")
    f, instance = lower.f, lower.C()
    assert top.g() == (1, 1, 1)
    importer.install([source("zed_low", low.format(2))])
    assert top.g() == (2, 2, 2)
    assert f() == 2
    assert instance.m() == 2
    assert type(instance) is lower.C is top.C


def test_super_and_subclasses_follow_an_edit(importer: RemoteImporter) -> None:
    base = "class A:\n  def __init__(self): self.made = {0}\n"
    sub = "from zed_low import A\nclass B(A):\n  def __init__(self): super().__init__(); self.more = {0}\n"
    importer.install([source("zed_low", base.format(1)), source("zed_top", sub.format(1))])
    B = importlib.import_module("zed_top").B
    old = B()
    importer.install([source("zed_low", base.format(2)), source("zed_top", sub.format(3))])
    old.__init__()
    assert (old.made, old.more) == (2, 3)
    assert importlib.import_module("zed_top").B is B


def test_modules_that_cannot_be_updated_are_replaced(importer: RemoteImporter) -> None:
    text = (
        "import enum, functools\nclass E(enum.Enum):\n  A = {0}\n"
        "class S:\n  __slots__ = 'x{0}',\nclass D({1}): pass\n@functools.cache\ndef c(): return {0}\n"
        "def outer(n):\n  def inner(): return n + {0}\n  return inner\nclosed = outer({0})\n"
    )
    importer.install([source("zed_low", text.format(1, "int"))])
    module = importlib.import_module("zed_low")
    importer.install([source("zed_low", text.format(2, "str"))])
    assert (module.E.A.value, module.S.__slots__, module.c(), module.closed()) == (2, ("x2",), 2, 4)
    assert issubclass(module.D, str)


def test_circles_and_failures_of_edits(importer: RemoteImporter) -> None:
    importer.install(
        [source("zed_one", "import zed_two\nx = 1"), source("zed_two", "import zed_one\ny = 1")]
    )
    one = importlib.import_module("zed_one")
    with pytest.raises(ZeroDivisionError):
        importer.install([source("zed_one", "import zed_two\nx = 2\n1 / 0")])
    with pytest.raises(ZeroDivisionError):
        importer.install([])
    importer.install([source("zed_one", "import zed_two\nx = 3")])
    assert one.x == 3


# with a rank


def test_modules_by_import_and_by_the_values_that_use_them(notebook: Notebook) -> None:
    write(notebook.folder / "first.py", "def twice(x): return 2 * x")
    write(
        notebook.folder / "helpers.py",
        "from parts import k\ndef twice(x): return k * x\nclass C:\n  n = 3",
    )
    write(notebook.folder / "parts.py", "k = 2")
    write(notebook.folder / "late.py", "z = 26")
    write(notebook.folder / "pkg/__init__.py", "")
    write(notebook.folder / "pkg/part.py", "v = 11")
    notebook.there("import first\na = first.twice(4)")
    assert "first" not in sys.modules, "a cell's import is the ranks' alone"
    notebook.here(
        "import helpers as h\nfrom helpers import twice\nobj = h.C()\ndef use(): return twice(5)"
    )
    notebook.there("b = h.twice(1), obj.n, use()")
    notebook.here("def f():\n  import late\n  return late.z\nimport pkg.part")
    notebook.there("c = f(), pkg.part.v")
    notebook.here(
        "import concurrent.futures as _\nimport concurrent\ndef pool(): return concurrent.futures.Future().done()"
    )
    notebook.there("d = pool()")
    assert notebook.values("[a, *b, *c, d]") == [[8, 2, 3, 10, 26, 11, False]] * 2


def test_edited_module_is_sent_again_and_functions_follow(notebook: Notebook) -> None:
    path = notebook.folder / "helpers.py"
    write(path, "def f(): return 1")
    notebook.here("import helpers\nfrom helpers import f")
    notebook.there("a = f(), helpers.f()")
    assert moved(notebook.there("b = f(), helpers.f()")) == []
    assert not notebook.there("f(), helpers.f()").orders.modules
    write(path, "def f(): return 2 # edited")
    manifest = notebook.there("c = f(), helpers.f()")
    assert [sent.module.name for sent in manifest.orders.modules] == ["helpers"]
    assert notebook.values("[*a, *b, *c]") == [[1, 1, 1, 1, 2, 2]] * 2


def test_module_that_fails_is_named(notebook: Notebook) -> None:
    path = notebook.folder / "helpers.py"
    write(path, "x = 1")
    notebook.there("import helpers")
    write(path, "raise RuntimeError('no luck')")
    with pytest.raises(FarError, match="helpers .*RuntimeError: no luck"):
        notebook.there("import helpers")


def test_broken_module_fails_only_if_the_cell_imports_it(
    notebook: Notebook,
) -> None:
    write(notebook.folder / "old.py", "print 'Python 2'")
    write(
        notebook.folder / "top.py",
        "try:\n  import old\nexcept (SyntaxError, ImportError):\n  old = None",
    )
    notebook.there("import top\na = top.old")
    assert notebook.values("a") == [None] * 2
    with pytest.raises(CaptureError, match="old.py, line 1: Missing parentheses"):
        notebook.there("import old")


def test_data_files_of_a_package_on_this_machine(notebook: Notebook) -> None:
    write(notebook.folder / "pack/__init__.py", "")
    write(notebook.folder / "pack/names.txt", "one")
    notebook.there(
        "import importlib.resources\na = importlib.resources.files('pack').joinpath('names.txt').read_text()"
    )
    notebook.there("import pkgutil\nb = pkgutil.get_data('pack', 'names.txt').decode()")
    assert notebook.values("[a, b]") == [["one", "one"]] * 2


def test_a_module_from_an_added_folder(notebook: Notebook) -> None:
    src = notebook.folder.parent / f"{notebook.folder.name}-src"
    write(src / "outside.py", "def f(): return 1")
    sys.path.append(str(src))
    try:
        notebook.here("import outside")
        notebook.there("a = outside.f()")
        write(src / "outside.py", "def f(): return 22")
        notebook.there("b = outside.f()")
        assert notebook.values("[a, b]") == [[1, 22]] * 2
    finally:
        sys.path.remove(str(src))
        sys.modules.pop("outside", None)
