"""Names of a rank for other ranks: packed as one, so that what they share stays shared, with what their functions use."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from skymagic.data.capture.code import cell_sources
from skymagic.data.capture.names import interactive
from skymagic.data.values import pickling
from skymagic.kernels.rank.namespace import Namespace


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
            each for each in uses if each in variables and each not in held and not interactive(each, variables[each])
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
