"""A cell beside the notebook: its handle tells how it is, waits, stops it, and has what each rank wrote; other cells wait or are refused."""

from __future__ import annotations

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook, gate
from tests.lab.pools import borrowed

TEN = "for step in range(10):\n    print('step', step, 'of rank', rank)\n"

notebook = borrowed(
    "--ranks 2",
    "%%sky_broadcast\nimport os\nrank = int(os.environ['RANK']);",
    "def begin(line, body): return get_ipython().run_cell_magic('sky_broadcast', f'-a {line}', body)",
)


def begin(notebook: Notebook, body: str, line: str = "") -> None:
    """Begin a cell beside the notebook, with the handle `run`."""
    notebook.run(f"run = begin({line!r}, {body!r})")


def written(rank: int, steps: int = 10) -> str:
    return "".join(f"step {step} of rank {rank}\n" for step in range(steps))


def test_the_handle_of_a_run(golden: Golden, notebook: Notebook) -> None:
    way = gate(notebook.folder)
    begin(
        notebook,
        f"{TEN}\nif rank == 0:\n    open({str(way)!r}).read()\nprint('over')\nrank * 2;",
        "-o twice",
    )
    notebook.run("while '9 of rank 0' not in run.output(): run.wait(0.01)")
    assert notebook.value("run.status, run.done(), run.wait(0.0), 'twice' in globals()") == (
        "running",
        False,
        False,
        False,
    )
    assert notebook.value("run.output(0)") == written(0)
    golden(notebook.fail("run.result(0.0)").text.splitlines()[-1])
    golden(notebook.fail("run.output(7)", "no-rank").evalue)
    way.write_text("go")
    assert notebook.value("run.wait(60), run.status, run.result(), twice") == (
        True,
        "done",
        [0, 2],
        [0, 2],
    )
    # complete, of a rank that was not shown too; and another run's output is not its
    notebook.run("%%sky_broadcast\nprint('of a later cell')")
    assert notebook.value("[run.output(rank) for rank in (0, 1)]") == [
        f"{written(rank)}over\n" for rank in (0, 1)
    ]


def test_a_result_has_the_last_values_without_an_output(notebook: Notebook) -> None:
    begin(notebook, "rank + 5")
    assert notebook.value("run.result()") == [5, 6]
    begin(notebook, "import threading\nthreading.Lock()")
    assert "lock" in notebook.value("repr(run.result()[0])"), (
        "what cannot come back fails nothing: nobody has asked for it"
    )
    begin(notebook, "x = 1")
    assert notebook.value("run.result()") == [None, None]


def test_background_run_captures_names_at_once(notebook: Notebook) -> None:
    notebook.run(
        "import numpy as np, torch\n"
        "a, model, text = np.zeros(20_000_000), torch.zeros(5_000_000), bytearray(b'x' * 50_000_000)\na[-1] = -1"
    )
    notebook.run(
        "handle = get_ipython().run_cell_magic('sky_broadcast', '-a -o sums',"
        " 'float(a[0]), float(a[-1]), len(set(a[::1000])), model.sum().item(), set(text[::1000])')\n"
        "model.fill_(1)\ntext[:] = b'y' * len(text)\na.sort()\na += 1"
    )
    notebook.run("handle.result()")
    assert notebook.value("sums") == [(0.0, -1.0, 1, 0.0, {ord("x")})] * 2


def test_background_run_captures_values_before_it_returns(
    notebook: Notebook,
) -> None:
    notebook.run("import numpy as np\na = np.zeros(20_000_000)")
    notebook.run(
        "handle = get_ipython().run_cell_magic('sky_broadcast', '-a --ranks 2 -o sums', 'float(a[0]), float(a[-1])')\na += 1"
    )
    notebook.run("handle.result()")
    assert notebook.value("sums") == [(0.0, 0.0)] * 2


def test_handle_returns_long_output_and_none(notebook: Notebook) -> None:
    begin(notebook, "for i in range(100_000): print('täglich', i)", "-t 1")
    notebook.run("run.wait(60)")
    assert (
        notebook.value("run.output() == ''.join(f'täglich {i}\\n' for i in range(100_000))") is True
    )
    begin(notebook, "None")
    notebook.run("run.wait(60)")
    assert notebook.value("run.output(0)") == ""


def test_a_run_is_awaited(notebook: Notebook) -> None:
    way = gate(notebook.folder)
    begin(notebook, f"open({str(way)!r}).read()\n'late'", "-t 1 -o late")
    cell = notebook.start("import asyncio\nbeats = 0\nasync def beat():\n    global beats\n    while True:\n        beats += 1\n        print('beat', flush=True)\n        await asyncio.sleep(0.05)\n"
                          "beating = asyncio.ensure_future(beat())\nvalue = await run\nbeating.cancel();")  # fmt: skip
    notebook.watch(
        cell, lambda shown: shown.text.count("beat") > 3
    )  # the event loop goes on meanwhile
    way.write_text("go")
    notebook.finish(cell)
    assert notebook.value("value, run.status") == (["late"], "done")
    notebook.run("again = await run")
    assert notebook.value("again") == ["late"]


def test_a_run_that_fails_raises_where_it_is_awaited(notebook: Notebook) -> None:
    begin(notebook, "1 / 0")
    assert notebook.fail("await run").ename == "ZeroDivisionError"
    assert notebook.value("run.wait(), run.status") == (True, "failed")


def test_a_wait_that_is_cancelled_leaves_the_run(notebook: Notebook) -> None:
    way = gate(notebook.folder)
    begin(notebook, f"open({str(way)!r}).read()", "-t 0")
    waits = (
        "import asyncio\nasync def waits(): return await run\nawait asyncio.wait_for(waits(), 0.05)"
    )
    assert notebook.fail(waits).ename == "TimeoutError"
    assert notebook.value("run.status") == "running"
    way.write_text("go")
    assert notebook.value("run.wait(60), run.status") == (True, "done")


def test_a_run_that_is_cancelled(notebook: Notebook) -> None:
    begin(notebook, "import time\nprint('begun', flush=True)\ntime.sleep(1000)")
    notebook.run("while 'begun' not in run.output(1): run.wait(0.01)")
    assert notebook.value("run.cancel(), run.wait(60), run.status, run.cancel()") == (
        True,
        True,
        "stopped",
        False,
    )


def test_a_cell_that_is_not_to_wait_is_refused(golden: Golden, notebook: Notebook) -> None:
    way = gate(notebook.folder)
    begin(notebook, f"open({str(way)!r}).read()", "-t 0")
    refused = notebook.fail("%%sky_broadcast --busy refuse\n1", "pool-busy")
    golden(refused.evalue, hide=[r"\[\d+\]", r"\bcell \d+"])
    notebook.run("%%sky_broadcast --busy refuse -t 1 -o free\n'free'")
    notebook.run('%config SkyMagic.busy = "refuse"')
    notebook.fail("%%sky_broadcast --rank 0\n1", "pool-busy")
    notebook.fail("%%sky_sh\ntrue", "pool-busy")
    waits = notebook.start("%%sky_broadcast --busy wait -o after\n'after it'")
    way.write_text("go")
    notebook.finish(waits)
    notebook.run('%config SkyMagic.busy = "wait"')
    assert notebook.value("free, after") == (["free"], ["after it"] * 2)


def test_the_output_of_a_pool_that_has_ended(notebook: Notebook) -> None:
    begin(notebook, "print('last')")
    notebook.run("run.wait(60)")
    notebook.run("%sky_down")
    assert notebook.fail("run.output()").ename == "PoolStateError"
