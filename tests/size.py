"""Print how large the package is: ``python -m tests.layers``. The figures are information, not a gate.

A plain cell is traced: which modules and functions of the package run in the notebook for one ``%%sky_broadcast`` on a pool that is ready.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from tests.layers import PACKAGE, ROOT

LARGE = 20
"""Methods that a class may have."""
TRACED = """\
import collections, sys, threading
from IPython.core.interactiveshell import InteractiveShell
seen, on = collections.Counter(), False
def profile(frame, event, argument):
    if on and event == "call" and frame.f_code.co_filename.startswith({package!r}):
        seen[frame.f_code] += 1
threading.setprofile(profile)
sys.setprofile(profile)
shell = InteractiveShell.instance()
def run(cell):
    shell.run_cell(cell, store_history=True).raise_error()
run("%load_ext skymagic")
run("%sky_pool --ranks 2 -y")
run("x = 1")
for _ in range(2):
    run("%%sky_broadcast\\nx + 1")
on = True
run("%%sky_broadcast\\nx + 1")
on = False
run("%sky_down --all")
names = {{code.co_filename for code in seen}}
print("traced", len(names), len(seen))
if "-v" in sys.argv:
    print("\\n".join(sorted(names)))
"""


def modules() -> list[Path]:
    """All files of Python in the package."""
    return sorted(PACKAGE.rglob("*.py"))


def classes() -> Iterator[tuple[str, int]]:
    """Each class at the top of a module, with the number of its methods; the cases of an `ast.NodeVisitor` (``visit_If``) count as one."""
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                methods = [
                    each.name
                    for each in node.body
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                ]
                yield (
                    node.name,
                    len({name if not name.startswith("visit_") else "visit" for name in methods}),
                )


def commented(source: str) -> int:
    """Lines that hold a comment."""
    tokens = tokenize.generate_tokens(StringIO(source).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def figures() -> dict[str, int]:
    """What can be counted without running anything."""
    sources = [path.read_text() for path in modules()]
    sizes = list(classes())
    return {
        "lines": sum(source.count("\n") for source in sources),
        "modules": len(sources),
        "modules of pool/": len(list((PACKAGE / "pool").rglob("*.py"))),
        "classes over 20 methods": sum(methods > LARGE for _, methods in sizes),
        "class names with two meanings": sum(
            count > 1 for count in Counter(name for name, _ in sizes).values()
        ),
    }


def share_of_comments() -> float:
    """Comments for a hundred lines."""
    sources = [path.read_text() for path in modules()]
    return 100 * sum(map(commented, sources)) / sum(source.count("\n") for source in sources)


def plain_cell(*options: str) -> tuple[int, int, str]:
    """How many modules and functions one plain cell runs in the notebook, and all that the tracing printed.

    Raises:
        RuntimeError: the cell failed; with what was printed.
    """
    source = TRACED.format(package=str(PACKAGE))
    done = subprocess.run(
        [sys.executable, "-c", source, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    _, found, rest = done.stdout.rpartition("traced ")
    if done.returncode or not found:
        raise RuntimeError(done.stdout + done.stderr)
    count, functions = rest.split()[:2]
    return int(count), int(functions), rest


def main() -> None:
    """Print the figures."""
    count, functions, _ = plain_cell()
    figures_now = {
        **figures(),
        "modules of a plain cell": count,
        "functions of a plain cell": functions,
    }
    for name, value in figures_now.items():
        print(f"{value:7,}  {name}")
    print(f"{share_of_comments():7.1f}  comment lines per 100 lines")
