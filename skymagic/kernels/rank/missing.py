"""What a failed cell looked for on this rank and did not find: a global name, or a file.

The notebook compares it with what it has itself, and names the remedy below the error.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from skymagic.kernels.rank import tracebacks

_READERS = {"globals", "vars", "locals", "user_ns"}
"""Names in code that looks up a global name by a string."""
_NOT_DEFINED = re.compile(r"'(\w+)' is not defined")
_NOT_IN_MAIN = re.compile(r"Can't get attribute '(\w+)[\w.]*' on <module '__main__'")
"""What pickle says of a class or function of the notebook that a file refers to by its name."""


def missing_name(problem: BaseException | None, variables: dict[str, Any]) -> str:
    """Return the global name whose absence made a cell fail, or "" if it failed for another reason.

    Args:
        problem: the cell's exception.
        variables: the rank's global names.
    """
    if problem is None:
        return ""
    name = _unpickled_name(problem) or _looked_up_name(problem, variables)
    return name if name.isidentifier() and name not in variables else ""


def _unpickled_name(problem: BaseException) -> str:
    # a library may raise an error of its own from pickle's: np.load, pd.read_pickle
    for raised in tracebacks.chain(problem):
        if match := _NOT_IN_MAIN.search(tracebacks.message(raised)):
            return match[1]
    return ""


def _looked_up_name(problem: BaseException, variables: dict[str, Any]) -> str:
    frames = [link.tb_frame for link in tracebacks.walk(problem.__traceback__)]
    own = [frame for frame in frames if frame.f_globals is variables]
    if not own or isinstance(problem, UnboundLocalError):
        return ""
    if isinstance(problem, NameError):
        if problem.name:  # set by the interpreter: a module's own names are not the notebook's
            return problem.name if own[-1] is frames[-1] else ""
        match = _NOT_DEFINED.search(str(problem))  # a library that looks names up: pandas' query
        return match[1] if match else ""
    if isinstance(problem, KeyError):
        key = problem.args[0] if problem.args else None
        by_string = not _READERS.isdisjoint(own[-1].f_code.co_names)
        return key if isinstance(key, str) and by_string else ""
    if isinstance(problem, AttributeError) and problem.obj is sys.modules.get("__main__"):
        return problem.name or ""
    return ""
