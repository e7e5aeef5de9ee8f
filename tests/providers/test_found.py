"""A pool whose notebook was killed, found and ended from another machine that has no record of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.desk import killed
from tests.lab.hosts import still_there
from tests.lab.machines import machines
from tests.lab.notebook import opened
from tests.lab.places import home_that_knows
from tests.lab.shells import pip_settings

pytestmark = pytest.mark.needs("sshd", "namespaces")
POOL = f"%sky_pool lab --provider ssh --hosts h[1-2] --procs-per-node 2 --python {sys.executable}"
FOREVER = (
    "%%sky_broadcast\nimport time\nprint('begun', flush=True)\nwhile True:\n    time.sleep(0.1)"
)


def command(home: Path, *line: str) -> subprocess.CompletedProcess[str]:
    """The console command, on a machine that knows the hosts' names and nothing else."""
    env = {**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
    code = "import sys; from skymagic.api.command import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *line], env=env, capture_output=True, text=True, timeout=60
    )


def test_endless_cell_is_found_and_ended_from_elsewhere(tmp_path: Path) -> None:
    """Three homes: the notebook's, which is killed during the cell; another one that lists the pool by `--hosts`; and the hosts'."""
    with machines(tmp_path / "hosts", 2, env=pip_settings()) as hosts:
        home, other = (
            home_that_knows(hosts, tmp_path / "client", fresh=True),
            home_that_knows(hosts, tmp_path / "other", fresh=True),
        )
        (tmp_path / "notebook").mkdir()
        (tmp_path / "again").mkdir()
        mine = {"HOME": str(home), "XDG_STATE_HOME": str(tmp_path / "state")}
        with opened(tmp_path / "notebook", POOL, env=mine) as notebook:
            own = notebook.run("%sky_status --hosts h1,h2").stdout
            assert "this notebook" in own
            assert "%sky_down" not in own
            assert "%sky_down lab ends it" in notebook.fail("%sky_down --hosts h1,h2").text
            notebook.watch(notebook.start(FOREVER), lambda cell: "begun" in cell.text)
            killed(notebook)

        for _ in range(10):  # a node writes its record once a second at most
            asked = command(other, "status", "--hosts", "h1,h2", "--json")
            assert asked.returncode == 0, asked.stderr
            (pool,) = json.loads(asked.stdout)["pools"]
            if all(one["busy_since"] for one in pool["nodes"]):
                break
        assert (pool["name"], pool["nodes_elsewhere"]) == ("lab", 0)
        assert [(one["host"], sorted(one["ranks"])) for one in pool["nodes"]] == [
            ("h1", ["0", "1"]),
            ("h2", ["2", "3"]),
        ]
        assert all(one["busy_since"] and not one["idle_since"] for one in pool["nodes"])
        ranks = [process for host in hosts for process in host.processes()]
        assert len(ranks) > 4

        kept = command(other, "down", "--clean", "--hosts", "h1,h2", "--all")
        assert kept.stdout == "h1: nothing removed\nh2: nothing removed\n", (
            kept.stderr
        )  # a pool uses it

        # the next notebook here is told of it; one elsewhere sees it all the same, and ends it
        with opened(tmp_path / "again", env=mine) as notebook:
            told = notebook.run("%reload_ext skymagic").text
            assert re.search("pool 'lab' .* h1, h2 .*: %sky_attach lab ", told)
        text = command(other, "status", "--hosts", "h1,h2,h9").stdout
        assert re.search(r"\bcell runs\b", text)
        assert "h9: " in text
        assert f"%sky_down {pool['name']} " in text
        refused = command(other, "down", "--hosts", "h1,h2", "train")
        assert (refused.returncode, "available: lab" in refused.stderr) == (2, True)
        ended = command(other, "down", "--hosts", "h1,h2", "lab")
        assert ended.returncode == 0, ended.stderr
        assert f"pool 'lab' ({pool['job_id']}) is down on h1, h2" in ended.stdout
        assert "lab" not in command(other, "status", "--hosts", "h1,h2").stdout
        assert still_there(ranks, 30.0) == []

        disk = command(other, "status", "--hosts", "h1", "--disk").stdout
        assert re.search(r"^skymagic's code +\d.* ago$", disk, re.MULTILINE), disk
        assert (
            "skymagic's code ("
            in command(other, "down", "--clean", "--hosts", "h1", "--all", "--dry-run").stdout
        )
        with opened(tmp_path / "again", env=mine) as notebook:
            assert re.match(
                r"h1: skymagic's code \(.*\) removed$",
                notebook.run("%sky_down --clean --hosts h1 --all").stdout,
            )
            assert "h1: nothing in /" in notebook.run("%sky_status --hosts h1 --disk").stdout
            assert "lab" not in notebook.run("%sky_status --hosts h[1-2]").stdout
            assert "was left" not in notebook.run("%reload_ext skymagic").text

        hosts[0].stop()
        asked = command(other, "status", "--hosts", "h1")
        assert asked.returncode == 1
        assert "skymagic status: h1: " in asked.stderr
