"""Which distribution an import is from, what a node lacks, and which imports count: tables."""

from __future__ import annotations

import ast
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import FunctionType

import pytest

from skymagic.data.capture import installed
from skymagic.data.capture.code import code_names
from skymagic.data.capture.imports import required_names
from skymagic.plan.distributions import (
    Distribution,
    Environment,
    canonical,
    differs,
    distributions,
    lacks,
)

HERE = Environment(
    {"pyyaml": "6.0", "scikit-learn": "1.7", "opencv-python": "4.9", "google-auth": "2.0", "google-cloud-storage": "3.1", "ipython": "9.0"},
    {
        "yaml": ("PyYAML",), "_yaml": ("PyYAML",), "sklearn": ("scikit-learn",), "cv2": ("opencv-python",),
        "IPython": ("ipython",), "google.auth": ("google-auth",), "google.cloud.storage": ("google-cloud-storage",),
    },
)  # fmt: skip


@pytest.mark.parametrize(
    ("imported", "found"),
    [
        ("yaml", ["PyYAML"]),
        ("sklearn.linear_model.LinearRegression", ["scikit-learn"]),
        ("cv2", ["opencv-python"]),
        ("google.cloud.storage.blob", ["google-cloud-storage"]),
        ("google.auth", ["google-auth"]),
        ("os.path", []),
        ("IPython.display", []),  # each node has it
        ("skymagic", []),
    ],
)
def test_a_name_stands_for_a_distribution(imported: str, found: list[str]) -> None:
    named, unknown = distributions([imported], HERE)
    assert [one.name for one in named] == found
    assert unknown == set()


@pytest.mark.parametrize("imported", ["google", "nowhere", "nowhere.at.all"])
def test_unknown_name_is_refused(imported: str) -> None:
    assert distributions([imported], HERE) == ([], {imported})


@pytest.mark.parametrize(
    ("versions", "modules", "missing", "other"),
    [
        ({}, [], True, ""),
        ({"scikit-learn": "1.7"}, [], False, ""),
        ({"scikit-learn": "1.5"}, [], False, "1.5"),
        ({"scikit-learn": "1.7+cpu"}, [], False, ""),
        ({}, ["sklearn"], False, ""),  # from elsewhere: conda, PYTHONPATH
    ],
)
def test_missing_and_different_versions_of_a_node(
    versions: dict[str, str], modules: list[str], missing: bool, other: str
) -> None:
    node = Environment(versions, dict.fromkeys(modules, ()))
    needed = Distribution("scikit-learn", "1.7", "sklearn")
    assert lacks(needed, node) == missing
    assert differs(needed, node) == other


BODIES = {
    "import a": {"a"},
    "from a import b": {"a", "a.b"},
    "if x: import a": {"a"},
    "with x: import a": {"a"},
    "try: import a\nfinally: import b": {"a", "b"},
    "try: import a\nexcept ImportError: import b": set(),
    "try: import a\nexcept (ImportError, OSError) as e: pass": set(),
    "try: pass\nexcept Exception: pass\nelse: import a": set(),
    "try: import a\nexcept: pass\nimport b": {"b"},
    "for x in y:\n try: import a\n except Exception: continue\nimport c.d": {"c.d"},
}


@pytest.mark.parametrize("body", BODIES)
def test_imports_that_code_cannot_do_without(body: str) -> None:
    """Told by the source of a cell as by the code of a function."""
    assert required_names(ast.parse(body)) == BODIES[body]
    indented = "".join(f" {line}\n" for line in body.splitlines())
    made: dict[str, FunctionType] = {}
    exec(f"def f():\n{indented}", made)
    assert code_names(made["f"].__code__).required == BODIES[body] | (
        {"a"} if "else" in body else set()
    )


@pytest.mark.parametrize(
    "source",
    [
        "if TYPE_CHECKING: import a",
        "import typing as t\nif t.TYPE_CHECKING: import a",
        "if importlib.util.find_spec('a'): import a",
        "if sys.version_info < (3, 11): import a",
        "with contextlib.suppress(ImportError): import a",
    ],
)
def test_imports_that_ask_first(source: str) -> None:
    assert "a" not in required_names(ast.parse(source))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import_module('a.b')", {"a.b"}),
        ("importlib.resources.files('a')", {"a"}),
        ("files('a')", {"a"}),
        ("import importlib.resources as r\nr.files('a')", {"importlib.resources", "a"}),
        ("pkgutil.get_data('a', 'b.txt')", {"a"}),
        ("Path('a').read_text('utf8')", set()),
        ("archive.files('a.txt')", set()),
    ],
)
def test_calls_that_require_a_module(source: str, names: set[str]) -> None:
    assert required_names(ast.parse(source)) == names


def test_imports_of_functions_count_where_they_are_called() -> None:
    tree = ast.parse("import a\ndef f(): import b\nclass C:\n import c\n def m(self): import d")
    assert required_names(tree) == {"a", "b", "c", "d"}
    assert required_names(tree, functions=False) == {"a", "c"}


def test_files_are_those_of_the_record(tmp_path: Path) -> None:
    one = metadata.distribution("numpy")
    assert {str(path) for path in one.files or ()} <= {*installed._recorded_paths(one)}
    odd = metadata.PathDistribution(tmp_path)
    assert [*installed._recorded_paths(odd)] == []
    binary = f"alone{EXTENSION_SUFFIXES[0]}"
    (tmp_path / "RECORD").write_text(
        f'one/__init__.py,sha256=x,1\n"a,b.txt",,\n{binary},,\n../bin/one,,\n'
    )
    assert [*installed._recorded_paths(odd)][1] == "a,b.txt"
    assert installed._top_level_names(odd) == {"one", "alone"}


def test_this_environment_lists_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders' names tell the same versions as the distributions' own files, whose descriptions are read of none: each takes 2 ms."""
    parsed = []
    plain = vars(metadata.Distribution)["metadata"].fget

    def told(self: metadata.Distribution) -> object:
        parsed.append(self)
        return plain(self)

    monkeypatch.setattr(metadata.Distribution, "metadata", property(told))
    installed._read.cache_clear()
    here, present = installed.current_environment(), installed.present()
    assert len(set(map(id, parsed))) <= 3, "editable ones alone"
    assert {
        name: metadata.version(name) for name in ("numpy", "ipython")
    }.items() <= here.versions.items()
    assert here.versions["pytest"] == pytest.__version__
    assert [one.name for one in distributions(["yaml", "PIL"], here)[0]] == ["PyYAML", "pillow"]
    known = {name for name in here.versions if name in present.versions}
    assert {name: present.versions[name] for name in known} == {
        name: here.versions[name] for name in known
    }
    assert known == set(here.versions)
    assert "pytest" in present.modules
    assert canonical("Py.YAML_x") == "py-yaml-x"
