"""A rank that fails, dies, is stuck or is interrupted: the cell ends with the cause, the others go on, the next cell works."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Failed, Notebook, gate, opened

pytest.importorskip("torch")

SETUP = """import os, signal, time, ctypes
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP"""
ALIVE = """%%sky_broadcast -o sums
import torch, torch.distributed as dist
one = torch.ones(1)
dist.all_reduce(one)
one.item();"""
PATIENT = "%config SkyMagic.grace = 6.0"
"""Ranks that are freed have longer than by default until they are killed: the machine may be busy."""
WAITS = "dist.all_reduce(torch.ones(1 << 16))"


@pytest.fixture(scope="module")
def module_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(
        tmp_path_factory.mktemp("hangs"), PATIENT, "%sky_pool --nodes 4 --plugin torch", SETUP
    ) as one:
        yield one


@pytest.fixture
def notebook(module_notebook: Notebook) -> Iterator[Notebook]:
    """The pool works before a test, and after it."""
    module_notebook.run(f"%%sky_broadcast\n{SETUP}\nkept = dist.get_rank()")
    yield module_notebook
    works(module_notebook)


def works(notebook: Notebook) -> None:
    shown = notebook.run(ALIVE)
    assert notebook.value("sums") == [4.0] * 4
    assert "process group" not in shown.text


def kept(notebook: Notebook) -> list[object]:
    notebook.run("%%sky_broadcast -o found\nglobals().get('kept')")
    return list(notebook.value("found"))


def pids(notebook: Notebook) -> list[int]:
    return list(
        notebook.value(
            "[row[3] for row in __import__('sys').modules['skymagic.pool.registry'].pool_named().status()]"
        )
    )


def fail(notebook: Notebook, body: str, options: str = "") -> Failed:
    return notebook.fail(f"%%sky_broadcast {options}\n{body}")


# ---------------------------------------------------------------------------------------------- a rank raises


@pytest.mark.parametrize(
    "collective",
    [
        "dist.broadcast(torch.ones(9), src=2)",
        "dist.all_gather([torch.ones(9) for _ in range(4)], torch.ones(9))",
        "dist.all_gather_object([None] * 4, kept)",
        "DDP(torch.nn.Linear(64, 64))(torch.randn(4, 64)).sum().backward()",
    ],
)
def test_others_are_freed_in_place(notebook: Notebook, collective: str) -> None:
    before = pids(notebook)
    error = fail(
        notebook, f"if dist.get_rank() == 2:\n    raise ValueError('planted')\n{collective}"
    )
    assert error.ename == "ValueError"
    assert "planted" in error.text
    assert "rank 2 of 4" in error.text
    assert "ranks 0, 1, 3 " in error.text
    assert "line 3" in error.text
    assert "Connection closed" not in error.text
    works(notebook)
    assert pids(notebook) == before
    assert kept(notebook) == [0, 1, 2, 3]


def test_groups_of_the_users_own_are_freed_and_made_again(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\npair = dist.new_group([0, 1])")
    error = fail(
        notebook,
        "if dist.get_rank() == 1:\n    raise KeyError('no')\nif dist.get_rank() == 0:\n    dist.barrier(group=pair)",
    )
    assert error.ename == "KeyError"
    shown = notebook.run("%%sky_broadcast\nif dist.get_rank() < 2:\n    dist.barrier(group=pair)")
    assert "pair" not in shown.text
    assert "pair: " not in error.text
    notebook.run("%%sky_broadcast\ndel pair")


def test_ddp_continues_training(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast\ntorch.manual_seed(0)\nmodel = DDP(torch.nn.Linear(8, 8))\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "def step():\n    optimizer.zero_grad(); model(torch.randn(4, 8)).pow(2).mean().backward(); optimizer.step()\n"
        "step(); step()"
    )
    error = fail(
        notebook, "step()\nif dist.get_rank() == 3:\n    raise RuntimeError('half way')\nstep()"
    )
    assert "half way" in error.text
    notebook.run(
        "%%sky_broadcast -o sums\nstep(); step()\nsum(p.double().sum().item() for p in model.parameters())"
    )
    assert len(set(notebook.value("sums"))) == 1


def test_groups_that_were_replaced_leave_nothing_open(notebook: Notebook) -> None:
    # the first wrapper imports much of torch, where functions may hold the group of that time, as this one does
    notebook.run(
        f"%%sky_broadcast\n{SETUP}\nmodel = DDP(torch.nn.Linear(8, 8))\ndef total(x, group=dist.group.WORLD): ..."
    )
    counts = (
        "%%sky_broadcast -o counts\nmodel(torch.randn(4, 8)).sum().backward()\n"
        "{kind: len(os.listdir(f'/proc/self/{kind}')) for kind in ('fd', 'task')}"
    )
    notebook.run(counts)
    before = notebook.value("counts")
    for _ in range(3):
        fail(notebook, f"if dist.get_rank() == 1:\n    raise ValueError('planted')\n{WAITS}")
        notebook.run(counts)
        assert notebook.value("counts") == before
    notebook.run("%%sky_broadcast\ndel model, total")


def test_the_group_in_variables_and_parameters_is_carried_over(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast\nworld = dist.group.WORLD\n"
        "def total(value, group=dist.group.WORLD, *, again=dist.group.WORLD):\n"
        "    for one in (group, again, world):\n        dist.all_reduce(value, group=one)\n"
        "    return value.item()"
    )
    fail(notebook, f"if dist.get_rank() == 1:\n    raise ValueError('planted')\n{WAITS}")
    notebook.run("%%sky_broadcast -o totals\ntotal(torch.ones(1))")
    assert notebook.value("totals") == [64.0] * 4
    notebook.run("%%sky_broadcast\ndel world, total")


def test_differing_parameters_are_reported(golden: Golden, notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nmodel = DDP(torch.nn.Linear(8, 8))")
    error = fail(
        notebook,
        "with torch.no_grad():\n    model.module.bias.add_(dist.get_rank() == 0)\n"
        "if dist.get_rank() == 1:\n    raise ValueError('no')\ndist.barrier()",
    )
    shown = notebook.run("%%sky_broadcast\nvalue = 1")
    said = error.text + shown.text
    golden.line(said, "model: ")
    remedy = "for p in model.parameters(): dist.broadcast(p.data, 0)"
    assert remedy in said
    notebook.run(f"%%sky_broadcast -o sums\n{remedy}\nmodel.module.bias.sum().item()")
    assert len(set(notebook.value("sums"))) == 1
    notebook.run("%%sky_broadcast\ndel model")


# ------------------------------------------------------------------------------------ a rank cannot be freed, or dies


def test_a_rank_that_holds_the_interpreter_is_replaced(golden: Golden, notebook: Notebook) -> None:
    before = pids(notebook)
    stuck = "sum(range(10**12))"  # native code that neither looks for signals nor gives the interpreter away
    error = fail(
        notebook,
        f"if dist.get_rank() == 1:\n    {stuck}\n"
        "elif dist.get_rank() == 0:\n    raise ValueError('planted')\nelse:\n    dist.barrier()",
    )
    assert error.ename == "ValueError"
    golden.line(error.text, "rank 1 ", "restarted")
    works(notebook)
    after = pids(notebook)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True, True]
    assert kept(notebook) == [0, None, 2, 3]


def test_a_crash_is_shown_down_to_the_cell(golden: Golden, notebook: Notebook) -> None:
    error = fail(
        notebook,
        "def crash():\n    ctypes.string_at(0)\nif dist.get_rank() == 2:\n    crash()\ndist.barrier()",
    )
    golden.line(error.text, "in crash")
    assert not re.search(r"\bline 5\b", error.text.split("in crash")[0])


def test_rank_dying_between_cells_is_noted_and_replaced(notebook: Notebook) -> None:
    before = pids(notebook)
    psutil.Process(before[3]).kill()
    while pids(notebook)[3] in (before[3], None):
        pass  # each look is a round trip to the notebook's kernel
    shown = notebook.run("%%sky_broadcast -o found\nglobals().get('kept')")
    assert notebook.value("found") == [0, 1, 2, None]
    assert "rank 3" in shown.text
    assert "SIGKILL" in shown.text


def test_children_of_a_dead_rank_go_with_it(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast -o child -t 1 --head\nimport subprocess\nchild = subprocess.Popen(['sleep', '300'])\nchild.pid"
    )
    child = psutil.Process(notebook.value("child"))
    assert (
        fail(notebook, "if dist.get_rank() == 1:\n    os._exit(9)\ndist.barrier()").ename
        == "RankDied"
    )
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


# ------------------------------------------------------------------------------------------------- the stop button


@pytest.mark.parametrize("body", ["!sleep 300", "import threading; threading.Event().wait()"])
def test_the_stop_button(notebook: Notebook, body: str) -> None:
    before = pids(notebook)
    cell = notebook.start(f"%%sky_broadcast\nprint('begun', flush=True)\n{body}")
    notebook.watch(cell, lambda shown: "begun" in shown.text)
    notebook.interrupt()
    notebook.finish(cell)
    if body[0] != "!" or cell.error:  # IPython ends a command and goes on, as in any notebook
        assert cell.error is not None
        assert cell.error.ename == "RunInterrupted"
    works(notebook)
    assert pids(notebook) == before
    assert kept(notebook) == [0, 1, 2, 3]


def test_stop_just_before_a_wait_works(notebook: Notebook) -> None:
    """`map` calls one C function after another, and Python checks for signals only later: the wait begins with a pending signal."""
    before = pids(notebook)
    groups = "%%sky_broadcast -o groups\nid(dist.group.WORLD)"
    notebook.run(groups)
    formed = notebook.value("groups")
    cell = notebook.start(
        "%%sky_broadcast --only all\nimport functools, hashlib, operator\nprint('begun', flush=True)\n"
        "busy = functools.partial(hashlib.pbkdf2_hmac, 'sha256', b'x', b'y', 400_000)\n"
        "list(map(operator.call, [busy, functools.partial(time.sleep, 300)]))"
    )
    notebook.watch(cell, lambda shown: shown.text.count("begun") == 4)
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.error is not None
    assert cell.error.ename == "RunInterrupted"
    assert pids(notebook) == before
    notebook.run(groups)
    assert notebook.value("groups") == formed  # a second signal has freed it: no group had to go
    works(notebook)


def test_cleanup_after_an_interrupt_is_awaited(notebook: Notebook) -> None:
    """Such as saving a checkpoint, which takes longer than the grace period."""
    notebook.run("%config SkyMagic.grace = 0.5")
    try:
        cell = notebook.start(
            "%%sky_broadcast --only all\ntry:\n    print('begun', flush=True)\n    time.sleep(300)\nfinally:\n"
            "    time.sleep(1.3)\n    kept = 'saved'"
        )
        notebook.watch(cell, lambda shown: shown.text.count("begun") == 4)
        notebook.interrupt()
        notebook.finish(cell)
    finally:
        notebook.run(PATIENT)
    shown = notebook.run("%%sky_broadcast -o found\nglobals().get('kept')")
    assert notebook.value("found") == ["saved"] * 4, f"{cell.text}\n{cell.error}\n{shown.text}"


def test_repeated_interrupt_does_not_cut_cleanup_short(notebook: Notebook) -> None:
    """The rank handles the interrupt right after its control thread has checked for it."""
    cell = notebook.start(
        """%%sky_broadcast --only all
import sys
from skymagic.kernels.rank import interrupts
ends, plain = os.pipe(), interrupts.scheduling_state
def scheduled():
    found = plain()
    if sys._getframe(1).f_code.co_name == '_is_blocked':
        os.write(ends[1], b"x")  # the main thread goes on, and handles the interrupt
        time.sleep(0.3)
    return found
interrupts.scheduling_state = scheduled
signal.siginterrupt(signal.SIGINT, False)  # so that no signal ends the read
try:
    print('begun', flush=True)
    ctypes.CDLL(None).read(ends[0], ctypes.create_string_buffer(1), 1)
    time.sleep(300)
finally:
    interrupts.scheduling_state = plain
    signal.siginterrupt(signal.SIGINT, True)
    time.sleep(1.0)
    kept = 'saved'"""
    )
    notebook.watch(cell, lambda shown: shown.text.count("begun") == 4)
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.error is not None
    assert cell.error.ename == "RunInterrupted"
    assert kept(notebook) == ["saved"] * 4


def test_a_cell_that_handles_the_interrupt_ends_well(notebook: Notebook) -> None:
    cell = notebook.start(
        "%%sky_broadcast --only all -o found\ntry:\n    print('begun', flush=True)\n    time.sleep(300)\n"
        "except KeyboardInterrupt:\n    kept = 'early'\nkept"
    )
    notebook.watch(cell, lambda shown: shown.text.count("begun") == 4)
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.error is None
    assert notebook.value("found") == ["early"] * 4


PRESS = "class Press:\n    def __reduce__(self):\n        return os.kill, (notebook_pid, signal.SIGINT)\n"
"""On its way back to the notebook it presses the stop button there."""


@pytest.mark.parametrize(
    "body",
    [
        f"{PRESS}(Press() if dist.get_rank() == 2 else None, dist.get_rank())",
        "_ = signal.signal(signal.SIGINT, signal.SIG_IGN); dist.barrier()\n"
        "if dist.get_rank() == 2:\n    os.kill(notebook_pid, signal.SIGINT)\n"
        "time.sleep(0.3)\nNone, dist.get_rank()",
    ],
    ids=["while values come back", "but no rank takes notice"],
)
def test_a_press_for_a_cell_that_has_ended_loses_nothing(
    golden: Golden, notebook: Notebook, body: str
) -> None:
    notebook.run("import os, signal\nnotebook_pid = os.getpid()\nfound = None")
    error = fail(notebook, body, "-o found")
    assert error.ename == "RunInterrupted"
    golden(error.evalue)
    assert "skymagic/" not in error.text
    assert notebook.value("found") == [(None, 0), (None, 1), (None, 2), (None, 3)]


def test_stop_pressed_twice_while_values_return(golden: Golden, notebook: Notebook) -> None:
    notebook.run("import os, signal\nnotebook_pid = os.getpid()\nfound = None")
    error = fail(notebook, f"{PRESS}Press(), Press()", "-o found")
    assert error.ename == "RunInterrupted"
    golden(error.evalue)
    assert "skymagic/" not in error.text
    assert notebook.value("found") is None


def test_a_press_at_the_end_of_a_cell_stays_out_of_the_next(notebook: Notebook) -> None:
    notebook.run("import os, signal\nnotebook_pid = os.getpid()")
    for _ in range(10):
        cell = notebook.start(
            "%%sky_broadcast\nif dist.get_rank() == 2:\n    os.kill(notebook_pid, signal.SIGINT)"
        )
        notebook.finish(cell)
        assert cell.error is None or cell.error.ename == "RunInterrupted"
        notebook.run("%%sky_broadcast\ntime.sleep(0.1)")


def test_an_import_is_not_torn(notebook: Notebook) -> None:
    """A half-imported module could not be imported again."""
    path = notebook.folder / "slow_to_import.py"
    path.write_text("import time\nprint('importing', flush=True)\ntime.sleep(0.6)\nwhole = True\n")
    cell = notebook.start(
        "%%sky_broadcast --only all\nimport slow_to_import\nnever = 1\ntime.sleep(300)"
    )
    notebook.watch(cell, lambda shown: shown.text.count("importing") == 4)
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.error is not None
    assert cell.error.ename == "RunInterrupted"
    notebook.run("%%sky_broadcast -o whole\nslow_to_import.whole, 'kept' in globals()")
    assert notebook.value("whole") == [(True, True)] * 4


@pytest.mark.parametrize(
    "locks",
    [
        pytest.param("logger.setLevel(10); logger.isEnabledFor(20)", id="logging"),
        pytest.param("with condition: pass", id="condition"),
        pytest.param("os.waitpid(os.fork() or os._exit(0), 0)", id="fork"),  # logging's lock
    ],
)
def test_an_interrupt_leaves_no_lock_locked(notebook: Notebook, locks: str) -> None:
    notebook.run(
        "%%sky_broadcast\nimport concurrent.futures, logging, threading\nimport warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)  # of forks beside threads\n"
        "condition, logger = threading.Condition(), logging.getLogger('of a cell')\n"
        "executor = concurrent.futures.ThreadPoolExecutor(1)\n"
        "def is_free(lock): return lock.acquire(timeout=5) and not lock.release()"
    )
    for _ in range(5):
        cell = notebook.start(
            f"%%sky_broadcast --only all\nprint('begun', flush=True)\nwhile True:\n"
            f"    {locks}\n    for _ in range(100): pass"
        )
        notebook.watch(cell, lambda shown: shown.text.count("begun") == 4)
        notebook.interrupt()
        notebook.finish(cell)
        assert cell.error is not None
        assert cell.error.ename == "RunInterrupted"
        notebook.run(
            "%%sky_broadcast -o free\n"
            "[executor.submit(is_free, lock).result() for lock in (logging._lock, condition)]"
        )
        assert notebook.value("free") == [[True, True]] * 4


# ------------------------------------------------------------------------------------------- time limits and stalls


def test_timeout_shows_where_native_code_blocks(golden: Golden, notebook: Notebook) -> None:
    notebook.run("%config SkyMagic.grace = 1.0")  # rank 2 is killed after it in any case
    try:
        error = fail(
            notebook,
            "def crunch():\n    sum(range(10**12))\nif dist.get_rank() == 2:\n    crunch()\ndist.barrier()",
            "--timeout 1s",
        )
    finally:
        notebook.run(PATIENT)
    golden.line(error.text, "rank 2: line 5 → line 3 in crunch ")
    assert "ranks 0, 1, 3: line 6 → barrier" in error.text


def test_a_rank_that_is_a_collective_behind_is_pointed_out(notebook: Notebook) -> None:
    notebook.run("%config SkyMagic.stall_after = 1.5")
    try:
        cell = notebook.start(
            "%%sky_broadcast\nif dist.get_rank() == 2:\n    while not os.path.exists('go'):\n        time.sleep(60)\n"
            "dist.barrier()"
        )
        notebook.watch(cell, lambda shown: "rank 2: line 4" in shown.standstill)
        assert "rank 2 is behind" in cell.standstill
        assert "ranks 0, 1, 3: line 5 → barrier" in cell.standstill
        assert not cell.done
        notebook.interrupt()
        notebook.finish(cell)
        assert cell.standstill
    finally:
        notebook.run("%config SkyMagic.stall_after = 30.0")


def test_ranks_that_wait_for_one_that_has_ended_are_pointed_out(notebook: Notebook) -> None:
    notebook.run("%config SkyMagic.stall_after = 1.5")
    try:
        cell = notebook.start("%%sky_broadcast\nif dist.get_rank() == 2:\n    dist.barrier()")
        notebook.watch(cell, lambda shown: "rank 2: line 3 → barrier" in shown.standstill)
        assert "ranks 0, 1, 3 have ended" in cell.standstill
        notebook.interrupt()
        notebook.finish(cell)
    finally:
        notebook.run("%config SkyMagic.stall_after = 30.0")


def test_a_rank_that_works_alone_is_left_alone(notebook: Notebook) -> None:
    notebook.run("%config SkyMagic.stall_after = 0.6")
    try:
        shown = notebook.run(
            "%%sky_broadcast\nif dist.get_rank() == 0:\n    end = time.time() + 2\n    n = 0\n"
            "    def a(x): return x + 1\n    def b(x): return a(x)\n"
            "    while time.time() < end:\n        n = b(n)\n        n += 1\n        n = a(n)\n        sum(range(1000))"
        )
    finally:
        notebook.run("%config SkyMagic.stall_after = 30.0")
    assert not shown.standstill


# ---------------------------------------------------------------------------------------- what user code may do


def test_init_process_group_in_a_cell(golden: Golden, notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast -o r\ndist.init_process_group('gloo')\ndist.get_world_size()"
    )
    assert notebook.value("r") == [4] * 4
    golden.line(shown.stderr, "process group", hide=[r"/\S+:\d+: "])


def test_destroy_and_init_in_a_cell(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast -o r\ndist.destroy_process_group()\ndist.init_process_group('gloo')\n"
        "one = torch.ones(1)\ndist.all_reduce(one)\none.item()"
    )
    assert notebook.value("r") == [4.0] * 4


def test_the_group_stays_when_a_program_destroys_it(notebook: Notebook) -> None:
    """As PyTorch's DDP tutorial and accelerate do with a live model; twenty times, because it was a race."""
    shown = notebook.run(
        "%%sky_broadcast\nfrom torch.nn.parallel import DistributedDataParallel as DDP\ndef train():\n"
        "    dist.init_process_group('gloo')\n    model = DDP(module=torch.nn.Linear(4, 4))\n"
        "    model(torch.ones(2, 4)).sum().backward()\n    dist.destroy_process_group()\n    return model\n"
        "for _ in range(20):\n    model = train()"
    )
    assert shown.stderr.count("destroy_process_group changes nothing") == 20
    works(notebook)


def test_a_subgroup_can_be_destroyed(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast -o r\npart = dist.new_group([0, 1])\ndist.destroy_process_group(part)\n"
        "len(dist.distributed_c10d._world.pg_map)"
    )
    assert notebook.value("r") == [1] * 4
    works(notebook)


@pytest.mark.parametrize(
    ("context", "ranks"), [("fork", 4), ("spawn", 1)]
)  # each spawned one imports torch
def test_data_loader_workers(notebook: Notebook, context: str, ranks: int) -> None:
    notebook.run(
        f"%%sky_broadcast -o r -t 0:{ranks}\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "data = TensorDataset(torch.arange(8.0))\n"
        f"loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context='{context}')\n"
        "sum(batch[0].sum().item() for batch in loader)"
    )
    assert notebook.value("r") == [28.0] * ranks


def test_threads_of_a_cell_may_continue(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast\nimport threading\nover = threading.Event()\n"
        "worker = threading.Thread(target=lambda: (print('late'), over.wait()))\nworker.start()"
    )
    notebook.run("%%sky_broadcast -o r\nover.set(); worker.join(5); worker.is_alive()")
    assert notebook.value("r") == [False] * 4


# ---------------------------------------------------------------------------------------------------- the machinery


def test_restart_of_all_while_a_cell_runs(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -a -o later\ntime.sleep(300)")
    before = pids(notebook)
    notebook.run("%sky_restart")
    assert not set(before) & set(pids(notebook))
    assert kept(notebook) == [None] * 4


def test_suspended_notebook_continues(notebook: Notebook) -> None:
    kernel = psutil.Process(notebook.pid)
    cell = notebook.start(
        "%%sky_broadcast -o r\nfor i in range(40):\n    print(i, flush=True); time.sleep(0.05)\ni"
    )
    notebook.watch(cell, lambda shown: "3" in shown.text)
    kernel.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(psutil.TimeoutExpired):
            kernel.wait(timeout=3)  # longer than what is left of the cell
    finally:
        kernel.send_signal(signal.SIGCONT)
    notebook.finish(cell)
    assert cell.error is None
    assert cell.lines == [str(i) for i in range(40)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A pool without a process group, which works again after each test."""
    with opened(tmp_path_factory.mktemp("plain"), "%sky_pool --nodes 2") as one:
        yield one


def test_an_agent_that_hangs_is_given_up(plain: Notebook) -> None:
    """It reports no end of its ranks, although a time limit or a second stop has killed them."""
    agent = next(
        process
        for process in psutil.Process(plain.pid).children()
        if "skymagic.kernels.agent.agent" in process.cmdline()
    )
    agent.suspend()
    error = plain.fail("%%sky_broadcast --timeout 0.5\n1")
    assert "answer" in error.text
    assert "%sky_restart" in error.text
    assert not agent.is_running()
    plain.run("%sky_restart")
    plain.run("%%sky_broadcast -o r\n2")
    assert plain.value("r") == [2, 2]


def test_error_is_shown_before_groups_are_formed_again(
    notebook: Notebook,
) -> None:
    way = gate(notebook.folder)
    notebook.run(
        "%%sky_broadcast\nfrom skymagic.plugins._torch.groups import Group\nform = Group.form\ndef slow(self, info):\n"
        f"    if info.rank == 0:\n        open({str(way)!r}).read()\n    form(self, info)\nGroup.form = slow"
    )
    notebook.run(
        "from skymagic.pool.recovery import Recovery\nwaited, wait = [], Recovery.wait\n"
        "Recovery.wait = lambda *arguments: waited.append(arguments) or wait(*arguments)"
    )
    fail(notebook, f"if dist.get_rank() == 2:\n    raise ValueError('planted')\n{WAITS}")
    state = "__import__('sys').modules['skymagic.pool.registry'].pool_named().state.value"
    until_recovering(notebook, state)
    cell = notebook.start(ALIVE)
    way.write_text("go")
    assert notebook.finish(cell).error is None
    assert notebook.value(f"{state}, sums, len(waited)") == ("ready", [4.0] * 4, 0)
    notebook.run("%%sky_broadcast\nGroup.form = form")
    notebook.run("Recovery.wait = wait")


def until_recovering(notebook: Notebook, state: str) -> None:
    while notebook.value(state) != "recovering":
        pass  # each look is a round trip to the notebook's kernel
