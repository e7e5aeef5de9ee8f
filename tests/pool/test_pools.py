"""Pools: how they begin, what is refused, what ranks find in their environment, and that nothing is left whatever ends them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import IPython
import psutil
import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import ROOT, Notebook, opened
from tests.lab.waiting import until

SOON = 15.0  # seconds after which nothing may be left of a notebook that was killed


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook without a pool; tests end theirs."""
    folder = tmp_path_factory.mktemp("pools")
    path = os.pathsep.join([str(ROOT), str(write_plugins(folder / "site"))])
    with opened(folder, env={"PYTHONPATH": path, "POOL_TEST_SECRET": "hush-7391"}) as one:
        yield one


@pytest.fixture(autouse=True)
def no_pool_is_left(notebook: Notebook) -> Iterator[None]:
    yield
    notebook.run("%sky_down --all")
    assert family(notebook) == []


PLUGINS = '''
import contextlib, os, time
from skymagic.plugins import Plugin

def failing(where: str = "app", rank: int = 1, folder: str = ""):
    """Fails, ends the process, or waits for ever, on one rank."""
    @contextlib.contextmanager
    def around(info):
        if info.rank == rank:
            if where == "exit":
                os._exit(5)
            if where == "hang":
                open(os.path.join(folder, "hangs"), "w").close()
                time.sleep(600)
            raise LookupError("planted in the plugin")
        yield
    return Plugin(name="failing", around_app=around)

def counting(folder: str = ""):
    """Leaves a file when it is entered, and another when it is left."""
    @contextlib.contextmanager
    def around(info):
        open(os.path.join(folder, f"entered-{info.rank}-{os.getpid()}"), "w").close()
        yield
        open(os.path.join(folder, f"left-{info.rank}-{os.getpid()}"), "w").close()
    return Plugin(name="counting", around_app=around)
'''


def write_plugins(site: Path) -> Path:
    """A folder that holds an installed package with two plugins of a third party."""
    info = site / "pool_plugins-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "pool_plugins.py").write_text(PLUGINS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pool-plugins\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[skymagic.plugins]\nfailing = pool_plugins:failing\ncounting = pool_plugins:counting\n"
    )
    return site


def family(notebook: Notebook) -> list[psutil.Process]:
    """All processes that the notebook's kernel has started, but for zombies."""
    children = psutil.Process(notebook.pid).children(recursive=True)
    return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]


def folders(notebook: Notebook) -> list[Path]:
    """Where the pool in use has its files."""
    agent = "__import__('sys').modules['skymagic.pool.registry'].pool_named().agents.started[0]"
    return [Path(notebook.value(f"{agent}.{name}")) for name in ("directory", "store")]


def gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that are still there after a while."""
    return psutil.wait_procs(processes, timeout=SOON)[1]


# ------------------------------------------------------------------------------------------ made, used again, refused


HEAVY = {"debugpy", "tqdm", "numpy", "torch", "pandas", "matplotlib"}
if IPython.version_info >= (8,):  # IPython 7 imports it with its completer
    HEAVY.add("jedi")


def test_cell_options_make_a_pool_and_reuse_it_if_equal(
    golden: Golden,
    notebook: Notebook,
) -> None:
    first = notebook.run(
        f"%%sky_broadcast --nodes 2 -o pids\nimport os, sys\nos.getpid(), sorted({HEAVY!r} & sys.modules.keys())"
    )
    assert "starting 2 ranks" in first.said
    pids = [pid for pid, _ in notebook.value("pids")]
    assert len(set(pids)) == 2
    assert notebook.value("[loaded for _, loaded in pids]") == [[], []], (
        "nothing that the cell did not ask for"
    )
    again = notebook.run("%%sky_broadcast --nodes 2 -o again\nos.getpid()")
    assert again.stdout == ""
    assert notebook.value("again") == pids
    assert notebook.value("len(__import__('sys').modules['skymagic.pool.registry'].pools())") == 1
    notebook.run("%sky_pool main --nodes 2")
    notebook.run("%sky_pool main")
    before = {process.pid for process in family(notebook)}
    for line in (
        "%%sky_broadcast --nodes 3\n1",
        "%sky_pool main --plugin torch",
        "%sky_pool main --env A=1",
    ):
        error = notebook.fail(line)
        assert error.ename == "UsageError"
        golden(error.text)
    assert {process.pid for process in family(notebook)} == before
    notebook.run("%%sky_broadcast --pool main -o again\nos.getpid()")
    assert notebook.value("again") == pids


def test_two_pools_side_by_side_one_of_them_by_toml(notebook: Notebook) -> None:
    notebook.run("%sky_pool one --nodes 1")
    notebook.run("%%sky_pool two\nnodes = 2\n[env]\nFROM_TOML = 'yes'")
    notebook.run("%%sky_broadcast -o r\nimport os\nos.environ['FROM_TOML']")
    assert notebook.value("r") == ["yes", "yes"]
    notebook.run("%%sky_broadcast --pool one -o r\nx = 'one'")
    notebook.run("%%sky_broadcast --pool two -o r\n'x' in globals()")
    assert notebook.value("r") == [False, False]
    notebook.run("%%sky_broadcast -o r\n1")
    assert notebook.value("len(r)") == 2, "the latest"
    notebook.run("%sky_pool one")
    notebook.run("%%sky_broadcast -o r\nx")
    assert notebook.value("r") == ["one"]


def test_dry_run_prints_the_plan_and_starts_nothing(notebook: Notebook) -> None:
    shown = notebook.run("%sky_pool --nodes 2 --procs-per-node 3 --plugin torch --dry-run")
    assert "2 × 3" in shown.stdout
    assert "$0.00" in shown.stdout
    assert family(notebook) == []


# ------------------------------------------------------------------------------------------ mistakes


def test_missing_local_resources_are_reported_at_once(notebook: Notebook) -> None:
    error = notebook.fail(
        "%sky_pool --gpu A100:64 --memory 99999 --cpus 9999+ --pip there-is-no-such-package-7391"
    )
    assert error.ename == "UsageError"
    for words in (
        "A100",
        "--memory 99999",
        "--cpus 9999+",
        "there-is-no-such-package-7391 is not installed",
        "--provider ssh",
    ):
        assert words in error.text
    assert family(notebook) == []


@pytest.mark.parametrize(
    "line",
    [
        "%%sky_broadcast --pool nowhere\n1",
        "%sky_down nowhere",
        "%sky_restart --pool nowhere",
        "%sky_push x --pool nowhere",
    ],
)
def test_missing_pool_is_explained(notebook: Notebook, line: str) -> None:
    notebook.run("x = 1")
    error = notebook.fail(line, "no-pool")
    assert notebook.fields()["names"] == ("nowhere",)
    assert "%sky_pool" in error.text


# ------------------------------------------------------------------------------------------ a start that fails


@pytest.mark.parametrize(
    ("where", "words"),
    # the plugin's own line too
    [("app", ["LookupError: planted in the plugin", 'raise LookupError("planted in the plugin")']), ("exit", ["exit code 5"])],
)  # fmt: skip
def test_a_plugin_that_fails_on_one_rank(notebook: Notebook, where: str, words: list[str]) -> None:
    error = notebook.fail(f"%sky_pool --nodes 2 --plugin failing:where={where}")
    assert error.ename == "ProvisionError"
    assert [word for word in ["rank 1", *words] if word not in error.text] == []
    assert "skymagic/kernels" not in error.text
    assert family(notebook) == []
    assert "no pool" in notebook.run("%sky_status").said


def test_interrupt_while_a_pool_starts(notebook: Notebook) -> None:
    shown = notebook.start(
        f"%sky_pool --nodes 2 --plugin failing:where=hang,folder={notebook.folder}"
    )
    until((notebook.folder / "hangs").exists)  # the kernel is busy: nobody can say when
    notebook.interrupt()
    notebook.finish(shown)
    assert shown.failure.ename == "KeyboardInterrupt"
    assert family(notebook) == []
    notebook.run("%sky_pool --nodes 2")
    notebook.run("%%sky_broadcast -o r\n1")
    assert notebook.value("r") == [1, 1]


def test_third_party_plugin_is_entered_and_left_per_process(
    notebook: Notebook, tmp_path: Path
) -> None:
    """With the pool ends what a rank has started."""
    notebook.run(f"%sky_pool --nodes 2 --plugin counting:folder={tmp_path}")
    notebook.run(
        "%%sky_broadcast -o found\nimport os, subprocess\nos.getpid(), subprocess.Popen(['sleep', '600']).pid"
    )
    pids, started = zip(*notebook.value("found"), strict=True)
    children = [psutil.Process(pid) for pid in started]
    notebook.run("%%sky_broadcast\npass")
    notebook.run("%sky_down")
    assert gone(children) == []
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{word}-{rank}-{pid}" for word in ("entered", "left") for rank, pid in enumerate(pids)
    }


# ------------------------------------------------------------------------------------------ the environment


NAMES = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT COMPUTE_POOL SKYPILOT_NODE_IPS "
    "SKYPILOT_NUM_NODES SKYPILOT_NODE_RANK SKYPILOT_NUM_GPUS_PER_NODE SKYPILOT_TASK_ID GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME OMP_NUM_THREADS GIVEN"
).split()


def test_every_rank_of_two_nodes_with_two_ranks_knows_its_place(notebook: Notebook) -> None:
    """Compares each rank's environment with torchrun's and its `sky.instance_info()`."""
    notebook.run(
        "%sky_pool --nodes 2 --procs-per-node 2 --plugin torch --env GIVEN='with blank' --secret POOL_TEST_SECRET"
    )
    notebook.run(f"names = {NAMES}")
    notebook.run(
        "%%sky_broadcast -o envs\nimport os, torch, torch.distributed as dist, skymagic as sky\n"
        "total = torch.ones(1); dist.all_reduce(total)\n"
        "({name: os.environ.get(name) for name in names}, dist.get_rank(), total.item(), os.environ['POOL_TEST_SECRET'],\n"
        " vars(sky.instance_info()) | {'peers': len(sky.instance_info().peers), 'is_head': sky.instance_info().is_head})"
    )
    envs = notebook.value("envs")
    ports = set()
    for rank, (env, torch_rank, total, secret, info) in enumerate(envs):
        node, local = divmod(rank, 2)
        expected = {
            "RANK": rank,
            "LOCAL_RANK": local,
            "WORLD_SIZE": 4,
            "LOCAL_WORLD_SIZE": 2,
            "NODE_RANK": node,
            "GROUP_RANK": node,
        }
        expected |= {"GROUP_WORLD_SIZE": 2, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": 4}
        expected |= {
            "SKYPILOT_NUM_NODES": 2,
            "SKYPILOT_NODE_RANK": node,
            "SKYPILOT_NUM_GPUS_PER_NODE": 0,
        }
        assert {name: env[name] for name in expected} == {
            name: str(value) for name, value in expected.items()
        }
        assert [name for name in NAMES if not env[name]] == []
        assert env["GIVEN"] == "with blank"
        assert (torch_rank, total, secret) == (rank, 4.0, "hush-7391")
        place = {
            "rank": rank,
            "node": node,
            "local_rank": local,
            "world_size": 4,
            "total_nodes": 2,
            "local_world_size": 2,
            "peers": 2,
        }
        assert {name: info[name] for name in place} == place
        assert info["is_head"] is (node == 0)
        pool: dict[str, Any] = json.loads(env["COMPUTE_POOL"])
        assert (pool["rank"], pool["node"], pool["total_nodes"]) == (rank, node, 2)
        assert len(env["SKYPILOT_NODE_IPS"].splitlines()) == 2
        ports.add(env["MASTER_PORT"])
    assert len(ports) == 1
    head = psutil.Process(int(notebook.run("%sky_status").said.splitlines()[2].split()[3]))
    assert int(ports.pop()) in {
        c.laddr.port for c in head.net_connections("tcp") if c.status == "LISTEN"
    }
    listening = [
        c.laddr.ip
        for process in family(notebook)
        for c in process.net_connections("inet")
        if c.status == "LISTEN"
    ]
    assert {address for address in listening if not address.startswith("127.")} <= {"::1"}, (
        "no public address"
    )


@pytest.mark.parametrize("options", ["--dry-run", "", "--cpus 9999"])
def test_missing_secret_is_refused(golden: Golden, notebook: Notebook, options: str) -> None:
    refused = notebook.fail(f"%sky_pool unset --nodes 1 --secret NOT_SET_ANYWHERE {options}")
    golden(refused.text, hide=[r"\(\d+ CPUs?\)"])
    assert ("9999" in refused.text) == ("9999" in options)  # all mistakes at once


# ------------------------------------------------------------------------------------------ two notebooks


LATER = """import atexit, pathlib
from skymagic.pool import registry
atexit.register(lambda: pathlib.Path('pools').write_text(repr(registry.pools())))"""
"""What came before the pools ends after them: it may hang, as ipykernel's own end does."""


def test_notebooks_are_independent_and_shutdown_is_clean(
    notebook: Notebook, tmp_path: Path
) -> None:
    with opened(tmp_path, LATER) as other:
        both = (notebook, other)
        for one, shown in [(one, one.start("%sky_pool --nodes 2")) for one in both]:
            assert one.finish(shown).error is None
        cell = "%%sky_broadcast --only all -o r\nimport os\nfor _ in range(50): print(word)\n(os.environ['MASTER_PORT'], word);"
        for number, one in enumerate(both, 1):
            one.run(f"word = 'of notebook {number}'")
        ports = set()
        for number, (one, shown) in enumerate([(one, one.start(cell)) for one in both], 1):
            assert one.finish(shown).error is None
            assert sorted(shown.lines) == [
                f"[{rank}] of notebook {number}" for rank in (0, 1) for _ in range(50)
            ]
            assert {word for _, word in one.value("r")} == {f"of notebook {number}"}
            ports |= {port for port, _ in one.value("r")}
        assert len(ports) == 2, "ranks of each meet at a port of their own"
        left, processes = folders(other), family(other)
        assert not set(folders(notebook)) & set(left)
    assert gone(processes) == []
    assert [path for path in left if path.exists()] == []
    assert (tmp_path / "pools").read_text() == "[]"
    notebook.run("%%sky_broadcast -o r\nword")
    assert notebook.value("r") == ["of notebook 1"] * 2


# ------------------------------------------------------------------------------------------ ends


def test_nothing_is_left_of_a_start_whose_notebook_is_killed(tmp_path: Path) -> None:
    with opened(tmp_path) as one:
        shown = one.start("%sky_pool --nodes 2 --plugin torch")
        one.watch(shown, lambda cell: "starting" in cell.said)
        kernel = psutil.Process(one.pid)
        processes = kernel.children(recursive=True)
        os.kill(one.pid, signal.SIGKILL)
        processes += [child for process in list(processes) for child in _children(process)]
        assert gone(processes) == []


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(process.children(recursive=True))
    return []


def test_extension_is_loaded_again_and_unloaded(notebook: Notebook, tmp_path: Path) -> None:
    """Nothing is lost by it: pools, what ranks hold, settings, a cell that goes on."""
    gate = tmp_path / "gate"
    notebook.run("%sky_pool --nodes 1")
    notebook.run("%config SkyMagic.view_after = 623.0")
    notebook.run("%%sky_broadcast\nimport os, time\nkept = 7")
    processes = family(notebook)
    assert processes
    late = f"while not os.path.exists({str(gate)!r}): time.sleep(0.02)\nprint('not lost')\nkept + 5"
    beside = notebook.run(f"%%sky_broadcast -a -o late\n{late}")
    notebook.run("run = _")
    notebook.run("%load_ext skymagic")
    notebook.run("%reload_ext skymagic")
    assert "still running" in notebook.run("%unload_ext skymagic").text
    gate.touch()
    assert notebook.value("run.wait(60), late") == (True, [12])
    notebook.watch(beside, lambda seen: "not lost" in seen.text)
    notebook.run("%%sky_broadcast -o found\nkept")
    notebook.run("%load_ext skymagic")
    notebook.run("%%sky_broadcast -o found\nkept + 1")
    assert notebook.value("found") == [8]
    assert "623.0" in notebook.run("%config SkyMagic").text
    notebook.run("%sky_down")
    assert gone(processes) == []


def test_start_beside_files_named_like_python_modules(notebook: Notebook) -> None:
    """What starts the ranks uses Python's `selectors`; ranks find what lies beside the notebook, as the notebook does."""
    wrong = notebook.folder / "selectors.py"
    wrong.write_text("raise RuntimeError('the wrong one')")
    (notebook.folder / "mine.py").write_text("word = 'here'")
    try:
        notebook.run("%sky_pool --nodes 2")
        shown = notebook.run("%%sky_broadcast --only all\nimport mine\nprint(mine.word)")
        assert sorted(shown.lines) == ["[0] here", "[1] here"]
    finally:
        wrong.unlink()


SLOW_FORK = """import os, sys, time
if "skymagic.kernels.agent.agent" in sys.orig_argv:
    os.register_at_fork(after_in_parent=lambda: time.sleep(1.5))
"""


def test_rank_ready_before_its_fork_is_reported(notebook: Notebook, tmp_path: Path) -> None:
    """As on a busy machine."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_FORK)
    notebook.run(
        f"import os\npath = os.environ['PYTHONPATH']\nos.environ['PYTHONPATH'] = {str(tmp_path)!r} + os.pathsep + path"
    )
    try:
        notebook.run("%sky_pool --ranks 1")
        notebook.run("%%sky_broadcast -o r\n1")
        assert notebook.value("r") == [1]
    finally:
        notebook.run("os.environ['PYTHONPATH'] = path")
