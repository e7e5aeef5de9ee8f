"""Output is written to the screen in few messages and in order."""

from __future__ import annotations

from skymagic.display import text
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


def test_a_place_names_the_function_whose_line_it_gives(golden: Golden) -> None:
    cell = StackFrame("<module>", 5, cell=11)
    forward = StackFrame("forward", 19, cell=3)
    conv2d = StackFrame("conv2d", 700, file="torch/nn/functional.py")
    golden(
        text.positions(
            {0: [cell, conv2d], 1: [cell, forward, conv2d], 2: [cell, forward], 3: [cell]}
        )
    )
