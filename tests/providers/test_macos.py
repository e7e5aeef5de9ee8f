"""A Mac as the notebook's machine: tested with a stand-in, which hides from Python what only Linux has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.distributions import Shelf, own_environments
from tests.lab.hosts import loopback, masters
from tests.lab.notebook import ROOT, opened
from tests.lab.shells import bootstrapped_home
from tests.lab.sites import MACOS

__all__ = ["bootstrapped_home"]
MAX_SOCKET_PATH = 103
"""Bytes of a socket's path on macOS (104 with the final zero byte)."""
SUFFIX = 17
"""Bytes that ssh appends to a ControlPath while it creates the socket."""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment of a notebook on macOS, whose temporary folder has a name as long as there."""
    folder = Path("/tmp") / f"{tmp_path.name[:40]:_<45}"
    folder.mkdir()
    assert len(str(folder)) >= len("/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T")
    yield {
        "PYTHONPATH": os.pathsep.join([str(MACOS), str(ROOT)]),
        "TMPDIR": str(folder),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_RUNTIME_DIR": "",
    }
    shutil.rmtree(folder)


def test_a_local_pool_runs_on_cpus(environment: dict[str, str], tmp_path: Path) -> None:
    with opened(tmp_path, env=environment) as notebook:
        shown = notebook.run("%sky_pool a-pool-with-quite-a-long-name --ranks 2 --plugin torch")
        assert "ranks run on CPUs: there is no process group for Apple's GPU" in shown.said
        notebook.run("import numpy as np\nimport sys\ndata = np.arange(300_000)")
        notebook.run(
            "%%sky_broadcast -o seen\nimport torch, torch.distributed as dist\n"
            "total = torch.ones(1)\ndist.all_reduce(total)\n"
            "total.item(), int(data.sum()), sys.platform"
        )
        assert notebook.value("seen") == [(2.0, sum(range(300_000)), "darwin")] * 2
        notebook.fail(
            "%%sky_broadcast\nimport os\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)",
            "rank-died",
        )
        notebook.run("%%sky_broadcast -o seen\nint(data[-1])")
        assert notebook.value("seen") == [299_999] * 2
        assert "down" in notebook.run("%sky_down").said


@pytest.mark.needs("sshd")
def test_an_openssh_connection_fits_into_short_socket_paths(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with loopback(tmp_path / "hosts", 1) as hosts, masters(hosts) as env:
        env = {**env, **environment}
        with opened(tmp_path, env=env) as notebook:
            options = "--provider ssh --hosts h1 --ssh openssh --python"
            notebook.run(f"import sys\n%sky_pool lab {options} {{sys.executable}}")
            notebook.run("%%sky_broadcast -o seen\nimport sys\nsys.platform")
            assert notebook.value("seen") == ["linux"]
            sockets = [path for path in Path(environment["TMPDIR"]).rglob("*") if path.is_socket()]
            assert sockets
            assert max(len(str(path)) for path in sockets) + SUFFIX <= MAX_SOCKET_PATH
            notebook.run("%sky_down")


@pytest.mark.needs("sshd")
def test_linux_hosts_get_environments_of_their_own(
    environment: dict[str, str], tmp_path: Path, bootstrapped_home: Path
) -> None:
    shelf = Shelf(tmp_path / "shelf")
    code = "class Frame:\n    def __init__(self, n): self.n = n\n"
    shelf.add("tiny-data", "1.2", {"tinydata.py": code})
    with loopback(tmp_path / "hosts", 2, env=shelf.of_hosts, names=("gpu1", "gpu2")) as hosts:
        for host in hosts:
            own_environments(host.home, bootstrapped_home)
        (tmp_path / "client/.ssh").mkdir(parents=True)
        shutil.copy(hosts.config, tmp_path / "client/.ssh/config")
        paths = [environment["PYTHONPATH"], shelf.of_notebook.get("PYTHONPATH", "")]
        env = {
            **environment,
            **shelf.of_notebook,
            "HOME": str(tmp_path / "client"),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        with opened(tmp_path, "%sky_pool lab --provider ssh --hosts gpu[1-2]", env=env) as notebook:
            notebook.run("import tinydata\nimport numpy as np")
            notebook.run("frame, data = tinydata.Frame(3), np.arange(300_000)")
            notebook.run(
                "%%sky_broadcast -o seen\nimport sys\nsys.platform, frame.n, int(data[-1])"
            )
            assert notebook.value("seen") == [("linux", 3, 299_999)] * 2
            error = notebook.fail("%%sky_broadcast\n1 / 0")
            assert error.ename == "ZeroDivisionError"
            (tmp_path / "notes.txt").write_text("kept")
            notebook.run("%sky_put notes.txt ~/notes.txt")
            assert [(host.home / "notes.txt").read_text() for host in hosts] == ["kept"] * 2
            notebook.run("%sky_down")
