"""A broadcast cell means what the plain cell means: hundreds of cells both ways, on one pool, in one process beside this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.jobs.both_ways import ROOT
from tests.jobs.differential import CASES, KNOWN


@pytest.fixture(scope="module")
def differences(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Of all cases that are wanted."""
    selected = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    wanted = [each.params["case"] for each in selected if each is not None]
    folder = tmp_path_factory.mktemp("both")
    done = subprocess.run(
        [sys.executable, "-m", "tests.jobs.both_ways", str(folder)],
        input=json.dumps(wanted), cwd=ROOT, text=True, capture_output=True, check=False, timeout=110,
        env={**os.environ, "IPYTHONDIR": str(folder / ".ipython"), "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_cell_both_ways(differences: dict[str, list[str]], case: str) -> None:
    if any(case.startswith(start) for start in KNOWN):
        assert differences[case], "it is the same by now: take it out of the table, and out of docs/variables.md"
        return
    assert not differences[case], "\n".join([CASES[case].setup, "----", CASES[case].cell, *differences[case]])


def test_the_tables_name_cases() -> None:
    assert [start for start in KNOWN if sum(case.startswith(start) for case in CASES) != 1] == []
