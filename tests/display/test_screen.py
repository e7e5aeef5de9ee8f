"""Output is written to the screen in few messages and in order, and counts as shown a while later."""

from __future__ import annotations

from skymagic.display import text
from skymagic.display.labels import DELAY
from skymagic.display.run_line import INTERVAL, MAX_HELD
from skymagic.display.screen import Settling
from skymagic.wire.queries import StackFrame
from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2")


def test_batched_output_stays_in_order(notebook: Notebook) -> None:
    shown = notebook.run(
        "from skymagic.display.live import DisplayData, show, batched_output, write\n"
        "with batched_output():\n"
        "    write('stderr', 'a line ')\n"
        "    with batched_output(): write('stderr', 'in two parts\\n')\n"
        "    show(DisplayData({'text/plain': 'a display'}))\n"
        "    write('stdout', 'after it\\n')\n"
        "write('stdout', 'apart\\n')"
    )
    assert shown.stderr == "a line in two parts\n"
    assert shown.kinds == ["stderr", "display_data", "stdout"]
    assert shown.stdout == "after it\napart\n"


def test_written_output_counts_as_shown_after_a_while() -> None:
    marks: list[tuple[int, int]] = []
    settling = Settling(lambda rank, seq: marks.append((rank, seq)))
    for rank, seq, now in (0, 1, 0.0), (1, 5, 0.0), (0, 2, 0.5), (0, 3, 1.9):
        settling.add(rank, seq, now)
        settling.settle(now)
    assert marks == []
    settling.settle(4.6)
    assert marks == [(0, 2), (1, 5)]
    settling.settle(10.0)
    assert marks[2:] == [(0, 3)]
    assert Settling.SECONDS > MAX_HELD + INTERVAL + DELAY, (
        "by then, lines that the screen held back are written"
    )


def test_a_place_names_the_function_whose_line_it_gives(golden: Golden) -> None:
    cell = StackFrame("<module>", 5, cell=11)
    forward = StackFrame("forward", 19, cell=3)
    conv2d = StackFrame("conv2d", 700, file="torch/nn/functional.py")
    golden(
        text.positions(
            {0: [cell, conv2d], 1: [cell, forward, conv2d], 2: [cell, forward], 3: [cell]}
        )
    )
