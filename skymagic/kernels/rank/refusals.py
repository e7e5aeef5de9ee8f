"""What a cell may ask of a notebook and not of a rank, refused in one line: input, debuggers, launchers, and skymagic itself."""

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

INPUT_REFUSED = "input() cannot ask from a rank: ask in a plain cell of the notebook, and use the variable in the broadcast cell"
DEBUGGER_REFUSED = "{what} cannot ask from a rank: print what you want to see, or get the variables (-g name) and debug in a plain cell of the notebook"
OURS_REFUSED = (
    "{what} belongs in a cell of the notebook: this one already runs on the ranks of a pool"
)
LAUNCHER_REFUSED = (
    "{what} would start processes on each of the {ranks}, which are the processes already: call {name}({arguments}) itself; "
    "ranks of a pool with --plugin torch have their process group"
)
DEBUGGERS = ("pdb", "debug")
"""IPython's magics that open a debugger."""
EXTENSIONS = ("load_ext", "reload_ext", "unload_ext")


def magic(written: str, plain: Any) -> Any:
    """The magic itself, or what raises UsageError in the place of one that has no meaning on a rank.

    Args:
        written: its name with its per cent signs.
        plain: the function of this name on the rank; None if it has none.
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


def refusal(
    what: str, kind: type[Exception] = RuntimeError, words: str = DEBUGGER_REFUSED
) -> Callable[..., NoReturn]:
    """A function that refuses."""

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise kind(words.format(what=what))

    return refused


def refuse_launchers() -> None:
    """From now on what would start a training's processes from a cell is refused, with what to write instead."""
    when_imported(
        "accelerate.launchers",
        functools.partial(_refuse_launcher, name="notebook_launcher", many=_several),
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
        functools.partial(_refuse_launcher, name="start_processes", many=_fresh),
    )


def _refuse_launcher(
    module: types.ModuleType, name: str, many: Callable[[dict[str, Any]], str]
) -> None:
    """Refuse calls of a module's launcher; `many` says from the arguments what it would do, empty for a call that is let through."""
    launch = getattr(module, name)
    signature = inspect.signature(launch)

    @wraps(launch)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        if what := many(given.arguments):
            function = next(iter(given.arguments.values()))
            raise RuntimeError(
                LAUNCHER_REFUSED.format(
                    what=what,
                    ranks=f"{runtime.instance_info().world_size} ranks",
                    name=getattr(function, "__name__", "the function"),
                    arguments="…" if given.arguments["args"] else "",
                )
            )
        return launch(*args, **kwargs)

    package = sys.modules.get(module.__name__.rpartition(".")[0])
    for place in (module, package):  # a package that is imported already holds the function too
        if getattr(place, name, None) is launch:
            setattr(place, name, checked)


def _several(given: dict[str, Any]) -> str:
    """``notebook_launcher(train, args, 1)`` calls the function."""
    return "" if given["num_processes"] == 1 else "notebook_launcher()"


def _fresh(given: dict[str, Any]) -> str:
    """A new interpreter knows nothing of what the notebook's cells have defined; a forked process does."""
    of_a_cell = getattr(given["fn"], "__module__", "") == "__main__"
    return "torch.multiprocessing.spawn()" if of_a_cell and given["start_method"] != "fork" else ""
