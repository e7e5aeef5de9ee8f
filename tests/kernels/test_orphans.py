"""What cells leave running, in sessions of its own too, ends with the rank that ran them; what asks to be kept stays."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.kernels.test_left_behind import all_end, family, folders
from tests.lab.notebook import Notebook, opened
from tests.lab.pools import KERNEL, borrowed

START = '''
import os, subprocess, sys

WAIT = "import signal; signal.pause()"

def detached(**options):
    """A process in a session of its own."""
    return subprocess.Popen([sys.executable, "-c", WAIT], start_new_session=True, **options).pid

def daemon():
    """A process in a session of its own whose parent has ended."""
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {WAIT!r}], start_new_session=True, stdout=-3).pid)"
    return int(subprocess.run([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE).stdout)

def without_environment_for_a_while():
    """A process in a session of its own that shows no environment until it has called exec, as each does in the middle of that call."""
    mark, null = os.environ["SKYMAGIC_IDENT"], subprocess.DEVNULL
    code = f"import os, time; time.sleep(0.5); os.execve('/bin/sleep', ['sleep', '1000'], {{'SKYMAGIC_IDENT': '{mark}'}})"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env={}, stdin=null, stdout=null, stderr=null).pid

def forked():
    """A forked process that has told nobody whose it is, and holds nothing."""
    read, write = os.pipe()
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.write(write, b"%d" % os.getpid())
            os.closerange(0, 1024)
            while True:
                __import__("signal").pause()
        os._exit(0)
    os.wait()
    return int(os.read(read, 20))
'''

notebook = borrowed(KERNEL)


@pytest.fixture
def pool(notebook: Notebook) -> Notebook:
    """A pool of two ranks, of which `pids` are processes: another one where a test has ended it."""
    notebook.run("%sky_pool --nodes 2")
    notebook.run(f"%%sky_broadcast -o pids\n{START}\nos.getpid();")
    return notebook


def started(notebook: Notebook, what: str) -> list[list[psutil.Process]]:
    """What each rank has started with an expression, a list of process ids."""
    notebook.run(f"%%sky_broadcast -o found\n{what};")
    return [[psutil.Process(pid) for pid in notebook.value(f"found[{rank}]")] for rank in range(2)]


ALL = "[detached(), detached(env={}), detached(env={}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), daemon()]"


def test_children_of_a_dead_rank_are_killed(pool: Notebook) -> None:
    mine, others = started(
        pool,
        "[detached(), detached(env={}), daemon(), os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '1000')]",
    )
    die = (
        "%%sky_broadcast\nimport skymagic\nif skymagic.instance_info().rank == 0:\n    os._exit(3)"
    )
    assert pool.fail(die).ename == "RankDied"
    all_end(mine)
    assert all(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in others)


def test_a_process_whose_environment_cannot_be_read_yet(pool: Notebook) -> None:
    mine, _ = started(pool, "[without_environment_for_a_while()]")
    pool.run("%sky_restart --rank 0")
    all_end(mine)


def test_processes_that_end_by_themselves_are_awaited(pool: Notebook) -> None:
    (mine, *_), _ = started(pool, "[daemon()]")
    forkserver = mine.parent()
    assert forkserver == psutil.Process(pool.value("pids[0]")).parent(), "adopted"
    assert forkserver is not None
    mine.kill()
    all_end([mine])
    started(pool, "[]")
    pool.run("%sky_restart")
    assert mine.pid not in [child.pid for child in forkserver.children()]


def test_rank_notices_its_agents_end_while_sending() -> None:
    """The cell gets no error from this: the rank ends as it does when the socket ends."""
    code = """
import socket
from skymagic.kernels.rank.context import AgentControl
from skymagic.wire.agent import RankReady
near, far = socket.socketpair()
control = AgentControl(near, 0)
far.shutdown(socket.SHUT_RD)
control.send(RankReady(0))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGKILL


def test_a_signal_handler_sends_while_its_own_thread_is_sending() -> None:
    """As when a second notice calls the hook while the end of the first call is being sent: no line is torn."""
    code = """
import signal, socket, threading
from skymagic.kernels.rank.context import AgentControl
from skymagic.wire.agent import RankReady, decoder
class Interrupted(socket.socket):
    def sendall(self, data):
        self.send(data[:4])
        if not sent:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGURG)
        super().sendall(data[4:])
def handler(*_):
    sent.append(2)
    control.send(RankReady(2))
sent = []
near, far = socket.socketpair()
signal.signal(signal.SIGURG, handler)
control = AgentControl(Interrupted(fileno=near.detach()), 0)
control.send(RankReady(1))
print([message.rank for message in decoder().feed(far.recv(4096))])
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.stdout == "[1, 2]\n", done.stderr


SHARING = """%%sky_broadcast -o shared --only all
import os
from multiprocessing.shared_memory import SharedMemory
import numpy as np
from joblib import Parallel, delayed
segment = SharedMemory(create=True, size=1 << 16)
Parallel(n_jobs=2)(delayed(np.sum)(np.ones(1 << 18)) for _ in range(2))
[f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name == segment.name or str(os.getpid()) in name]"""


def shared(notebook: Notebook) -> list[Path]:
    """What ranks share with processes of theirs: memory, joblib's folder of arrays, and its semaphores."""
    notebook.run(SHARING)
    paths = [Path(path) for of_rank in notebook.value("shared") for path in of_rank]
    assert all(path.exists() for path in paths)
    assert len(paths) > 2 * 4
    return paths


def test_restart_and_pool_end_spare_only_marked_processes(pool: Notebook) -> None:
    started_first, before = started(pool, f"[*{ALL}, forked()]"), shared(pool)
    pool.run("%sky_restart")
    all_end([*started_first[0], *started_first[1]])
    pool.run(f"%%sky_broadcast\n{START}")
    ended, after = started(pool, f"[*{ALL}, forked()]"), shared(pool)
    nohup = "SKYMAGIC_KEEP=1 nohup sleep 1000 > /dev/null 2>&1 & echo $!"
    kept = started(
        pool,
        "[detached(env={**os.environ, 'SKYMAGIC_KEEP': '1'}), "
        f"int(subprocess.run({nohup!r}, shell=True, stdout=subprocess.PIPE).stdout)]",
    )
    pool.run("%sky_down")
    all_end([*ended[0], *ended[1]])
    assert not any(path.exists() for path in [*before, *after]), (
        "trackers were given time, also beside the restart"
    )
    for one in [*kept[0], *kept[1]]:
        assert one.is_running()
        one.kill()
        all_end([one])


BUSY = "%%sky_broadcast --only all\nimport time\nprint('busy', flush=True)\ntime.sleep(600)"


@pytest.mark.parametrize("whom", ["agent", "forkserver"])
def test_killed_internal_process_is_reported_and_cleaned_up(pool: Notebook, whom: str) -> None:
    (first, *_), (second, *_) = started(pool, "[daemon()]")
    agent, others = family(pool)
    places = folders(agent)
    assert len(places) == 2
    forkserver = psutil.Process(pool.value("pids[0]")).parent()
    shown = pool.start(BUSY)
    pool.watch(shown, lambda cell: cell.stdout.count("busy") == 2)
    assert forkserver is not None
    {"agent": agent, "forkserver": forkserver}[whom].kill()
    assert pool.finish(shown).failure.ename == "RankDied"
    assert "%sky_down" in shown.failure.text
    assert "lost" in pool.run("%sky_status").said
    assert "%sky_down" in pool.fail("%%sky_broadcast\n1").text
    pool.run("%sky_down")
    all_end([agent, *others, first, second])
    if whom != "agent":  # whose folders the next agent sweeps: test_left_behind
        assert [place for place in places if place.exists()] == []


def test_shared_memory_is_deleted_with_the_kernel(tmp_path: Path) -> None:
    with opened(tmp_path, "import os", "%sky_pool --nodes 2") as notebook:
        paths = shared(notebook)
        started = psutil.Process(notebook.value("os.getpid()")).children(recursive=True)
    all_end(started)
    assert not any(path.exists() for path in paths)
