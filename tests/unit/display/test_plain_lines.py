"""Progress without displays: lines with a pause between them, and a terminal's last line below all other text."""

from __future__ import annotations

import io

import pytest

from skymagic.display.plain_lines import LINES_PER_MINUTE, LastLine, PrintedLines
from tests.lab.terminal import rows


class Terminal(io.StringIO):
    """A terminal of 40 columns."""

    def rows(self) -> list[str]:
        """What it shows."""
        return rows(self.getvalue())

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "40")
    return Terminal()


def written(line: LastLine, terminal: Terminal, text: str) -> None:
    """Text of a rank, above the line."""
    with line.above(terminal, text):
        terminal.write(text)


def test_at_most_ten_lines_in_a_minute() -> None:
    now = 100.0
    lines, shown = PrintedLines(lambda: now), io.StringIO()
    for _ in range(600):  # ten times a second, for a minute
        if lines.due:
            lines.show(shown, "45%")
        now += 0.1
    assert shown.getvalue().count("45%\n") == LINES_PER_MINUTE == 10


def test_line_is_replaced_by_a_shorter_one(terminal: Terminal) -> None:
    line = LastLine()
    line.show(terminal, "2 ranks · 0:09 · 9:00 left")
    line.show(terminal, "2 ranks · 0:10")
    assert terminal.rows() == ["2 ranks · 0:10"]


def test_text_is_written_above_the_line(terminal: Terminal) -> None:
    line = LastLine()
    line.show(terminal, "2 ranks · 0:09")
    written(line, terminal, "epoch 1\nepoch 2\n")
    assert terminal.rows() == ["epoch 1", "epoch 2", "2 ranks · 0:09"]
    line.erase()
    line.erase()
    assert terminal.rows() == ["epoch 1", "epoch 2", ""]


def test_text_that_goes_into_a_file_leaves_the_line(terminal: Terminal) -> None:
    line, file = LastLine(), io.StringIO()
    line.show(terminal, "2 ranks · 0:09")
    with line.above(file, "results"):
        file.write("results")
    line.show(terminal, "2 ranks · 0:10")
    assert file.getvalue() == "results"
    assert terminal.rows() == ["2 ranks · 0:10"]


def test_line_waits_until_a_bar_has_ended(terminal: Terminal) -> None:
    line = LastLine()
    line.show(terminal, "2 ranks · 0:09")
    written(line, terminal, " 45%|####")
    line.show(terminal, "2 ranks · 0:10")
    assert terminal.rows() == [" 45%|####"]
    written(line, terminal, "####\n")
    line.show(terminal, "2 ranks · 0:11")
    assert terminal.rows() == [" 45%|########", "2 ranks · 0:11"]


def test_line_is_cut_to_the_width_of_the_terminal(terminal: Terminal) -> None:
    line = LastLine()
    line.show(terminal, "x" * 100)
    line.show(terminal, "y")
    assert terminal.rows() == ["y"]


def test_next_cell_begins_at_the_start_of_a_line(terminal: Terminal) -> None:
    line = LastLine()
    written(line, terminal, "loading …")
    terminal.write("\n")
    line.begin()
    line.show(terminal, "2 ranks")
    assert terminal.rows() == ["loading …", "2 ranks"]
