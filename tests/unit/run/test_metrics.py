"""What ranks report, as a table and as progress; and what is kept of it while the notebook is away."""

from __future__ import annotations

import copy
import math
import pickle
from array import array
from pathlib import Path
from unittest.mock import Mock

import pytest

from skymagic.display.run_line import Progress
from skymagic.kernels.agent import replay_buffer as kept_by_agent
from skymagic.kernels.agent.replay_buffer import MetricsBuffer
from skymagic.run import metrics as module
from skymagic.run.metrics import Metrics, newest_within, records, table
from skymagic.run.run import show_output
from skymagic.wire.agent import BeginOutput, MetricsReport
from skymagic.wire.metrics import USAGE, MetricBatch, packed, unpacked
from skymagic.wire.output import Output, OutputComplete, OutputMetrics
from tests.kernels.filters import output_filter
from tests.lab.golden import Golden

NAN = math.nan


def batch(names: str, *rows: tuple[float, ...]) -> tuple[MetricBatch, ...]:
    """Rows of (seconds, step, total, numbers…), as they travel."""
    return packed({tuple(names.split()): array("d", [value for row in rows for value in row])})


def of(*batches: tuple[int, tuple[MetricBatch, ...]], cell: int = 1) -> Metrics:
    """What was reported by (rank, batch)."""
    made = Metrics(cell)
    for rank, each in batches:
        made.add(rank, each)
    return made


def loop(
    names: str, steps: range, total: float = NAN, rate: float = 10.0
) -> tuple[MetricBatch, ...]:
    """A loop that reports its step as each number."""
    count = len(names.split())
    return batch(names, *((step / rate, step, total, *[float(step)] * count) for step in steps))


# ------------------------------------------------------------------------------------------ the table


def test_a_row_for_each_step_of_each_rank() -> None:
    run = of(
        (1, batch("loss", (0.1, 0, 2, 0.5), (0.2, 1, 2, NAN))),
        (0, batch("loss", (0.1, 0, 2, 0.25))),
        cell=7,
    )
    found = records([run])
    assert found[:2] == [
        {"step": 0, "rank": 0, "cell": 7, "seconds": 0.1, "loss": 0.25},
        {"step": 0, "rank": 1, "cell": 7, "seconds": 0.1, "loss": 0.5},
    ]
    assert (found[2]["step"], math.isnan(found[2]["loss"])) == (1, True)


def test_metrics_of_a_step_are_merged_and_newer_ones_win() -> None:
    run = of(
        (0, batch("loss", (1, 5, NAN, 0.5), (2, 5, NAN, 0.4))),
        (0, batch("accuracy lr", (3, 5, NAN, 0.9, 0.1))),
    )
    assert records([run]) == [
        {"step": 5, "rank": 0, "cell": 1, "seconds": 3, "loss": 0.4, "accuracy": 0.9, "lr": 0.1}
    ]


def test_steps_that_begin_again_are_counted_on() -> None:
    epochs = of(
        (0, loop("loss", range(3))), (0, loop("loss", range(3))), (0, loop("accuracy", range(2)))
    )
    again = of((0, loop("loss", range(1, 3))), cell=2)
    found = records([epochs, again])
    assert [(row["step"], row.get("loss"), row.get("accuracy")) for row in found] == [
        (0, 0, 0), (1, 1, 1), (2, 2, None), (3, 0, None), (4, 1, None), (5, 2, None), (6, 1, None), (7, 2, None),
    ]  # fmt: skip
    assert [row["cell"] for row in found] == [1] * 6 + [2] * 2


def test_a_data_frame_that_one_line_plots() -> None:
    pandas = pytest.importorskip("pandas")
    run = of(
        (0, loop("loss", range(3))), (1, loop("loss", range(3))), (0, batch("lr", (0, 2, NAN, 0.1)))
    )
    frame = table([run])
    assert list(frame.index.names) == ["step", "rank"]
    assert list(frame.columns) == ["cell", "seconds", "loss", "lr"]
    assert frame.loss.unstack().shape == (3, 2)
    assert frame.lr.dropna().to_dict() == {(2, 0): 0.1}
    empty = table([])
    assert isinstance(empty, pandas.DataFrame)
    assert len(empty) == 0


def test_without_pandas_it_is_a_list_of_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert table([of((0, batch("loss", (0.5, 1, NAN, 2.0))))]) == [
        {"step": 1, "rank": 0, "cell": 1, "seconds": 0.5, "loss": 2.0}
    ]


@pytest.mark.parametrize("pandas", [True, False])
def test_columns_are_read_with_and_without_pandas(
    monkeypatch: pytest.MonkeyPatch, pandas: bool
) -> None:
    if pandas:
        pytest.importorskip("pandas")
    else:
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    run = of((0, loop("loss", range(1, 4))), (0, batch("min", (0, 2, NAN, 0.1))))
    found = table([run])
    assert len(found) == len(found.loss) == 3
    assert found["loss"].tolist() == found.loss.tolist()
    assert found.loss.mean() == pytest.approx(sum(found.loss) / 3)
    assert (found.loss.min(), found.loss.max()) == (min(found.loss), max(found.loss))
    assert found["min"].dropna().tolist() == [0.1]
    assert list(found.columns) == ["cell", "seconds", "loss", "min"]
    with pytest.raises(AttributeError):
        _ = found.accuracy
    with pytest.raises(KeyError):
        _ = found["accuracy"]
    assert len(table([])) == 0
    assert table([]).cell.tolist() == []


def test_missing_column_lists_existing_ones(
    golden: Golden,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    found = table([of((0, loop("loss", range(3))))])
    with golden.raises(AttributeError):
        _ = found.accuracy
    assert "loss" in dir(found)
    assert pickle.loads(pickle.dumps(found)) == found
    assert copy.copy(found).loss == found.loss


def test_oldest_runs_are_forgotten_above_the_limit() -> None:
    runs = [of((0, loop("loss", range(10))), cell=cell) for cell in range(4)]
    empty = Metrics(9)
    assert [run.cell for run in newest_within([*runs, empty], doubles=90)] == [2, 3]
    assert [run.cell for run in newest_within(runs, doubles=1)] == [3]


# ------------------------------------------------------------------------------------------ progress


def progress_of(run: Metrics) -> Progress:
    """It, of a run that has some."""
    found = run.progress()
    assert found is not None
    return found


@pytest.mark.parametrize("first", [0, 1])
def test_percent_rate_and_time_left(first: int) -> None:
    run = of(
        (0, loop("loss", range(first, first + 5), 20)),
        (0, loop("loss", range(first + 5, first + 10), 20)),
    )
    progress = progress_of(run)
    assert (progress.done, progress.share) == (10, 0.5)
    assert progress.rate == pytest.approx(10)
    assert progress.remaining_seconds == pytest.approx(1)


def test_the_slowest_rank_counts() -> None:
    run = of((0, loop("loss", range(50), 100)), (1, loop("loss", range(25), 100)))
    progress = progress_of(run)
    assert progress.share == 0.25


def test_a_new_epoch_begins_at_the_beginning() -> None:
    run = of((0, loop("loss", range(100), 100)))
    assert progress_of(run).share == 1
    run.add(0, loop("loss", range(10), 100))
    assert progress_of(run).share == 0.1
    both = of((0, batch("loss", *((i / 10, i % 4, 4, 0.0) for i in range(6)))))
    assert progress_of(both).share == 0.5


def test_of_loops_in_each_other_the_outer_one_counts() -> None:
    run = of((0, loop("epoch", range(1), 10, rate=0.1)), (0, loop("loss", range(90), 100)))
    run.add(0, loop("epoch", range(1, 2), 10, rate=0.1))
    progress = progress_of(run)
    assert progress.total == 10


def test_unknown_total() -> None:
    progress = progress_of(of((0, loop("loss", range(5)))))
    assert (progress.share, progress.remaining_seconds, progress.done) == (None, None, 5)
    assert Metrics().progress() is None


def test_numbers_are_the_mean_and_range_of_ranks() -> None:
    run = of((0, loop("loss", range(4))), (1, loop("loss", range(3))))
    (loss,) = run.numbers()
    assert (loss.name, loss.value, loss.low, loss.high, loss.history) == (
        "loss",
        2.5,
        2,
        3,
        (0, 1, 2, 3),
    )


# ------------------------------------------------------------------------------------------ who lags


def test_a_rank_that_falls_back_by_seconds_lags() -> None:
    ranks = {rank: loop("loss", range(100), 200) for rank in (0, 1, 3)}
    assert of(*ranks.items(), (2, loop("loss", range(40), 200, rate=4))).lagging() == {2: 60}


@pytest.mark.parametrize(
    "slow",
    [
        loop("loss", range(80), 200),  # two seconds: news of ranks are that far apart
        loop("loss", range(40), 50),  # another loop
    ],
)
def test_ranks_that_do_not_lag(slow: tuple[MetricBatch, ...]) -> None:
    ranks = {rank: loop("loss", range(100), 200) for rank in (0, 1, 3)}
    assert of(*ranks.items(), (2, slow)).lagging() == {}


def test_the_head_alone_and_ranks_that_are_over_do_not_lag() -> None:
    assert of((0, loop("loss", range(100), 200))).lagging() == {}
    both = of((0, loop("loss", range(100), 200)), (1, loop("loss", range(10), 200, rate=1)))
    assert both.lagging() == {1: 90}
    assert both.lagging(finished=[1]) == {}


# ------------------------------------------------------------------------------------------ while the notebook is away


def test_newest_numbers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_by_agent, "MAX_NUMBERS_BYTES", 32_000)
    numbers, steps = MetricsBuffer(), 10_000
    numbers.add(loop("accuracy", range(10)))  # of those that are few, none is lost
    for start in range(0, steps, 100):
        numbers.add(loop("loss", range(start, start + 100), steps))
        numbers.add(loop(" ".join(USAGE), range(3)))
    found = dict(unpacked(numbers.batches))
    loss = list(found["loss",][1::4])
    assert loss == list(range(numbers.dropped, steps))
    assert 900 < len(loss) <= 1000
    assert len(found["accuracy",]) == 40
    assert found[USAGE][-1] == 2


def test_names_that_change_each_step_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_by_agent, "MAX_NUMBERS_BYTES", 320)
    numbers = MetricsBuffer()
    for step in range(100):
        numbers.add(batch(f"loss{step}", (0.0, step, NAN, step)))
    found = dict(unpacked(numbers.batches))
    assert len(found) == 10
    assert numbers.dropped == 90
    assert ("loss99",) in found


def test_row_larger_than_the_bound_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_by_agent, "MAX_NUMBERS_BYTES", 31)
    numbers = MetricsBuffer()
    numbers.add(loop("loss", range(3)))
    assert (numbers.batches, numbers.dropped) == ((), 3)


def reported(outputs: list[Output]) -> list[tuple[float, float]]:
    """Steps and losses in the metrics among these outputs of rank 3."""
    batches = [(3, piece.batches) for piece in outputs if isinstance(piece, OutputMetrics)]
    return [(row["step"], row["loss"]) for row in records([of(*batches)])]


def test_returning_notebook_gets_buffered_output(tmp_path: Path) -> None:
    sent: list[Output] = []
    output = output_filter(3, tmp_path / "log", {}, sent.append)
    try:
        output.screen.report(MetricsReport(3, loop("loss", range(1))))
        assert sent == [], "between cells it is nobody's"
        output.begin(BeginOutput(3, "run-1", False, 100), 0.0)
        output.screen.detach()
        for step in range(3):
            output.screen.report(MetricsReport(3, loop("loss", range(step, step + 1))))
        assert sent == []
        output.screen.attach()
        output.screen.report(MetricsReport(3, loop("loss", range(3, 4))))
        output.end(1.0)
    finally:
        output.close()
    assert [type(piece) for piece in sent] == [OutputMetrics, OutputMetrics, OutputComplete]
    assert reported(sent) == [(step, step) for step in range(4)]


def test_dropped_numbers_are_counted_on_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_by_agent, "MAX_NUMBERS_BYTES", 3200)
    sent: list[Output] = []
    output = output_filter(3, tmp_path / "log", {}, sent.append)
    try:
        output.begin(BeginOutput(3, "run-1", False, 100), 0.0)
        output.screen.detach()
        output.screen.report(MetricsReport(3, loop("loss", range(1300))))
        output.screen.attach()
    finally:
        output.close()
    screen = Mock()
    show_output(screen, sent[0])
    screen.note.assert_called_once_with(
        "[the oldest 1,200 rows that rank 3 reported while this notebook was away are not kept]\n"
    )


def test_another_notebook_gets_all_that_was_reported(tmp_path: Path) -> None:
    sent: list[Output] = []
    output = output_filter(3, tmp_path / "log", {}, sent.append)
    try:
        output.begin(BeginOutput(3, "run-1", False, 100), 0.0)
        output.screen.report(MetricsReport(3, loop("loss", range(9))))
        output.begin(BeginOutput(3, "run-2", False, 100), 1.0)
        output.screen.report(
            MetricsReport(3, loop("loss", range(1)))
        )  # while the first notebook was there
        output.screen.detach()
        output.screen.report(MetricsReport(3, loop("loss", range(1, 2))))
        output.screen.replaced()
        output.screen.report(
            MetricsReport(3, loop("loss", range(2, 3)))
        )  # as the second has not asked yet
        output.screen.follow()  # it is killed
        output.screen.detach()
        output.screen.report(MetricsReport(3, loop("loss", range(3, 4))))
        output.screen.replaced()
        sent.clear()
        output.screen.follow()
        output.screen.report(MetricsReport(3, loop("loss", range(4, 5))))
        output.end(2.0)
        told = len(sent)
        output.screen.follow()  # it had ended meanwhile
    finally:
        output.close()
    for contents in (sent[:told], sent[told:]):
        assert isinstance(contents[-1], OutputComplete)
        assert reported(contents) == [(step, step) for step in range(5)]
