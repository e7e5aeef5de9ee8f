"""Pools on hosts over SSH: real sshd's, real notebooks; the same promises as on one machine, and what links can suffer."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from skymagic.jobs.forwarding import WHO_CONNECTS
from tests.content.test_files import sparse
from tests.lab.hosts import Hosts, loopback, still_there
from tests.lab.notebook import Notebook, Shown, opened
from tests.lab.places import home_that_knows
from tests.lab.shells import pip_settings
from tests.lab.waiting import until

pytestmark = pytest.mark.needs("sshd")
POOL = f"%sky_pool lab --provider ssh --hosts h[1-2] --procs-per-node 2 --python {sys.executable}"
AWAY = "h2: connection lost; ranks there keep running for 1d at most, and this notebook reconnects"
NAMES = "%%sky_broadcast\nimport os, time\nrank = int(os.environ['RANK'])"
ALIVE = "%%sky_broadcast -o alive\nrank"
COUNTING = """%%sky_broadcast --only all
for number in range(ROUNDS):
    print(rank, number, flush=True)
    time.sleep(0.06)"""


@contextmanager
def lab(folder: Path, count: int = 2) -> Iterator[tuple[Hosts, Notebook]]:
    """Hosts, and a notebook that can reach them."""
    with loopback(folder / "hosts", count, env=pip_settings()) as hosts:
        home = home_that_knows(hosts, folder / "client")
        (folder / "notebook").mkdir()
        with opened(folder / "notebook", env={"HOME": str(home)}) as notebook:
            yield hosts, notebook


SERVER = """
import http.server, threading
def serve(rank):
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers(); self.wfile.write(f"rank {rank}".encode())
        def log_message(self, *_): pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hosts, Notebook]]:
    """Two hosts with a pool of four ranks."""
    with lab(tmp_path_factory.mktemp("ssh")) as (hosts, notebook):
        notebook.run(POOL)
        notebook.run(NAMES)
        yield hosts, notebook


# ------------------------------------------------------------------------------------------ as on one machine


def test_values_go_to_all_hosts_and_from_one_to_another(two: tuple[Hosts, Notebook]) -> None:
    hosts, notebook = two
    notebook.run("import numpy as np\nscale = np.full(300_000, 2.0)")
    notebook.run(
        "mapped = np.memmap('mapped.dat', dtype='f4', mode='w+', shape=(4,)); mapped[:] = 2"
    )
    shown = notebook.run(
        "%%sky_broadcast -o found\n"
        "print('logged by', rank)\n"
        "lent = np.full(300_000, float(rank)); view = lent[:5]; small = [rank]\n"
        "node = os.environ['HOME'], os.environ['NODE_RANK'], os.environ['LOCAL_RANK']\n"
        "rank, *node, float(scale.sum()), type(mapped).__name__, mapped.tolist()"
    )
    assert notebook.value("found") == [
        (
            rank,
            str(hosts[rank // 2].home),
            str(rank // 2),
            str(rank % 2),
            600_000.0,
            "ndarray",
            [2.0] * 4,
        )
        for rank in range(4)
    ]
    said = r"mapped: its contents are sent as an array, because it maps .*/mapped\.dat, which is on this machine"
    assert re.search(said, shown.text)
    assert "logged by 3" in notebook.run("%sky_logs --rank 3").lines, "a log is read from its host"

    notebook.run("%sky_clone 0,2 --from 3 lent view small")
    notebook.run("%%sky_broadcast -o found\nlent[0] = 9.0\n(view[:2].tolist(), len(lent), small)")
    assert notebook.value("found") == [
        ([9.0, float(each)], 300_000, [each]) for each in (3, 1, 3, 3)
    ]


def test_script_runs_on_the_ranks_host(two: tuple[Hosts, Notebook]) -> None:
    _, notebook = two
    shown = notebook.run("%%sky_sh -t 3\necho $HOME $RANK $LOCAL_RANK\npwd")
    first, folder = shown.lines
    assert first.endswith("h2/home 3 1")
    assert folder == first.split()[0], "where the rank is"
    failed = notebook.fail("%%sky_sh -t 3\nexit 5", "script")
    assert notebook.fields()["host"] == "h2"
    assert "exit code 5" in failed.text
    running = notebook.start("%%sky_sh -t 2\necho $$\nexec sleep 600")
    notebook.watch(running, lambda cell: "\n" in cell.stdout)
    pid = int(running.stdout)
    assert psutil.pid_exists(pid)
    notebook.interrupt()
    notebook.finish(running)
    assert not psutil.pid_exists(pid)


# ------------------------------------------------------------------------------------------ files


def file_processes(hosts: Hosts) -> list[psutil.Process]:
    """What copies files on the hosts, and does not end."""
    found = []
    for process in (process for host in hosts for process in host.processes()):
        with contextlib.suppress(psutil.Error):
            found += (
                [process]
                if "skymagic.kernels.transfer_server" in " ".join(process.cmdline())
                else []
            )
    return still_there(found)


def test_files_are_copied_to_all_hosts_and_back(two: tuple[Hosts, Notebook]) -> None:
    hosts, notebook = two
    folder = notebook.folder
    (folder / "data/sub").mkdir(parents=True)
    (folder / "data/sub/a.txt").write_text("a")
    (folder / "data/big.bin").write_bytes(os.urandom(3_000_000))
    assert notebook.run("%sky_put data ~/copied").said.startswith(
        "2 files (3.0 MB) to 2 nodes each in "
    )
    again = notebook.run("%sky_put data/ copied")
    assert again.said == "0 files (0 bytes) to 2 nodes each; 2 files there already"
    for host in hosts:
        assert (host.home / "copied/big.bin").read_bytes() == (folder / "data/big.bin").read_bytes()
    (hosts[1].home / "copied/sub/a.txt").write_text("of the second")
    notebook.run("%sky_get copied results --node all")
    assert (folder / "results/node0/copied/sub/a.txt").read_text() == "a"
    assert (folder / "results/node1/copied/sub/a.txt").read_text() == "of the second"
    notebook.run("%sky_get copied/sub/a.txt one.txt --node 1")
    assert (folder / "one.txt").read_text() == "of the second"
    failed = notebook.fail("%sky_get ~/nothing/here .")
    assert failed.ename == "FilesError"
    assert "node 0 (h1)" in failed.text
    assert not file_processes(hosts)


def test_a_port_of_a_host_is_a_link_here(two: tuple[Hosts, Notebook]) -> None:
    _, notebook = two
    notebook.run(SERVER)
    notebook.run("%%sky_broadcast -o ports -t 0,2\nserver = serve(rank)\nserver.server_port")
    try:
        there, other = notebook.value("ports")
        first, second = (
            notebook.run(f"%sky_forward {there} --node 0").rich[0]["text/plain"],
            notebook.run(f"%sky_forward {other} --node 1").rich[0]["text/plain"],
        )
        assert re.fullmatch(
            rf"port {there} of node 0 \(\S+\): (http://127\.0\.0\.1:\d+/)\n{WHO_CONNECTS}", first
        ), first
        for rank, text in ((0, first), (2, second)):
            page = f"import urllib.request\nprint(urllib.request.urlopen({text.splitlines()[0].split()[-1]!r}).read().decode())"
            assert notebook.run(page).text == f"rank {rank}\n"
        assert notebook.run(f"%sky_forward {there}").rich[0]["text/plain"] == first, (
            "what is forwarded is kept"
        )
    finally:
        notebook.run("%%sky_broadcast -t 0,2\nserver.shutdown(); server.server_close()")
    assert "listens" in notebook.run(f"%sky_forward {there}").rich[0]["text/plain"]
    assert "no node 2" in notebook.fail("%sky_forward 6006 --node 2").text


def test_stopping_a_copy_leaves_nothing_on_any_host(two: tuple[Hosts, Notebook]) -> None:
    hosts, notebook = two
    for place in [notebook.folder, *(host.home for host in hosts)]:
        sparse(place / "large", 3 << 30)
    for line in ("%sky_put large large.copy", "%sky_get large large.copy --node all"):
        copying = notebook.start(line, watched=True)
        notebook.watch(copying, lambda shown: "B of " in str(shown.rich))
        notebook.interrupt()
        assert "KeyboardInterrupt" in str(notebook.finish(copying).error)
        assert not file_processes(hosts)
        for place in [notebook.folder, *(host.home for host in hosts)]:
            left = [
                path.name for path in place.rglob("*") if path.name.endswith((".copy", ".part"))
            ]
            assert [name for name in left if not (place / name).is_dir()] == []


def test_interrupted_copy_is_reported_and_can_resume(
    two: tuple[Hosts, Notebook],
) -> None:
    hosts, notebook = two
    folder = notebook.folder / "lossy"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    sparse(folder / "large", 1 << 28)
    there = hosts[1].home / "lossy"
    copying = notebook.start("%sky_put lossy lossy")
    until(
        (there / "a.txt").exists
    )  # the first batch is written there, and seconds of the large file are still to come
    hosts[1].kill_sessions()
    error = notebook.finish(copying).failure
    assert error.ename == "FilesError"
    assert "node 1 (h2): " in error.text
    assert "node 0" not in error.text
    assert (hosts[0].home / "lossy/large").stat().st_size == 1 << 28
    assert not file_processes(hosts)
    assert [path.name for path in there.iterdir() if not path.name.startswith(".skymagic-")] == [
        "a.txt"
    ], "half a file has no name"
    sparse(folder / "large", 1 << 20)
    shown = notebook.run("%sky_put lossy lossy")
    assert shown.said.startswith("1 file (1.0 MB) to 2 nodes each")
    assert "1 file there already" in shown.said
    assert (there / "large").stat().st_size == 1 << 20


def test_script_folder_is_synchronized(two: tuple[Hosts, Notebook]) -> None:
    hosts, notebook = two
    project = notebook.folder / "project"
    project.mkdir()
    for name, text in {
        "say.py": "print('first')",
        "unused.py": "",
        "x.log": "",
        ".gitignore": "*.log",
    }.items():
        (project / name).write_text(text)
    cell = "%%sky_sh --workdir project --only all\npython3 say.py && ls && touch made.there"

    def said() -> list[str]:
        """What the cell shows; that it took long to send it is not the point."""
        return [
            line
            for line in notebook.run(cell).said.splitlines()
            if not line.startswith("[shipped ")
        ]

    copied, *lines = said()
    assert copied.startswith("[project: 3 files (")
    assert sorted(lines) == sorted(
        f"[{node}] {line}" for node in (0, 1) for line in ("first", "say.py", "unused.py")
    )
    (project / "say.py").write_text("print('then')")
    (project / "unused.py").unlink()
    copied, *lines = said()
    assert "1 file there already; 1 file removed" in copied
    assert sorted(lines) == sorted(
        f"[{node}] {line}" for node in (0, 1) for line in ("then", "made.there", "say.py")
    )
    assert "project:" not in notebook.run(cell).text


def test_preview_shows_hosts_and_mistakes_before_the_start(
    two: tuple[Hosts, Notebook],
) -> None:
    _, notebook = two
    new = POOL.partition(" --hosts")[0].replace("lab", "new")
    shown = notebook.run(
        f"{POOL.replace('lab', 'new').replace('h[1-2]', 'h1,h1,h2')} --dry-run"
    ).text
    assert "ssh: h1, h1, h2" in shown
    assert "6 (3 × 2" in shown
    assert re.search("^.*nothing .* h1, h1, h2$", shown, re.MULTILINE)
    assert "needs --hosts" in notebook.fail(new).text
    assert "--nodes" in notebook.fail(f"{new} --hosts h1 --nodes 3").text
    assert (
        "nowhere.invalid" in notebook.fail(f"{new} --hosts h1,nowhere.invalid,h2 --gpu A100").text
    )
    lacking = notebook.fail(f"{new} --hosts h[1-2] --gpu A100 --python {sys.executable}").text
    assert "h1 has no A100" in lacking
    assert "h2 has no A100" in lacking
    notebook.fail("%sky_down new", "no-pool")


# ------------------------------------------------------------------------------------------ links fail


def counted(shown: Shown) -> dict[int, list[int]]:
    """By rank, the numbers that it printed, in the order in which they were shown."""
    found: dict[int, list[int]] = {}
    for line in shown.lines:
        if match := re.fullmatch(r"\[\d\] (\d) (\d+)", line):
            found.setdefault(int(match[1]), []).append(int(match[2]))
    return found


def counting(notebook: Notebook, rounds: int) -> Shown:
    """A cell in which all ranks print so many numbers, and have begun."""
    notebook.run(f"ROUNDS = {rounds}")
    running = notebook.start(COUNTING)
    passed(notebook, running, 10)
    return running


def passed(notebook: Notebook, running: Shown, number: int) -> None:
    """Wait until ranks of both hosts have been heard to print this number."""
    notebook.watch(
        running, lambda shown: all(f"] {rank} {number}\n" in shown.text for rank in (0, 2))
    )


def all_came(notebook: Notebook, running: Shown, rounds: int) -> bool:
    """Whether the cell ends well, and no number is lost or repeated."""
    shown = notebook.finish(running)
    assert shown.error is None, shown.error
    return counted(shown) == {rank: list(range(rounds)) for rank in range(4)}


def test_connections_that_are_killed_cost_nothing(two: tuple[Hosts, Notebook]) -> None:
    """The head's, then the other host's, then all."""
    hosts, notebook = two
    running = counting(notebook, 80)
    for lost, number in (([hosts[0]], 25), ([hosts[1]], 45), (hosts, 65)):
        for host in lost:
            host.kill_sessions()
        passed(notebook, running, number)
    assert all_came(notebook, running, 80)
    notebook.run(ALIVE)


def test_a_host_that_is_not_to_be_reached_for_a_while(two: tuple[Hosts, Notebook]) -> None:
    """Its cell continues, status and cell explain the situation, and nothing is lost."""
    hosts, notebook = two
    running = counting(notebook, 100)
    hosts[1].stop()
    hosts[1].kill_sessions()
    notebook.watch(running, lambda shown: AWAY in shown.stderr)
    hosts[1].start()
    assert all_came(notebook, running, 100)


def test_silent_connection_is_replaced(two: tuple[Hosts, Notebook]) -> None:
    hosts, notebook = two
    running = counting(notebook, 24)
    frozen = hosts[1].sessions()
    for process in frozen:
        process.suspend()
    assert all_came(notebook, running, 24)
    for process in frozen:
        process.resume()


def test_second_stop_does_not_wait_for_a_lost_host(
    two: tuple[Hosts, Notebook],
) -> None:
    hosts, notebook = two
    running = notebook.start("%%sky_broadcast -t 2,3\nprint('begun', flush=True)\ntime.sleep(1000)")
    notebook.watch(running, lambda shown: "begun" in shown.text)
    hosts[1].stop()
    hosts[1].kill_sessions()
    notebook.watch(running, lambda shown: "connection lost" in shown.stderr)
    notebook.interrupt()
    notebook.watch(running, lambda shown: "press again" in shown.stderr)
    notebook.interrupt()
    assert "RunInterrupted" in str(notebook.finish(running).error)
    assert re.search(r"2 +1 +h2 .*reconnecting", notebook.run("%sky_status").said)
    hosts[1].start()
    notebook.run("%sky_restart")
    notebook.run(NAMES)
    notebook.run(ALIVE)
    assert notebook.value("alive") == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------ the end


def test_ended_and_abandoned_pools_leave_nothing(
    two: tuple[Hosts, Notebook],
) -> None:
    """The last test here: it ends the shared notebook."""
    hosts, notebook = two
    assert all(host.processes() for host in hosts)
    notebook.run("%sky_down lab")
    assert [process.cmdline() for host in hosts for process in host.processes()] == [], (
        "gone as soon as it says so"
    )
    notebook.run("%config SkyMagic.away = 4")
    notebook.run(POOL)
    notebook.run("%%sky_broadcast\n1")
    os.kill(notebook.pid, 9)
    assert all(host.processes() for host in hosts)
    for host in hosts:  # daemons of a session of their own are nobody's children
        psutil.wait_procs(host.processes(), timeout=60)
        assert [process.cmdline() for process in host.processes()] == []
