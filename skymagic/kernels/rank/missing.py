"""The global name that an exception says is missing: the notebook may have it, and say how it gets here."""

from __future__ import annotations

import re
import sys
from typing import Any

from skymagic.kernels.rank.tracebacks import walk

_READERS = {"globals", "vars", "locals", "user_ns"}
"""What code names that looks a key up among the global names."""
_NOT_DEFINED = re.compile(r"'(\w+)' is not defined")


def missing_name(problem: BaseException | None, variables: dict[str, Any]) -> str:
    """The name that is not among these global names, for want of which a cell has failed; empty if that is not why it failed."""
    name = _candidate(problem, variables) if problem is not None else ""
    return name if name.isidentifier() and name not in variables else ""


def _candidate(problem: BaseException, variables: dict[str, Any]) -> str:
    frames = [link.tb_frame for link in walk(problem.__traceback__)]
    own = [frame for frame in frames if frame.f_globals is variables]
    if not own or isinstance(problem, UnboundLocalError):
        return ""
    if isinstance(problem, NameError):
        if problem.name:  # by the interpreter: a module's own names are not the notebook's
            return problem.name if own[-1] is frames[-1] else ""
        found = _NOT_DEFINED.search(str(problem))  # by a library that looks names up: pandas' query
        return found[1] if found else ""
    if isinstance(problem, KeyError):
        key = problem.args[0] if problem.args else None
        return key if isinstance(key, str) and not _READERS.isdisjoint(own[-1].f_code.co_names) else ""
    if isinstance(problem, AttributeError) and problem.obj is sys.modules.get("__main__"):
        return problem.name or ""
    return ""
