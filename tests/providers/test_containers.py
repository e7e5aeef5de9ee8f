"""Pools whose nodes run in containers: real podman and charliecloud on an image made of this machine's files, other engines by stand-ins."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.lab.containers import (
    LACKING,
    MARKER,
    STAND_IN,
    installable,
    podman,
    root_file_system,
    storage,
)
from tests.lab.desk import killed
from tests.lab.golden import Golden
from tests.lab.hosts import Hosts, loopback, still_there
from tests.lab.notebook import Notebook, opened, seen
from tests.lab.places import home_that_knows
from tests.lab.waiting import until

pytestmark = [pytest.mark.needs("sshd"), pytest.mark.in_order]
ENGINES = [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("podman", "charliecloud")]
NAME = f"boxed{os.getpid()}"
"""Of the pools, in the names of their files."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("images")
    (folder / "env").mkdir()
    yield root_file_system(folder / "image")
    shutil.rmtree(folder)


@dataclass
class Lab:
    """Hosts with an engine, and a notebook that knows them.

    Attributes:
        pool: the line that makes a pool of two nodes with two ranks each.
        env: podman's settings.
    """

    hosts: Hosts
    notebook: Notebook
    pool: str
    env: dict[str, str]
    container: str

    def containers(self) -> str:
        """podman's containers that run."""
        return podman(self.env, "ps", "--all", "--quiet")


@contextmanager
def lab(
    folder: Path, container: str, *, environments: Path | None = None, path: str = ""
) -> Iterator[Lab]:
    (folder / "podman").mkdir()
    with storage(folder / "podman") as env:
        settings = {**env, **installable(folder / "wheels")}
        if path:
            settings["PATH"] = path
        with loopback(folder / "hosts", 2, env=settings) as hosts:
            home = home_that_knows(hosts, folder / "client")
            if environments is not None:
                for host in hosts:
                    (host.home / ".skymagic/env").symlink_to(environments)
            (folder / "notebook").mkdir()
            with opened(folder / "notebook", env={"HOME": str(home)}) as notebook:
                options = "--provider ssh --hosts h[1-2] --procs-per-node 2"
                line = f"%sky_pool {NAME} {options} --container {container} --bind {folder}/wheels"
                yield Lab(hosts, notebook, line, env, container)
                notebook.run("%load_ext skymagic\n%sky_down --all")


@pytest.fixture(scope="module", params=ENGINES)
def boxed(
    request: pytest.FixtureRequest, image: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lab]:
    """A pool in containers of an engine."""
    folder, environments = tmp_path_factory.mktemp("boxed"), image.parent / "env"
    with lab(folder, f"{request.param}:{image}", environments=environments) as made:
        shown = made.notebook.run(made.pool)
        assert "4 ranks" in shown.said
        yield made


INSIDE = f"""import os, socket, sys, cloudpickle, {LACKING}
(os.path.exists({MARKER!r}), os.environ['HOME'], os.getuid(), socket.gethostname(),
 os.statvfs('/dev/shm').f_blocks, cloudpickle.__file__, {LACKING}.__file__, sys.flags.no_user_site)"""


def test_ranks_run_in_the_image_and_see_the_nodes_folders(boxed: Lab) -> None:
    for host, facts in zip([0, 0, 1, 1], seen(boxed.notebook, INSIDE), strict=True):
        home = str(boxed.hosts[host].home)
        marked, rank_home, uid, name, blocks, has, added, alone = facts
        assert (marked, rank_home, uid) == (True, home, os.getuid())
        assert name == os.uname().nodename
        assert blocks == os.statvfs("/dev/shm").f_blocks
        assert has.startswith("/usr/local/lib/"), "the image's own package was installed again"
        assert added.startswith(f"{home}/.skymagic/env/")
        assert alone
    assert not Path(MARKER).exists()


def test_files_of_ranks_are_the_users(boxed: Lab) -> None:
    boxed.notebook.run("%%sky_broadcast\nopen('written', 'a').close()")
    for host in boxed.hosts:
        assert next(host.home.rglob("written")).stat().st_uid == os.getuid()


def test_scripts_run_in_the_container(boxed: Lab) -> None:
    shown = boxed.notebook.run(f"%%sky_sh --only all\ncat {MARKER}")
    assert shown.stdout.count("image") == 2


def test_stop_ends_a_script_with_its_children(boxed: Lab) -> None:
    cell = boxed.notebook.start("%%sky_sh\nsetsid sleep 611 &\necho at work\nsleep 612")
    boxed.notebook.watch(cell, lambda shown: "at work" in shown.text)
    asleep = (["sleep", "611"], ["sleep", "612"])
    until(lambda: len(running(boxed, lambda words: words in asleep)) == 4)
    sleeping = running(boxed, lambda words: words in asleep)
    boxed.notebook.interrupt()
    boxed.notebook.finish(cell)
    assert still_there(sleeping) == []


def test_stop_keeps_variables(boxed: Lab) -> None:
    boxed.notebook.run("%%sky_broadcast\nkept = 7")
    cell = boxed.notebook.start(
        "%%sky_broadcast\nimport time\nprint('at work', flush=True)\nwhile True: time.sleep(0.05)"
    )
    boxed.notebook.watch(cell, lambda shown: "at work" in shown.text)
    boxed.notebook.interrupt()
    boxed.notebook.finish(cell)
    assert seen(boxed.notebook, "kept") == [7] * 4


def test_killed_rank_is_replaced_and_its_children_end(boxed: Lab) -> None:
    pids = seen(
        boxed.notebook,
        "import os, subprocess\nchild = subprocess.Popen(['sleep', '613'])\nos.getpid()",
    )
    sleeping = running(boxed, lambda words: words == ["sleep", "613"])
    assert len(sleeping) == 4
    boxed.notebook.fail(
        "%%sky_broadcast\nimport os, signal\nif os.environ['RANK'] == '3': os.kill(os.getpid(), signal.SIGKILL)"
    )
    until(lambda: len(still_there(sleeping, 0)) == 3)
    now = seen(boxed.notebook, "import os\nos.getpid()")
    assert now[:3] == pids[:3]
    assert now[3] != pids[3]


def test_the_node_lists_its_pools(boxed: Lab) -> None:
    """From outside the container, by the numbers of its processes."""
    pids = seen(boxed.notebook, "import os\nos.getpid()")
    assert all(psutil.pid_exists(pid) for pid in pids)
    assert NAME in boxed.notebook.run("%sky_status --hosts h1").said
    assert f"in {boxed.container}" in boxed.notebook.run("%sky_status").rich[-1]["text/html"]


def test_lost_connections_are_opened_again(boxed: Lab) -> None:
    boxed.notebook.run("%%sky_broadcast\nkept = 8")
    for host in boxed.hosts:
        host.kill_sessions()
    assert seen(boxed.notebook, "kept") == [8] * 4


def test_another_notebook_attaches(boxed: Lab) -> None:
    boxed.notebook.run("%%sky_broadcast\nkept = 9")
    killed(boxed.notebook)
    boxed.notebook.restart()
    boxed.notebook.run(f"%load_ext skymagic\n%sky_attach {NAME}")
    assert seen(boxed.notebook, "kept") == [9] * 4


def test_down_leaves_nothing(boxed: Lab) -> None:
    boxed.notebook.run("%sky_down")
    left_nothing(boxed)


def test_end_of_a_container_is_the_end_of_its_node(boxed: Lab) -> None:
    if not boxed.container.startswith("podman:"):
        return  # other engines have nothing that could be ended as a whole
    boxed.notebook.run(boxed.pool)
    first = boxed.containers().split()[0]
    podman(boxed.env, "rm", "--force", "--time=0", first)
    boxed.notebook.fail("%%sky_broadcast\nimport time\ntime.sleep(60)")
    assert boxed.notebook.fields()["code"] == "rank-died"
    boxed.notebook.run("%sky_down")
    until(lambda: not boxed.containers())
    until(lambda: not any(host.processes() for host in boxed.hosts))
    for folder in (Path("/tmp"), Path("/dev/shm")):  # what is killed does not tidy up
        for path in folder.glob(f"skymagic*{NAME}*"):
            shutil.rmtree(path)


def test_killed_notebook_leaves_nothing(boxed: Lab) -> None:
    notebook = boxed.notebook
    notebook.run("%sky_down --all")
    notebook.run("%config SkyMagic.away = 1")
    notebook.run(boxed.pool.replace("h[1-2]", "h1"))
    notebook.run("%%sky_broadcast\nimport subprocess\nchild = subprocess.Popen(['sleep', '614'])")
    started = boxed.hosts[0].processes()
    assert any(one.cmdline() == ["sleep", "614"] for one in started)
    killed(notebook)
    assert still_there(started, timeout=60.0) == []
    left_nothing(boxed)
    notebook.restart()


def running(boxed: Lab, matches: Callable[[list[str]], bool]) -> list[psutil.Process]:
    found = []
    for host in boxed.hosts:
        found += [one for one in host.processes() if matches(one.cmdline())]
    return found


def left_nothing(boxed: Lab) -> None:
    """No process of a node, no container and no file."""
    until(lambda: not any(host.processes() for host in boxed.hosts))
    assert boxed.containers() == ""
    folders = (Path("/tmp"), Path("/dev/shm"))
    assert [left for one in folders for left in one.glob(f"skymagic*{NAME}*")] == []


# -- without a shared pool -----------------------------------------------------------------------


def test_mistakes_of_hosts_are_shown_before_anything_starts(tmp_path: Path, golden: Golden) -> None:
    """The hosts find only podman, and only a stand-in that has no image and reaches no registry."""
    programs = tmp_path / "bin"
    programs.mkdir()
    podman_program = programs / "podman"
    podman_program.write_text(
        "#!/bin/sh\n[ $1 = pull ] || exit 1\necho 'Error: initializing source: pinging registry: refused' >&2\nexit 125\n"
    )
    podman_program.chmod(0o755)
    with lab(tmp_path, "nothing", path=f"{programs}:{os.defpath}") as made:

        def start(container: str) -> str:
            return made.pool.replace("--container nothing", f"--container {container}")

        texts = [
            made.notebook.fail(start("singularity:/a.sif")).evalue,
            made.notebook.fail(start("podman:/a/b")).evalue,
            made.notebook.fail(start("podman:lab/image:1")).evalue,
            made.notebook.fail(start("pyxis:lab/image:1")).evalue,
        ]
        plan = made.notebook.run(f"{start('podman:lab/image:1')} --dry-run").text
        texts += [line for line in plan.splitlines() if "set-up" in line or "container " in line]
        assert all(list(host.home.iterdir()) == [host.home / ".skymagic"] for host in made.hosts)
        golden("\n\n".join(texts))


@pytest.mark.needs("charliecloud")
def test_first_engine_of_the_node_is_used(image: Path, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "apptainer").write_text(STAND_IN)
    (programs / "apptainer").chmod(0o755)
    environments = image.parent / "env"
    with lab(
        tmp_path, str(image), environments=environments, path=f"{programs}:{os.environ['PATH']}"
    ) as made:
        line = made.pool.replace("h[1-2]", "h1")
        assert " by apptainer on h1" in made.notebook.run(f"{line} --dry-run").text
        made.notebook.run(line)
        assert seen(made.notebook, f"import os\nos.path.exists({MARKER!r})") == [True, True]
        cell = made.notebook.start("%%sky_sh\nsetsid sleep 615 &\necho at work\nsleep 616")
        made.notebook.watch(cell, lambda shown: "at work" in shown.text)
        made.notebook.interrupt()
        made.notebook.finish(cell)
        made.notebook.run("%sky_down")
        left_nothing(made)
