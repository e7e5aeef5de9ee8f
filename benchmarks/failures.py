"""What it takes to go on after a failure: a rank raises, is killed, or the user stops a collective; torchrun and others beside it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import cluster, peers
from benchmarks.figures import RANKS, Figure, median, say
from skymagic.errors import RankDied, RankError, RunInterrupted
from skymagic.pool import Pool

RAISES = 50
KILLS = 10
STOPS = 10
TORCHRUNS = 3
VICTIM = 2
DEADLINE = 40.0
"""Seconds after which another tool counts as hanging."""

STAMP = Path(tempfile.gettempdir()) / f"bench-failed-at-{os.getpid()}"
"""Where the victim writes when it failed."""
STORE = STAMP.with_name(STAMP.name + "-store")
"""Where ipyparallel's engines meet."""
FAIL = f"""\
import os, signal, time, torch, torch.distributed as dist
ones = torch.ones(1)
if dist.get_rank() == {VICTIM}:
    time.sleep(0.1)  # the others wait by then
    with open({str(STAMP)!r}, "w") as stamp:
        stamp.write(repr(time.time()))
    {{fault}}
dist.all_reduce(ones)
"""
RAISE = FAIL.format(fault="raise ValueError('planted')")
KILL = FAIL.format(fault="os.kill(os.getpid(), signal.SIGKILL)")
STUCK = f"""\
import torch, torch.distributed as dist
if dist.get_rank() != {VICTIM}:
    dist.all_reduce(torch.ones(1))
else:
    import time; time.sleep(3600)
"""
NEXT = """\
import torch, torch.distributed as dist
total = torch.full((1,), dist.get_rank() + 1.0); dist.all_reduce(total)
total.item(), globals().get("keepsake")
"""
TOTAL = RANKS * (RANKS + 1) / 2


@dataclass
class Rounds:
    """Times of one kind of failure, in seconds by round."""

    ended: list[float] = field(default_factory=list)
    """From the failure to the error."""
    after: list[float] = field(default_factory=list)
    """From the error to the end of the next cell, in which all ranks reduce."""
    intact: int = 0
    """Rounds in which the error was the right one, the next cell right, and every living rank had its variables."""


def keep(pool: Pool, number: int) -> list[str]:
    """Give each rank a variable to lose; what each holds."""
    cluster.run(
        pool, f"import os\nkeepsake = f'{number} of rank {{os.environ[\"RANK\"]}}'", timeout=60
    )
    return [f"{number} of rank {rank}" for rank in range(RANKS)]


def rounds(
    pool: Pool,
    times: int,
    fail: Callable[[Pool], tuple[float, BaseException | None]],
    kind: type,
    *,
    dies: bool,
) -> Rounds:
    """Fail so often.

    Args:
        fail: runs a cell that fails; returns the `time.time()` of the failure, and the error.
        kind: of error that is expected.
        dies: the victim loses its variables.
    """
    found = Rounds()
    for number in range(times):
        kept: list[str | None] = [*keep(pool, number)]
        if dies:
            kept[VICTIM] = None
        failed_at, problem = fail(pool)
        error_at = time.time()
        values = cluster.run(pool, NEXT, timeout=60)
        found.after.append(time.time() - error_at)
        found.ended.append(error_at - failed_at)
        right = isinstance(problem, kind) and values == [(TOTAL, word) for word in kept]
        found.intact += right
        if not right:
            say(f"  round {number + 1}: {problem!r}, and then {values}")
    say(
        f"  {times} rounds: error after {median(found.ended):.3f} s, next cell {median(found.after):.3f} s"
    )
    return found


def stamped(body: str) -> Callable[[Pool], tuple[float, BaseException | None]]:
    """Run a cell whose victim writes down when it failed; the error counts when its text is ready to be shown."""

    def fail(pool: Pool) -> tuple[float, BaseException | None]:
        problem = cluster.problem_of(lambda: cluster.run(pool, body, timeout=60))
        "".join(getattr(problem, "_render_traceback_", list)())
        return float(STAMP.read_text()), problem

    return fail


def stopped(pool: Pool) -> tuple[float, BaseException | None]:
    """Run a cell that cannot end, and press the stop button."""
    with cluster.stop_button(0.5) as pressed:
        problem = cluster.problem_of(lambda: cluster.run(pool, STUCK))
    return pressed[0], problem


def figures() -> Iterator[Figure]:
    """One pool for all rounds of ours, then the others with the same script."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with cluster.started(RANKS, "torch") as pool:
            say(f"rank {VICTIM} raises")
            raised = rounds(pool, RAISES, stamped(RAISE), RankError, dies=False)
            say(f"kill -9 of rank {VICTIM}")
            killed = rounds(pool, KILLS, stamped(KILL), RankDied, dies=True)
            say("the stop button")
            pressed = rounds(pool, STOPS, stopped, RunInterrupted, dies=False)
        say("torchrun of the same")
        again = median(
            [peers.torchrun(peers.INIT + NEXT + peers.END, RANKS).seconds for _ in range(TORCHRUNS)]
        )
        yield from of_raise(raised, again)
        yield from of_kill(killed, again)
        yield from of_stop(pressed, again)
        yield from others(median(raised.ended))
    finally:
        for path in (STAMP, STORE):
            path.unlink(missing_ok=True)
        for path in STORE.parent.glob(f"{STORE.name}-*"):
            path.rmdir()


def of_raise(found: Rounds, again: float) -> Iterator[Figure]:
    """Lines for a rank that raises; `again` is what a new torchrun takes."""
    runs = [(peers.torchrun(peers.INIT + RAISE, RANKS), stamp()) for _ in range(TORCHRUNS)]
    message = median([ran.seen("ValueError: planted") - at for ran, at in runs])
    end = median([ran.ended - at for ran, at in runs])
    what = f"rank {VICTIM} raises"
    yield Figure(
        f"{what}: to the error, median", median(found.ended), "s", end, "torchrun's end", limit=0.2
    )
    yield Figure(f"{what}: to the error, worst of {RAISES}", max(found.ended), limit=1.0)
    yield Figure(
        f"{what}: to the error, median", median(found.ended), "s", message, "torchrun's message"
    )
    yield Figure(
        f"{what}: next all_reduce, median", median(found.after), "s", again, "torchrun", limit=0.5
    )
    yield Figure(
        f"{what}: next all_reduce, worst of {RAISES}", max(found.after), "s", again, "torchrun"
    )
    yield Figure(
        f"{what}: variables intact", float(found.intact), "×", limit=float(RAISES), least=True
    )


def of_kill(found: Rounds, again: float) -> Iterator[Figure]:
    """Lines for a rank that is killed."""
    runs = [(peers.torchrun(peers.INIT + KILL, RANKS), stamp()) for _ in range(TORCHRUNS)]
    end = median([ran.ended - at for ran, at in runs])
    what = f"kill -9 of rank {VICTIM}"
    yield Figure(
        f"{what}: to the error, worst of {KILLS}",
        max(found.ended),
        "s",
        end,
        "torchrun's end",
        limit=1.5,
    )
    yield Figure(
        f"{what}: all ranks work again, worst", max(found.after), "s", again, "torchrun", limit=2.0
    )
    yield Figure(
        f"{what}: the others' variables intact",
        float(found.intact),
        "×",
        limit=float(KILLS),
        least=True,
    )


def of_stop(found: Rounds, again: float) -> Iterator[Figure]:
    """Lines for the stop button."""
    end = median([interrupted_torchrun() for _ in range(TORCHRUNS)])
    what = "stop in a collective"
    yield Figure(
        f"{what}: to the prompt, worst of {STOPS}",
        max(found.ended),
        "s",
        end,
        "torchrun's end",
        limit=0.5,
    )
    yield Figure(
        f"{what}: next all_reduce, median", median(found.after), "s", again, "torchrun", limit=0.5
    )
    yield Figure(
        f"{what}: variables intact", float(found.intact), "×", limit=float(STOPS), least=True
    )


def stamp() -> float:
    """When the victim failed; infinite if it did not."""
    try:
        return float(STAMP.read_text())
    except OSError:
        return math.inf


def interrupted_torchrun() -> float:
    """Seconds from Ctrl-C, when all ranks are in the collective, to torchrun's end."""
    pressed: list[float] = []
    STAMP.unlink(missing_ok=True)
    ready = f"if dist.get_rank() == {VICTIM}:\n    open({str(STAMP)!r}, 'w').close()\n"

    def press(process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not STAMP.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)
        pressed.append(time.time())
        os.killpg(process.pid, signal.SIGINT)

    ran = peers.torchrun(peers.INIT + ready + STUCK, RANKS, meanwhile=press, limit=DEADLINE)
    return ran.ended - pressed[0]


# -- other tools -----------------------------------------------------------------------------------------------------

IPYPARALLEL = f"""
import logging, os, time
import ipyparallel as ipp
cluster = ipp.Cluster(n={RANKS}, log_level=logging.ERROR)
client = cluster.start_and_connect_sync()
for rank in range({RANKS}):
    client[rank].push({{"rank": rank}}, block=True)
client[:].execute('''
import torch.distributed as dist
dist.init_process_group("gloo", "file://{STORE}", rank=rank, world_size={RANKS})''', block=True)
try:
    client[:].execute({RAISE!r}).get(timeout={DEADLINE / 2})
    print("it ended well")
except TimeoutError:
    print("it hangs")
except Exception:
    print("error at", time.time())
os._exit(0)
"""
TORCHRUNX = f"""
import time
import torchrunx
def work():
    exec({RAISE!r}, {{}})
if __name__ == "__main__":
    try:
        torchrunx.Launcher(hostnames=["localhost"], workers_per_host={RANKS}, backend="gloo").run(work)
    except Exception as problem:
        print("error at", time.time(), flush=True)
"""
NBDISTRIBUTED = f"""
import os, time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "nbdistributed")
shell.run_line_magic("dist_init", "-n {RANKS}")
for _ in range(4):  # it says too early that it is ready, and gives up on a cell after 30 s
    shell.run_cell_magic("distributed", "", "import os; os.mkdir(f'{STORE}-{{rank}}')")
    if os.path.exists("{STORE}-0"):
        break
shell.run_cell_magic("distributed", "", {RAISE!r})
print("error at", time.time(), flush=True)
os._exit(0)
"""


def others(ours: float) -> Iterator[Figure]:
    """The first failure with what a notebook's user may have instead, each in a process of its own, beside our median."""
    what = f"rank {VICTIM} raises: to the error, median"
    say("ipyparallel")
    yield Figure(what, ours, peer=seconds(IPYPARALLEL, ""), who="ipyparallel")
    for package, script, needs in (
        ("torchrunx", TORCHRUNX, ("fabric",)),
        ("nbdistributed", NBDISTRIBUTED, ()),
    ):
        say(package)
        with peers.installed(package, *needs) as folder:
            if folder is None:
                yield Figure(f"{what} ({package} could not be installed)", ours)
                continue
            theirs = seconds(
                script, folder, 4 * DEADLINE if package == "nbdistributed" else DEADLINE + 20
            )
            if math.isnan(theirs):
                yield Figure(f"{what} ({package} did not run here)", ours)
            else:
                yield Figure(what, ours, peer=theirs, who=package)


def seconds(script: str, folder: str, limit: float = DEADLINE + 20) -> float:
    """From the failure to the error with another tool that lies in a folder; infinite without an error, NaN without a failure."""
    STAMP.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    ran = peers.python(script, env={"PYTHONPATH": path, "PATH": programs}, limit=limit)
    if not math.isfinite(stamp()):
        say(f"  it came to no failure:\n{ran.text[-4000:]}")
        return math.nan
    return ran.seen("error at") - stamp()
