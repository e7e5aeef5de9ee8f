"""A broadcast cell means what the plain cell means: hundreds of cells both ways, on one pool, in one process beside this one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.both_ways import ROOT
from tests.jobs.differential import CASES, KNOWN


class BothWays:
    """The process beside this one.

    Args:
        folder: where it works.
    """

    def __init__(self, folder: Path) -> None:
        self._errors = folder / "stderr"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.jobs.both_ways", str(folder)],
                cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env={**os.environ, "IPYTHONDIR": str(folder / ".ipython"), "PYTHONWARNINGS": "ignore"},
            )  # fmt: skip

    def differences(self, case: str) -> list[str]:
        """Of one case."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"it has ended:\n{self._errors.read_text()}"
        found: list[str] = json.loads(line)
        return found

    def close(self) -> None:
        """Let it end its pool."""
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0, self._errors.read_text()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothWays]:
    with contextlib.closing(BothWays(tmp_path_factory.mktemp("both"))) as process:
        yield process


@pytest.mark.parametrize("case", CASES)
def test_a_cell_both_ways(both: BothWays, case: str) -> None:
    found = both.differences(case)
    if any(case.startswith(start) for start in KNOWN):
        assert found, (
            "it is the same by now: take it out of the table, and out of docs/explanation/variables.md"
        )
        return
    assert not found, "\n".join([CASES[case].setup, "----", CASES[case].cell, *found])


def test_the_tables_name_cases() -> None:
    assert [start for start in KNOWN if sum(case.startswith(start) for case in CASES) != 1] == []


def test_known_differences_are_documented() -> None:
    page = " ".join((ROOT / "docs" / "explanation" / "variables.md").read_text().split())
    assert [words for words in KNOWN.values() if words not in page] == []
