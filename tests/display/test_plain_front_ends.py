"""Front ends without widgets and HTML: a terminal redraws one line, and what cannot redraw gets few of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lab import terminal
from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2")

TRAINING = (
    "import pathlib, time\nimport skymagic as sky\n"
    "sky.report(step=1, total=2)\nprint('begun')\n"
    "while not pathlib.Path({go!r}).exists():\n    time.sleep(0.05)\n"
    "print('over')"
)
START = ("%load_ext skymagic", "%config SkyMagic.view_after = 0.2", "%sky_pool --ranks 2")
STATE = r"2 ranks · 0:0\d · 50%"
"""The progress of a cell that trains."""
END = r"2 ranks · \d+\.\d s( · .*)?"


def broadcast(go: Path) -> str:
    """A line that runs the training on the ranks."""
    return f"get_ipython().run_cell_magic('sky_broadcast', '', {TRAINING.format(go=str(go))!r})"


def test_terminal_redraws_one_line_below_the_output(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with terminal.opened(tmp_path, *START) as shell:
        begun, over, end = shell.run(
            broadcast(go), ("begun", None), (STATE, None), (STATE, go), ("over", None)
        )
        shell.run("%sky_down")
    assert (begun, over) == ("begun", "over")
    assert re.fullmatch(END, end)


def test_terminal_without_cursor_gets_no_carriage_returns(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with terminal.opened(tmp_path, *START, term="dumb") as shell:
        before = len(shell.received)
        begun, state, over, end = shell.run(
            broadcast(go), ("begun", None), (STATE, go), ("over", None)
        )
        shell.run("%sky_down")
        shown = shell.received[before:].partition("\n")[2]
        assert "\r" not in shown.replace("\r\n", "")
    assert (begun, over) == ("begun", "over")
    assert re.match(STATE, state)
    assert re.fullmatch(END, end)


def test_front_end_that_cannot_replace_gets_lines(notebook: Notebook, tmp_path: Path) -> None:
    """A request that names no cell, and allows questions: qtconsole's, Jupyter's console's, Emacs's."""
    go = tmp_path / "go"
    module = "__import__('skymagic.display.plain_lines', fromlist=['it'])"
    notebook.run(f"%config SkyMagic.view_after = 0.2\n{module}.LINES_PER_MINUTE = 120")
    try:
        cell = notebook.start(f"%%sky_broadcast\n{TRAINING.format(go=str(go))}", answering=True)
        notebook.watch(cell, lambda shown: shown.stdout.count("50%") >= 2)
        go.touch()
        notebook.finish(cell)
    finally:
        notebook.run(f"{module}.LINES_PER_MINUTE = 10")
    assert set(cell.kinds) == {"stdout"}
    assert all(re.match(STATE, line) for line in cell.lines if "50%" in line)
    assert re.fullmatch(END, cell.lines[-1])


@pytest.mark.parametrize("attended", [False, True])
def test_only_unattended_notebooks_show_no_progress(notebook: Notebook, attended: bool) -> None:
    line = "from skymagic.display.live import plain_progress\nprint(plain_progress() is None)"
    shown = notebook.finish(notebook.start(line, answering=attended))
    assert shown.stdout == f"{not attended}\n"
