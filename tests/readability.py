"""Measure how the package reads: its docstrings, names, comments, line lengths and log calls.

Run ``python -m tests.readability`` for a table by folder, with ``--list FIGURE`` for the places
behind a figure, and with ``--only FOLDER`` for one folder. `tests.test_readability` holds the
limits, which may only become stricter.

The patterns are heuristics. If one matches a good sentence, rewrite the sentence anyway; do not
look for a synonym that avoids the pattern.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "skymagic"
COLUMNS = 100

VAGUE = frozenset(
    """
    asked begun brought carried chosen each every found given gone heard here kept known left look
    made meant mine missed one others ours place places rest said seen spare such theirs there told
    wanted way where whole words
    """.split()
)
"""Names that leave open what they hold or do."""

_INDIRECT_CLAUSE = (
    r"(?:^|[.:;,(] )(?:what|who|whoever|whatever|how) "
    r"(?:is|was|has|have|had|can|could|comes|came|goes|runs|a|the|it|they|ranks|nodes|users"
    r"|another)\b"
)
DOCSTRING_PATTERNS = {
    label: re.compile(pattern, flags)
    for label, pattern, flags in (
        ("opens with a question word", r"^(?:What|Where|Who|Which|How|That|Why|When)\b", 0),
        (
            "opens with a pronoun",
            r"^(?:It|Its|They|Them|Those|One|Ones|All|Each|None|He|There|This one)\b",
            0,
        ),
        ("names a thing by a clause", _INDIRECT_CLAUSE, re.IGNORECASE),
        ("'goes on' for 'continues'", r"\b(?:go|goes|going|went|gone) on\b", re.IGNORECASE),
        (
            "an old-fashioned adverb",
            r"\b(?:anew|afresh|amid|beside|likewise|henceforth|thereof)\b",
            re.IGNORECASE,
        ),
        ("'in its place'", r"\bin (?:the|its|their|whose) place\b", re.IGNORECASE),
        ("'of its own'", r"\bof (?:its|their|our|his) own\b|\bof (?:ours|theirs)\b", re.IGNORECASE),
        (
            "a passive of telling or hearing",
            r"\b(?:is|are|was|were|be|been) (?:told|said|asked|heard|meant|had|noted)\b",
            re.IGNORECASE,
        ),
        (
            "'there is none'",
            r"\bthere (?:is|are|was|were) (?:none|no|one|some|such)\b",
            re.IGNORECASE,
        ),
        (
            "'for' as 'because'",
            r", for (?:it|they|that|this|the|what|nobody|its|he|hosts|ranks)\b",
            re.IGNORECASE,
        ),
        (
            "'nobody', 'whoever' and the like",
            r"\b(?:nobody|somebody|whoever|whatever|whosoever)\b",
            re.IGNORECASE,
        ),
        ("'has come'", r"\b(?:has|have|had) come\b", re.IGNORECASE),
        ("'of which'", r"\b(?:of|to|in|by|for|with|on|from|at) which\b", re.IGNORECASE),
        ("'tells' for a message", r"\b(?:tells|told|hears|heard|says|said)\b", re.IGNORECASE),
    )
}
_LOG_CALL = re.compile(r"\b_?log(?:ger)?\.(?:debug|info|warning|error|exception)\(")
_UNTYPED = re.compile(r"(?:dict|Mapping)\[str, Any\]")


@dataclass(frozen=True)
class Place:
    """A line that counts for a figure."""

    figure: str
    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"skymagic/{self.path}:{self.line}: {self.text}"


class Figures:
    """Figures of some modules, as numbers and as the places behind them.

    ``docs`` and ``names`` are percentages of the docstrings and bindings, ``comments`` of the
    lines. All others are counts.
    """

    def __init__(self) -> None:
        self.totals = Counter[str]()
        self.places: list[Place] = []

    def add(self, other: Figures) -> None:
        """Add the figures of other modules."""
        self.totals += other.totals
        self.places += other.places

    def listed(self, figure: str) -> list[Place]:
        """Return the places that count for a figure."""
        return [place for place in self.places if place.figure == figure]

    def _share(self, figure: str, whole: str) -> float:
        return 100 * self.totals[figure] / max(1, self.totals[whole])

    def values(self) -> dict[str, float]:
        """Return each figure by name."""
        counts = ("long", "fmt", "logger", "untyped", "definitions")
        return {
            "docs": self._share("docs", "docstrings"),
            "names": self._share("names", "bindings"),
            "comments": self._share("comments", "lines"),
            **{figure: float(self.totals[figure]) for figure in counts},
        }


PERCENTAGES = ("docs", "names", "comments")
LISTED = ("docs", "names", "long", "fmt", "untyped", "definitions")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of all docstrings, including those that follow an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield (1 if isinstance(node, ast.Module) else node.lineno), text
        body = getattr(node, "body", None)
        for statement in body[1:] if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    yield statement.lineno, text


def bindings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of all assigned names and parameters."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name


def public_definitions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of the classes, functions and methods without a leading underscore."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if not node.name.startswith("_"):
                    yield node.lineno, node.name


def is_vague(name: str) -> bool:
    """Return True for a name that is only a vague word, whatever its case and underscores."""
    return name.strip("_").lower() in VAGUE


def measure(source: str, path: Path = Path("module.py")) -> Figures:
    """Return the figures of one module; `path` is relative to the package."""
    figures = Figures()
    totals = figures.totals
    tree = ast.parse(source)

    def count(figure: str, line: int, text: str) -> None:
        totals[figure] += 1
        figures.places.append(Place(figure, path, line, text))

    lines = source.splitlines()
    totals["lines"], totals["modules"] = len(lines), 1
    for number, text in enumerate(lines, 1):
        if len(text) > COLUMNS:
            count("long", number, f"{len(text)} columns")
        for _ in _LOG_CALL.finditer(text):
            totals["logger"] += 1
        for annotation in _UNTYPED.finditer(text):
            count("untyped", number, annotation[0])
    for number, text in docstrings(tree):
        totals["docstrings"] += 1
        text = text.strip()
        labels = [label for label, pattern in DOCSTRING_PATTERNS.items() if pattern.search(text)]
        if labels:
            count("docs", number, f"{text.splitlines()[0]}  [{', '.join(labels)}]")
    for number, name in bindings(tree):
        totals["bindings"] += 1
        if name.strip("_") in VAGUE:
            count("names", number, name)
    if is_vague(path.stem):
        count("definitions", 1, path.stem)
    for number, name in public_definitions(tree):
        if is_vague(name):
            count("definitions", number, name)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            totals["comments"] += 1
            if "fmt:" in token.string:
                count("fmt", token.start[0], token.string)
    return figures


def by_folder(package: Path = PACKAGE) -> dict[str, Figures]:
    """Return the figures of each top-level folder; ``.`` is the package's own modules."""
    folders = dict[str, Figures]()
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        folder = relative.parts[0] if len(relative.parts) > 1 else "."
        folders.setdefault(folder, Figures()).add(measure(path.read_text(), relative))
    return folders


def total(folders: dict[str, Figures]) -> Figures:
    """Return the figures of all folders together."""
    figures = Figures()
    for folder in folders.values():
        figures.add(folder)
    return figures


def table(folders: dict[str, Figures]) -> str:
    """Return the figures as text, one line for each folder and one for all of them."""
    names = list(Figures().values())
    rows = [["folder", "lines", "modules", *names]]
    for folder, figures in [*folders.items(), ("all", total(folders))]:
        values = [
            f"{value:.2f} %" if name in PERCENTAGES else f"{value:.0f}"
            for name, value in figures.values().items()
        ]
        sizes = [str(figures.totals["lines"]), str(figures.totals["modules"])]
        rows.append([folder, *sizes, *values])
    return "\n".join(row[0].ljust(12) + "".join(cell.rjust(12) for cell in row[1:]) for row in rows)


def main() -> None:
    """Print the table, or the places behind one figure."""
    parser = argparse.ArgumentParser(prog="python -m tests.readability", description=__doc__)
    parser.add_argument("--list", choices=LISTED, help="print the places behind this figure")
    parser.add_argument("--only", metavar="FOLDER", help="measure this top-level folder only")
    options = parser.parse_args()
    folders = {
        folder: figures for folder, figures in by_folder().items() if options.only in (None, folder)
    }
    if options.list:
        print(*total(folders).listed(options.list), sep="\n")
    else:
        print(table(folders))


if __name__ == "__main__":
    main()
