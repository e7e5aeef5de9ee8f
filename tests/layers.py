"""The layers of the package, from the bottom up, and the map of them in CONTRIBUTING.md: ``python -m tests.layers`` draws it again, and prints how large the package is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "skymagic"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"

# A layer knows itself, what stands before it in its part, and what both sides share. `data`, `files` and `kernels` are counted
# by their folders, for one part of them runs on a node and another in the notebook.
BOTH = (
    "wire", "errors", "plan", "runtime", "content", "content.transfer", "data", "data.capture", "data.values", "plugins",
)  # fmt: skip
"""What both sides share; `data.shipping`, `content.remote` and the rest of `files` are the notebook's end of it."""
NOTEBOOK = (
    "ssh", "bootstrap", "display", "cluster", "data.shipping", "content.remote", "content.files", "providers", "run", "pool",
    "jobs",
    "api", "magics",
)  # fmt: skip
NODE = (
    "kernels",
    "kernels.agent",
    "kernels.rank",
    "kernels.script",
    "kernels.store",
    "kernels.daemon",
)
PARTS = {"in the notebook": NOTEBOOK[::-1], "on both sides": BOTH[::-1], "on the nodes": NODE[::-1]}
FENCE = re.compile(r"(?<=<!-- map -->\n```\n).*?(?=```\n<!-- end of map -->)", re.DOTALL)


def folders() -> list[Path]:
    """All packages, the root itself left out."""
    return sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)


def docstring(path: Path) -> str:
    """Of a package or a module."""
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.get_docstring(ast.parse(source.read_text())) or ""


def listed(folder: Path) -> dict[str, str]:
    """What a folder's docstring lists: a module's name, or a folder's with a slash → what it is."""
    return dict(re.findall(r"^(\w+/?) {2,}(\S.*)$", docstring(folder), re.MULTILINE))


def summary(layer: str) -> str:
    """The first line of a layer's docstring, without its full stop."""
    return docstring(PACKAGE.joinpath(*layer.split("."))).partition("\n")[0].rstrip(".")


def drawn() -> str:
    """The map: a line for each layer of each part, from the top down."""
    lines = []
    for part, layers in PARTS.items():
        lines.append(f"── {part} ".ljust(30, "─"))
        lines += [
            f"{each.replace('.', '/') + ('' if each == 'errors' else '/'):<17} {summary(each)}"
            for each in layers
        ]
    return "\n".join(lines) + "\n"


def mapped() -> str:
    """The map as CONTRIBUTING.md has it."""
    found = FENCE.search(CONTRIBUTING.read_text())
    return found[0] if found else ""


if __name__ == "__main__":
    from tests import size  # it reads this module

    CONTRIBUTING.write_text(FENCE.sub(lambda _: drawn(), CONTRIBUTING.read_text()))
    size.main()
