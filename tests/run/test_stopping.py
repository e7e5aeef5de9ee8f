"""The stop button and `cancel`: who needs no grace period, what is told of where ranks were, and that nothing is lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from skymagic.plan.requests import Defaults
from tests.lab.golden import Golden
from tests.lab.notebook import ROOT, Failed, Notebook, Shown
from tests.lab.pools import borrowed

pytest.importorskip("torch")

SETUP = """import os, signal, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP"""
ALIVE = """%%sky_broadcast -o found
import torch, torch.distributed as dist
one = torch.ones(1)
dist.all_reduce(one)
one.item(), os.getpid(), globals().get('kept')"""
FOREVER = 1000.0
"""Seconds of grace that no test lives to see the end of."""

module_notebook = borrowed("--ranks 3 --plugin torch", SETUP, f"%config SkyMagic.grace = {FOREVER}")


@pytest.fixture
def notebook(module_notebook: Notebook) -> Iterator[Notebook]:
    """Whatever a test stops, the ranks are the same processes afterwards, with their variables, and reduce together."""
    module_notebook.run(f"%%sky_broadcast\n{SETUP}\nkept = dist.get_rank()")
    module_notebook.run(ALIVE)
    before = module_notebook.value("found")
    yield module_notebook
    module_notebook.run(ALIVE)
    after = module_notebook.value("found")
    assert (
        [row[:2] for row in after]
        == [row[:2] for row in before]
        == [(3.0, pid) for _, pid, _ in before]
    )
    assert all(row[2] is not None for row in after)


def kept(notebook: Notebook) -> list[object]:
    notebook.run("%%sky_broadcast -o r\nkept")
    return list(notebook.value("r"))


def begun(notebook: Notebook, body: str, options: str = "") -> Shown:
    """A cell that every rank has begun: `body` says so with ``begin()``."""
    notebook.run("%%sky_broadcast\ndef begin():\n    print('begun', flush=True)")
    cell = notebook.start(f"%%sky_broadcast --only all {options}\n{body}")
    return notebook.watch(cell, lambda shown: shown.text.count("begun") == 3)


def stopped(notebook: Notebook, cell: Shown) -> Failed:
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.failure.ename == "RunInterrupted"
    return cell.failure


# ------------------------------------------------------------------------------------ two presses


def test_a_second_press_at_once_does_not_spoil_the_next_cell(module_notebook: Notebook) -> None:
    """Ranks that ended at the first press are not killed by the second one."""
    module_notebook.run(f"%%sky_broadcast\n{SETUP}")
    for _ in range(4):
        cell = begun(module_notebook, "begin()\nwhile True: pass")
        module_notebook.interrupt()
        stopped(module_notebook, cell)
        module_notebook.run(ALIVE)
        assert [row[0] for row in module_notebook.value("found")] == [3.0] * 3


# ------------------------------------------------------------------------------------ where ranks wait in native code

HANGS = {
    "all_reduce": "dist.all_reduce(torch.ones(1 << 16))",
    "asynchronous": "dist.all_reduce(torch.ones(9), async_op=True).wait()",
    "barrier": "dist.barrier()",
    "objects": "dist.all_gather_object([None] * 3, kept)",
    "backward": "model(torch.randn(4, 8)).sum().backward()",
}


@pytest.mark.parametrize("name", HANGS)
def test_a_collective_that_hangs_is_left_without_grace(notebook: Notebook, name: str) -> None:
    notebook.run("%%sky_broadcast\nmodel = DDP(torch.nn.Linear(8, 8))")
    cell = begun(notebook, f"begin()\nif dist.get_rank() == 2:\n    time.sleep(300)\n{HANGS[name]}")
    error = stopped(notebook, cell)
    assert re.search(
        "rank 2 (at line 4|in get_rank, line 3|in begin, line 3)", error.evalue
    )  # it may still be on its way there
    assert "line 5" in error.evalue  # as one of the others may
    assert kept(notebook) == [0, 1, 2]
    notebook.run("%%sky_broadcast\ndel model")


def test_interrupt_during_an_import_frees_the_next_collective(
    notebook: Notebook, tmp_path: Path
) -> None:
    """DDP's first step imports modules: the interrupt is repeated after the import, when the rank waits in native code."""
    (tmp_path / "imported_slowly.py").write_text(
        "import time\nprint('begun', flush=True)\ntime.sleep(0.5)\n"
    )
    cell = begun(
        notebook,
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nif dist.get_rank() == 2:\n    begin()\n    time.sleep(300)\n"
        "__import__('imported_slowly')\ndist.barrier()",
    )
    stopped(notebook, cell)
    assert kept(notebook) == [0, 1, 2]


# what is waited for in the cell's own line raises that the connection closed, before Python takes the interrupt
@pytest.mark.parametrize("name", [name for name in HANGS if name != "asynchronous"])
def test_cleanup_on_interrupt_also_runs_after_a_collective(notebook: Notebook, name: str) -> None:
    notebook.run("%%sky_broadcast\nmodel = DDP(torch.nn.Linear(8, 8))")
    cell = begun(
        notebook,
        f"try:\n    begin()\n    if dist.get_rank() == 2:\n        time.sleep(300)\n    {HANGS[name]}\n"
        "except KeyboardInterrupt:\n    kept = 'saved'",
    )
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.error is None
    assert kept(notebook) == ["saved"] * 3
    notebook.run("%%sky_broadcast\ndel model")


def test_unfinished_collective_does_not_block_the_next_cell(
    notebook: Notebook,
) -> None:
    """All ranks leave the cell in Python and no connection is shut down, but the collective would be matched with the next one."""
    cell = begun(
        notebook,
        "try:\n    work = dist.barrier(async_op=True) if dist.get_rank() == 0 else None\n    begin()\n    time.sleep(300)\n"
        "except KeyboardInterrupt:\n    kept = 'saved'",
    )
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.error is None
    assert kept(notebook) == ["saved"] * 3


def test_ranks_that_clean_up_stay_in_their_collectives(notebook: Notebook) -> None:
    """They have handled the interrupt; their cleanup may use collectives."""
    go = notebook.folder / "go"
    cell = begun(
        notebook,
        f"try:\n    begin()\n    time.sleep(300)\nfinally:\n    if dist.get_rank() == 2:\n"
        f"        while not os.path.exists({str(go)!r}):\n            time.sleep(0.01)\n"
        "    total = torch.ones(1)\n    dist.all_reduce(total)\n    kept = total.item()",
    )
    notebook.interrupt()
    notebook.watch(
        cell, lambda shown: "press again to kill" in shown.text
    )  # several looks at who waits later
    go.touch()
    notebook.finish(cell)
    assert "ranks 0–2 at line 4" in cell.failure.evalue
    assert kept(notebook) == [3.0] * 3


# --------------------------------------------------------------------------------------------------- where ranks were


BEGIN_IN_ALL_REDUCE = """
import sys, threading, time
def begin_in_all_reduce():
    def look():
        at = None
        while at is None or sys._current_frames()[main].f_code.co_name != 'all_reduce' or sys._current_frames()[main].f_lasti != at:
            at = sys._current_frames()[main].f_lasti
            time.sleep(0.05)
        begin()
    main = threading.get_ident()
    threading.Thread(target=look).start()
"""
"""Says that a rank has begun once its main thread stays within all_reduce."""


def test_ranks_at_the_same_place_are_named_together(notebook: Notebook) -> None:
    notebook.run(f"%%sky_broadcast\n{BEGIN_IN_ALL_REDUCE}")
    cell = begun(
        notebook,
        "def load_batch():\n    begin()\n    while True:\n        pass\nif dist.get_rank() == 2:\n    load_batch()\n"
        "begin_in_all_reduce()\ndist.all_reduce(torch.ones(1))",
    )
    error = stopped(notebook, cell)
    assert error.evalue.splitlines()[0] == "interrupted on ranks 0–2"
    where = error.evalue.splitlines()[1]
    assert where.startswith("ranks 0, 1 in all_reduce, line 9; rank 2 in load_batch, line ")
    assert where[-1] in "45"


# ------------------------------------------------------------------------------------------------ cells that await


def test_a_cell_that_awaits_is_stopped(notebook: Notebook) -> None:
    error = stopped(notebook, begun(notebook, "import asyncio\nbegin()\nawait asyncio.sleep(300)"))
    assert error.evalue.splitlines()[1] == "ranks 0–2 at line 4"


@pytest.mark.parametrize(
    "body",
    ["time.sleep(300)", "while True: pass", "dist.get_rank() and dist.barrier()\ntime.sleep(300)"],
)
def test_blocking_code_in_an_async_cell_is_stopped(notebook: Notebook, body: str) -> None:
    error = stopped(
        notebook, begun(notebook, f"import asyncio\nawait asyncio.sleep(0)\nbegin()\n{body}")
    )
    assert "line 5" in error.evalue


def test_a_cell_that_awaits_while_it_tidies_up_is_waited_for(notebook: Notebook) -> None:
    cell = begun(
        notebook,
        "import asyncio\ntry:\n    begin()\n    await asyncio.gather(asyncio.sleep(300), asyncio.sleep(400))\nfinally:\n"
        "    print('tidying', flush=True)\n    await asyncio.sleep(0.3)\n    kept = 'saved'",
    )
    stopped(notebook, cell)
    assert kept(notebook) == ["saved"] * 3


# ----------------------------------------------------------------------------------------------- what stands still


@pytest.fixture
def impatient(notebook: Notebook) -> Iterator[Notebook]:
    """What stands still is pointed out after 1.5 s."""
    notebook.run("%config SkyMagic.stall_after = 1.5")
    yield notebook
    notebook.run(f"%config SkyMagic.stall_after = {Defaults.stall_after}")


def test_ranks_that_all_stand_still_are_pointed_out(golden: Golden, impatient: Notebook) -> None:
    cell = impatient.start(
        "%%sky_broadcast\ndef load():\n    time.sleep(300)\nload() if dist.get_rank() else time.sleep(300)"
    )
    impatient.watch(cell, lambda shown: "ranks 1, 2: line 4 → line 3 in load" in shown.standstill)
    golden(cell.standstill)
    stopped(impatient, cell)
    assert cell.standstill, "it stays where the user has stopped the cell"


def test_ranks_whose_processes_work_are_left_alone(impatient: Notebook) -> None:
    shown = impatient.run(
        "%%sky_broadcast\nimport subprocess, sys\n"
        "busy = 'import time; end = time.monotonic() + 2.5\\nwhile time.monotonic() < end: sum(range(1000))'\n"
        "_ = subprocess.run(['sh', '-c', f'{sys.executable} -c \"$0\"; true', busy])"
    )
    assert not shown.standstill


@pytest.mark.parametrize(
    "body",
    [
        "for i in range(3): print(i); time.sleep(0.7)",
        "if dist.get_rank() == 2:\n    for i in range(3): print(i); time.sleep(0.7)",
        "import sys\nfor i in range(3): sys.stderr.write(f'\\r{i}'); time.sleep(0.7)",
        "import skymagic as sky\nfor i in range(3): sky.report(i, loss=1.0); time.sleep(0.7)",
        "for i in range(3): open('log', 'a').write('step\\n'); time.sleep(0.7)",
        "import os\nfor i in range(3): os.system('sleep 0.7')",
        "import subprocess\n_ = subprocess.run(['sh', '-c', 'for i in 1 2 3; do echo $i > out; sleep 0.7; done'])",
        "import threading\ndef work():\n    for i in range(3): print(i); time.sleep(0.7)\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()",
        "if dist.get_rank() == 1:\n    for i in range(3): print(i); time.sleep(0.7)\ndist.barrier()",
    ],
    ids=["print", "hidden", "bar", "report", "file", "system", "child", "thread", "behind"],
)
def test_ranks_that_move_slowly_are_left_alone(impatient: Notebook, body: str) -> None:
    seen = impatient.start(f"%%sky_broadcast\n{body}")
    impatient.watch(seen, lambda shown: shown.done or bool(shown.standstill))
    assert not seen.standstill
    impatient.finish(seen)


def test_a_note_on_ranks_that_stand_still_is_withdrawn(impatient: Notebook, tmp_path: Path) -> None:
    go, end = tmp_path / "go", tmp_path / "end"
    cell = impatient.start(
        f"%%sky_broadcast\nfor _ in range(60):\n    time.sleep(5)\n    if os.path.exists({str(go)!r}): break\n"
        f"while not os.path.exists({str(end)!r}):\n    print('moves')\n    time.sleep(0.2)"
    )
    impatient.watch(cell, lambda shown: bool(shown.standstill))
    (note,) = [data for data in cell.rich if "no progress" in data["text/plain"]]
    assert "<details" in note["text/html"]
    assert "[" not in note["text/plain"]
    assert "stderr" not in cell.kinds
    go.touch()
    impatient.watch(cell, lambda shown: "moves" in shown.text)
    impatient.watch(cell, lambda shown: not shown.standstill)
    assert not cell.done, "it is withdrawn while the cell runs, not at its end"
    end.touch()
    impatient.finish(cell)


def test_failures_page_states_the_release_delay(golden: Golden) -> None:
    page = (ROOT / "docs" / "explanation" / "failures.md").read_text()
    assert f"{Defaults().stall_after:g} s" in page


# ---------------------------------------------------------------------------------------- cells beside the notebook


def beside(notebook: Notebook, body: str, options: str = "") -> Shown:
    """A cell with -a that every rank has begun; its handle is `run`."""
    notebook.run("%%sky_broadcast\ndef begin():\n    print('begun', flush=True)")
    cell = notebook.run(f"%%sky_broadcast -a --only all {options}\nbegin()\n{body}")
    notebook.run("run = _")
    return notebook.watch(cell, lambda shown: shown.text.count("begun") == 3)


def test_background_cell_is_stopped_by_its_handle(notebook: Notebook) -> None:
    cell = beside(notebook, "dist.get_rank() == 2 or dist.barrier()\ntime.sleep(300)")
    text = notebook.value("repr(run)")
    assert " on ranks 0–2: running for " in text
    assert ".cancel() stops it>" in text
    assert notebook.value("run.cancel()") is True
    error = notebook.fail("run.result()")
    assert error.ename == "RunInterrupted"
    assert "ranks 0, 1 in barrier, line 3; rank 2 at line 4" in error.evalue
    assert " on ranks 0–2: stopped after " in notebook.value("repr(run)")
    notebook.watch(cell, lambda shown: "stopped after" in shown.rich[0]["text/plain"])
    assert notebook.value("run.cancel(), run.done()") == (False, True)


def test_handle_is_redrawn_when_the_run_ends(notebook: Notebook) -> None:
    cell = beside(notebook, "pass")  # no value: on a busy machine it may come before the handle
    notebook.run("run.result()")
    notebook.watch(cell, lambda shown: ": done after " in shown.rich[0]["text/plain"])


def test_queued_cell_names_the_run_it_waits_for(golden: Golden, notebook: Notebook) -> None:
    beside(notebook, "time.sleep(300)", "-t 0:")
    number = notebook.value("run.number")
    behind = notebook.start("%%sky_broadcast -t 1\nkept = 'later'")
    said = f"[waits for cell {number} on ranks 0–2; to stop that one, stop this cell, then Out[{number}].cancel()]\n"
    notebook.watch(behind, lambda shown: shown.stdout == said)
    golden(stopped(notebook, behind).evalue)
    notebook.run(f"Out[{number}].cancel()")
    assert notebook.fail("run.result()").ename == "RunInterrupted"
    assert kept(notebook) == [0, 1, 2]


def test_queued_cell_can_be_stopped_by_its_handle(golden: Golden, notebook: Notebook) -> None:
    beside(notebook, "time.sleep(300)")
    waits = notebook.run("%%sky_broadcast -a\nkept = 'never'")
    notebook.run("second = _")
    notebook.watch(waits, lambda shown: "waits for cell" in shown.stdout)
    assert ": waiting for " in notebook.value("repr(second)")
    assert notebook.value("second.cancel()") is True
    golden(notebook.fail("second.result()").evalue)
    assert notebook.value("run.done(), run.cancel()") == (False, True)
    assert notebook.fail("run.result()").ename == "RunInterrupted"
    assert kept(notebook) == [0, 1, 2]


# ------------------------------------------------------------------------------------ while a cell displays large values

FIGURES = """%%sky_broadcast
import random, signal, threading
from IPython.display import Image, display
figure = Image(data=random.randbytes(3 << 18), format="png")  # 1 MB as base64
PRESSES_OF_A_CELL = 50

def press_stop():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

def display_while_stop_is_pressed():
    shown = stopped = 0
    while stopped < PRESSES_OF_A_CELL:
        timer = threading.Timer(random.uniform(0, 0.03), press_stop)
        try:
            timer.start()
            for _ in range(4):
                display(figure, display_id="figure", update=shown > 0)
                shown += 1
            timer.join()
        except KeyboardInterrupt:
            stopped += 1
            timer.join()
    return shown"""


def has_displayed(least: int, shown: Shown) -> bool:
    return len(shown.rich) >= least


def test_stop_during_large_displays_keeps_ranks(notebook: Notebook) -> None:
    """An interrupt arrives at any moment of sending a figure, which is sent completely or not at all."""
    notebook.run(FIGURES)
    for _ in range(4):
        notebook.run("%%sky_broadcast\ndisplay_while_stop_is_pressed();")
        assert kept(notebook) == [0, 1, 2]
    for least in (0, 1, 2) * 2:
        cell = begun(notebook, "begin()\nwhile True:\n    display(figure)")
        notebook.watch(cell, partial(has_displayed, least))
        stopped(notebook, cell)
        assert kept(notebook) == [0, 1, 2]


# ------------------------------------------------------------------------------------ what the errors name

TRAIN = """%%sky_broadcast
def train():
    weight = torch.ones(1 << 12, requires_grad=True)
    print('begun', flush=True)
    while True:
        loss = weight.sum()
        for _ in range(2000):
            loss = loss * 1.0
        time.sleep(0)
        loss.backward()"""


def test_stop_inside_library_names_line_of_user(notebook: Notebook) -> None:
    notebook.run(TRAIN)
    found = ""
    for _ in range(20):
        cell = notebook.start("%%sky_broadcast --only all\ntrain()")
        notebook.watch(cell, lambda shown: shown.text.count("begun") == 3)
        found += stopped(notebook, cell).evalue
        if "in loss.backward(), line 10 of train" in found:
            break
    assert "in loss.backward(), line 10 of train" in found
    assert "_engine_run_backward" not in found


def test_error_of_a_dead_rank_names_variables_to_clone(module_notebook: Notebook) -> None:
    # names that come first in the alphabet: the line has the first twelve
    module_notebook.run(f"%%sky_broadcast\n{SETUP}\na_layer, a_step = {{'a': 1}}, 5")
    error = module_notebook.fail(
        "%%sky_broadcast\nif dist.get_rank() == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    )
    (line,) = [line for line in error.text.splitlines() if "%sky_clone" in line]
    command = line[line.index("%sky_clone") :]
    assert command.startswith("%sky_clone 1 --from 0 ")
    assert {"a_layer", "a_step"} <= {*command.split()}
    assert not {"torch", "os", "time"} & {*command.split()}
    module_notebook.run(command)
    module_notebook.run("%%sky_broadcast -o r\na_layer, a_step")
    assert module_notebook.value("r") == [({"a": 1}, 5)] * 3


def test_clone_command_of_many_names_ends_its_line(module_notebook: Notebook) -> None:
    """The rest of the line is a command that can be copied."""
    names = [f"a_{number:02}" for number in range(14)]
    cell = "".join(f"{name} = {number}\n" for number, name in enumerate(names))
    module_notebook.run(f"%%sky_broadcast\n{SETUP}\n{cell}")
    error = module_notebook.fail(
        "%%sky_broadcast\nif dist.get_rank() == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    )
    (line,) = [line for line in error.text.splitlines() if "%sky_clone" in line]
    assert re.search(r" \(the first 12 of \d\d\): %sky_clone ", line)
    command = line[line.index("%sky_clone") :]
    cloned = re.findall(r"\ba_\d\d\b", command)
    assert cloned
    module_notebook.run(command)
    module_notebook.run("%%sky_broadcast -o r -t 1\nsorted(n for n in globals() if n[:2] == 'a_')")
    assert module_notebook.value("r")[0] == sorted(cloned)


LOST = """import traceback
class Slow:
    def __del__(self):
        print('begun', flush=True)
        time.sleep(1000)
def work():
    slow = Slow()
    del slow
    time.sleep(1000)
try:
    work()
except KeyboardInterrupt:
    traceback.print_exc()
    print(traceback.format_exc())
    raise"""


def test_no_stop_prints_internal_frames(module_notebook: Notebook) -> None:
    """The first interrupt is lost in a destructor, which Python prints; the cell itself prints the second one."""
    module_notebook.run(f"%%sky_broadcast\n{SETUP}")
    cell = module_notebook.start(f"%%sky_broadcast --only all\n{LOST}")
    module_notebook.watch(cell, lambda shown: shown.text.count("begun") == 3)
    module_notebook.interrupt()
    module_notebook.watch(cell, lambda shown: shown.text.count("KeyboardInterrupt") >= 3)
    module_notebook.interrupt()
    module_notebook.finish(cell)
    assert "Exception ignored in" in cell.text
    for internal in ("interrupts.py", "in fall", "skymagic/"):
        assert internal not in cell.text + cell.failure.text
