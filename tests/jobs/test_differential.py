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
    here = [item for item in request.session.items if item.path == request.path]
    wanted = [name for item in here if (name := getattr(item, "callspec", None) and item.callspec.params.get("case"))]
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
    known = next((reason for start, reason in KNOWN.items() if case.startswith(start)), None)
    if known is not None:
        pytest.xfail(known)
    assert not differences[case], "\n".join([CASES[case].setup, "----", CASES[case].cell, *differences[case]])


def test_every_known_difference_is_of_a_case() -> None:
    assert [start for start in KNOWN if not any(case.startswith(start) for case in CASES)] == []
