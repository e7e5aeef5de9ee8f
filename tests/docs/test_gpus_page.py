"""docs/how-to/gpus.md and `make gpu`: the page names each check, a machine without GPUs skips each by name, wheels bring no torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_checks import CHECKS, Check, Row
from benchmarks.gpu_wheels import wanted

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "gpus.md").read_text()


def test_the_page_names_each_check_and_how_many_gpus_it_needs() -> None:
    rows = [row.split("|") for row in PAGE.splitlines() if row.startswith("| ")]
    told = {
        name: int(row[2])
        for row in rows
        if row[2].strip().isdigit()
        for name in row[1].strip().split("; ")
    }
    assert told == {each.name: each.gpus for each in CHECKS}


def test_checks_a_machine_cannot_run_are_skipped() -> None:
    here = Check("a", lambda: iter(()), gpus=2, needs=("json", sys.__name__))
    assert [here.absent(count) for count in (0, 1, 2)] == ["needs 2 GPUs", "needs 2 GPUs", ""]
    assert (
        Check("b", lambda: iter(()), needs=("no_such_module",)).absent(8)
        == "not installed: no_such_module"
    )
    assert all(each.absent(0) for each in CHECKS)


def test_wheels_are_those_that_the_machine_does_not_bring() -> None:
    names = [
        "Torch",
        "triton",
        "nvidia_cublas_cu12",
        "cuda-bindings",
        "torchmetrics",
        "IPython",
        "typing_extensions",
    ]
    report = json.dumps(
        {"install": [{"metadata": {"name": name, "version": "1.0"}} for name in names]}
    )
    assert wanted(report) == ["ipython==1.0", "torchmetrics==1.0", "typing-extensions==1.0"]


def test_unfinished_check_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LOGS", tmp_path)
    unknown = Check("no such check", lambda: iter(()))
    (row,) = gpu.rows_of(unknown, {"PATH": ""}, 60)
    assert row.good is False
    assert Row(**json.loads(json.dumps(vars(row)))) == row
