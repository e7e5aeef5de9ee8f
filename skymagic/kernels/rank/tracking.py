"""Numbers of `sky.report` on their way to an experiment tracker: TensorBoard, MLflow or Weights & Biases, by their own libraries.

::

    sky.report ──▶ Recorder ── twice a second ──┬──▶ the notebook
                                                └──▶ Tracking, on the first rank of a run ──▶ the library

A run of the tracker is opened with the first number of a cell and closed when the cell ends. Where it is kept is the library's own
matter: its environment variables (``MLFLOW_TRACKING_URI``, ``WANDB_MODE``, …) and its files count; TensorBoard has ``runs/``.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from skymagic.runtime import reporting
from skymagic.wire.metrics import FIXED, STEP, Names, Rows
from skymagic.wire.order import RunCell


@dataclass(frozen=True)
class TrackedStep:
    """The numbers of one step: the step, when it was (seconds since 1970), and the numbers by name."""

    step: int
    when: float
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class TrackerRun:
    """An open run of a tracker's library."""

    write: Callable[[Sequence[TrackedStep]], object]
    close: Callable[[], object]


def _tensorboard(name: str) -> TrackerRun:
    from tensorboard.summary import Writer

    writer = Writer(f"runs/{name}")

    def write(steps: Sequence[TrackedStep]) -> None:
        for one in steps:
            for tag, number in one.numbers.items():
                writer.add_scalar(tag, number, step=one.step, wall_time=one.when)
        writer.flush()

    return TrackerRun(write, writer.close)


def _mlflow(name: str) -> TrackerRun:
    import mlflow
    from mlflow.entities import Metric

    # the library's own choice of an experiment; left at once, for it belongs to this thread alone, and written to by its id
    with mlflow.start_run(run_name=name, nested=True) as run:
        client, ident = mlflow.MlflowClient(), run.info.run_id

    def write(steps: Sequence[TrackedStep]) -> None:
        metrics = [
            Metric(tag, value, int(one.when * 1000), one.step)
            for one in steps
            for tag, value in one.numbers.items()
        ]
        for first in range(0, len(metrics), 1000):  # as many as one call takes
            client.log_batch(ident, metrics=metrics[first : first + 1000])

    return TrackerRun(write, lambda: client.set_terminated(ident))


def _wandb(name: str) -> TrackerRun:
    import wandb

    theirs = wandb.run
    run = theirs or wandb.init(name=name, settings=wandb.Settings(silent=True, console="off"))
    run.define_metric("*", step_metric="step")

    def write(steps: Sequence[TrackedStep]) -> None:
        for one in steps:
            run.log({"step": one.step, **one.numbers})

    def close() -> None:
        if theirs is None:
            run.finish()
            wandb.teardown()  # its service, a process of its own, would go on until this one ends

    return TrackerRun(write, close)


TRACKERS: Mapping[str, Callable[[str], TrackerRun]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
"""By the value of ``SkyMagic.tracker``, which is also the package's name."""


def _installed(package: str) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module of this name was put into the package's place
        return False
    return (
        spec is not None and spec.origin is not None
    )  # a folder of this name, such as wandb's own, is no package


class Tracking:
    """One cell's numbers for a tracker; `take` is safe on any thread.

    Raises:
        RuntimeError: the library is not installed on this rank.
    """

    def __init__(self, tracker: str, rank: int, cell: int) -> None:
        if not _installed(tracker):
            raise RuntimeError(
                f"SkyMagic.tracker is {tracker!r}, and rank {rank} has no package {tracker}: "
                f"%sky_pip install {tracker}, or %config SkyMagic.tracker = ''"
            )
        self._tracker, self._name = tracker, time.strftime(f"cell{cell}-%Y%m%d-%H%M%S")
        self._began = time.time()
        self._run: TrackerRun | None = None
        self._last: dict[Names, tuple[int, int]] = {}
        """By names: the step reported last, and the step that it was counted as."""
        self._failed = False
        self._lock = threading.Lock()

    def take(self, rows: Rows) -> None:
        """Write rows. What the library cannot do is said once: a training does not fail for it."""
        with self._lock:
            if self._failed:
                return
            try:
                self._run = self._run or TRACKERS[self._tracker](self._name)
                self._run.write([*self._steps(rows)])
            except Exception as problem:
                self._give_up(problem)

    def close(self) -> None:
        """The cell has ended."""
        reporting.track(None)
        with self._lock:
            try:
                if self._run is not None:
                    self._run.close()
            except Exception as problem:
                self._give_up(problem)

    def _give_up(self, problem: Exception) -> None:
        self._failed = True
        print(
            f"[{self._tracker} does not accept numbers from this cell ({type(problem).__name__}: {problem}); pool.metrics has them]",
            file=sys.stderr,
        )

    def _steps(self, rows: Rows) -> Iterator[TrackedStep]:
        for names, flat in rows.items():
            width = FIXED + len(names)
            for first in range(0, len(flat) if names else 0, width):
                seconds, numbers = (
                    flat[first],
                    dict(zip(names, flat[first + FIXED : first + width], strict=True)),
                )
                yield TrackedStep(
                    self._counted(names, int(flat[first + STEP])), self._began + seconds, numbers
                )

    def _counted(self, names: Names, step: int) -> int:
        """The step in a series that only grows: where a loop's steps begin again, as each epoch's do, it counts on."""
        before, counted = self._last.get(names, (-1, -1))
        now = counted + step - before if step >= before else counted + max(1, step)
        self._last[names] = step, now
        return now


def tracked(cell: RunCell, rank: int) -> Tracking | None:
    """Give what a cell reports to an experiment tracker too, on its first rank, until it is closed.

    Raises:
        RuntimeError: the tracker's library is not installed on this rank.
    """
    if not cell.tracker or rank != min(cell.ranks):
        return None
    tracking = Tracking(cell.tracker, rank, cell.execution_count)
    reporting.track(tracking.take)
    return tracking
