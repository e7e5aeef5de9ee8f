"""How the shell shows a rank's error: always as the rank's own traceback.

IPython asks an error for its lines (``_render_traceback_``), but not one that is an exception group: of that it prints the
notebook's own frames, which are ours.
"""

from __future__ import annotations

from types import TracebackType

from IPython.core.interactiveshell import InteractiveShell

from skymagic.errors import RankError
from skymagic.plan.masking import without_colours


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
