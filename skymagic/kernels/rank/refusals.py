"""What a cell may ask of a notebook and not of a rank, refused in one line: input, debuggers, and skymagic itself."""

from __future__ import annotations

import pdb
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from IPython.core import debugger
from IPython.core.error import UsageError

INPUT_REFUSED = (
    "input() cannot ask from a rank: ask in a plain cell of the notebook, and use the variable in the broadcast cell"
)
DEBUGGER_REFUSED = "{what} cannot ask from a rank: print what you want to see, or get the variables (-g name) and debug in a plain cell of the notebook"
OURS_REFUSED = "{what} belongs in a cell of the notebook: this one runs on the ranks of a pool already"
DEBUGGERS = ("pdb", "debug")
"""IPython's magics that open a debugger."""
EXTENSIONS = ("load_ext", "reload_ext", "unload_ext")


def magic(written: str, plain: Any) -> Any:
    """The magic itself, or what raises UsageError in the place of one that has no meaning on a rank.

    Args:
        written: its name with its per cent signs.
        plain: IPython's own function; None if it has none.
    """
    name = written.lstrip("%")
    if name in DEBUGGERS:
        return refusal(written, UsageError)
    if name.startswith("sky_"):
        return refusal(written, UsageError, OURS_REFUSED)
    if name not in EXTENSIONS or plain is None:
        return plain

    def extension(line: str) -> Any:
        if line.split("#")[0].strip() == "skymagic":
            refusal(f"{written} skymagic", UsageError, OURS_REFUSED)()
        return plain(line)

    return extension


def refuse_debuggers() -> None:
    """From now on no debugger opens in this process: nobody could type into it, and it would read the end of its input."""
    sys.breakpointhook = refusal("breakpoint()")
    for name in ("set_trace", "post_mortem", "pm"):
        setattr(pdb, name, refusal(f"pdb.{name}()"))
    debugger.set_trace = refusal("set_trace()")
    # for those that make one themselves, as torch.distributed.breakpoint() does
    pdb.Pdb.interaction = refusal("a debugger")  # type: ignore[method-assign]


def refusal(what: str, kind: type[Exception] = RuntimeError, words: str = DEBUGGER_REFUSED) -> Callable[..., NoReturn]:
    """A function that refuses."""

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise kind(words.format(what=what))

    return refused
