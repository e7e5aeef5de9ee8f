"""Ending a pool while something runs on it: whoever waits for the run gets a PoolError at once, wherever the end comes from."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import KERNEL, borrowed

notebook = borrowed(KERNEL, "import skymagic as sky, threading", scope="function")

ENDLESS = "print('at work', flush=True)\nwhile True: __import__('time').sleep(0.05)"
ENDED = "pool 'brief' was ended while"
ENDS_AT_WORK = """
def ends(end):
    "End the pool on another thread, once a run is under way."
    def wait():
        pool = sky.find('brief').pool
        while not pool.runs.active_runs():
            __import__('time').sleep(0.05)  # until the run of the next cell is under way
        end(pool)
    global ending
    ending = threading.Thread(target=wait)
    ending.start()
"""
WAYS_TO_END = {
    "stop": "lambda pool: sky.find('brief').stop()",
    "down": "lambda pool: get_ipython().run_line_magic('sky_down', 'brief')",
    "down-all": "lambda pool: get_ipython().run_line_magic('sky_down', '--all')",
    "close": "lambda pool: pool.close()",
}
RUNS = {
    "cell": f"%%sky_broadcast\n{ENDLESS}",
    "some-ranks": f"%%sky_broadcast -t 1\n{ENDLESS}",
    "swallows-interrupts": "%%sky_broadcast\nimport time\nwhile True:\n    try: time.sleep(100)\n    except BaseException: pass",
    "script": "%%sky_sh\necho at work; sleep 1000",
    "python": f"sky.find('brief').run_cell({ENDLESS!r})",
    "calls": "@sky.function\ndef forever():\n    import time\n    while True: time.sleep(0.05)\n(forever() & forever() & forever()) >> sky.find('brief')",
    "joblib": "from joblib import Parallel, delayed\ndef forever(x):\n    import time\n    while True: time.sleep(0.05)\nParallel()(delayed(forever)(x) for x in range(4))",
    "everywhere": "@sky.function\ndef forever():\n    import time\n    while True: time.sleep(0.05)\nforever() @ sky.find('brief')",
}


@pytest.mark.parametrize("way", WAYS_TO_END)
def test_a_cell_ends_with_its_pool(golden: Golden, notebook: Notebook, way: str) -> None:
    notebook.run("%sky_pool brief --ranks 2")
    notebook.run(ENDS_AT_WORK)
    notebook.run(f"ends({WAYS_TO_END[way]})")
    cell = notebook.finish(notebook.start(RUNS["cell"]))
    assert cell.failure.ename == "PoolError"
    assert ENDED in cell.failure.evalue
    assert "%sky_pool" in cell.failure.evalue
    # another pool of its name can be made at once, although the first one may still be stopping
    notebook.run("%sky_pool brief --ranks 1")
    notebook.run("%%sky_broadcast -o again\n1 + 1")
    assert notebook.value("again") == [2]
    notebook.run("ending.join()\n%sky_down brief")
    golden(notebook.run("%sky_status").said)


@pytest.mark.parametrize("run", [name for name in RUNS if name != "cell"])
def test_whatever_runs_ends_with_its_pool(notebook: Notebook, run: str) -> None:
    if run == "joblib" and find_spec("joblib") is None:
        pytest.skip("joblib is not installed")
    notebook.run(f"%sky_pool brief --ranks 2 {'--plugin joblib' if run == 'joblib' else ''}")
    notebook.run(ENDS_AT_WORK)
    notebook.run(f"ends({WAYS_TO_END['stop']})")
    cell = notebook.finish(notebook.start(RUNS[run]))
    if run == "joblib" and cell.failure.ename == "PoolStateError":
        assert "stopp" in cell.failure.evalue  # a batch that joblib sent at the end, or just after
        return
    assert cell.failure.ename == "PoolError"
    assert ENDED in cell.failure.evalue


BACKGROUND = {
    "cell": f"%%sky_broadcast -a\n{ENDLESS}",
    "script": "%%sky_sh -a\necho at work; sleep 1000",
    "waits": f"%%sky_broadcast -a\n{ENDLESS}",
}


@pytest.mark.parametrize("kind", BACKGROUND)
def test_a_handle_ends_with_its_pool(notebook: Notebook, kind: str) -> None:
    notebook.run("%sky_pool brief --ranks 2")
    if kind == "waits":
        notebook.watch(
            notebook.start(f"%%sky_broadcast -a\n{ENDLESS}"), lambda seen: "at work" in seen.stdout
        )
    notebook.start(BACKGROUND[kind])
    notebook.run("run = _")
    expected = "waiting" if kind == "waits" else "running"
    notebook.run(f"import time\nwhile run.status != {expected!r}: time.sleep(0.02)")
    number = notebook.value("run.number")
    down = notebook.run("%sky_down").stdout
    stopped = {
        "cell": f"cell {number} on ranks 0, 1 was stopped",
        "script": f"the script of cell {number} on rank 0 was stopped",
        "waits": f"cell {number - 1} on ranks 0, 1 and cell {number} on ranks 0, 1 were stopped",
    }
    assert f"pool 'brief' is down; {stopped[kind]}\n" in down
    notebook.run("run.wait(30)")
    assert notebook.value("run.done(), run.cancel(), run.status") == (True, False, "stopped")
    failed = notebook.fail("run.result()")
    assert failed.ename == "PoolError"
    assert ENDED in failed.evalue
    assert "cancel()" not in notebook.value("repr(run)")
