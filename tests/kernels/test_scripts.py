"""``%%sky_sh``: what a script finds, what is shown of it, how it fails, and that nothing of it is left.

Tests that take `notebook` run on each of `PLACES`, but for those of a script's text and of what is said of it, which a place has no part in.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from skymagic.jobs.script import ScriptEnd, script_error, too_many_nodes_warning
from skymagic.kernels.agent import resources
from skymagic.kernels.script import environment
from skymagic.runtime.info import InstanceInfo, Peer
from skymagic.wire.script import ScriptCause
from tests.lab.golden import Golden
from tests.lab.notebook import Notebook, Shown, opened
from tests.lab.places import PLACES, pooled
from tests.lab.pools import Pools
from tests.lab.waiting import until


@pytest.fixture(scope="module", params=PLACES)
def notebook(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Notebook]:
    """A notebook with a pool that all tests share: none may break it, and at the end the same ranks are there."""
    with pooled(
        request.param, tmp_path_factory.mktemp("notebook"), {"SECRET_WORD": "hunter2"}
    ) as opened_one:
        before = pids(opened_one)
        yield opened_one
        assert pids(opened_one) == before


HERE = pytest.mark.parametrize("notebook", ["local"], indirect=True)


def pids(notebook: Notebook) -> list[int]:
    """Of the ranks, as they say themselves."""
    notebook.run("%%sky_broadcast -o pids\nimport os\nos.getpid();")
    return notebook.value("pids")


def sh(script: str, options: str = "") -> str:
    return f"%%sky_sh {options}\n{script}"


def started(notebook: Notebook, script: str, options: str = "") -> Shown:
    """A script that is running: it has said "begun"."""
    return notebook.watch(notebook.start(sh(script, options)), lambda shown: "begun" in shown.text)


def gone(pid: int) -> bool:
    """Whether a process has ended; waits for one that is on its way."""
    try:
        psutil.Process(pid).wait(timeout=10)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def numbers(text: str, label: str) -> list[int]:
    """The numbers that follow a label."""
    return [int(found) for found in re.findall(rf"{label} (\d+)", text)]


# ------------------------------------------------------------------------------------------ what a script finds

TOLD = "NODE_IPS NUM_NODES NODE_RANK NUM_GPUS_PER_NODE TASK_ID".split()
DUMP = """python - <<'END'
import json, os, sys
print("ENV" + json.dumps(dict(os.environ)) + "\\nPYTHON" + sys.executable)
END"""


def environments(shown: Shown) -> list[dict[str, str]]:
    return [json.loads(line.partition("ENV")[2]) for line in shown.lines if "ENV{" in line]


def test_the_cluster_stands_in_the_environment(notebook: Notebook) -> None:
    """Scripts get the variables of SkyPilot, and none of a rank's."""
    shown = notebook.run(sh(DUMP, "--only all"))
    first, second = sorted(environments(shown), key=lambda env: env["SKYPILOT_NODE_RANK"])
    for node, env in enumerate((first, second)):
        assert env["SKYPILOT_NODE_RANK"] == str(node)
        assert env["SKYPILOT_NUM_NODES"] == "2"
        assert env["SKYPILOT_NUM_GPUS_PER_NODE"] == "2", (
            "without GPUs: as many as the node has ranks"
        )
        assert len(env["SKYPILOT_NODE_IPS"].split("\n")) == 2
        assert [env[f"SKYMAGIC_{name}"] for name in TOLD] == [
            env[f"SKYPILOT_{name}"] for name in TOLD
        ]
        assert env["MASTER_ADDR"] == env["SKYPILOT_NODE_IPS"].split("\n")[0]
        info = json.loads(env["COMPUTE_POOL"])
        assert (info["node"], info["total_nodes"], info["rank"], info["world_size"]) == (
            node,
            2,
            node,
            2,
        )
        assert info["head_port"] == int(env["MASTER_PORT"])
        assert env["SKYMAGIC_HOSTFILE"].endswith("/hostfile")
        assert env["FROM_POOL"] == "1"
        of_a_rank = {name for name in env if environment.RANK_VARIABLES.fullmatch(name)}
        assert of_a_rank == {
            "MASTER_ADDR",
            "MASTER_PORT",
            "COMPUTE_POOL",
            "TORCHELASTIC_ERROR_FILE",
        }
        assert ("OMP_NUM_THREADS" in env) == ("OMP_NUM_THREADS" in os.environ), (
            "the ranks have one from the pool"
        )
    assert first["SKYPILOT_TASK_ID"] == second["SKYPILOT_TASK_ID"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["TORCHELASTIC_ERROR_FILE"] != second["TORCHELASTIC_ERROR_FILE"]
    again = environments(notebook.run(sh(DUMP)))[0]
    assert again["SKYPILOT_TASK_ID"] != first["SKYPILOT_TASK_ID"], "each run has its own"


@pytest.mark.parametrize(
    ("addresses", "text"),
    [
        (["10.0.0.4", "10.0.0.5"], "10.0.0.4 slots=8\n10.0.0.5 slots=8\n"),
        (["127.0.0.1", "127.0.0.1"], "node0 slots=8\nnode1 slots=8\n"),
        (["10.0.0.4"], "10.0.0.4 slots=8\n"),
    ],
)
def test_the_text_of_a_hostfile(addresses: list[str], text: str) -> None:
    cluster = InstanceInfo(
        peers=tuple(Peer(node, address) for node, address in enumerate(addresses))
    )
    assert environment.hostfile(cluster, 8) == text


def test_the_pools_python_is_first_on_the_path(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -o own --head\nimport sys\nsys.executable;")
    shown = notebook.run(sh('command -v python\ncommand -v torchrun\necho "$PATH"'))
    folder = str(Path(notebook.value("own")).parent)
    assert shown.lines[0] == f"{folder}/python"
    assert shown.lines[1] == f"{folder}/torchrun"
    assert shown.lines[2].split(os.pathsep)[0] == folder


def test_the_master_port_is_free_on_the_head(notebook: Notebook) -> None:
    shown = notebook.run(
        sh(
            # on the head alone: both nodes are this machine, and would take it from each other
            "[ $SKYPILOT_NODE_RANK != 0 ] || "
            "python -c \"import os, socket; socket.create_server((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])))\" && echo free"
        )
    )
    assert shown.lines == ["free"]


def test_some_nodes_are_a_cluster_of_their_own(notebook: Notebook) -> None:
    script = (
        'echo "$SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES: $(echo "$SKYPILOT_NODE_IPS" | wc -l)"'
    )
    shown = notebook.run(sh(script, "--nodes 1 -o ends"))
    assert shown.lines == ["0 of 1: 1"], "one node alone has no label"
    assert notebook.value("[end.node for end in ends]") == [1]


def test_a_script_of_a_rank_has_its_place_and_folder(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast\nimport os\nos.makedirs('below', exist_ok=True)\nos.chdir('below')"
    )
    shown = notebook.run(sh(f"{DUMP}\npwd\nls -d ../below", "-t 3 -o ends --env GIVEN=1"))
    notebook.run("%%sky_broadcast\nos.chdir('..')")
    (env,) = environments(shown)
    place = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")
    assert [env[name] for name in place] == ["3", "1", "4", "2", "1"]
    info = InstanceInfo.from_plain(json.loads(env["COMPUTE_POOL"]))
    assert (info.rank, info.node, info.world_size) == (3, 1, 4)
    assert (env["FROM_POOL"], env["GIVEN"]) == ("1", "1")
    assert (env["SKYPILOT_NUM_NODES"], env["SKYPILOT_NODE_RANK"]) == ("1", "0")
    assert env["MASTER_ADDR"] == env["SKYPILOT_NODE_IPS"], "a meeting point of its own"
    assert Path(shown.lines[-2]).name == "below", "the folder where the rank is now"
    assert notebook.value("[(end.node, end.status) for end in ends]") == [(1, 0)]


def test_a_script_of_a_rank_is_in_that_ranks_log(notebook: Notebook) -> None:
    failed = notebook.fail(sh("echo its last word; exit 5", "-t -1"))
    assert "node 1 of 2" in failed.text
    assert "exit code 5" in failed.text
    assert "its last word" in notebook.run("%sky_logs -t 3").text
    assert "its last word" not in notebook.run("%sky_logs -t 2").text


@HERE
def test_a_script_of_a_rank_runs_while_other_ranks_work(notebook: Notebook) -> None:
    gate = notebook.folder / "other ranks"
    notebook.run(
        f"%%sky_broadcast -a -t 0:3\nimport os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    )
    assert notebook.run(sh("echo $RANK", "-t 3 --busy refuse")).stdout == "3\n"
    refused = notebook.fail(sh("echo $RANK", "-t 2 --busy refuse"))
    assert "is running" in refused.text
    gate.touch()
    assert notebook.run(sh("echo $RANK", "-t head")).stdout == "0\n", "it waits"


@HERE
def test_script_runs_on_a_single_rank(notebook: Notebook) -> None:
    refused = notebook.fail(sh("echo run", "-t 0,2"))
    told = (
        "UsageError: --targets: one rank at a time, not 2; --nodes 0,2 runs the script on nodes\n"
    )
    assert refused.text == told
    assert re.search(r"--targets: .*\brank 7\b", notebook.fail(sh("echo run", "-t 7")).text)


def test_variables_of_the_line_and_secrets(notebook: Notebook) -> None:
    look = """python - <<'END'
import glob, os
words = b" ".join(open(path, "rb").read() for path in glob.glob("/proc/[0-9]*/cmdline") if os.path.exists(path))
print(os.environ["GIVEN"], os.environ["FROM_POOL"], os.environ["SECRET_WORD"] == "hunter" + "2")
print(b"hunter" + b"2" in words, b"a word of the " + b"script" in words)   # a word of the script
END"""
    shown = notebook.run(sh(look, "--env GIVEN='a b' --env FROM_POOL=2 --secret SECRET_WORD"))
    assert shown.lines == ["a b 2 True", "False False"]


def test_a_script_runs_in_its_folder(notebook: Notebook, tmp_path: Path) -> None:
    folder = tmp_path / "my scripts"
    folder.mkdir()
    (folder / "part.sh").write_text("echo from the folder")
    shown = notebook.run(sh(". ./part.sh; pwd", f"--workdir '{folder}'"))
    *copied, said, where = shown.lines  # on other machines a line says first what was copied there
    assert said == "from the folder"
    assert Path(where).name.startswith("my scripts")
    assert len(copied) < 2


def test_gpus_that_are_in_use_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho '0, 4, 81559'; echo '1, 40000, 81559'; echo '2, 1000, 81559'"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert resources.gpus_in_use("0") == ""
    assert resources.gpus_in_use("0,1").startswith("GPU 1: 41.9 of 86 GB ")
    assert "GPU 2: 1.0 of 86 GB" in resources.gpus_in_use("")
    program.write_text("#!/bin/sh\nexit 9")
    assert resources.gpus_in_use("") == ""


@pytest.mark.parametrize(
    ("text", "node", "expected"),
    [
        ("torchrun --nnodes=2 main.py", 0, "is_host=1"),
        ("torchrun --nnodes=2 main.py", 1, None),
        ("torchrun --rdzv_backend=c10d main.py", 0, "is_host=1"),
        ("torchrun --rdzv-backend c10d main.py", 1, "is_host=0"),
        ("torchrun --rdzv_backend=c10d a.py; torchrun --standalone b.py", 1, None),
    ],
)
def test_torchrun_gets_addresses_instead_of_guessing(
    text: str, node: int, expected: str | None
) -> None:
    info = InstanceInfo(
        peers=(Peer(0, "10.0.0.4"), Peer(1, "10.0.0.5")), node=node, local_world_size=2
    )
    found = environment.torchrun(environment.cluster_of(info, [0, 1], "task", 1234), text)
    assert found["PET_LOCAL_ADDR"] == ("10.0.0.4", "10.0.0.5")[node]
    assert found.get("PET_RDZV_CONF") == expected
    # on one machine it guesses right, unless the script meets at a port
    here = InstanceInfo(peers=(Peer(0, "127.0.0.1"), Peer(1, "127.0.0.1")), node=node)
    found = environment.torchrun(environment.cluster_of(here, [0, 1], "task", 1234), text)
    meets = "c10d" in text and "standalone" not in text
    assert found == ({"PET_RDZV_CONF": f"is_host={1 - node}"} if meets else {})


STATIC = {
    "NNODES": "2",
    "NPROC_PER_NODE": "4",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "1234",
}


@pytest.mark.parametrize(
    ("text", "nodes", "expected"),
    [
        ("torchrun main.py", [0, 1], STATIC),
        ("set -e\npython -m torch.distributed.run --nnodes=$N main.py", [0, 1], STATIC),
        (
            "torchrun --rdzv_backend=c10d main.py",
            [0, 1],
            {
                "NNODES": "2",
                "NPROC_PER_NODE": "4",
                "RDZV_ENDPOINT": "10.0.0.4:1234",
                "RDZV_ID": "task",
            },
        ),
        ("torchrun main.py", [1], {"NPROC_PER_NODE": "4"}),
        ("torchrun --standalone main.py", [0, 1], {}),
        ("torchrun --nnodes=1 main.py", [0, 1], {}),
        ("torchrun --nnodes '1:1' main.py", [0, 1], {}),
        ("torchrun --nnodes=16 main.py", [0, 1], STATIC),
        ("bash train.sh", [0, 1], {}),
    ],
)
def test_torchrun_finds_the_nodes_without_options(
    text: str, nodes: list[int], expected: dict[str, str]
) -> None:
    info = InstanceInfo(peers=(Peer(0, "10.0.0.4"), Peer(1, "10.0.0.5")), node=1)
    cluster = environment.cluster_of(info, nodes, "task", 1234)
    assert environment.launch(cluster, 4, text) == {
        f"PET_{name}": value for name, value in expected.items()
    }


# ------------------------------------------------------------------------------------------ what is shown


def test_the_head_is_shown_and_all_are_labelled_by_node(notebook: Notebook) -> None:
    script = "echo node $SKYPILOT_NODE_RANK; echo error $SKYPILOT_NODE_RANK >&2"
    shown = notebook.run(sh(script))
    assert (shown.stdout, shown.stderr) == ("node 0\n", "error 0\n")
    shown = notebook.run(sh(script, "--only all"))
    assert sorted(shown.text.splitlines()) == [
        "[0] error 0",
        "[0] node 0",
        "[1] error 1",
        "[1] node 1",
    ]
    assert notebook.run(sh(script, "--only 1")).stdout == "node 1\n"


@HERE
def test_it_is_bash_with_pipes_and_options(notebook: Notebook) -> None:
    shown = notebook.run(sh("[[ abc == a* ]] && echo bash\nfalse | true\necho $? ${PIPESTATUS[*]}"))
    assert shown.lines == ["bash", "0 1 0"]
    failed = notebook.fail(sh("set -euo pipefail\nfalse | true\necho not reached"), "script")
    assert "exit code 1" in failed.text
    assert "not reached" not in failed.text
    assert notebook.run(sh("false\ntrue")).error is None, "the last command counts"


@HERE
def test_the_lines_of_a_complaint_are_those_of_the_cell(notebook: Notebook) -> None:
    failed = notebook.fail("%%sky_sh\necho one\nno_such_command")
    assert "line 3: no_such_command: " in failed.text
    assert "exit code 127" in failed.text


@HERE
def test_nothing_can_be_read(notebook: Notebook) -> None:
    assert notebook.run(sh("cat; read x || echo no input")).lines == ["no input"]


def test_exit_codes_and_last_lines_are_returned(notebook: Notebook) -> None:
    notebook.run(sh("echo a; echo node $SKYPILOT_NODE_RANK >&2", "-o ends"))
    assert notebook.value("[(e.node, e.status, sorted(e.tail.splitlines()), e.stopped) for e in ends]") == [
        (0, 0, ["a", "node 0"], False), (1, 0, ["a", "node 1"], False),
    ]  # fmt: skip


def test_script_runs_in_the_background(notebook: Notebook) -> None:
    gate = notebook.folder / "gate"
    notebook.run(sh(f"until [ -e '{gate}' ]; do sleep 0.05; done; echo late", "-a"))
    notebook.run("beside = get_ipython().magics_manager.registry['SkyMagics'].runs.pending[-1]")
    assert notebook.value("beside.done()") is False
    gate.touch()
    notebook.run("ends = beside.result(60)")
    assert notebook.value("[(end.status, end.tail) for end in ends]") == [(0, "late"), (0, "late")]


# ------------------------------------------------------------------------------------------ what fails


def test_a_node_that_fails_ends_the_others(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nkept = 5")
    failed = notebook.fail(
        sh(
            'if [ "$SKYPILOT_NODE_RANK" = 1 ]; then echo "no luck" >&2; exit 3; fi\nsleep 1000',
            "-o ends",
        )
    )
    assert failed.ename == "ScriptError"
    assert notebook.fields()["node"] == 1
    assert re.search(r"node 1 of 2 on \S+ .*exit code 3\n.*\n  no luck\nnode 0 ", failed.text)
    assert notebook.value("[(e.status, e.stopped) for e in ends]") == [
        (-signal.SIGTERM, True),
        (3, False),
    ]
    notebook.run("%%sky_broadcast -o found\nkept")
    assert notebook.value("found") == [5] * 4, "the ranks had no part in it"


@HERE
def test_error_names_the_node_and_cause(notebook: Notebook) -> None:
    caught = "try:\n    get_ipython().run_cell_magic('sky_sh', '-t 0', 'exit 4')\nexcept Exception as problem:\n    caught = problem"
    notebook.run(caught)
    assert notebook.value("(type(caught).__name__, caught.node, caught.status)") == (
        "ScriptError",
        0,
        4,
    )
    notebook.run("import pickle\ncopy = pickle.loads(pickle.dumps(caught))")
    assert notebook.value("(str(copy) == str(caught), copy.node, copy.status)") == (True, 0, 4)


@HERE
def test_script_ended_by_a_signal_names_it(notebook: Notebook) -> None:
    failed = notebook.fail(sh("kill -SEGV $$", "-t 0"))
    assert "SIGSEGV" in failed.text


@HERE
def test_the_last_traceback_is_the_cause(notebook: Notebook) -> None:
    script = "python - <<'END'\ndef load():\n    raise KeyError('column')\nload()\nEND\nresult=$?; echo afterwards; exit $result"
    failed = notebook.fail(sh(script, "-t 0"))
    assert "line 2, in load" in failed.text
    assert "KeyError: 'column'" in failed.text


REFUSED = {
    "--workdir no/such/folder": "there is no folder 'no/such/folder'",
    "--secret NOT_THERE_AT_ALL": "--secret NOT_THERE_AT_ALL: the notebook's environment has no such variable",
    "--nodes 7": "--nodes: there is no node 7",
    "--only 5": "node",
    "--wat": "--wat",
}


@HERE
def test_misuse_is_reported_in_a_line(notebook: Notebook) -> None:
    for options, words in REFUSED.items():
        failed = notebook.fail(sh("echo run", options))
        assert failed.ename == "UsageError", options
        assert words in failed.text
        assert "rank" not in failed.text


@HERE
def test_too_many_nodes_are_reported_at_once(notebook: Notebook) -> None:
    assert "--nnodes=4, and 2 nodes" in too_many_nodes_warning("torchrun --nnodes=4 main.py", 2)
    assert (
        too_many_nodes_warning(
            "torchrun --nnodes $N a.py; torchrun --nnodes=1:4 b.py; torchrun --nnodes=2 c.py", 2
        )
        == ""
    )
    failed = notebook.fail(
        sh("torchrun() { sleep 1000; }\ntorchrun --nnodes=4 main.py", "--timeout 1s")
    )
    assert failed.ename == "RunTimeout"


def end(node: int, status: int | None, **more: object) -> ScriptEnd:
    return ScriptEnd(node, f"host{node}", status, **more)  # type: ignore[arg-type]


def cause(text: str, *, follows: bool = False) -> ScriptCause:
    return ScriptCause(text, summary=text, follows=follows)


def test_node_with_the_cause_is_named_first(golden: Golden) -> None:
    lost = end(0, 1, cause=cause("RuntimeError: Connection closed by peer", follows=True))
    raised = end(1, 1, cause=cause("ValueError: x"))
    assert script_error([lost, raised], 2).node == 1
    knew = end(1, -15, stopped=True, cause=cause("ValueError: x"))
    assert script_error([lost, knew], 2).node == 1
    stopped = end(1, -15, stopped=True)
    error = script_error([lost, stopped, end(2, 0)], 3)
    assert (error.node, error.status) == (0, 1)
    golden(str(error))


def test_abort_in_native_code_is_explained(golden: Golden) -> None:
    aborted = cause("torchrun's rank 1 (local rank 1), process 7, was ended by SIGABRT")
    said = "terminate called after throwing\n  what():  Resource temporarily unavailable"
    error = script_error([end(0, 1, cause=aborted, message=said)], 1)
    assert "what():  Resource temporarily unavailable" in str(error)
    assert "gloo" not in str(error)
    ended = end(0, 1, cause=aborted, message="terminate called without an active exception")
    golden(str(script_error([ended], 1)))


def test_taken_port_and_missing_launcher_have_a_remedy(golden: Golden) -> None:
    busy = script_error([end(0, 1, cause=cause("DistNetworkError: … name: EADDRINUSE"))], 1)
    assert "$MASTER_PORT" in str(busy)
    missing = script_error([end(0, 127, tail="sky_sh: line 2: torchrun: command not found")], 1)
    golden(str(missing))
    there = script_error(
        [end(0, 127, tail="sky_sh: line 2: torchrun: command not found")], 1, has_torch=True
    )
    assert "--plugin torch" not in str(there)
    golden(str(there))
    other = script_error(
        [end(0, 127, tail="torchrun has begun\nsky_sh: line 3: nvcc: command not found")], 1
    )
    assert "PyTorch" not in str(other)


# ------------------------------------------------------------------------------------------ nothing is left

TREE = r"""sleep 1001 &
echo child $!
setsid sh -c 'echo "own session $$"; sleep 1002; true' &
python -c "
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(1, b'daemon %d\n' % os.getpid())  # in one piece: others print, too
        time.sleep(1003)
    os._exit(0)
os.wait()"
sh -c 'trap "" TERM; echo "deaf $$"; while :; do sleep 1; done' &
sleep 0.3
echo begun
"""
"""A child, a grandchild with a session of its own, a daemon whose parents have gone, and one that does not hear TERM."""


def all_gone(text: str) -> None:
    found = [
        pid for label in ("child", "own session", "daemon", "deaf") for pid in numbers(text, label)
    ]
    assert len(found) == 4
    assert [pid for pid in found if not gone(pid)] == []


def test_leftover_processes_of_a_script_are_ended_and_named(notebook: Notebook) -> None:
    shown = notebook.run(sh(TREE, "-t 0"))
    all_gone(shown.stdout)
    assert re.search(r"\[node 0: .*sleep 1001", shown.stderr)
    assert "sleep 1002" in shown.stderr


@HERE
def test_processes_that_end_by_themselves_are_not_named(notebook: Notebook) -> None:
    assert notebook.run(sh("(sleep 0.1; echo late) & echo first")).text == "first\nlate\n"


def test_stop_button_ends_all_processes(notebook: Notebook) -> None:
    shown = started(notebook, TREE + "wait", "-o ends")
    notebook.interrupt()
    notebook.finish(shown)
    assert shown.failure.ename == "RunInterrupted"
    assert "interrupted on nodes 0, 1" in shown.failure.text
    all_gone(shown.stdout)
    assert notebook.value("[end.stopped for end in ends]") == [True, True]


def test_time_limit_ends_all_processes(notebook: Notebook) -> None:
    shown = notebook.finish(notebook.start(sh(TREE + "wait", "--timeout 2s -t 0")))
    assert shown.failure.ename == "RunTimeout"
    assert re.search(r"\b2 s .*node 0\nnode 0's last lines:", shown.failure.text)
    assert "  begun" in shown.failure.text
    all_gone(shown.stdout)


SLOW_END = """%%sky_broadcast
import time
from skymagic.kernels.script import root_cause
quick = root_cause.root_cause
def slow(recorded, tail):
    time.sleep(3)
    return quick(recorded, tail)
root_cause.root_cause = slow;"""
QUICK_END = "%%sky_broadcast\nroot_cause.root_cause = quick"


@HERE
def test_rank_that_has_just_stopped_its_script_is_not_killed(
    notebook: Notebook,
) -> None:
    """A script that ignores SIGTERM is killed at the end of the grace period, when the notebook also looks for stuck ranks."""
    before = pids(notebook)
    notebook.run(SLOW_END)
    shown = notebook.finish(
        notebook.start(
            sh("trap '' TERM\necho begun\nwhile :; do sleep 1; done", "--timeout 1s -t 0")
        )
    )
    notebook.run(QUICK_END)
    assert re.search(r"\b1 s .*node 0\nnode 0's last lines:", shown.failure.text)
    assert pids(notebook) == before


SHARED = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
made = [SharedMemory(create=True, size=1000) for _ in range(200)]
with open(sys.argv[1], "w") as names:
    print(*(one.name for one in made), file=names)
print("begun", flush=True)
time.sleep(600)
"""


# ------------------------------------------------------------------------------------------ ranks and pools that end


def test_a_second_press_kills_and_so_does_the_end_of_the_rank(tmp_path: Path) -> None:
    with opened(tmp_path, "%sky_pool --nodes 1") as notebook:
        deaf = TREE + "trap '' TERM INT; while :; do sleep 1; done"
        shown = started(notebook, deaf)
        notebook.interrupt()
        notebook.watch(shown, lambda shown: "press again to kill" in shown.text)
        notebook.interrupt()
        assert notebook.finish(shown).error is not None
        all_gone(shown.stdout)
        notebook.run("%%sky_broadcast -o pid --head\nimport os\nos.getpid();")
        rank = notebook.value("pid")
        shown = started(notebook, deaf)
        os.kill(rank, signal.SIGKILL)
        notebook.finish(shown)
        assert shown.failure.ename == "RankDied"
        all_gone(shown.stdout)
        names = tmp_path / "names"
        notebook.run("%%sky_broadcast -o pid --head\nimport os\nos.getpid();")
        rank = notebook.value("pid")
        shown = started(notebook, f"python - {names} <<'END'{SHARED}END")
        os.kill(rank, signal.SIGKILL)
        notebook.finish(shown)
        made = names.read_text().split()
        assert len(made) == 200
        # the resource tracker of multiprocessing deletes it: it is not killed along
        until(lambda: not any(Path("/dev/shm", name).exists() for name in made))
        shown = started(notebook, deaf)
        os.kill(notebook.pid, signal.SIGKILL)
        all_gone(shown.stdout)


def test_a_failure_leaves_the_ranks_process_group_alone(shared_pools: Pools) -> None:
    pytest.importorskip("torch")
    reduce = (
        "%%sky_broadcast -o found\nimport torch, torch.distributed as dist\nfrom skymagic.runtime import rendezvous\n"
        "t = torch.ones(1)\ndist.all_reduce(t)\n(t.item(), rendezvous.generation());"
    )
    with shared_pools.lent("--ranks 2 --plugin torch", reduce) as torch_notebook:
        before = torch_notebook.value("found")
        torch_notebook.fail(sh("exit 1"))
        torch_notebook.run(reduce)
        assert torch_notebook.value("found") == before
        assert [total for total, _ in before] == [2.0, 2.0]


def test_a_port_that_another_holds_is_refused_before_it_hangs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text("print('not reached')")
    with (
        opened(tmp_path, "%sky_pool --ranks 1") as notebook,
        socket.create_server(("127.0.0.1", 0)) as busy,
    ):
        port = busy.getsockname()[1]
        ways = (
            f"--master_addr=$MASTER_ADDR --master_port={port} --node_rank=$SKYPILOT_NODE_RANK",
            f"--rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:{port} --rdzv_id $SKYPILOT_TASK_ID",
        )
        for way in ways:
            failed = notebook.fail(sh(f"torchrun --nnodes=1 --nproc_per_node=1 {way} train.py"))
            assert "EADDRINUSE" in failed.text
            assert "$MASTER_PORT" in failed.text
            assert "launch_agent" not in failed.text, "no frames of torchrun's own"
