"""Pools of this machine that outlive their notebook: left, listed, attached to, and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from skymagic.plan.planning import fits, plan
from skymagic.plan.plans import Inventory
from skymagic.plan.requests import PoolRequest
from skymagic.pool import records
from skymagic.pool.records import PoolRecord
from skymagic.providers import Local
from skymagic.wire.record import answers
from tests.lab.hosts import still_there
from tests.lab.notebook import Notebook, opened

WAITS = """%%sky_broadcast -o value
import os, time
print('before', flush=True)
while not os.path.exists(GATE): time.sleep(0.02)
print('after')
int(os.environ['RANK'])"""


@dataclass
class Desk:
    """Where notebooks of one user come and go."""

    folder: Path
    pool: str = field(default_factory=lambda: f"lab{os.urandom(4).hex()}")
    """Its name: other tests have pools on this machine too."""
    notebooks: int = 0

    @property
    def made(self) -> str:
        return f"%sky_pool {self.pool} --ranks 2 --detached"

    @property
    def env(self) -> dict[str, str]:
        return {"XDG_STATE_HOME": str(self.folder / "state")}

    @contextmanager
    def notebook(self, *cells: str) -> Iterator[Notebook]:
        self.notebooks += 1
        folder = self.folder / f"notebook-{self.notebooks}"
        folder.mkdir()
        with opened(folder, *cells, env=self.env) as one:
            yield one

    def command(self, *line: str) -> subprocess.CompletedProcess[str]:
        """The console command."""
        code = "import sys; from skymagic.api.command import main; sys.exit(main())"
        env = {**os.environ, **self.env}
        return subprocess.run([sys.executable, "-c", code, *line], env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def killed(notebook: Notebook) -> None:
    """As by the system, out of memory."""
    process = psutil.Process(notebook.pid)
    process.kill()
    assert still_there([process]) == []


def test_a_pool_of_this_machine_goes_on_without_its_notebook(desk: Desk) -> None:
    gate = desk.folder / "gate"
    with desk.notebook(desk.made) as first:
        cell = first.start(WAITS.replace("GATE", repr(str(gate))))
        first.watch(cell, lambda seen: "before" in seen.stdout)
        killed(first)
    with desk.notebook() as second:
        left = f"pool {desk.pool!r} was left on "
        assert left in second.run("%reload_ext skymagic").text
        assert left in second.run("%sky_status").text
        cell = second.start(f"%sky_attach {desk.pool}")
        second.watch(cell, lambda seen: "goes on" in seen.text)
        gate.write_text("")
        second.finish(cell)
        assert cell.error is None, cell.error
        assert cell.stdout.count("after") == 1
        second.run("%%sky_broadcast -o kept\nvalue = [3] * 200_000\nlen(value)")
        assert second.value("value, kept") == ([0, 1], [200_000, 200_000])
        killed(second)
    (pool,) = json.loads(desk.command("pools", "--json").stdout)["pools"]
    assert (pool["name"], pool["provider"], pool["left"]) == (desk.pool, "local", True)
    found = json.loads(desk.command("status", desk.pool, "--json").stdout)["pools"]
    ranks = [psutil.Process(pid) for node in found[0]["nodes"] for pid in node["ranks"].values()]
    assert (found[0]["job_id"], len(ranks)) == (pool["job_id"], 2)
    assert f"to end it: %sky_down {desk.pool}" in desk.command("status", desk.pool).stdout.splitlines()
    with desk.notebook() as third:
        assert f"pool {desk.pool!r} ({pool['job_id']}) was ended on" in third.run(f"%sky_down {desk.pool}").stdout
        assert still_there(ranks) == []
        while answers(f"{pool['job_id']}-0"):  # its daemon goes last
            time.sleep(0.05)
        assert left not in third.run("%sky_status").text
    assert json.loads(desk.command("pools", "--json").stdout)["pools"] == []
    assert desk.command("down", desk.pool).returncode == 2


def test_a_kernel_that_is_shut_down_leaves_its_script(desk: Desk) -> None:
    gate = desk.folder / "gate"
    with desk.notebook(f"{desk.made.removesuffix('--detached')}", "%sky_pool other --ranks 1") as first:
        assert "ends with its notebook" in first.fail("%%sky_sh --detach\ntrue").text
        first.run("%sky_down --all")
        first.run(desk.made)
        shown = first.start(
            f"%%sky_sh --detach -o ends\necho before\nuntil [ -e {gate} ]; do sleep 0.05; done\necho after\nexit 3"
        )
        first.watch(shown, lambda seen: "before" in seen.stdout)
        assert shown.done  # it goes on beside the notebook
    with desk.notebook() as second:  # the first was shut down as by the menu
        cell = second.start(f"%sky_attach {desk.pool}")
        second.watch(cell, lambda seen: "goes on" in seen.text)
        gate.write_text("")
        second.finish(cell)
        assert cell.error is not None
        assert cell.error.ename == "ScriptError"
        assert cell.stdout.count("after") == 1
        assert second.value("[(end.status, end.tail) for end in ends]") == [(3, "before\nafter")] * 2
        second.run(f"%sky_down {desk.pool}")


def test_it_ends_when_nobody_comes_back(desk: Desk) -> None:
    with desk.notebook("%config SkyMagic.away = '1s'", desk.made) as first:
        found = json.loads(desk.command("status", desk.pool, "--json").stdout)["pools"]
        ranks = [psutil.Process(pid) for node in found[0]["nodes"] for pid in node["ranks"].values()]
        killed(first)
    assert still_there(ranks, 30.0) == []
    for daemon in [
        one for one in psutil.process_iter(["cmdline"]) if f"{found[0]['job_id']}-0" in (one.info["cmdline"] or ())
    ]:
        with suppress(psutil.NoSuchProcess):
            daemon.terminate()  # it would wait for a notebook that asks why
        assert still_there([daemon]) == []
    with desk.notebook() as second:
        assert f"no pool {desk.pool!r} was left from here" in second.fail(f"%sky_attach {desk.pool}").evalue
        assert "was left" not in second.run("%sky_status").text


def test_one_that_ends_with_its_notebook_does_not_fit() -> None:
    here = Inventory("laptop", 8, 16.0)
    stays, goes = plan(PoolRequest(nodes=2, detached=True), here), plan(PoolRequest(nodes=2), here)
    assert (stays.outlives, goes.outlives) == (True, False)
    assert fits(PoolRequest(detached=True), goes) == ["it ends with its notebook: it was made without --detached"]
    assert fits(PoolRequest(detached=True), stays) == fits(PoolRequest(), stays) == []
    assert "some time after the notebook" in stays.text()
    assert "with the notebook" in goes.text()
    assert Local(detached=True).fields == {"detached": True}


def test_how_it_is_ended_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    gone = PoolRecord("lab", "lab-0a1b2c3d", "local", ("laptop",), "/home/ann", process="1 1 long-ago")
    assert records.reminders([gone]) == [
        "pool 'lab' was left on laptop by a notebook that is gone: %sky_attach lab goes on with it, %sky_down lab-0a1b2c3d ends it"
    ]
    records.write(gone)
    assert records.every() == []  # its daemon is not there any more
    assert list((tmp_path / "skymagic" / "pools").iterdir()) == []
