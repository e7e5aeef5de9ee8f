"""Refuse in one line requests that only a notebook can serve.

These are input, debuggers, launchers, and skymagic itself.
"""

from __future__ import annotations

import functools
import inspect
import pdb
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from IPython.core import debugger
from IPython.core.error import UsageError

from skymagic.runtime import info as runtime
from skymagic.runtime.on_import import when_imported, wraps

INPUT_REFUSED = (
    "input() cannot ask from a rank: ask in a plain cell of the notebook, "
    "and use the variable in the broadcast cell"
)
DEBUGGER_REFUSED = (
    "{what} cannot ask from a rank: print what you want to see, "
    "or get the variables (-g name) and debug in a plain cell of the notebook"
)
OURS_REFUSED = (
    "{what} belongs in a cell of the notebook: this one already runs on the ranks of a pool"
)
LAUNCHER_REFUSED = (
    "{what} would start processes on each of the {ranks}, which are the processes already: "
    "call {name}({arguments}) itself; "
    "ranks of a pool with --plugin torch have their process group"
)
DEBUGGERS = ("pdb", "debug")
"""IPython's magics that open a debugger."""
EXTENSIONS = ("load_ext", "reload_ext", "unload_ext")


def magic(written: str, plain: Any) -> Any:
    """Return a magic, or a function that raises UsageError if a rank cannot serve it.

    Args:
        written: its name with its percent signs.
        plain: the function of this name on the rank; None if the rank lacks that magic.
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
    """Disable debuggers in this process.

    It has no keyboard: they would read the end of its input.
    """
    sys.breakpointhook = refusal("breakpoint()")
    for name in ("set_trace", "post_mortem", "pm"):
        setattr(pdb, name, refusal(f"pdb.{name}()"))
    debugger.set_trace = refusal("set_trace()")
    # for code that creates a debugger itself, as torch.distributed.breakpoint() does
    pdb.Pdb.interaction = refusal("a debugger")  # type: ignore[method-assign]


def refusal(
    what: str, kind: type[Exception] = RuntimeError, reason: str = DEBUGGER_REFUSED
) -> Callable[..., NoReturn]:
    """Return a function that refuses."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise kind(reason.format(what=what))

    return refuse


def refuse_launchers() -> None:
    """Refuse functions that would launch training processes, and suggest an alternative."""
    when_imported(
        "accelerate.launchers",
        functools.partial(_refuse_launcher, name="notebook_launcher", many=_multi_process_launcher),
    )
    when_imported(
        "accelerate.launchers",
        functools.partial(
            _refuse_launcher, name="debug_launcher", many=lambda given: "debug_launcher()"
        ),
    )
    when_imported(
        "torch_xla.distributed.xla_multiprocessing",
        functools.partial(
            _refuse_launcher,
            name="spawn",
            many=lambda given: "" if given["nprocs"] == 1 else "xla_multiprocessing.spawn()",
        ),
    )
    when_imported(
        "torch.multiprocessing.spawn",
        functools.partial(_refuse_launcher, name="start_processes", many=_new_interpreter_launcher),
    )


def _refuse_launcher(
    module: types.ModuleType, name: str, many: Callable[[dict[str, Any]], str]
) -> None:
    """Refuse calls of a module's launcher.

    Args:
        many: returns the name of the launcher from its arguments, or "" for a call to let
            through.
    """
    launch = getattr(module, name)
    signature = inspect.signature(launch)

    @wraps(launch)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if what := many(bound.arguments):
            function = next(iter(bound.arguments.values()))
            raise RuntimeError(
                LAUNCHER_REFUSED.format(
                    what=what,
                    ranks=f"{runtime.instance_info().world_size} ranks",
                    name=getattr(function, "__name__", "the function"),
                    arguments="…" if bound.arguments["args"] else "",
                )
            )
        return launch(*args, **kwargs)

    package = sys.modules.get(module.__name__.rpartition(".")[0])
    for holder in (module, package):  # an already imported package holds the function too
        if getattr(holder, name, None) is launch:
            setattr(holder, name, checked)


def _multi_process_launcher(arguments: dict[str, Any]) -> str:
    """Return the launcher's name, or "" if it would only call the function.

    ``notebook_launcher(train, args, 1)`` does that.
    """
    return "" if arguments["num_processes"] == 1 else "notebook_launcher()"


def _new_interpreter_launcher(arguments: dict[str, Any]) -> str:
    """Return the launcher's name if it would start a new interpreter for a function of a cell.

    A new interpreter does not know the notebook's definitions; a forked process does.
    """
    of_a_cell = getattr(arguments["fn"], "__module__", "") == "__main__"
    return (
        "torch.multiprocessing.spawn()" if of_a_cell and arguments["start_method"] != "fork" else ""
    )
