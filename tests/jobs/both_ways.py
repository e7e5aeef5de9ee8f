"""The same cell plain and broadcast: runs cases both ways in one process, and says where they differ.

    python -m tests.jobs.both_ways FOLDER < ids.json > differences.json

The plain cell runs in an IPython shell; the broadcast one in the same shell, emptied, on a pool of two ranks. Compared are the
names that are bound and deleted, every value as the rank has it and as it comes back, the value of the last expression, what
is printed, and the exception. The ranks are emptied after each case, so that one pool serves them all.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skymagic.errors import CellSyntaxError, SkyError

ROOT = Path(__file__).resolve().parents[2]
IPYTHONS = re.compile(
    r"_+|_i+|_\d+|_i\d+|_[iod]h|_exit_code|_both_ways|In|Out|exit|quit|get_ipython|open|__\w+__|_sky\w*"
)
"""Names that are IPython's own, or ours."""
TIMES = re.compile(r"[\d.e+]+ (?:ns|us|µs|μs|ms|s|min)\b|\+-|±")
SHIPPED = re.compile(r"^\[(shipped .* in .*|waits for cell .*)\]\n", re.MULTILINE)
"""What a cell is told on a busy machine, where its names take half a second, or while an earlier one runs."""
LOCAL = "%%local"
"""The first line of a cell that is a plain one both ways."""
PULL = "%%pull"
"""In the place of a cell: brings names here, where there are ranks."""
BEHIND = "%%behind\n"
"""Before a cell that runs in the background where there are ranks: the next one does not wait for it."""
ADDRESS = re.compile(r"0[xX][0-9a-fA-F]+")


# -- what is seen of a value ------------------------------------------------------------------------------------------


def seen(value: Any, depth: int = 4) -> Any:
    """A value in words that are the same in every process."""
    kind = type(value)
    if depth == 0:
        return kind.__name__
    if isinstance(value, type):
        members = sorted(name for name in vars(value) if not name.startswith("__"))
        return "class", value.__qualname__, [base.__name__ for base in value.__mro__], members
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return (
            kind.__name__,
            value.__qualname__,
            seen(value.__defaults__, depth - 1),
            str(value.__annotations__),
        )
    if kind.__name__ == "_lru_cache_wrapper":
        return kind.__name__, value.__qualname__
    if kind.__module__.split(".")[0] in ("numpy", "pandas", "torch"):
        return kind.__name__, ADDRESS.sub("0x", repr(value)), str(getattr(value, "dtype", ""))
    if isinstance(value, dict):
        return kind.__name__, [
            (seen(key, depth - 1), seen(each, depth - 1)) for key, each in value.items()
        ]
    if isinstance(value, (set, frozenset)):
        return kind.__name__, sorted(repr(seen(each, depth - 1)) for each in value)
    if isinstance(value, (list, tuple)):
        return kind.__name__, [seen(each, depth - 1) for each in value]
    if isinstance(value, BaseException):
        return kind.__name__, seen(value.args, depth - 1)
    if vars(object)["__repr__"] is getattr(kind, "__repr__"):  # noqa: B009
        return kind.__name__, seen(getattr(value, "__dict__", {}), depth - 1)
    return kind.__name__, ADDRESS.sub("0x", repr(value))


def own(space: Mapping[str, Any]) -> dict[str, Any]:
    """The user's names."""
    return {name: value for name, value in space.items() if not IPYTHONS.fullmatch(name)}


def look(space: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Called on a rank: its names in words, and the values that can come back. The rank is empty then."""
    from skymagic.data.values import pickling

    found, back = own(space), {}
    for name, value in found.items():
        with contextlib.suppress(Exception):
            pickling.dumps(value, space)
            back[name] = value
    words = {name: seen(value) for name, value in found.items()}
    for name in found:
        del space[name]
    return words, back


# -- both ways --------------------------------------------------------------------------------------------------------


class Run:
    """What a cell did: its names in words, what it printed, how it ended."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.bound: set[str] = set()
        self.printed = ""
        self.value: Any = None
        self.error: Any = None


class Both:
    """One shell and one pool."""

    def __init__(self, folder: str) -> None:
        from IPython.core.interactiveshell import InteractiveShell
        from IPython.utils.capture import capture_output
        from traitlets.config import Config

        os.chdir(folder)
        sys.path.insert(0, folder)
        config = Config()
        config.HistoryManager.hist_file = ":memory:"
        config.InteractiveShell.autoawait = True
        config.InteractiveShell.cache_size = 0
        self._capture = capture_output
        self.shell: Any = InteractiveShell.instance(config=config)
        # nobody reads them, and they take longer than the cell; the last is the history's
        for shown in (
            "showtraceback",
            "_showtraceback",
            "showsyntaxerror",
            "_format_exception_for_storage",
        ):
            setattr(self.shell, shown, lambda *_, **__: None)
        for shown in ("write_output_prompt", "write_format_data", "finish_displayhook"):
            setattr(self.shell.displayhook, shown, lambda *_: None)
        self.run_cell("%load_ext skymagic")
        self.run_cell(
            "%config SkyMagic.view_after = 600.0"
        )  # the line of a long cell is no part of what it prints
        self.run_cell("%sky_pool --ranks 2")
        self.must(
            f"%%sky_broadcast\nimport sys as _sys\n_sys.path.insert(0, {str(ROOT)!r})\ndel _sys"
        )
        self.must("%%sky_broadcast --no-push\nfrom tests.jobs import both_ways as _both_ways")

    def run_cell(self, cell: str) -> tuple[Any, str]:
        """Its result, and what it prints."""
        with self._capture() as captured:
            result = self.shell.run_cell(cell, store_history=True)
        return result, captured.stdout

    def must(self, cell: str) -> None:
        """Run a cell that ends well; raises what it raised."""
        result, _ = self.run_cell(cell)
        result.raise_error()

    def _empty(self) -> None:
        for name in own(self.shell.user_ns):
            del self.shell.user_ns[name]
        for name in ("open", "exit", "quit"):
            if name in vars(builtins):
                self.shell.user_ns[name] = vars(builtins)[name]

    def plain(self, setup: str, cells: list[str]) -> Run:
        """The cells as they are."""
        self._empty()
        self.must(setup)
        run, before = Run(), own(self.shell.user_ns)
        for cell in cells:
            if cell.startswith(PULL):
                continue
            result, printed = self.run_cell(cell.removeprefix(BEHIND))
            run.printed += printed
            problem = result.error_before_exec or result.error_in_exec
            run.error = problem and told(problem)
        run.value = seen(result.result)
        after = own(self.shell.user_ns)
        run.names = {name: seen(value) for name, value in after.items()}
        run.bound = {
            name for name, value in after.items() if name not in before or before[name] is not value
        }
        return run

    def broadcast(self, setup: str, cells: list[str]) -> tuple[Run, Run]:
        """The cells on the ranks: as the first rank has it, and as it comes back."""
        self._empty()
        self.must(setup)
        run, back = Run(), Run()
        self.shell.user_ns.pop("_sky_value", None)
        for cell in cells:
            if cell.startswith(PULL):
                self.must(f"%sky_pull --head {cell.removeprefix(PULL)}")
                continue
            if cell.startswith(BEHIND):
                self.must(f"%%sky_broadcast -a\n{cell.removeprefix(BEHIND)}")
                continue
            local = cell.startswith(LOCAL)
            result, printed = self.run_cell(
                cell if local else f"%%sky_broadcast -o _sky_value\n{cell}"
            )
            run.printed += SHIPPED.sub("", printed)
            problem = result.error_before_exec or result.error_in_exec
            if type(problem).__name__ == "ResultError":
                problem = None
            run.error = problem and told(problem)
        values = self.shell.user_ns.get("_sky_value") or [None, None]
        self.must("%%sky_broadcast --no-push -o _sky_looks\n_both_ways.look(globals())")
        looks = self.shell.user_ns["_sky_looks"]
        run.names, brought = looks[0]
        if looks[1][0] != run.names:
            run.names["the other rank"] = looks[1][0]
        back.names = {name: seen(value) for name, value in brought.items()}
        run.value = back.value = seen(values[0])
        return run, back


def told(problem: BaseException) -> Any:
    """An exception, or the one that a rank raised."""
    if isinstance(problem, SkyError) and problem.__cause__ is not None:
        problem = problem.__cause__
    if isinstance(problem, (SyntaxError, CellSyntaxError)):
        return "SyntaxError"  # refused before anything is sent, in words of its own
    if isinstance(problem, SkyError):
        return getattr(problem, "ename", type(problem).__name__), getattr(
            problem, "evalue", str(problem)
        )
    return type(problem).__name__, seen(problem.args)


def differences(plain: Run, there: Run, back: Run) -> list[str]:
    """Where a broadcast cell was not what the plain one is."""
    found = [f"the rank has {name}" for name in there.names.keys() - plain.names.keys()]
    found += [f"the rank has no {name}" for name in plain.bound - there.names.keys()]
    for where, names in (("on the rank", there.names), ("brought back", back.names)):
        found += [
            f"{name} {where}: {words} instead of {plain.names[name]}"
            for name, words in names.items()
            if name in plain.names and words != plain.names[name]
        ]
    if plain.error != there.error:
        found.append(f"raised {there.error} instead of {plain.error}")
    if (
        not plain.error
        and back.value != plain.value
        and not str(back.value).startswith("('Unavailable'")
    ):
        found.append(f"the value {back.value} instead of {plain.value}")
    if TIMES.sub("T", plain.printed) != TIMES.sub("T", there.printed):
        found.append(f"printed {there.printed!r} instead of {plain.printed!r}")
    return found


def main() -> None:
    """For each line that comes in, the name of a case in JSON, write a line: what differs."""
    from tests.jobs.differential import CASES

    out = sys.stdout
    sys.stdout = io.StringIO()
    both = Both(sys.argv[1])
    for line in sys.stdin:
        case = CASES[json.loads(line)]
        cells = case.cell.split("\n%%%\n")
        try:
            for file, text in case.files.items():
                Path(file).write_text(text)
            plain = both.plain(case.setup, cells)
            found = differences(plain, *both.broadcast(case.setup, cells))
        except BaseException as problem:
            found = [f"not to be compared: {type(problem).__name__}: {problem}"]
        print(json.dumps(found), file=out, flush=True)
    with contextlib.redirect_stdout(io.StringIO()):
        both.shell.run_line_magic("sky_down", "--all")


if __name__ == "__main__":
    main()
