"""The global name or file that a failed cell looked for on this rank and did not find.

The notebook compares it with its own, and shows the remedy below the error.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from skymagic.kernels.rank import tracebacks
from skymagic.wire.outcome import MissingFiles

_NAMESPACE_READERS = {"globals", "vars", "locals", "user_ns"}
"""Names in code that looks up a global name by a string."""
_NOT_DEFINED = re.compile(r"'(\w+)' is not defined")
_NOT_IN_MAIN = re.compile(r"Can't get attribute '(\w+)[\w.]*' on <module '__main__'")
"""Pickle's error for a class or function of the notebook that a file refers to by name."""


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
    # a library may raise its own error from pickle's: np.load, pd.read_pickle
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
        by_string = not _NAMESPACE_READERS.isdisjoint(own[-1].f_code.co_names)
        return key if isinstance(key, str) and by_string else ""
    if isinstance(problem, AttributeError) and problem.obj is sys.modules.get("__main__"):
        return problem.name or ""
    return ""


_MEANS_MISSING = re.compile(
    r"no such file|not found|not exist|(?:cannot|can't|could not|unable to) (?:find|open|locate)",
    re.I,
)
_MENTIONS_FILE = re.compile(r"file|path|folder|director", re.I)
_WORD = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"|([^\s'\"`=]+)")
_PUNCTUATION = ".,:;()[]<>`"
_MAX_TEXT = 4000
"""Maximum number of characters of a message that are searched for a path."""
_MAX_PATHS = 20


def missing_files(problem: BaseException | None) -> MissingFiles | None:
    """Return paths that a failed cell tried to open and that do not exist on this rank.

    A path may be any word of the error's message: the notebook only shows a hint if it has that
    file.
    """
    if problem is None:
        return None
    try:
        folder = os.getcwd()
    except OSError:  # it was deleted
        return None
    missing_paths = {
        _relative(path, folder): None
        for raised in tracebacks.chain(problem)
        for path in _paths(raised)
        if path and not os.path.lexists(path)
    }
    if not missing_paths:
        return None
    home = os.path.realpath(os.path.expanduser("~"))
    return MissingFiles(tuple(missing_paths)[:_MAX_PATHS], folder, home)


def _paths(problem: BaseException) -> Iterator[str]:
    if isinstance(problem, FileNotFoundError):
        for name in (problem.filename, problem.filename2):
            if isinstance(name, (str, bytes, os.PathLike)):  # not a file descriptor
                path = os.fsdecode(name)
                yield path
                yield os.path.dirname(path)  # the folder of a file to be written
    text = tracebacks.message(problem)[:_MAX_TEXT]
    if _MEANS_MISSING.search(text) and _MENTIONS_FILE.search(f"{type(problem).__name__} {text}"):
        for match in _WORD.finditer(text):
            word = next(filter(None, match.groups()))
            yield from filter(None, {word, word.rstrip(_PUNCTUATION).lstrip("([<`")})


def _relative(path: str, folder: str) -> str:
    """Turn a path that a library made absolute back into a relative one."""
    return os.path.relpath(path, folder) if path.startswith(f"{folder}/") else path
