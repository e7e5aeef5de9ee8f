"""Numbers of ``sky.report`` in experiment trackers, written and read back by their own libraries."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skymagic.kernels.rank.tracking import Tracking
from skymagic.wire.metrics import Rows
from tests.lab.notebook import Notebook
from tests.lab.pools import Pools

EPOCHS = ((0.1, 0, 2, 0.5), (0.2, 1, 2, 0.4), (0.3, 0, 2, 0.3), (0.4, 1, 2, 0.2))
"""Rows of (seconds, step, total, loss): two epochs, whose steps both begin at 0."""
COUNTED = [(0, 0.5), (1, 0.4), (2, 0.3), (3, 0.2)]


def rows(*each: tuple[float, ...]) -> Rows:
    return {("loss",): array("d", [value for row in each for value in row])}


def tracked(tracker: str) -> None:
    """One cell's numbers, in two batches."""
    pytest.importorskip(tracker)
    tracking = Tracking(tracker, 0, 7)
    tracking.take(rows(*EPOCHS[:3]))
    tracking.take(rows(*EPOCHS[3:]))
    tracking.close()


def scalars(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of TensorBoard's only run in a folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    [run] = folder.iterdir()
    ndarray = pytest.importorskip("tensorboard.util.tensor_util").make_ndarray
    events = accumulator.EventAccumulator(str(run)).Reload().Tensors("loss")
    return [(event.step, round(float(ndarray(event.tensor_proto)), 6)) for event in events]


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tracked("tensorboard")
    assert scalars(tmp_path / "runs") == COUNTED


def test_a_library_that_is_missing_is_named_with_what_to_do() -> None:
    with pytest.raises(
        RuntimeError,
        match="rank 3 has no package no_tracker: %sky_pip install no_tracker, or %config",
    ):
        Tracking("no_tracker", 3, 1)


def test_a_tracker_that_fails_does_not_fail_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file in the folder's place")
    tracking = Tracking("tensorboard", 0, 1)
    tracking.take(rows(EPOCHS[0]))
    tracking.take(rows(EPOCHS[1]))
    tracking.close()
    assert (
        capsys.readouterr().err.count("[tensorboard does not accept numbers from this cell (") == 1
    )


REPORTS = """\
%%sky_broadcast -o folders
import os
import skymagic as sky
for step in (0, 1, 0, 1):
    sky.report(step=step, loss=step / 2)
os.getcwd()"""
REPORTED = [(0, 0.0), (1, 0.5), (2, 0.0), (3, 0.5)]


@pytest.fixture(scope="module")
def notebook(shared_pools: Pools) -> Iterator[Notebook]:
    with shared_pools.lent("--ranks 2") as one:
        yield one
        shared_pools.spoil(one)  # trackers leave threads, and hooks at the end of a process


def reported(notebook: Notebook, tracker: str, **env: str) -> Path:
    """Report in a cell with a tracker, and in one without; where the ranks are."""
    notebook.run(f"%%sky_broadcast\nimport os\nos.environ.update({env!r})")
    notebook.run(f"%config SkyMagic.tracker = {tracker!r}")
    assert notebook.run(REPORTS).stderr == ""
    notebook.run("%config SkyMagic.tracker = ''")
    notebook.run("%%sky_broadcast\nsky.report(step=0, loss=9.0)")
    [folder] = {Path(one) for one in notebook.value("folders")}
    return folder


def test_the_first_rank_of_a_cell_writes_its_numbers(notebook: Notebook) -> None:
    pytest.importorskip("tensorboard")
    assert scalars(reported(notebook, "tensorboard") / "runs") == REPORTED


def test_mlflow(notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow, uri = pytest.importorskip("mlflow"), (tmp_path / "mlruns").as_uri()
    reported(notebook, "mlflow", MLFLOW_TRACKING_URI=uri, MLFLOW_ALLOW_FILE_STORE="true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=uri)
    [run] = client.search_runs(["0"])
    assert run.info.status == "FINISHED"
    assert [
        (one.step, one.value) for one in client.get_metric_history(run.info.run_id, "loss")
    ] == REPORTED


def test_wandb(notebook: Notebook) -> None:
    pytest.importorskip("wandb")
    folder = reported(notebook, "wandb", WANDB_MODE="offline")
    [written] = folder.glob("wandb/offline-run-*/*.wandb")
    assert b"loss" in written.read_bytes()


def test_a_tracker_that_is_missing_fails_the_cell_before_it_begins(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nimport sys\nsys.modules['wandb'] = None")
    notebook.run("%config SkyMagic.tracker = 'wandb'")
    failed = notebook.fail("%%sky_broadcast -o begun\nbegun = True")
    assert "rank 0 has no package wandb: %sky_pip install wandb" in failed.text
    notebook.run("%config SkyMagic.tracker = ''")
    assert notebook.run("%%sky_broadcast --only 0\nprint('begun' in globals())").stdout == "False\n"
