"""How the shell shows what comes from ranks: an error as the rank's own traceback, and lists of values by rank as a table.

IPython asks an error for its lines (``_render_traceback_``), but not one that is an exception group: of that it prints the notebook's own
frames, which are ours. What ``-o`` and ``-g`` give stays a plain list; it is shown as a table where it is the last value of a cell.
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
    """Show the errors of ranks in this shell; a handler of the user's own stays. Twice is safe."""
    if not shell.custom_exceptions:
        shell.set_custom_exc((RankError,), show)


def unregister(shell: InteractiveShell) -> None:
    """Leave it to IPython again."""
    if shell.custom_exceptions == (RankError,):
        shell.set_custom_exc((), None)


def show(
    shell: InteractiveShell,
    kind: type[BaseException],
    error: RankError,
    tb: TracebackType | None,
    tb_offset: int | None = None,
) -> list[str]:
    """What IPython does with other errors."""
    shell._get_exc_info((kind, error, tb))  # for %debug, %tb and sys.last_value
    lines = error._render_traceback_()
    if shell.colors.lower() == "nocolor":  # the rank does not know
        lines = [without_colours(line) for line in lines]
    shell._showtraceback(kind, error, lines)
    if shell.call_pdb:
        shell.debugger(force=True)
    return lines


LINE_WIDTH = 79
"""Characters of a list that reads well as Python writes it."""


class ResultTables:
    """Formatters of one shell for the lists of values by rank; those are no class of ours, for libraries such as JAX take
    apart lists alone.

    Attributes:
        kept: by the variable that a cell has set, which ranks its values are of.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.kept: dict[str, tuple[int, ...]] = {}
        formatters = shell.display_formatter.formatters
        self._text, self._html = formatters["text/plain"], formatters["text/html"]
        self._python = self._text.for_type(list)
        self._text.for_type(list, self._as_text)
        if list not in self._html.type_printers:  # else it is the user's own
            self._html.for_type(list, self._as_html)

    def remember(self, name: str, ranks: Sequence[int]) -> None:
        """A variable of the notebook holds the values of these ranks."""
        self.kept[name] = tuple(ranks)

    def _ranks(self, values: list[Any]) -> tuple[int, ...]:
        """The ranks of a list that a cell has given; none of another."""
        names = self._shell.user_ns
        found = (
            ranks
            for name, ranks in self.kept.items()
            if names.get(name) is values and len(ranks) == len(values)
        )
        return next(found, ())

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
    """Whether a list of Python's own values fits on a line."""
    plain = all(
        type(value) in display.PLAIN and display.words(value) == repr(value) for value in values
    )
    return plain and len(repr(values)) <= LINE_WIDTH


UNWRAPPED = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Wrappers of torch that stay on the ranks: what comes back is the module within."""


def arrived(name: str, value: Any, ranks: Sequence[int], kind: str, *, head: bool) -> str:
    """What %sky_pull has brought, in a line: "model → CNN, from rank 0; DistributedDataParallel unwrapped".

    Args:
        value: what the variable holds: a list by rank unless `head`.
        kind: the type that the rank has of it, without its module.
    """
    here = type(value if head or not value else value[0]).__name__
    what = here if head else f"list of {len(value)} × {here}"
    where = f"from {rank_words(list(ranks[:1] if head else ranks))}"
    return f"{name} → {what}, {where}" + (
        f"; {kind} unwrapped" if kind in UNWRAPPED and here != kind else ""
    )
