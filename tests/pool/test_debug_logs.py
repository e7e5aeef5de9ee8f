"""Debug logs of a whole pool: every change of state is found, in order, and nothing secret is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.desk import Desk, killed, local_desk, ssh_desk
from tests.lab.notebook import Notebook
from tests.lab.waiting import until

SECRET = "hunter2-of-this-test"
ON = "%config SkyMagic.log_level = 'DEBUG'"
ALL = "%sky_logs --debug -n 100000"
HANG = "%%sky_broadcast --timeout 6s\nimport os, time\nif rank == 1: time.sleep(600)"
DIES = "%%sky_broadcast\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
RANK = "%%sky_broadcast\nimport skymagic\nrank = skymagic.instance_info().rank"


def in_order(log: str, *patterns: str) -> None:
    """Assert that lines match these regular expressions, each after the one before."""
    lines = iter(log.splitlines())
    for pattern in patterns:
        assert any(re.search(pattern, line) for line in lines), f"missing: {pattern}\n{log}"


@pytest.mark.needs("sshd")
def test_hang_death_and_lost_node_are_found_in_order(tmp_path: Path) -> None:
    """Provokes the three failures, and finds each step in the collected debug logs."""
    settings = ("%config SkyMagic.stall_after = 1.0", ON)
    with ssh_desk(tmp_path) as desk, desk.notebook(*settings, desk.made, RANK) as notebook:
        assert notebook.fail(HANG).ename
        notebook.fail(DIES)
        notebook.run("%%sky_broadcast\nrank = int(__import__('os').environ['RANK'])")
        on_both = notebook.run(ALL).stdout
        going = notebook.start("%%sky_broadcast\nimport time\ntime.sleep(600)")
        until(lambda: desk.hosts[1].sessions())
        desk.hosts[1].power_cut()
        assert notebook.finish(going).failure.ename
        log = notebook.run(ALL).stdout
        desk.hosts[1].start()
        notebook.run("%sky_restart")  # takes the folders of the killed daemon over
        notebook.run("%sky_down lab")
    in_order(
        on_both,
        r"\[notebook\] \S+ INFO pool\.status: pool is starting: pool=lab job=lab-",
        r"\[node 1 daemon\] .* daemon serves its first notebook: .*pool=lab node=1",
        r"\[node 1 agent\] .* rank forked: rank=1 pid=\d+ pool=lab node=1",
        r"\[node 1 rank-1\] .* rank is ready for cells .*pool=lab node=1 rank=1",
        r"\[notebook\] .* pool is ready: pool=lab",
        r"\[notebook\] .* run begins: pool=lab run=2 ",
        r"\[node 1 rank-1\] .* order begins: kind=RunCell run=2 .*pool=lab node=1 rank=1",
        r"\[notebook\] .* run makes no progress: run=2 waiting=\[1\] ended=\[0\]",
        r"\[notebook\] .* time limit reached: run=2 ranks=\[1\]",
        r"\[node 1 agent\] .* rank is signalled: rank=1 pid=\d+ signal=2 pool=lab node=1",
        r"\[node 1 rank-1\] .* order ends: kind=RunCell run=2 status=error error=KeyboardInterrupt",
        r"\[notebook\] .* run ends: pool=lab run=2 good=False .*timed_out=True",
        r"\[notebook\] .* run begins: pool=lab run=3 ",
        r"\[node 1 agent\] .* rank exited: rank=1 pid=\d+ status=SIGKILL.* pool=lab node=1",
        r"\[notebook\] .* rank died: pool=lab node=1 rank=1 ",
        r"\[notebook\] .* recovery begins: pool=lab ranks=\[1\]",
        r"\[notebook\] .* pool is ready: pool=lab .*before=recovering",
    )
    in_order(
        log,
        r"\[node 1\] its debug logs could not be read: ",
        r"\[notebook\] .* run begins: pool=lab run=5 ",
        r"\[notebook\] .* link is reconnecting: pool=lab node=1",
        r"\[notebook\] .* node is lost: pool=lab node=1 ranks=\[1\] ",
        r"\[notebook\] .* pool is degraded: pool=lab",
    )


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with local_desk(tmp_path) as desk:
        desk.more.update(SKYMAGIC_LOG="DEBUG", TOKEN=SECRET)
        yield desk


def debug_files(desk: Desk, notebook: Notebook) -> list[Path]:
    """All debug logs of a desk and of its pool's node."""
    work = Path(notebook.value("pool.pool.agents.started[0].directory"))
    job = notebook.value("pool.pool.job_id")
    daemon = Path(f"/tmp/skymagic-daemon-{os.getuid()}-{job}-0")
    state = desk.folder / "state" / "skymagic" / "debug"
    return [path for parent in (work, daemon, state) for path in parent.glob("*.log")]


def test_no_values_secrets_or_cells_are_logged(desk: Desk) -> None:
    made = f"pool = {desk.made} --secret TOKEN --env OTHER={SECRET}-env"
    with desk.notebook(made, f"value = '{SECRET}-value'") as notebook:
        notebook.run(f"%%sky_broadcast -o back\n# {SECRET}-cell\nback = value + '{SECRET}'\nback")
        notebook.fail(f"%%sky_broadcast\nraise ValueError('{SECRET}-error')")
        notebook.run(f"%%sky_sh\necho {SECRET}-script")
        files = [path for path in debug_files(desk, notebook) if "debug" in str(path)]
        names = {re.sub(r"^notebook-.*", "notebook", path.name) for path in files}
        text = "".join(path.read_text() for path in files)
        modes = {path.stat().st_mode & 0o777 for path in files}
        notebook.run(f"%sky_down {desk.pool}")
    assert {"debug-0-agent.log", "debug-0-forkserver.log", "debug-0-daemon.log"} <= names
    assert {"debug-0-rank-0.log", "debug-0-rank-1.log", "notebook"} <= names
    assert modes == {0o600}
    assert "error=ValueError" in text
    assert SECRET not in text


def test_user_configuration_shows_and_stops_nothing(desk: Desk) -> None:
    configured = "import logging, logging.config\nlogging.basicConfig(level=logging.DEBUG)\n"
    disabled = "logging.disable(logging.CRITICAL)\nlogging.config.dictConfig({'version': 1})"
    with desk.notebook(desk.made, configured + disabled) as notebook:
        notebook.run(f"%%sky_broadcast --only all\n{configured}{disabled}")
        shown = notebook.run("%%sky_broadcast --only all\nprint('seen')")
        log = notebook.run(ALL).stdout
        notebook.run(f"%sky_down {desk.pool}")
    assert "skymagic." not in shown.text
    assert "kernels.rank" not in shown.text
    in_order(
        log,
        r"\[notebook\] .* run begins: .* run=2",
        r"\[node 0 rank-1\] .* order ends: kind=RunCell run=2 status=ok",
    )


def test_logs_of_a_pool_whose_notebook_died(desk: Desk) -> None:
    with desk.notebook(desk.made, RANK) as notebook:
        killed(notebook)
    status, out, err = desk.ran("logs", desk.pool, "--debug", "--lines", "10000")
    assert (status, err) == (0, "")
    in_order(
        out,
        rf"\[notebook\] .* pool is ready: pool={desk.pool}",
        r"\[notebook\] .* run begins: ",
        r"\[node 0 rank-1\] .* order ends: kind=RunCell run=1",
        r"\[node 0 agent\] .* notebook is away: ranks=\[0, 1\]",
    )
    status, out, _ = desk.ran("logs", desk.pool, "--debug", "--grep", "rank forked", "-n", "1")
    assert len(out.splitlines()) == 1
    status, _, err = desk.ran("logs", desk.pool, "--debug", "--grep", "(", "-t", "0")
    assert status == 2
    assert "leave -t out" in err
    assert "'('" in err
    assert desk.ran("down", desk.pool)[0] == 0
