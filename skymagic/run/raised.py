"""The exception that a rank raised, raised again in the notebook: of its own type and a RankError in one."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Mapping
from typing import Any

from skymagic.data.values.exceptions import bare, fill, members, state_of
from skymagic.errors import RankError

_NAMED_ONLY = (SystemExit, GeneratorExit, asyncio.CancelledError, SyntaxError)
"""Of these an error has the name and the fields alone: the first ones would end more than the cell, and IPython shows a SyntaxError
by itself, without the rank's traceback."""


def rank_error(original: BaseException | None, report: Mapping[str, Any]) -> RankError:
    """A RankError that is also what the rank raised, where Python allows such a type; else one with its name.

    Args:
        original: None where it could not be rebuilt.
        report: the attributes of a RankError.
    """
    if original is not None:
        try:
            return raised_again(original, report)
        except Exception:  # the type's own metaclass or __init_subclass__, or another layout
            pass
    named = _type(report["ename"], (RankError,), {"__module__": "builtins"})
    error: RankError = named(report["evalue"], **{name: value for name, value in report.items() if name != "evalue"})
    return error


def raised_again(original: BaseException, report: Mapping[str, Any]) -> RankError:
    """A copy of an exception as a RankError."""
    base = type(original)
    both = not issubclass(base, _NAMED_ONLY) and base not in RankError.__mro__
    # the exception's own methods and properties go first
    kind = _type(
        base.__name__,
        (base, RankError) if both else (RankError,),
        {"__module__": base.__module__, "__qualname__": base.__qualname__},
    )
    error = bare(kind, members(original) if both else ())
    fill(error, (state_of(original), None))
    assert isinstance(error, RankError)
    RankError._set_report(error, report)
    if not _says(error, report["evalue"]):
        type.__setattr__(kind, "__str__", lambda self: self._report["evalue"])
    return error


def _says(error: RankError, message: str) -> bool:
    """Whether the message is the one that it had on the rank; its ``__str__`` may use what is not here, or fail."""
    try:
        return str(error) == message
    except Exception:
        return False


def _type(name: str, bases: tuple[type, ...], members: Mapping[str, Any]) -> Any:
    own = {name: vars(RankError)[name] for name in ("_render_traceback_", "__reduce__")}
    return types.new_class(name, bases, exec_body=lambda space: space.update({**members, **own}))
