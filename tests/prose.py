"""Which sentences of the package the tests repeat: a message that is reworded should change a golden file, and no test.

An assertion of prose is a string in a test that is compared (``assert`` with ``==``, ``!=``, ``in``, ``startswith``, ``endswith``; ``match=``; ``fullmatch``),
and that quotes the package: three words of it in a row, with spaces, stand in a row in a string of the package, too. Docstrings of the package do not count, nor
does what a test prints itself, Python's own sentences, or code that a test has a notebook evaluate. A string counts once, whatever it quotes. ``python -m tests.prose [FOLDER]`` lists them.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
PYTHONS_OWN = re.compile(r"'\w+' is not defined|No module named '[\w.]+'")
COMPARING = {"startswith", "endswith", "fullmatch", "search"}


def in_a_row(text: str) -> set[tuple[str, ...]]:
    """All runs of three words of a text, with spaces between them; a number or a sign is no word."""
    tokens = [token.strip(",.;:!?()") for token in text.lower().split()]
    runs = zip(tokens, tokens[1:], tokens[2:], strict=False)
    return {run for run in runs if all(map(WORD.fullmatch, run))}


def package_prose() -> set[tuple[str, ...]]:
    """All runs of three words in strings of the package."""
    runs = set[tuple[str, ...]]()
    for path in (ROOT / "skymagic").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr):  # a docstring
                node.value = ast.Constant(None)
            elif isinstance(node, ast.JoinedStr):
                runs |= in_a_row(text_of(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                runs |= in_a_row(node.value)
    return runs


def text_of(node: ast.JoinedStr | ast.Constant) -> str:
    """Return a string's text, with 0 for the values in an f-string."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else " 0 " for part in node.values
    )


def _strings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string; an f-string is one, though Python 3.12 gives its parts places of their own."""
    if isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    ):
        yield node.lineno, text_of(node)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child)


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of the strings that a test compares."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            for part in ast.walk(node.test):
                if isinstance(part, ast.Compare):
                    for operand in (part.left, *part.comparators):
                        yield from _strings(operand)
                elif (
                    isinstance(part, ast.Call)
                    and isinstance(part.func, ast.Attribute)
                    and part.func.attr in COMPARING
                ):
                    for argument in part.args:
                        yield from _strings(argument)
        elif isinstance(node, ast.keyword) and node.arg == "match":
            yield from _strings(node.value)


def is_code(text: str) -> bool:
    """Return True for a comprehension or several statements; a sentence is no Python."""
    try:
        tree = ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return False
    return any(
        isinstance(node, ast.comprehension | ast.FunctionDef | ast.Lambda)
        for node in ast.walk(tree)
    )


def quotes(text: str, package: set[tuple[str, ...]]) -> bool:
    """Return True if a string repeats three words in a row of the package's sentences."""
    return not is_code(text) and not in_a_row(PYTHONS_OWN.sub("", text)).isdisjoint(package)


def assertions(package: set[tuple[str, ...]] | None = None) -> dict[str, list[tuple[int, str]]]:
    """Assertions of prose by test file: line and text."""
    runs = package_prose() if package is None else package
    found = dict[str, list[tuple[int, str]]]()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        strings = {*compared(ast.parse(path.read_text()))}
        quoting = [(line, text) for line, text in sorted(strings) if quotes(text, runs)]
        if quoting:
            found[str(path.relative_to(ROOT))] = quoting
    return found


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else None
    found = assertions()
    for name, strings in found.items():
        for line, text in strings if wanted and name.startswith(wanted) else ():
            print(f"{name}:{line}: {text!r}")
    for name in sorted(found, key=lambda name: -len(found[name])):
        print(f"{len(found[name]):4} {name}")
    print(f"{sum(map(len, found.values())):4} in all")
