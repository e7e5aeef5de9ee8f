"""More ranks than a machine has room for are refused before anything starts; very many on few cores are asked about."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from skymagic.errors import RequestError
from skymagic.plan.limits import MOST_DESCRIPTORS, Room, question, refusals
from skymagic.plan.planning import plan, plan_over
from skymagic.plan.plans import Inventory
from skymagic.plan.requests import PoolRequest
from skymagic.providers.room import room

TWO_CORES = Inventory("laptop", cpus=2, memory_gb=24.0, room=Room(tasks=50_000, nbytes=200 << 30, descriptors=65_536))


def test_many_ranks_on_few_cores_are_asked_about() -> None:
    made = plan(PoolRequest(nodes=1000), TWO_CORES)
    assert made.question == (
        "1000 ranks on 2 CPU cores are 500 for each, and need 20.0 GB of memory before they do anything"
    )
    assert f"  asks       {made.question}: add -y if you mean that\n" in made.text()
    assert plan(PoolRequest(nodes=1000, yes=True), TWO_CORES).question == ""
    assert (question(64, 2), question(4, 1)) == ("", "")
    assert question(65, 2)


@pytest.mark.parametrize(
    ("here", "told"),
    [
        (Room(nbytes=8_000_000_000), "need 20.0 GB of memory to start, and 8.0 GB are free: there is room for 400"),
        (Room(tasks=1420), "need 12020 processes and threads, and 1420 more are allowed (ulimit -u, pids.max): there is room for 116"),
        (Room(descriptors=1024), "need 7130 open files in one process, and 1024 are allowed (ulimit -Hn): there is room for 127"),
        (Room(tasks=-3), "there is room for 0"),
    ],
)  # fmt: skip
def test_what_there_is_no_room_for_is_refused_also_with_yes(here: Room, told: str) -> None:
    with pytest.raises(RequestError) as refused:
        plan(PoolRequest(nodes=1000, yes=True), replace(TWO_CORES, room=here))
    (mistake,) = refused.value.mistakes
    assert mistake.startswith("1000 ranks on this machine need ")
    assert told in mistake


def test_all_reasons_at_once_and_none_where_nothing_is_known() -> None:
    assert len(refusals(1000, Room(tasks=1, nbytes=1, descriptors=1))) == 3
    assert refusals(100_000, Room()) == []


def test_hosts_with_too_few_descriptors_are_refused_by_name() -> None:
    hosts = [Inventory(name, cpus=2, memory_gb=24.0, room=Room(descriptors=256)) for name in ("gpu1", "gpu2")]
    assert plan_over(PoolRequest(procs_per_node=9), hosts, "ssh").topology.world_size == 18
    with pytest.raises(RequestError) as refused:
        plan_over(PoolRequest(procs_per_node=64), hosts, "ssh")
    assert refused.value.mistakes == (
        "128 ranks in a pool whose head is gpu1 need 1026 open files in one process, and 256 are allowed (ulimit -Hn): "
        "there is room for 18",
        "64 ranks on gpu2 need 360 open files in one process, and 256 are allowed (ulimit -Hn)",
    )


# ------------------------------------------------------------------------------------------ what a machine tells


def kernel(folder: Path, files: dict[str, str]) -> Room:
    """The room of a machine whose kernel tells this."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return room(folder / "proc", folder / "cgroup")


FREE = {"proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 2000000 kB\n"}


def test_a_container_of_version_2(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "cgroup/a/b/pids.max": "max\n",
        "cgroup/a/b/pids.current": "40\n",
        "cgroup/a/pids.max": "100\n",
        "cgroup/a/pids.current": "60\n",
        "cgroup/a/b/memory.max": "1000000\n",
        "cgroup/a/b/memory.current": "900000\n",
        "cgroup/a/b/memory.stat": "anon 1\ninactive_file 300000\n",
    }
    found = kernel(tmp_path, {**FREE, **files})
    assert (found.tasks, found.nbytes) == (40, 400_000)


def test_a_container_of_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n8:pids:/x\n4:memory:/x\n0::/\n",
        "cgroup/pids/x/pids.max": "512\n",
        "cgroup/pids/x/pids.current": "12\n",
        "cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
        "cgroup/memory/x/memory.usage_in_bytes": "5\n",
    }
    found = kernel(tmp_path, {**FREE, **files})
    assert (found.tasks, found.nbytes) == (500, 2_048_000_000)


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert (kernel(tmp_path, {}).tasks, kernel(tmp_path, {}).nbytes) == (None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells it on Linux")
def test_this_machine() -> None:
    here = room()
    assert here.nbytes is not None
    assert 0 < here.nbytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert here.descriptors == min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], MOST_DESCRIPTORS)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells it on Linux")
def test_the_limit_of_a_user_counts_all_that_he_runs(tmp_path: Path) -> None:
    status = "Threads:\t{}\nUid:\t{}\t0\t0\t0\nCapEff:\t0000000000000000\n"
    for pid, threads, uid in (("self", 1, 0), ("11", 5, os.getuid()), ("12", 7, os.getuid()), ("13", 900, 54321)):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "status").write_text(status.format(threads, uid))
    code = (
        "import resource, sys; from pathlib import Path; from skymagic.providers.room import room\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (100, 100)); print(room(Path(sys.argv[1])).tasks)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "88\n"
