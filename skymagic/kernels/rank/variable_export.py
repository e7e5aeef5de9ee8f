"""Variables of a rank for other processes: for other ranks, and for processes that a cell spawns.

For other ranks, names are packed into one pickle, so that shared objects stay shared, together with
the names that their functions use. A process started by ``spawn`` or ``forkserver`` would run the
main script again, so that it finds ``__main__.work``. A notebook has no script: the definitions
travel before the process object, which refers to them by name, as do the tasks that follow, and
their results.
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

from skymagic.data.capture.names import cell_sources, is_interactive_name
from skymagic.data.namespace import Namespace
from skymagic.data.values import pickling
from skymagic.data.values.pickling import Named
from skymagic.kernels.rank.namespace import RankNamespace, is_own_code
from skymagic.wire.values import LentNames


def pack_for_ranks(
    namespace: RankNamespace, names: Iterable[str], held: Container[str]
) -> LentNames:
    """Pack names for other ranks, unless one of them cannot be packed.

    Args:
        held: names that the other ranks have; functions use those there.
    """
    requested, variables = list(names), namespace.variables
    missing = [name for name in requested if name not in variables]
    refused: dict[str, str] = {}
    skipped: dict[str, str] = {}
    selected: dict[str, object] = {}
    todo = [] if missing else list(requested)
    while todo:
        if (name := todo.pop(0)) in selected or name in refused or name in skipped:
            continue
        value = variables[name]
        try:
            uses = pickling.dumps(value, variables, between_ranks=True).uses
        except Exception as problem:
            (refused if name in requested else skipped)[name] = (
                f"{type(problem).__name__}: {problem}"
            )
            continue
        selected[name] = value
        todo += [
            used
            for used in uses
            if used in variables
            and used not in held
            and not is_interactive_name(used, variables[used])
        ]
    if missing or refused:
        return LentNames(missing=tuple(missing), refused=refused)
    return _pack(namespace, selected, skipped)


def _pack(
    namespace: RankNamespace, values: dict[str, object], skipped: dict[str, str]
) -> LentNames:
    alone = len(values) == 1
    value = next(iter(values.values())) if alone else tuple(values.values())
    pickled = pickling.dumps(value, namespace.variables, between_ranks=True)
    return LentNames(
        value=namespace.write(pickled),
        names=tuple(values),
        modules=tuple(sorted(pickled.modules)),
        sources=cell_sources(pickled.files),
        code=pickled.code,
        wrappers=pickled.wrappers,
        skipped=skipped,
    )


METHODS = ("spawn", "forkserver")
"""Start methods that begin with an empty process; joblib and others send definitions themselves."""


class Definition(NamedTuple):
    """Function, class or small constant of a cell: its pickled `Named`, and the names it uses."""

    header: bytes
    buffers: tuple[bytes, ...]
    uses: tuple[str, ...]


def define_in_children(variables: Namespace) -> None:
    """Make the functions and classes among these variables known to newly started processes."""

    def reduce(process: Any, protocol: Any) -> Any:
        reduced: Any = object.__reduce_ex__(process, protocol)
        make, args, *rest = reduced
        # multiprocessing.Process has no start method of its own; that of the process is forkserver
        # by default since Python 3.14
        if (
            get_spawning_popen() is None
            or (process._start_method or get_start_method()) not in METHODS
        ):
            return (make, args, *rest)
        # the first argument is rebuilt before the others, which refer to its definitions
        return (_make, (_Definitions(definitions(variables)), make, *args), *rest)

    BaseProcess.__reduce_ex__ = reduce  # type: ignore[method-assign]


def definitions(variables: Namespace) -> dict[str, Definition]:
    """Return functions, classes and small constants of cells by name.

    Those that cannot be sent are left out.
    """
    definitions_by_name = {}
    # a copy: pickling may run the user's code, which may bind variables
    for name, value in list(variables.items()):
        if is_own_code(value, variables) and not name.startswith("__"):
            with contextlib.suppress(Exception):
                pickled = pickling.dumps(Named(name, value), variables)
                definitions_by_name[name] = Definition(
                    pickled.header, tuple(map(bytes, pickled.buffers)), tuple(pickled.uses)
                )
    return definitions_by_name


class _Definitions:
    """Definitions that take effect in the process that unpickles them."""

    def __init__(self, definitions: dict[str, Definition]) -> None:
        self.found = definitions

    def __reduce__(self) -> Any:
        return _define, (self.found,)


def _define(definitions: dict[str, Definition]) -> None:
    """Make names available in the main module.

    Each is rebuilt on first use, because it may import large modules.
    """
    # without an agent, the group of such processes must serve its own store
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    space = vars(sys.modules["__main__"])

    def made(name: str) -> Any:
        if name not in definitions:
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        definition = definitions.pop(name)
        pickling.loads([definition.header], definition.buffers, space)
        for used_name in definitions.keys() & definition.uses:
            made(used_name)
        return space[name]

    # PEP 562: called for names that the main module does not have yet
    space["__getattr__"] = made


def _make(_: None, make: Any, *args: Any) -> Any:
    return make(*args)
