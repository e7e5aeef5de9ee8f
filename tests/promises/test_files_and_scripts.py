"""Files go to every node and come back; scripts run once per node with the cluster's environment; packages are where the ranks are."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from tests.lab.notebook import Notebook, seen


def folder_of(pool: Notebook) -> Path:
    """Where the notebook lies."""
    return pool.folder


def test_put_and_get_bring_files_both_ways(pool: Notebook, tmp_path: Path) -> None:
    there = tmp_path / "there"
    (folder_of(pool) / "sent").mkdir(exist_ok=True)
    (folder_of(pool) / "sent" / "a.txt").write_text("first")
    pool.run(f"%sky_put sent/ {there}")
    assert seen(pool, f"open({str(there / 'a.txt')!r}).read()") == ["first", "first"]
    (folder_of(pool) / "sent" / "a.txt").write_text("third")  # of the same size
    pool.run(f"%sky_put sent/ {there}")
    assert seen(pool, f"open({str(there / 'a.txt')!r}).read()") == ["third", "third"]
    pool.run(f"%%sky_broadcast -t 0\nopen({str(there / 'b.txt')!r}, 'w').write('made there');")
    pool.run(f"%sky_get {there}/ got")
    assert (folder_of(pool) / "got" / "b.txt").read_text() == "made there"


def test_missing_file_is_reported(pool: Notebook, tmp_path: Path) -> None:
    assert "absent" in pool.fail(f"%sky_put absent {tmp_path}").text


def test_a_script_runs_once_per_node(pool: Notebook) -> None:
    shown = pool.run(
        "%%sky_sh --only all -o ends_f\necho node $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES"
    )
    assert sorted(line.rpartition("] ")[2] for line in shown.lines) == [
        "node 0 of 2",
        "node 1 of 2",
    ]
    assert pool.value("[end.node for end in ends_f]") == [0, 1]


def test_failed_script_names_node_and_cause(pool: Notebook) -> None:
    failure = pool.fail('%%sky_sh\nif [ "$SKYPILOT_NODE_RANK" = 1 ]; then exit 3; fi')
    assert failure.ename == "ScriptError"
    pool.run("import sys\nerror_f = sys.last_value")
    assert pool.value("error_f.node, error_f.status") == (1, 3)


def test_a_script_has_its_variables_and_folder(pool: Notebook) -> None:
    (folder_of(pool) / "work").mkdir(exist_ok=True)
    (folder_of(pool) / "work" / "main.sh").write_text("echo $OWN_F from $(cat name)")
    (folder_of(pool) / "work" / "name").write_text("here")
    shown = pool.run("%%sky_sh --workdir work --env OWN_F=mine\nsh main.sh")
    assert shown.stdout.strip().endswith("mine from here")


def test_a_script_is_stopped(pool: Notebook) -> None:
    script = "trap 'echo saved; exit' TERM\necho begun\nwhile :; do sleep 0.05; done"
    running = pool.start(f"%%sky_sh --only all\n{script}")
    pool.watch(running, lambda shown: shown.text.count("begun") == 2)
    pool.interrupt()
    assert pool.finish(running).failure.ename == "RunInterrupted"
    assert running.text.count("saved") == 2, "it may save its work"


def test_a_script_has_a_time_limit(pool: Notebook) -> None:
    assert pool.fail("%%sky_sh --timeout 0.5s\nsleep 600").ename == "RunTimeout"


def test_processes_that_a_script_leaves_are_ended_and_named(pool: Notebook) -> None:
    sleep = ["sleep", f"60{os.getpid()}"]
    shown = pool.run(f"%%sky_sh\nsetsid {' '.join(sleep)} >/dev/null 2>&1 &")
    assert " ".join(sleep) in shown.text
    assert sleep not in [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]


def test_local_modules_and_their_edits_reach_ranks(pool: Notebook) -> None:
    (folder_of(pool) / "helper_f.py").write_text("def answer(): return 1\n")
    pool.run("import sys; sys.path.insert(0, '')\nimport helper_f")
    assert seen(pool, "helper_f.answer()") == [1, 1]
    (folder_of(pool) / "helper_f.py").write_text("def answer(): return 22\n")
    pool.run("import importlib; importlib.reload(helper_f);")
    assert seen(pool, "helper_f.answer()") == [22, 22]


def test_packages_of_the_notebook_are_on_the_nodes(pool: Notebook) -> None:
    pool.run("import numpy")
    assert seen(pool, "numpy.__version__") == [pool.value("numpy.__version__")] * 2


def test_missing_package_is_named_before_anything_runs(pool: Notebook) -> None:
    pool.run("%%sky_broadcast\nran_f = False")
    failure = pool.fail("%%sky_broadcast\nran_f = True\nimport no_such_package_f")
    assert "no_such_package_f" in failure.text


def test_pip_lists_packages_or_names_the_environment(pool: Notebook) -> None:
    shown = pool.finish(pool.start("%sky_pip list"))
    assert "numpy" in shown.said or shown.failure.ename == "PackagesError"
