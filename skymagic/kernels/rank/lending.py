"""Names of a rank for other processes: packed for other ranks, as one, so that what they share stays shared, with what their functions use; and
known to processes that a cell starts afresh, by ``spawn`` or ``forkserver``.

Python lets such a process run the main script again, so that it finds ``__main__.work``. A notebook has no script: the definitions
travel before the process object, which refers to them by name, as do the tasks that follow, and their results.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Container, Iterable
from multiprocessing import get_start_method
from multiprocessing.context import get_spawning_popen
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from skymagic.data.capture.names import cell_sources, interactive
from skymagic.data.values import pickling
from skymagic.data.values.pickling import Named
from skymagic.kernels.rank.namespace import Namespace, is_own_code


def lend(namespace: Namespace, names: Iterable[str], held: Container[str]) -> dict[str, Any]:
    """Pack names for other ranks; nothing is packed where one of them cannot be.

    Args:
        held: names that the others have: a function finds those there.

    Returns:
        ``missing``: names that this rank has not. ``refused``: name → why it cannot travel. Without either, ``lent``: the
        pickle as `bundle` describes it, its ``names``, what rebuilding it needs (``modules``, ``sources``), whether it holds
        ``code`` and ``wrappers`` around the process group, and ``left``: names that functions use and that cannot travel.
    """
    asked, variables = list(names), namespace.variables
    missing = [name for name in asked if name not in variables]
    refused: dict[str, str] = {}
    left: dict[str, str] = {}
    chosen: dict[str, object] = {}
    todo = [] if missing else list(asked)
    while todo:
        if (name := todo.pop(0)) in chosen or name in refused or name in left:
            continue
        value = variables[name]
        try:
            uses = pickling.dumps(value, variables, between_ranks=True).uses
        except Exception as problem:
            (refused if name in asked else left)[name] = f"{type(problem).__name__}: {problem}"
            continue
        chosen[name] = value
        todo += [
            each
            for each in uses
            if each in variables and each not in held and not interactive(each, variables[each])
        ]
    if missing or refused:
        return {"missing": missing, "refused": refused}
    return {"lent": {**_pack(namespace, chosen), "left": left}}


def _pack(namespace: Namespace, values: dict[str, object]) -> dict[str, Any]:
    alone = len(values) == 1
    value = next(iter(values.values())) if alone else tuple(values.values())
    pickled = pickling.dumps(value, namespace.variables, between_ranks=True)
    return {
        **namespace.write(pickled),
        "names": list(values),
        "code": pickled.code,
        "modules": sorted(pickled.modules),
        "sources": cell_sources(pickled.files),
        "wrappers": pickled.wrappers,
    }


METHODS = ("spawn", "forkserver")
"""Python's start methods by which a process begins with nothing; others, such as joblib's, send definitions themselves."""


class Definition(NamedTuple):
    """A function, a class or a small constant of a cell: the pickle of a `Named`, and the names that its code uses."""

    header: bytes
    buffers: tuple[bytes, ...]
    uses: tuple[str, ...]


def define_in_children(variables: dict[str, Any]) -> None:
    """From now on a process that is started afresh finds the functions and classes among these variables."""

    def reduce(process: Any, protocol: Any) -> Any:
        reduced: Any = object.__reduce_ex__(process, protocol)
        make, args, *rest = reduced
        # multiprocessing.Process has no method of its own; that of the process is forkserver by default since Python 3.14
        if (
            get_spawning_popen() is None
            or (process._start_method or get_start_method()) not in METHODS
        ):
            return (make, args, *rest)
        # the first argument is rebuilt before the others, which refer to what it defines
        return (_made, (_Definitions(definitions(variables)), make, *args), *rest)

    BaseProcess.__reduce_ex__ = reduce  # type: ignore[method-assign]


def definitions(variables: dict[str, Any]) -> dict[str, Definition]:
    """By name, the functions and classes of cells, and the small constants; what cannot travel is left out."""
    found = {}
    for name, value in list(variables.items()):
        if is_own_code(value, variables) and not name.startswith("__"):
            with contextlib.suppress(Exception):
                pickled = pickling.dumps(Named(name, value), variables)
                found[name] = Definition(
                    pickled.header, tuple(map(bytes, pickled.buffers)), tuple(pickled.uses)
                )
    return found


class _Definitions:
    """Defines in the process in which it is unpickled."""

    def __init__(self, found: dict[str, Definition]) -> None:
        self.found = found

    def __reduce__(self) -> Any:
        return _define, (self.found,)


def _define(found: dict[str, Definition]) -> None:
    """Let the main module have these names; each is made when it is asked for, for it may import what is large."""
    os.environ.pop(
        "TORCHELASTIC_USE_AGENT_STORE", None
    )  # nobody else serves the store of a group of such processes
    space = vars(sys.modules["__main__"])

    def made(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        one = found.pop(name)
        pickling.loads([one.header], one.buffers, space)
        for each in found.keys() & one.uses:
            made(each)
        return space[name]

    space["__getattr__"] = made


def _made(_: None, make: Any, *args: Any) -> Any:
    return make(*args)
