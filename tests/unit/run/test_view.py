"""The line of a running cell as text: what it says, and the one line that stays of it."""

from __future__ import annotations

import io
import math

import pytest

from skymagic.display.labels import Labels
from skymagic.display.run_line import (
    Number,
    Progress,
    RunState,
    RunSummary,
    as_html,
    end_line,
    line,
    sparkline,
)
from skymagic.display.terminal import Bars, OpenLine, bar

# ------------------------------------------------------------------------------------------ pure


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (RunState(4, 7.3), "4 ranks · 0:07"),
        (RunState(1, 3725.0), "1 rank · 1:02:05"),
        (
            RunState(4, 45.0, progress=Progress(450, 1000, 10), numbers=[Number("loss", 0.2034, 0.19, 0.21, (3, 2, 1))]),
            "4 ranks · 0:45 · 45% · 0:55 left · 10 steps/s · loss 0.203 (0.19–0.21) █▅▁",
        ),
        (RunState(2, 5.0, progress=Progress(12, None, 0.25)), "2 ranks · 0:05 · step 12 · 0.25 steps/s"),
        (RunState(2, 5.0, progress=Progress(999, 1000)), "2 ranks · 0:05 · 99%"),
        (RunState(2, 5.0, progress=Progress(10, 10, 2)), "2 ranks · 0:05 · 100% · 2 steps/s"),
        (
            RunState(8, 9.0, done=5, failed=(7,), waiting=(0, 1), lagging="rank 3 is 22 steps behind"),
            "8 ranks · 0:09 · rank 7 failed · 5 done · ranks 0, 1 waiting · rank 3 is 22 steps behind",
        ),
        (RunState(2, 5.0, progress=Progress(1, 2), activity="gathering 1.2 GB"), "2 ranks · 0:05 · gathering 1.2 GB"),
    ],
)  # fmt: skip
def test_line_of_a_running_cell(state: RunState, said: str) -> None:
    assert line(state) == said


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (RunSummary(4, 12.34), "4 ranks · 12.3 s"),
        (
            RunSummary(4, 12.34, shipped=400_000_000, ship_seconds=0.2, names=("results",)),
            "4 ranks · 12.3 s · shipped 400.0 MB in 0.2 s · results → `results`",
        ),
        (RunSummary(2, 3.0, shipped=4_200_000, ship_seconds=0.04), "2 ranks · 3.0 s · shipped 4.2 MB"),
        (RunSummary(2, 3.0, gathered=4_200_000, gather_seconds=0.01), "2 ranks · 3.0 s · gathered 4.2 MB"),
        (RunSummary(2, 75.0, gathered=2_000_000, gather_seconds=0.31), "2 ranks · 1:15 · gathered 2.0 MB in 0.3 s"),
        (RunSummary(2, 3.0, shipped=999, ship_seconds=0.1, failed=(1,)), "2 ranks · 3.0 s · rank 1 failed"),
        (RunSummary(2, 3.0, shipped=0, ship_seconds=1.3), "2 ranks · 3.0 s"),
        (RunSummary(2, 3.0, interrupted=True), "2 ranks · 3.0 s · interrupted"),
        (
            RunSummary(2, 3.0, interrupted=True, progress=Progress(450, 1000, 12.5)),
            "2 ranks · 3.0 s · interrupted · 45%, step 450 of 1000",
        ),
        (
            RunSummary(2, 3.0, failed=(1,), progress=Progress(7)),
            "2 ranks · 3.0 s · rank 1 failed · step 7",
        ),
        (RunSummary(2, 3.0, timed_out=True, lagged="rank 3 was 9 steps behind"), "2 ranks · 3.0 s · stopped: time limit reached · rank 3 was 9 steps behind"),
        (RunSummary(2, 3.0, cell=5, incomplete=True), "2 ranks · 3.0 s · not all output is shown: %sky_logs --cell 5"),
        (RunSummary(2, 3.0, cell=5), "2 ranks · 3.0 s"),
    ],
)  # fmt: skip
def test_final_line_of_a_run(end: RunSummary, said: str) -> None:
    assert end_line(end) == said


def test_sparklines() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5, 5]) == "", "a line at the bottom of the letters says nothing"
    assert sparkline([0, math.nan, 0, 0]) == ""
    assert sparkline([1, math.nan, 2, math.inf, 3]) == "▁ ▅ █"
    assert sparkline([1, 2]) == ""


def test_html_is_only_the_line() -> None:
    assert "<progress" not in as_html("4 ranks · results → `a<b`")
    assert "a&lt;b" in as_html("4 ranks · results → `a<b`")
    assert 'value="0.450"' in as_html("4 ranks", 0.45)


# ------------------------------------------------------------------------------------------ tqdm's bars


def test_a_loop_of_tqdm_is_progress() -> None:
    tqdm = pytest.importorskip("tqdm")

    def loop(stream: io.StringIO) -> None:
        for i in tqdm.tqdm(
            range(40), file=stream, mininterval=0, miniters=1, desc="train", postfix={"loss": 0.5}
        ):
            if i == 10:
                raise StopIteration

    stream = io.StringIO()
    with pytest.raises(StopIteration):
        loop(stream)
    text = stream.getvalue().rstrip("\n")
    bars = Bars()
    bars.feed(0, "stderr", text, 0.0)
    progress = bars.progress()
    assert progress is not None
    assert (progress.done, progress.total) == (10, 40)
    assert progress.rate > 0
    bars.feed(0, "stderr", "\n", 1.0)
    assert bars.progress() is None, "a bar that has ended says nothing of what comes"


@pytest.mark.parametrize(
    ("row", "progress"),
    [
        (" 45%|████▌     | 45/100 [00:01<00:01, 33.2it/s]", Progress(45, 100, 33.2)),
        ("  2%|▏| 1/60 [00:04<03:56,  4.00s/it, loss=0.1]", Progress(1, 60, 0.25)),
        ("  0%|          | 0/60 [00:00<?, ?it/s]", Progress(0, 60, 0)),
        ("data:  12%|█▏ | 1.20k/10.0k [1:00:01<00:01, 1.50kB/s]", Progress(1200, 10000, 1500)),
        ("45/100 of it", None),
        ("1.2.3/4 [00:00<?]", None),
    ],
)
def test_lines_of_tqdm(row: str, progress: Progress | None) -> None:
    assert bar(row) == progress


def test_nested_bars_show_the_outer_one_with_the_inner_share() -> None:
    bars = Bars()
    bars.feed(0, "stderr", "\r 20%| | 1/5 [00:10<00:40, 10.0s/it]", 0.0)
    bars.feed(0, "stderr", "\r 50%| | 50/100 [00:05<00:05, 10.0it/s]", 0.0)
    assert bars.progress() == Progress(1.5, 5, 0.1)
    bars.feed(1, "stderr", "\r 20%| | 1/5 [00:10<00:40, 10.0s/it]", 0.0)
    assert bars.progress() == Progress(1, 5, 0.1)


OUTER, INNER = " 40%| | 2/5 [00:10<00:40, 10.0s/it]", "inner:   0%| | 0/100 [00:05<00:05, 10.0it/s]"


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize(
    ("drawn", "done"),
    [
        (f"\r{OUTER}\r{INNER}", 2),
        (f"\r{OUTER}\r{INNER}\r{INNER.replace('0/100', '25/100')}", 2.25),
        (f"\r{OUTER}\r{INNER.replace('0/100', '100/100')}\n", 2),  # the inner one stays as a line
        (
            f"\r{OUTER}\r{INNER.replace('0/100', '50/100')}\r          \r{OUTER}",
            2,
        ),  # or is erasing_text away
        (f"\r{OUTER}\r{INNER}\r     \r\r     \rnote\n\r{INNER}\r{OUTER}", 2),  # tqdm.write
        (f"\r{OUTER}\n\rother:  30%| | 3/10 [00:10<00:40, 10.0s/it]", 3),  # one after another
        (f"\r{OUTER}\n", None),
        (f"\r{OUTER}\r     \r", None),
        (f"step\nloss 5\n{OUTER}", 2),
        ("\r1/" + "1" * 100_000, None),
    ],
)
def test_bars_that_share_a_line(drawn: str, done: float | None, size: int) -> None:
    bars = Bars()
    for start in range(0, len(drawn), size):  # as a pipe may cut it
        bars.feed(0, "stderr", drawn[start : start + size], 0.0, all=True)
    progress = bars.progress()
    assert (progress and progress.done) == done


def test_nested_loops_of_tqdm_are_read_in_their_order() -> None:
    tqdm = pytest.importorskip("tqdm")
    bars = Bars()

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            bars.feed(0, "stderr", text, 0.0, all=True)
            return len(text)

    found = []
    options = {"file": Stream(), "mininterval": 0, "miniters": 1, "position": 0}
    for _ in tqdm.tqdm(range(4), desc="outer", **options):
        for _ in tqdm.tqdm(range(5), leave=False, **options):
            progress = bars.progress()
            assert progress is not None
            found.append((progress.done, progress.total))
    assert found == [(epoch + step / 5, 4) for epoch in range(4) for step in range(5)]
    assert bars.progress() is None


@pytest.mark.parametrize(
    ("text", "ended", "left"),
    [
        ("a\nb", ["a"], "b"),
        ("a\r\nb\r\n", ["a", "b"], ""),
        ("abc\rd", [], "d"),
        ("\r 1/3\r 2/3\n", [" 2/3"], ""),
        ("wheel |\b/\b-", [], "wheel -"),
        ("\b\b12\b\b3", [], "3"),
        ("ab\b\r\bc", [], "c"),
        ("\x1b[31mab\x1b[0m\bc", [], "\x1b[31ma\x1b[0mc"),
        ("\x1b[0m\bc", [], "\x1b[0mc"),
        ("abc\x1b[2Kd", [], "d"),
        ("abc\x1b[Kd", [], "abcd"),
        ("abc\r\x1b[Kd", [], "d"),
        ("abc\r\x1b[32md", [], "\x1b[32md"),
        ("abc\r\x1b[0m\n", ["abc"], ""),
        ("a\x1b[1Ab\x1b[?25lc\x1b[2;3Hd\x1b[Je", [], "abcde"),
        ("\r 9/9\r      \r", [], "      "),
        ("\r 9/9\r      next\n", ["      next"], ""),
    ],
)
@pytest.mark.parametrize("size", [1, 4096])
def test_open_line(text: str, ended: list[str], left: str, size: int) -> None:
    line, found = OpenLine(0.0), list[str]()
    for start in range(0, len(text), size):
        found += line.feed(text[start : start + size], 0.0)
    assert (found, line.text) == (ended, left)


def on_a_terminal(text: str) -> str:
    """What a terminal shows of a line."""
    row: list[str] = []
    column = 0
    for piece in text:
        if piece == "\r":
            column = 0
        else:
            row[column : column + 1] = [piece]
            column += 1
    return "".join(row).rstrip()


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("training ..", ".. done", "training .... done"),
        ("\r 1/3", "\r 2/3\r 3/3", " 3/3"),
        ("\r 1/3\r", " 2/3", " 2/3"),
    ],
)
def test_open_lines_continue_below_the_run_line(before: str, after: str, shown: str) -> None:
    line = OpenLine(0.0)
    line.feed(before, 0.0)
    assert not on_a_terminal(before + line.erasing_text()), "nothing of it stays above"
    assert on_a_terminal(line.redrawing_text() + after) == shown


def test_line_of_an_erased_bar_stays_below_earlier_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Lightning's bars do, with a validation."""
    monkeypatch.setattr("skymagic.display.labels.DELAY", -1)
    written: list[str] = []
    labels = Labels([0], lambda _, text: written.append(text), redraws=True)
    labels.text(0, "stdout", "\r train\r check")
    labels.refresh()
    assert capsys.readouterr().out.strip() == "check"
    labels.text(0, "stderr", "fit stopped\n")
    labels.text(0, "stdout", "\r      \r train 2\nafter fit\n")
    labels.finish()
    assert capsys.readouterr().out.strip() == "train 2", "the block's last state"
    assert written == ["fit stopped\n", "after fit\n"]


def test_bar_that_was_wiped_away_leaves_its_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("skymagic.display.labels.DELAY", -1)
    written: list[str] = []
    labels = Labels([0], lambda _, text: written.append(text), redraws=True)
    labels.text(0, "stderr", "\r train")
    labels.refresh()
    assert capsys.readouterr().out.strip() == "train"
    labels.text(0, "stderr", "\r      \r")
    labels.text(0, "stderr", "a warning\n")
    labels.finish()
    assert capsys.readouterr().out.strip() == ""
    assert written == ["a warning\n"]
