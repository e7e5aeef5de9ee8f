"""Display of results from ranks: errors as the rank's own traceback, lists of values as tables.

IPython asks an error for its lines (``_render_traceback_``), except for exception groups: for those
it prints the notebook's own frames, which are skymagic's. The values of ``-o`` and ``-g`` are plain
lists; they are shown as a table if they are the last value of a cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from skymagic.display import inspection as display
from skymagic.errors import RankError
from skymagic.plan.masking import without_colours
from skymagic.plan.units import rank_words


def register(shell: InteractiveShell) -> None:
    """Show the errors of ranks in this shell; calling it twice is safe.

    A handler set by the user is kept.
    """
    if not shell.custom_exceptions:
        shell.set_custom_exc((RankError,), show)


def unregister(shell: InteractiveShell) -> None:
    """Restore IPython's own error display."""
    if shell.custom_exceptions == (RankError,):
        shell.set_custom_exc((), None)


def show(
    shell: InteractiveShell,
    kind: type[BaseException],
    error: RankError,
    tb: TracebackType | None,
    tb_offset: int | None = None,
) -> list[str]:
    """Show an error as IPython shows other errors."""
    shell._get_exc_info((kind, error, tb))  # for %debug, %tb and sys.last_value
    lines = error._render_traceback_()
    if shell.colors.lower() == "nocolor":  # the rank does not know the shell's setting
        lines = [without_colours(line) for line in lines]
    shell._showtraceback(kind, error, lines)
    if shell.call_pdb:
        shell.debugger(force=True)
    return lines


LINE_WIDTH = 79
"""Maximum length of a list that is readable in its plain ``repr``."""


class ResultTables:
    """Formatters of one shell for lists of values by rank.

    The values are plain lists, because libraries such as JAX do not take apart subclasses.

    Attributes:
        kept: ranks of the values, by the variable that a cell has set.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.kept: dict[str, tuple[int, ...]] = {}
        formatters = shell.display_formatter.formatters
        self._text, self._html = formatters["text/plain"], formatters["text/html"]
        self._python = self._text.for_type(list)
        self._text.for_type(list, self._as_text)
        if list not in self._html.type_printers:  # else the user has set one
            self._html.for_type(list, self._as_html)

    def remember(self, name: str, ranks: Sequence[int]) -> None:
        """Record that a variable of the notebook holds the values of these ranks."""
        self.kept[name] = tuple(ranks)

    def _ranks(self, values: list[Any]) -> tuple[int, ...]:
        """Return the ranks of a list that a cell has set, or () for any other list."""
        namespace = self._shell.user_ns
        matching = (
            ranks
            for name, ranks in self.kept.items()
            if namespace.get(name) is values and len(ranks) == len(values)
        )
        return next(matching, ())

    def _as_text(self, values: list[Any], printer: Any, cycle: bool) -> None:
        ranks = () if cycle or printer.stack[:-1] else self._ranks(values)
        if ranks and not _short(values):
            printer.text(display.as_text(ranks, values))
        else:
            self._python(values, printer, cycle)

    def _as_html(self, values: list[Any]) -> str | None:
        ranks = self._ranks(values)
        return display.as_html(ranks, values) if ranks else None


def _short(values: list[Any]) -> bool:
    """Return True if a list of built-in values fits on a line."""
    plain = all(
        type(value) in display.PLAIN and display.short_text(value) == repr(value)
        for value in values
    )
    return plain and len(repr(values)) <= LINE_WIDTH


UNWRAPPED = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Wrapper classes of torch that stay on the ranks: the module inside is sent to the notebook."""


def arrival_line(name: str, value: Any, ranks: Sequence[int], kind: str, *, head: bool) -> str:
    """Return a line on a pulled variable:

    "model → CNN, from rank 0; DistributedDataParallel unwrapped".

    Args:
        value: value of the variable: a list by rank unless `head`.
        kind: name of its type on the rank, without the module.
    """
    local_type = type(value if head or not value else value[0]).__name__
    description = local_type if head else f"list of {len(value)} × {local_type}"
    origin = f"from {rank_words(list(ranks[:1] if head else ranks))}"
    return f"{name} → {description}, {origin}" + (
        f"; {kind} unwrapped" if kind in UNWRAPPED and local_type != kind else ""
    )
