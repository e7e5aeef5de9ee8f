"""What a rank shows while the notebook is away, and what is too long to be shown, is bounded: the newest, or beginning and end."""

from __future__ import annotations

import os
import re
import signal
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from skymagic.kernels.agent.ending import GRACE, UnattendedRuns
from skymagic.kernels.agent.replay_buffer import (
    FIRST_BYTES,
    LAST_BYTES,
    MAX_DISPLAY_BYTES,
    MAX_DISPLAYS,
    DisplayBuffer,
    RunBuffer,
)  # fmt: skip
from skymagic.plan.limits import Lifetime
from skymagic.wire.agent import BeginOutput, Publish
from skymagic.wire.output import (
    Output,
    OutputComplete,
    OutputDisplay,
    OutputMissed,
    OutputSuppressed,
    OutputText,
)
from tests.kernels.filters import output_filter
from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", "pool = %sky_pool --ranks 2")


def display(text: str, ident: str = "", kind: str = "display_data") -> OutputDisplay:
    transient = {"display_id": ident} if ident else {}
    return OutputDisplay(0, kind, {"data": {"text/plain": text}, "transient": transient})


def texts(kept: list[OutputDisplay]) -> list[tuple[str, str]]:
    return [(display.kind, display.content["data"]["text/plain"]) for display in kept]


def test_a_display_is_kept_as_it_is_now() -> None:
    kept = DisplayBuffer()
    kept.add(display("a1", "a", "update_display_data"))
    kept.add(display("b1", "b"))
    for number in range(2, 10):
        for ident in "ab":
            kept.add(display(f"{ident}{number}", ident, "update_display_data"))
    assert texts(kept.take()) == [("update_display_data", "a9"), ("display_data", "b9")]
    assert kept.missed == 0


def test_the_newest_are_kept() -> None:
    kept = DisplayBuffer()
    kept.add(display("first", "first"))
    for number in range(MAX_DISPLAYS):
        kept.add(display(str(number)))
    assert kept.missed == 1
    kept.add(display("later", "first", "update_display_data"))
    expected = [*map(str, range(1, MAX_DISPLAYS)), "later"]
    assert texts(kept.take()) == [("display_data", text) for text in expected]
    for number in range(3):
        kept.add(display(str(number) * (MAX_DISPLAY_BYTES // 2)))
    assert len(kept.take()) == 1


def test_what_is_cleared_is_not_kept() -> None:
    kept, clearing = DisplayBuffer(), OutputDisplay(0, "clear_output", {"wait": True})
    for number in range(100):
        kept.add(clearing)
        kept.add(display(str(number)))
    assert kept.missed == 0
    clear, last = kept.take()
    assert clear == clearing
    assert texts([last]) == [("display_data", "99")]


def test_on_return_the_newest_is_shown(tmp_path: Path) -> None:
    sent: list[Output] = []
    reader, writer = os.pipe()
    output = output_filter(0, tmp_path / "log", {"stdout": reader}, sent.append)
    output.begin(BeginOutput(0, "run-1", True, 1000, 1), 0.0)
    output.screen.detach()
    for number in range(MAX_DISPLAYS + 5):
        output.publish(Publish(0, "display_data", display(str(number)).content), 0.0)
    assert sent == []
    output.screen.attach()
    assert replace(sent[0], cost=0) == OutputMissed(0, 5, seq=1, request="run-1")
    assert [type(output) for output in sent[1:]] == [OutputDisplay] * MAX_DISPLAYS
    output.publish(Publish(0, "display_data", display("now").content), 0.0)
    assert replace(sent[-1], cost=0) == replace(
        display("now"), seq=MAX_DISPLAYS + 2, request="run-1"
    )
    os.close(writer)
    output.close()


@pytest.mark.parametrize("shown", [0, 1, 2])
def test_the_end_is_told_to_whoever_follows(tmp_path: Path, shown: int) -> None:
    """A notebook that has seen it may have been killed before it had the values: the next one asks for them upon it."""
    told: list[Output] = []
    reader, writer = os.pipe()
    output = output_filter(0, tmp_path / "log", {"stdout": reader}, told.append)
    output.begin(BeginOutput(0, "run-1", True, 1000, 1), 0.0)
    output.publish(Publish(0, "display_data", display("1").content), 0.0)
    output.end(0.0)
    told.clear()
    output.screen.follow(shown)
    assert [type(output) for output in told] == [OutputDisplay, OutputComplete][min(shown, 1) :]
    os.close(writer)
    output.close()


def test_what_nobody_takes_is_bounded(tmp_path: Path) -> None:
    """Plots of 0.5 MB, and a flood of text; the figures of eight hours and 200 MB are in benchmarks/away.py."""
    sent: list[Output] = []
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    output = output_filter(0, tmp_path / "log", {"stdout": reader}, sent.append)
    output.begin(BeginOutput(0, "run-1", True, 1_000_000, 1), 0.0)
    output.screen.detach()
    tracemalloc.start()
    try:
        for number in range(300):
            picture = {
                "data": {"image/png": f"{number:08}" * 62_500, "text/plain": "a plot"},
                "metadata": {},
            }
            output.publish(Publish(0, "display_data", picture), 0.0)
        for _ in range(500):
            os.write(writer, b"x" * 59_999 + b"\n")
            output.drain(0.0)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    assert sum(len(piece.text) for piece in sent if isinstance(piece, OutputText)) <= 1_000_000
    assert (tmp_path / "log").stat().st_size > 30_000_000
    os.close(writer)
    output.close()


# ------------------------------------------------------------------------------------------ for another notebook

COUNT, SIZE = 3000, 1000


def flooded() -> RunBuffer:
    kept = RunBuffer(0)
    for number in range(1, COUNT + 1):
        kept.add(OutputText(0, "stdout", f"{number}\n".rjust(SIZE)))
    return kept


def numbers(outputs: list[Output]) -> list[int]:
    return [int(output.text) for output in outputs if isinstance(output, OutputText)]


def test_of_a_flood_there_is_the_beginning_the_end_and_the_size_of_the_rest() -> None:
    contents = list(flooded().after(0))
    (gap,) = [output for output in contents if isinstance(output, OutputSuppressed)]
    first, last = FIRST_BYTES // SIZE, LAST_BYTES // SIZE
    assert numbers(contents) == [*range(1, first + 1), *range(COUNT - last + 1, COUNT + 1)]
    assert contents.index(gap) == first
    assert gap.nbytes == (COUNT - first - last) * SIZE
    assert [output.seq for output in contents] == sorted(output.seq for output in contents)


def test_what_was_shown_does_not_come_again() -> None:
    kept, first, last = flooded(), FIRST_BYTES // SIZE, LAST_BYTES // SIZE
    assert numbers(list(kept.after(COUNT - 2))) == [COUNT - 1, COUNT]
    assert list(kept.after(COUNT)) == []
    shown = first + 100  # some of what is not kept any more
    contents = list(kept.after(shown))
    assert [output.nbytes for output in contents if isinstance(output, OutputSuppressed)] == [
        (COUNT - last - shown) * SIZE
    ]
    assert numbers(contents) == [*range(COUNT - last + 1, COUNT + 1)]


# ------------------------------------------------------------------------------------------ runs without a notebook


def tell(notebook: Notebook, what: str) -> None:
    """Tell the agent as its daemon does, until it has heard: it answers what comes after."""
    notebook.run(
        f"from skymagic.wire import agent as wire\npool.pool.resources.agents._links[0].send(wire.{what}())"
    )
    notebook.run("%sky_logs --rank 0 -n 1")


class Told:
    """What is asked of ranks."""

    def __init__(self) -> None:
        self.notes: list[tuple[int, str]] = []
        self.signals: list[tuple[int, int]] = []

    def note(self, rank: int, text: str) -> None:
        self.notes.append((rank, text))

    def signal(self, rank: int, signum: int) -> None:
        self.signals.append((rank, signum))


def test_a_run_that_is_told_to_stop_and_does_not_is_killed(golden: Golden) -> None:
    lifetime, ranks = Lifetime(None, None, 0.0, 1800.0, 86400.0), Told()
    runs = UnattendedRuns(lifetime, 86400.0, ranks.note, ranks.signal)
    for rank in (2, 3, 4):
        lifetime.begin(rank)
    lifetime.notebook_left(100.0)
    lifetime.end(2, 200.0)
    assert runs.due == 86500.0
    runs.stop_if_due(86499.0)
    assert ranks.signals == []
    for _ in range(2):  # once is enough
        runs.stop_if_due(86500.0)
        assert ranks.signals == [(3, signal.SIGINT), (4, signal.SIGINT)]
    assert [rank for rank, text in ranks.notes if " 1d " in text] == [3, 4]
    golden(ranks.notes[0][1])
    lifetime.end(4, 86501.0)  # it has taken the interrupt
    for _ in range(2):
        runs.stop_if_due(86500.0 + GRACE)
    assert ranks.signals[2:] == [(3, signal.SIGKILL)]
    lifetime.end(3, 86531.0)
    runs.stop_if_due(86532.0)
    assert runs.due is None
    assert lifetime.due == 86531.0 + 1800.0  # from then on it is the pool's own limit


def test_a_notebook_that_comes_back_in_time_keeps_its_run() -> None:
    lifetime, ranks = Lifetime(None, None, 0.0, 1800.0, 60.0), Told()
    runs = UnattendedRuns(lifetime, 60.0, ranks.note, ranks.signal)
    lifetime.begin(0)
    lifetime.notebook_left(100.0)
    lifetime.returned()
    runs.stop_if_due(1000.0)
    lifetime.notebook_left(2000.0)
    runs.stop_if_due(2060.0)
    lifetime.returned()  # the rest is its own stop button's
    runs.stop_if_due(2060.0 + GRACE)
    assert ranks.signals == [(0, signal.SIGINT)]


def test_a_cell_that_ends_while_the_notebook_is_away(golden: Golden, notebook: Notebook) -> None:
    tell(notebook, "NotebookDetached")
    cell = f"%%sky_broadcast\nfor number in range({MAX_DISPLAYS + 7}):\n    display(number)"
    shown = notebook.run(cell)
    assert [one["text/plain"] for one in shown.rich] == [
        str(number) for number in range(7, MAX_DISPLAYS + 7)
    ]
    golden.line(shown.text, "[7 displays of rank 0 ")
    tell(notebook, "NotebookAttached")
    assert len(notebook.run(cell).rich) == MAX_DISPLAYS + 7


def test_a_message_of_50_mb(golden: Golden, notebook: Notebook) -> None:
    long = "'begin ' + 'x' * 50_000_000 + ' end'"
    failed = notebook.fail(
        f"%%sky_broadcast\nimport os\nif os.environ['RANK'] == '1':\n    raise ValueError({long})"
    )
    assert failed.ename.endswith("ValueError")
    assert len(failed.text) < 1_000_000
    assert len(failed.evalue) < 1_000_000
    assert "begin xxx" in failed.text
    assert "xxx end" in failed.text
    golden(re.findall(r"\[… .* …\]", failed.text)[:1], hide=[r"[\d,]{5,}"])
    notebook.run("agent = pool.pool.resources.agents.started[0].directory")
    log = Path(notebook.value("agent"), "rank-1.log")
    assert log.stat().st_size > 50_000_000
