"""The layers hold: who may import whom, what an import costs, which names are public, nothing foreign."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import skymagic
from tests.layers import BOTH, NODE, NOTEBOOK, PACKAGE, ROOT, drawn, folders, listed, mapped

MOST_ENTRIES = 20

# Only these may import a library, wherever in the file.
ONLY_IN = {
    # installed for the benchmarks
    "ipyparallel": (),
    "paramiko": ("ssh",),
    "boto3": ("providers.aws",),
    "botocore": ("providers.aws",),
    "kubernetes": ("providers.kubernetes_api",),
}
# Never at a module's top level: they cost seconds, or must not be imported before a rank's environment is set.
INSIDE_FUNCTIONS = {
    "torch",
    "jax",
    "keras",
    "numpy",
    "pandas",
    "transformers",
    "datasets",
    "sklearn",
    "joblib",
}
INSIDE_FUNCTIONS |= {"boto3", "botocore", "kubernetes", "paramiko", "ipywidgets", "matplotlib"}

HEAVY = (
    "torch",
    "numpy",
    "pandas",
    "boto3",
    "paramiko",
    "ipyparallel",
    "ipywidgets",
    "zmq",
    "IPython",
    "jax",
)

MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
PROCESSES = Path("wire/processes.py")


def dotted(path: Path) -> str:
    """providers/aws.py -> providers.aws, plugins/__init__.py -> plugins, __init__.py -> ''."""
    return ".".join(part for part in path.with_suffix("").parts if part != "__init__")


@cache
def tree(path: Path) -> ast.Module:
    """A module, parsed once for all tests."""
    return ast.parse((PACKAGE / path).read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a module."""
    return list(ast.walk(tree(path)))


NAMES = {dotted(path) for path in MODULES}
"""All modules of ours: made once, for it is looked up for each import."""


def imports(path: Path, *, top_level: bool = False) -> Iterator[str]:
    """Absolute dotted names that a module imports; with top_level only those that its import runs."""
    package = ["skymagic", *path.parent.parts]
    for node in _run_by_import(tree(path)) if top_level else nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            # `from skymagic import plan` names a module, `from skymagic.plan import PoolRequest` a name in one
            yield from (f"{start}.{alias.name}" for alias in node.names)


def _run_by_import(root: ast.Module) -> Iterator[ast.AST]:
    queue: list[ast.AST] = [root]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        queue += ast.iter_child_nodes(node)


def layer(module: str) -> str:
    """The layer that a module is in: ``plan.units`` is in ``plan``, ``content.remote.client`` in ``content.remote``."""
    parts = module.split(".")
    inner = ".".join(parts[:2])
    return inner if inner in (*BOTH, *NOTEBOOK, *NODE) else parts[0]


@cache
def neighbours(path: Path) -> set[str]:
    """The layers that a module knows, by its imports and by the names of modules in its strings; "" is the face."""
    known = {_module_of(name) for name in imports(path)} | set(named(path))
    return {layer(module) for module in known if module is not None}


@cache
def named(path: Path) -> set[str]:
    """Modules of ours that strings of a module name, docstrings left out, and without the `:attribute` of a table."""
    documents = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    constants = [
        node for node in nodes(path) if isinstance(node, ast.Constant) and id(node) not in documents
    ]
    texts = [node.value for node in constants if isinstance(node.value, str)]
    found = {name for text in texts for name in re.findall(r"\bskymagic(?:\.\w+)+", text)}
    return {name.removeprefix("skymagic.") for name in found} & NAMES


def test_the_root_can_be_drawn() -> None:
    entries = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert len(entries) <= MOST_ENTRIES


def test_folder_docstring_lists_its_modules() -> None:
    """Each line of a folder's docstring names a module or a folder in it, and each of them has a line."""

    def inside(folder: Path) -> set[str]:
        modules = {path.stem for path in folder.iterdir() if path.suffix == ".py"} - {"__init__"}
        return modules | {
            f"{path.name}/" for path in folder.iterdir() if (path / "__init__.py").exists()
        }

    # in each: names with a line that are not there, or without one
    assert not {
        str(folder): odd for folder in folders() if (odd := set(listed(folder)) ^ inside(folder))
    }


def test_the_map_is_that_of_the_folders() -> None:
    assert mapped() == drawn(), "python -m tests.layers draws it anew"


def test_every_module_has_its_room() -> None:
    layers = {layer(dotted(path)) for path in MODULES} - {""}
    assert layers == {*BOTH, *NOTEBOOK, *NODE}


def test_lower_knows_nothing_of_higher() -> None:
    def allowed(path: Path) -> set[str]:
        own = layer(dotted(path))
        part = next(part for part in (BOTH, NOTEBOOK, NODE) if own in part)
        return {*part[: part.index(own) + 1], *(() if part is BOTH else BOTH)}

    # the face reaches everything, lazily; the table of processes is what the next test reads instead
    held = [path for path in MODULES if layer(dotted(path)) and path != PROCESSES]
    assert not {str(path): above for path in held if (above := neighbours(path) - allowed(path))}


def test_processes_are_named_in_one_table() -> None:
    """Modules started in another process are named in `wire.processes` only."""
    tables = {
        PROCESSES,
        Path("__init__.py"),
        Path("plugins/table.py"),
        Path("providers/registry.py"),
    }
    boundaries = named(PROCESSES)
    assert boundaries
    assert {module.split(".")[0] for module in boundaries} == {"kernels"}
    assert not {
        str(path): found for path in MODULES if path not in tables and (found := named(path))
    }


def test_no_circles() -> None:
    graph = {
        dotted(path): {n for n in map(_module_of, imports(path)) if n} - {dotted(path)}
        for path in MODULES
    }
    graph.pop("")
    settled: set[str] = set()
    while ready := {
        name for name, needs in graph.items() if name not in settled and needs <= settled
    }:
        settled |= ready
    assert not {name: needs - settled for name, needs in graph.items() if name not in settled}


def _module_of(imported: str) -> str | None:
    """The module of ours that an imported dotted name is in, None for other people's."""
    inner = imported.removeprefix("skymagic.") if imported.startswith("skymagic.") else ""
    while inner and inner not in NAMES:
        inner = inner.rpartition(".")[0]
    return inner or None


def libraries(path: Path, *, top_level: bool = False) -> set[str]:
    """What a module imports, without what is in it."""
    return {imported.split(".")[0] for imported in imports(path, top_level=top_level)}


def test_libraries_have_one_door() -> None:
    def through_another(path: Path) -> set[str]:
        inside = f"{dotted(path)}."
        return {
            each
            for each in libraries(path) & set(ONLY_IN)
            if not inside.startswith(tuple(f"{door}." for door in ONLY_IN[each]))
        }

    assert not {str(path): found for path in MODULES if (found := through_another(path))}


def test_heavy_libraries_are_imported_on_use() -> None:
    assert not {
        str(path): found
        for path in MODULES
        if (found := libraries(path, top_level=True) & INSIDE_FUNCTIONS)
    }


def test_plugins_import_the_standard_library_only() -> None:
    allowed = {*sys.stdlib_module_names, "skymagic"}
    plugins = [path for path in MODULES if path.parts[0] == "plugins"]
    assert not {
        str(path): found for path in plugins if (found := libraries(path, top_level=True) - allowed)
    }


def test_import_loads_nothing_heavy() -> None:
    code = (
        f"import sys, skymagic; dir(skymagic); print(*(m for m in {HEAVY!r} if m in sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.split() == []


def test_runtime_is_light() -> None:
    code = "import skymagic.runtime.info, skymagic.runtime.sharding, skymagic.plugins"
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys, {code[7:]}; print(*(m for m in {HEAVY!r} if m in sys.modules))",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert result.stdout.split() == []


def test_plan_needs_the_standard_library_only() -> None:
    assert foreign("import skymagic.plan.planning") - foreign("") == {"skymagic"}


def test_an_image_without_packages_does_not_import_packaging() -> None:
    statement = "from skymagic.plan.image import Image; Image(env={'A': '1'}).merge(Image())"
    assert "packaging" not in foreign(statement)


def foreign(statement: str) -> set[str]:
    """Top-level packages outside the standard library that a fresh Python has after `statement`."""
    code = f"import sys; {statement}\nprint(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return {name.split(".")[0] for name in result.stdout.split()} - sys.stdlib_module_names


def test_public_names() -> None:
    assert sorted(skymagic.__all__) == sorted(
        """
        AWS Compute ComputePool Image InstanceInfo Kubernetes Local PipIndex Ray SSH Slurm __version__ accelerators
        attach compute errors find function gather instance_info integrations load_ipython_extension on_interruption plugins pools report shard silent
        stderr stdout unload_ipython_extension
        """.split()
    )
    second_names = {"ComputePool", "compute"}
    assert set(dir(skymagic)) == set(skymagic.__all__) - second_names, (
        "those work, and do not complete"
    )
    assert all(hasattr(skymagic, name) for name in second_names)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="'nonsense'"):
        _ = skymagic.nonsense


def test_the_project_stands_alone() -> None:
    """No tracked file names a place that exists on one developer's machine only."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    foreign = re.compile(
        "|".join(
            map(
                re.escape,
                ("../" + "shared", "." + "library", "/work" + "/main", "/work" + "/shared"),
            )
        )
    )
    listed = subprocess.run(
        ["git", "ls-files", "-z"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file():
            lines = path.read_text(errors="replace").splitlines()
            found += [
                f"{name}:{n}: {line.strip()[:80]}"
                for n, line in enumerate(lines, 1)
                if foreign.search(line)
            ]
    assert not found
