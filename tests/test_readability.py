"""The package reads no worse than it did, and its vocabulary names what exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.readability import PACKAGE, Figures, by_folder, is_vague, measure, total

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = ROOT / "docs" / "explanation" / "vocabulary.md"

# Limits of the whole package. If a figure gets better, write its new value here; never loosen one.
AT_MOST = {
    "docs": 1.40,
    "names": 0.16,
    "long": 0,
    "fmt": 0,
    "untyped": 34,
    "definitions": 3,
}
AT_LEAST = {
    "comments": 2.84,
    "logger": 260,
}
ADVICE = {
    "docs": "rewrite these docstrings as you would say them to a colleague: an imperative sentence "
    "for a function, a noun phrase for a class or a module",
    "names": "name these variables and parameters by what they hold",
    "long": "break these lines at 100 columns",
    "fmt": "let the formatter have these lines",
    "untyped": "give these dicts a dataclass or a TypedDict",
    "definitions": "name these modules, classes and functions by what they are or do",
    "comments": "write comments where the code is subtle: the reason, an ordering that matters, a "
    "measured number, the library's bug that is worked around",
    "logger": "log changes of state, once and with their identifiers",
}
ROW = re.compile(r"^\| ([a-z][\w ,-]*) \| (.+?) \| `([\w.]+)` \|$", re.MULTILINE)


@cache
def package() -> Figures:
    return total(by_folder())


@pytest.mark.parametrize("figure", AT_MOST)
def test_figure_stays_below_its_limit(figure: str) -> None:
    value, limit = package().values()[figure], AT_MOST[figure]
    assert value <= limit, (
        f"{figure} is {value:.2f}, and at most {limit} is allowed: {ADVICE[figure]} "
        f"(python -m tests.readability --list {figure} shows where)"
    )


@pytest.mark.parametrize("figure", AT_LEAST)
def test_figure_stays_above_its_limit(figure: str) -> None:
    value, limit = package().values()[figure], AT_LEAST[figure]
    assert value >= limit, (
        f"{figure} is {value:.2f}, and at least {limit} is required: {ADVICE[figure]} "
        f"(python -m tests.readability shows it by folder)"
    )


def test_every_figure_has_a_limit_and_advice() -> None:
    assert {*AT_MOST, *AT_LEAST} == set(Figures().values()) == set(ADVICE)


@pytest.mark.parametrize(
    ("source", "figure", "count"),
    [
        ('def f():\n    """What a host has."""', "docs", 1),
        ('def f():\n    """Return what a host has."""', "docs", 0),
        ('class A:\n    size: int\n    """Whoever has made it."""', "docs", 1),
        ('text = "whoever"', "docs", 0),
        ("found = 1", "names", 1),
        ("def f(each): ...", "names", 1),
        ("for host in found: ...", "names", 0),
        ("def look(): ...", "definitions", 1),
        ("def _look(): ...", "definitions", 0),
        ("class Known:\n    def given(self): ...", "definitions", 2),
        (f"x = {'1' * 97}", "long", 1),
        (f"x = {'1' * 96}", "long", 0),
        ("x = 1  # fmt: skip", "fmt", 1),
        ('x = "# fmt: skip"', "fmt", 0),
        ("x: dict[str, Any] | Mapping[str, Any]", "untyped", 2),
        ("x: dict[str, int]", "untyped", 0),
        ("logger.info('a')\nself.logger.warning('b')", "logger", 2),
        ("catalog.info()", "logger", 0),
        ("# a\nx = 1  # b", "comments", 2),
        ('x = "# a"', "comments", 0),
    ],
)
def test_figure_counts_its_own(source: str, figure: str, count: int) -> None:
    assert measure(source).totals[figure] == count


def test_module_with_a_vague_name_counts() -> None:
    places = measure("x = 1", Path("pool/found.py")).listed("definitions")
    assert [str(place) for place in places] == ["skymagic/pool/found.py:1: found"]


def test_no_module_has_a_vague_name() -> None:
    paths = sorted((ROOT / "skymagic").rglob("*"))
    assert [path for path in paths if is_vague(path.stem)] == [], ADVICE["definitions"]


def exists(name: str) -> bool:
    """Return True if a dotted name below the package is a module, a class or a function."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath("skymagic", *parts[:length])
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if source.exists():
            return _defines(ast.parse(source.read_text()), parts[length:])
    return False


def _defines(scope: ast.Module | ast.ClassDef, names: list[str]) -> bool:
    for node in scope.body if names else ():
        if isinstance(node, ast.ClassDef) and node.name == names[0]:
            return _defines(node, names[1:])
        if isinstance(node, ast.FunctionDef) and node.name == names[0]:
            return len(names) == 1
    return not names


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("wire", True),
        ("wire.order", True),
        ("pool.pool.Pool.restart", True),
        ("pool.pool.Poll", False),
        ("pool.pool.Pool.restarted", False),
        ("pools", False),
    ],
)
def test_existence_of_a_name(name: str, answer: bool) -> None:
    assert exists(name) is answer


def rows() -> list[tuple[str, str]]:
    """Return the vocabulary's terms and verbs, each with the name of its place in the package."""
    return [(term, name) for term, _, name in ROW.findall(VOCABULARY.read_text())]


def test_vocabulary_names_what_exists() -> None:
    missing = {f"{term}: {name}" for term, name in rows() if not exists(name)}
    assert not missing, "correct the lines of docs/explanation/vocabulary.md"


def test_every_row_of_the_vocabulary_is_read() -> None:
    table = [line for line in VOCABULARY.read_text().splitlines() if line.startswith("| ")]
    heads = [line for line in table if line.endswith(("| where |", "| example |"))]
    assert len(rows()) == len(table) - len(heads)


def test_vocabulary_has_each_term_once() -> None:
    text = VOCABULARY.read_text()
    for part in text.partition("\n## Verbs\n")[::2]:
        terms = [term for term, _, _ in ROW.findall(part)]
        assert len(terms) == len(set(terms))


def test_documented_names_exist() -> None:
    """Sections "Args" and "Attributes" name parameters and fields that are there."""
    odd = [
        f"skymagic/{path.relative_to(PACKAGE)}:{node.lineno}: {name} of {node.name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for name in documented(ast.get_docstring(node) or "")
        if name not in defined(node)
    ]
    assert odd == []


def documented(docstring: str) -> set[str]:
    """Names in the sections of a docstring for parameters and attributes."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:    .*\n|\n)*)", docstring + "\n", re.M)
    lists = re.findall(r"^    \*{0,2}(\w+(?:, \w+)*):", "".join(sections), re.M)
    return {name for names in lists for name in names.split(", ")}


def defined(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Parameters of a function, or those of a class with its fields, properties and attributes."""
    if not isinstance(node, ast.ClassDef):
        return {item.arg for item in ast.walk(node.args) if isinstance(item, ast.arg)}
    names = set[str]()
    for item in ast.walk(node):
        if isinstance(item, ast.FunctionDef):
            names.add(item.name)
            names |= defined(item) if item.name in ("__init__", "__new__") else set()
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            # parameters of a dataclass are documented without the underscore of a private field
            names |= {item.target.id, item.target.id.lstrip("_")}
        elif isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store):
            names.add(item.attr)
    return names
