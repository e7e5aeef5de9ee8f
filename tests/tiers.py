"""Which tier a test belongs to, by what it starts: read from its code, its fixtures, and all that these call; never from a mark.

::

    quick   no process starts
    near    processes of this machine: pools, kernels, programs that the test itself runs
    far     hosts, machines, EC2's imitation, browsers, installations, other people's programs
    docs    what pages and notebooks promise: all of `tests/docs`

What a function calls is read from its names: globals, imports, and classes with all their methods, within the tests and the package.
A method of an object that came from elsewhere cannot be seen: `tests/conftest.py` fails a quick test that starts a process.
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

STARTERS = {
    "subprocess": {"Popen", "run", "call", "check_call", "check_output", "getoutput"},
    "os": {
        "fork",
        "forkpty",
        "posix_spawn",
        "posix_spawnp",
        "system",
        "popen",
        "execv",
        "execve",
        "execvp",
        "execvpe",
    },
    "multiprocessing": {"Process", "Pool", "Manager", "get_context"},
    "pty": {"fork", "spawn"},
    "pexpect": {"spawn"},
    "jupyter_client": {"KernelManager"},
}
"""What starts a process: the package that it is in, and its name."""
IMPORTS = dis.opmap["IMPORT_NAME"]
"""Most functions import nothing, and reading all their instructions would take 4 s."""
EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
"""The same as Python's audit events tell it."""
SOCKETS = {"socket.bind", "socket.connect", "socket.getaddrinfo"}
"""Audit events of what a pure module does not do."""
NEAR_MODULES = {"skymagic.pool.launch"}
"""What starts processes by way of a table that cannot be read."""
NOT_ON_LINUX = {"skymagic.wire.processes._started_by_ps"}
"""What is called on other systems only."""
FAR_LAB = {
    "tests.lab.hosts",
    "tests.lab.machines",
    "tests.lab.ec2",
    "tests.lab.servers",
    "tests.lab.shells",
}
"""Other machines and their imitations; what else is in `tests.lab` is far when it uses these."""
FAR_LIBRARIES = {"moto", "nbclient", "papermill", "playwright"}
FAR_FOLDERS = {"programs"}
"""What starts a process there runs other people's programs."""
DOCS_FOLDER = "docs"
"""All tests there are of the tier `docs`."""
UNIT_FOLDER = "unit"
"""Tests of pure modules: all of the tier `quick`, and none opens a socket."""


class Tier(IntEnum):
    """By what a test starts; it has the highest one of all that it calls."""

    quick = 0
    near = 1
    far = 2
    docs = 3


Used = tuple[Tier, str, object]
"""The tier of something that is used, its name, and the function or class where it is followed."""


class Reader:
    """Follows code from a test to all that it may call; what was read is kept."""

    def __init__(self) -> None:
        self._uses: dict[
            int, tuple[object, list[Used]]
        ] = {}  # what it is of is kept, so that no other gets its id
        self._quick: set[int] = (
            set()
        )  # nothing that these call starts a process: they need not be followed again
        self._known: dict[tuple[int, ...], tuple[Tier, str]] = {}

    def tier(self, roots: Iterable[object], folder: str = "") -> tuple[Tier, str]:
        """The tier of tests in this folder that call these functions, and what decides it."""
        chosen = tuple(roots)
        key = tuple(map(id, chosen))
        if key not in self._known:
            self._known[key] = self._highest(chosen)
        tier, why = self._known[key]
        return (Tier.far if tier and folder in FAR_FOLDERS else tier), why

    def _highest(self, roots: tuple[object, ...]) -> tuple[Tier, str]:
        queue, seen = deque(roots), set(map(id, roots))
        best, why = Tier.quick, ""
        while queue and best is not Tier.far:
            for tier, name, followed in self._used_by(queue.popleft()):
                if tier > best:
                    best, why = tier, name
                if (
                    followed is not None
                    and id(followed) not in seen
                    and id(followed) not in self._quick
                ):
                    seen.add(id(followed))
                    queue.append(followed)
        if best is Tier.quick:
            self._quick |= seen
        return best, why

    def _used_by(self, one: object) -> list[Used]:
        if id(one) not in self._uses:
            self._uses[id(one)] = one, list(dict.fromkeys(uses(one)))
        return self._uses[id(one)][1]


def uses(one: object) -> Iterator[Used]:
    """What a function uses, or a class in its methods and those of its bases."""
    if isinstance(one, type):
        for base in one.__bases__:
            yield _used(base.__module__, base.__name__, base)
        for value in vars(one).values():
            for function in _functions(value):
                yield from uses(function)
        return
    for function in _functions(one):
        names = dict(function.__globals__)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                names[name] = cell.cell_contents
            except ValueError:  # not bound yet
                continue
        yield from _of_code(function.__code__, names)


def _of_code(code: types.CodeType, names: dict[str, Any]) -> Iterator[Used]:
    attributes = {*code.co_names, *code.co_freevars}
    for name in attributes & names.keys():
        yield from _of_value(names[name], attributes)
    imported = ""
    for step in dis.get_instructions(code) if IMPORTS in code.co_code[::2] else ():
        if step.opname == "IMPORT_NAME":
            imported = str(step.argval)
            if imported.partition(".")[0] in FAR_LIBRARIES:  # also where nobody has loaded it yet
                yield Tier.far, imported, None
            if (module := _loaded(imported)) is not None:
                yield from _of_value(module, attributes)
        elif step.opname == "IMPORT_FROM":
            yield from _of_value(getattr(_loaded(imported), str(step.argval), None), attributes)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _of_code(constant, names)


def _of_value(value: Any, attributes: set[str]) -> Iterator[Used]:
    if not isinstance(value, types.ModuleType):
        yield _used(
            getattr(value, "__module__", None) or "", getattr(value, "__name__", None) or "", value
        )
        return
    ours = _is_ours(value.__name__)
    for attribute in attributes & (_names(value) if ours else vars(value).keys()):
        one = getattr(value, attribute)
        yield _used(getattr(one, "__module__", None) or value.__name__, attribute, one)
        if not callable(one):
            yield _used(value.__name__, attribute, one)


@functools.cache  # some look for plugins in the metadata of all packages
def _names(module: types.ModuleType) -> frozenset[str]:
    """What a module of ours has, also what is loaded on use."""
    return frozenset({*dir(module), *getattr(module, "__all__", ())})


def _used(module: str, name: str, value: object) -> Used:
    package = module.partition(".")[0]
    tier = Tier.quick
    if package in FAR_LIBRARIES or (module in FAR_LAB and callable(value)):
        tier = Tier.far
    elif module in NEAR_MODULES or name in STARTERS.get({"posix": "os"}.get(package, package), ()):
        tier = Tier.near
    followed = (
        f"{module}.{name}" not in NOT_ON_LINUX
        and _is_ours(getattr(value, "__module__", None) or module)
        and (isinstance(value, type) or _functions(value))
    )
    return tier, f"{module}.{name}", value if followed else None


def _loaded(name: str) -> types.ModuleType | None:
    """A module that a function imports; ours are, other people's are not where nobody else has."""
    if name not in sys.modules and _is_ours(name):
        importlib.import_module(name)
    return sys.modules.get(name)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("skymagic", "tests", "benchmarks")


def is_function(value: object) -> bool:
    """Return True for a function, and for one with some of its arguments."""
    return isinstance(value, types.FunctionType | functools.partial)


def _functions(value: Any) -> list[types.FunctionType]:
    """The functions in something that is called, or whose attribute is read: a method, a property, a fixture, a decorated function."""
    if isinstance(
        value, types.ModuleType
    ):  # it would look for what it is asked below among its plugins
        return []
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset) if isinstance(each, types.FunctionType)]
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, functools.partial | functools.partialmethod):
        value = value.func
    for _ in range(5):  # a fixture, and each decorator that is honest, has __wrapped__
        value = getattr(getattr(value, "hypothesis", None), "inner_test", value)
        if hasattr(type(value), "_get_wrapped_function"):
            value = value._get_wrapped_function()
        try:
            value = value.__wrapped__
        except Exception:
            break
    return [value] if isinstance(value, types.FunctionType) else []


def concerns(path: Path, tests: Path, folder: str) -> bool:
    """Whether a test file is of this folder of the package: it is in the tests' folder of this name, or imports from the package's."""
    if any(path.is_relative_to(root / folder) for root in (tests, tests / UNIT_FOLDER)):
        return True
    wanted = f"skymagic.{folder.strip('/').replace('/', '.')}"
    return any(name == wanted or name.startswith(f"{wanted}.") for name in _imports(path))


@functools.cache
def _imports(path: Path) -> frozenset[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)
