"""Output counts as shown a while after it was passed to the screen, and is acknowledged then, in few messages."""

from __future__ import annotations

from collections.abc import Mapping

from skymagic.display.labels import DELAY
from skymagic.display.run_line import INTERVAL as LINE_INTERVAL
from skymagic.display.run_line import MAX_HELD
from skymagic.run.acknowledgements import INTERVAL, SHOWN_AFTER, Acknowledgements


def test_output_is_acknowledged_a_while_after_it_was_passed_to_the_screen() -> None:
    sent: list[Mapping[int, int]] = []
    acknowledgements = Acknowledgements(sent.append)
    for rank, seq, now in (0, 1, 0.0), (1, 5, 0.0), (0, 2, 0.5), (0, 3, 1.9):
        acknowledgements.passed(rank, seq, now)
        acknowledgements.update(now)
    assert sent == []
    acknowledgements.update(SHOWN_AFTER + 0.6)
    assert sent == [{0: 2, 1: 5}]
    acknowledgements.update(10.0)
    assert sent[1:] == [{0: 3}]
    assert SHOWN_AFTER > MAX_HELD + LINE_INTERVAL + DELAY, (
        "by then, lines that the screen held back are written"
    )


def test_a_flood_is_acknowledged_in_few_messages() -> None:
    sent: list[Mapping[int, int]] = []
    acknowledgements = Acknowledgements(sent.append)
    for seq in range(1, 1001):
        acknowledgements.passed(0, seq, seq / 100)
        acknowledgements.update(seq / 100)
    assert len(sent) <= (10 - SHOWN_AFTER) / INTERVAL + 1
    assert sent[-1][0] >= 550
