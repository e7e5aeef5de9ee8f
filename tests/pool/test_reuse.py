"""Which pool of another notebook serves a request, and who of two notebooks rents."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from skymagic.errors import PoolError, RequestError
from skymagic.plan.renting import Rental, plan_rented
from skymagic.plan.requests import PoolRequest
from skymagic.pool import keys, records, reuse
from skymagic.pool.keys import PoolKey
from skymagic.pool.records import PoolRecord

REQUEST = PoolRequest(provider="aws", nodes=2, stated=frozenset({"provider", "nodes"}))
CLAIMS = """
import sys
from skymagic.errors import PoolError
from skymagic.pool import reuse
from skymagic.pool.records import PoolRecord
print("ready", flush=True)
sys.stdin.readline()
try:
    reuse.claim(PoolRecord("lab", "lab-" + sys.argv[1], "aws", ("2 machines",), "/home/ann"))
    print("rents", flush=True)
except PoolError as problem:
    print(problem, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def dead() -> str:
    """The identity of a process that is gone."""
    child = subprocess.Popen(["true"])
    child.wait()
    return f"{child.pid} 1 boot"


def kept(name: str, nodes: int = 2, *, alive: bool = False, key: bool = True) -> PoolRecord:
    """A pool that another notebook has rented."""
    record = PoolRecord(name, f"{name}-{nodes}", "aws", ("machines",), "/home/ann")
    record = record if alive else replace(record, process=dead())
    records.write(record)
    if key:
        rental = Rental("aws", "m5.large", "us-east-1a, on demand", "us-east-1", 2, 8.0)
        keys.write(PoolKey(name, record.job_id, plan_rented(replace(REQUEST, nodes=nodes), rental), (), (), 1))
    return record


def test_one_that_was_left_and_fits_is_found() -> None:
    record = kept("lab")
    assert reuse.left(replace(REQUEST, name="lab"), "lab", ()) == record
    assert reuse.left(REQUEST, "main", ()) == record, "a line without a name takes any that fits"
    assert reuse.left(replace(REQUEST, name="other"), "other", ()) is None
    assert reuse.left(REQUEST, "lab", (record.job_id,)) is None, "it is this notebook's own"


def test_one_of_the_name_that_is_another_is_refused() -> None:
    kept("lab", 4)
    with pytest.raises(RequestError, match=r"it has 4 nodes, not 2; end it first \(%sky_down lab\)"):
        reuse.left(replace(REQUEST, name="lab"), "lab", ())
    assert reuse.left(REQUEST, "main", ()) is None


def test_one_of_a_notebook_that_is_alive_is_told() -> None:
    kept("lab", alive=True)
    with pytest.raises(PoolError, match=f"process {os.getpid()}.*%sky_attach lab --take-over"):
        reuse.left(replace(REQUEST, name="lab"), "lab", ())
    assert reuse.left(REQUEST, "main", ()) is None


def test_one_that_was_never_ready_is_told() -> None:
    kept("lab", key=False)
    with pytest.raises(PoolError, match="%sky_down lab ends what is left"):
        reuse.left(replace(REQUEST, name="lab"), "lab", ())


def test_of_two_notebooks_at_once_one_rents() -> None:
    both = [
        subprocess.Popen([sys.executable, "-c", CLAIMS, str(each)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for each in (1, 2)
    ]  # fmt: skip
    pipes = [(one.stdin, one.stdout) for one in both if one.stdin is not None if one.stdout is not None]
    assert [answers.readline() for _, answers in pipes] == ["ready\n"] * 2

    def go(orders: IO[str]) -> None:
        orders.write("go\n")
        orders.flush()

    for orders, _ in pipes:
        go(orders)
    said = [answers.readline() for _, answers in pipes]
    for one in both:
        one.communicate("end\n", timeout=30)
    assert sorted(line.startswith("rents") for line in said) == [False, True]
    assert any("--take-over" in line for line in said)
