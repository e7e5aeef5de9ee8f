"""Rounds of random faults in one pool: after each the pool works, and in the end nothing is left over.

    ROUNDS=200 SEED=7 python benchmarks/soak.py

Ends with 1 when a fault is not told as it should be, when the next cell does not work, when a rank loses variables that it
should keep, or when processes, descriptors, threads, shared memory or the notebook's memory have grown.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks import cluster
from skymagic.errors import RankDied, RankError, RunInterrupted, RunTimeout
from skymagic.pool import Pool
from skymagic.run import interrupt

RANKS = 4
WARM = 20
"""Rounds after which what there is counts as normal."""
HANG = 90.0
"""Seconds after which a round counts as hanging: every thread's stack is printed, and the soak ends."""
GONE = 10.0
"""Seconds that what was ended may take to go."""
MARK = "SKYMAGIC_SOAK"
"""In the environment of all processes of this soak, however far down."""

ALL_REDUCE = """\
import torch, torch.distributed as dist
_t = torch.full((1,), dist.get_rank() + 1.0); dist.all_reduce(_t)
_t.item(), globals().get("keepsake")
"""
TRAIN = """\
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
_have = torch.tensor([int("model" in globals())]); dist.all_reduce(_have)
if _have.item() < dist.get_world_size():
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step():
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()
"""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in a cell.

    ``{victim}`` in the body is the rank that it happens to; ``{other}`` is another one.
    """

    body: str
    expect: type[BaseException] | None = None
    """What the cell raises; None if it only takes its time."""
    before: str = ""
    """A cell of its own, which goes well: the first DDP wrapper of a rank imports for seconds, which a stop leaves whole."""
    lost: bool = False
    """Whether the victim loses its variables."""
    press: tuple[float, float] | None = None
    """When the stop button is pressed: seconds after the start, somewhere in between."""
    timeout: float | None = None
    pause: float = 0.0
    """Seconds for which the victim is stopped by SIGSTOP."""
    may: bool = False
    """Whether the cell may also end before the fault comes."""
    status: int | None = None
    """How a dead victim ended."""


ME = "import torch, torch.distributed as dist\nme = dist.get_rank()\n"
FAULTS: dict[str, Fault] = {
    "raise before a collective": Fault(
        ME + "if me == {victim}: raise ValueError('planted')\nt = torch.ones(9); dist.all_reduce(t)", RankError
    ),
    "raise in DDP backward": Fault(
        TRAIN + "def planted(grad): raise ValueError('planted')\n"
        "handle = next(model.parameters()).register_hook(planted) if dist.get_rank() == {victim} else None\n"
        "try:\n    step()\nfinally:\n    handle and handle.remove()",
        RankError,
    ),
    "kill -9": Fault(
        ME + "import os\nif me == {victim}: os.kill(os.getpid(), 9)\nt = torch.ones(9); dist.all_reduce(t)",
        RankDied, lost=True, status=-9,
    ),
    "segfault": Fault(
        ME + "import ctypes\nif me == {victim}: ctypes.string_at(0)\nt = torch.ones(9); dist.all_reduce(t)",
        RankDied, lost=True, status=-11,
    ),
    "os._exit(3)": Fault(
        ME + "import os\nif me == {victim}: os._exit(3)\nt = torch.ones(9); dist.all_reduce(t)",
        RankDied, lost=True, status=3,
    ),
    "stop in a collective": Fault(
        ME + "t = torch.ones(9)\nif me != {victim}: dist.all_reduce(t)\nelse:\n    import time; time.sleep(60)",
        RunInterrupted, press=(0.1, 0.4),
    ),
    "stop in time.sleep": Fault("import time\ntime.sleep(60)", RunInterrupted, press=(0.1, 0.4)),
    "stop in a loop": Fault("while True: pass", RunInterrupted, press=(0.1, 0.4)),
    "stop in training": Fault("while True: step()", RunInterrupted, before=TRAIN, press=(0.1, 0.4)),
    "stop at once": Fault(
        ME + "t = torch.ones(9)\nif me != {victim}: dist.all_reduce(t)\nelse:\n    import time; time.sleep(60)",
        RunInterrupted, press=(0.0, 0.02),
    ),
    "stop at the end": Fault("import time\ntime.sleep(0.1)", RunInterrupted, press=(0.095, 0.13), may=True),
    "timeout": Fault(
        ME + "t = torch.ones(9)\nif me != {victim}: dist.all_reduce(t)\nelse:\n    import time; time.sleep(60)",
        RunTimeout, timeout=0.5,
    ),
    "destroy_process_group": Fault("import torch.distributed as dist\ndist.destroy_process_group()"),
    "collectives out of step": Fault(
        ME + "if me == {victim}: raise ValueError('planted')\nw = dist.all_reduce(torch.ones(9), async_op=True); del w", RankError
    ),
    "the GIL held for 5 s": Fault(
        ME + "import ctypes\nif me == {victim}: ctypes.PyDLL(None).sleep(5)\nt = torch.ones(9); dist.all_reduce(t)"
    ),
    "raise while the GIL is held": Fault(
        ME + "if me == {victim}: sum(range(10**12))\nif me == {other}: raise ValueError('planted')",
        RankError, lost=True,
    ),
    "SIGSTOP for 3 s": Fault(
        ME + "import time\nfor _ in range(40):\n    t = torch.ones(9); dist.all_reduce(t); time.sleep(0.01)", pause=3.0
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ one round


@dataclass
class Round:
    """How one fault went."""

    fault: str
    victim: int
    seconds: float = 0.0
    """To the end of the cell, from the press of the stop button where there is one."""
    next_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        words = f"{self.fault:<28} rank {self.victim}  {self.seconds:6.2f} s  next cell {self.next_seconds:5.2f} s"
        return "\n      ".join([words, *self.wrong])


class Soak:
    """Owns the pool, and knows what its ranks hold."""

    def __init__(self, pool: Pool, chance: random.Random) -> None:
        self.pool = pool
        self.chance = chance
        self.number = 0
        self.keepsakes: list[str | None] = [None] * RANKS

    def keep(self) -> None:
        """Give each rank a variable to lose."""
        self.number += 1
        cluster.run(self.pool, f"import os\nkeepsake = f'{self.number} of rank {{os.environ[\"RANK\"]}}'", timeout=60)
        self.keepsakes = [f"{self.number} of rank {rank}" for rank in range(RANKS)]

    def round(self, name: str) -> Round:
        """One fault, and whether the pool works after it."""
        victim = self.chance.randrange(RANKS)
        this = Round(name, victim)
        self.keep()
        cluster.run(self.pool, FAULTS[name].before, timeout=60)
        self._fail(FAULTS[name], this)
        self._go_on(FAULTS[name], this)
        return this

    def _fail(self, fault: Fault, this: Round) -> None:
        body = fault.body.replace("{victim}", str(this.victim)).replace("{other}", str((this.victim + 1) % RANKS))
        after = self.chance.uniform(*fault.press) if fault.press else 0.0
        begun = time.perf_counter()
        problem = cluster.problem_of(lambda: self._run(fault, body, after, this.victim))
        this.seconds = time.perf_counter() - begun - after
        if problem is None and (fault.expect is None or fault.may):
            return
        if fault.expect is None or not isinstance(problem, fault.expect):
            this.wrong.append(f"raised {problem!r}, not {fault.expect and fault.expect.__name__}")
        elif isinstance(problem, RankDied) and (problem.rank, problem.status) != (this.victim, fault.status):
            this.wrong.append(f"names rank {problem.rank} with status {problem.status}, not {fault.status}")
        elif isinstance(problem, RankError) and "planted" not in str(problem):
            this.wrong.append(f"hides the cause: {problem}")

    def _run(self, fault: Fault, body: str, after: float, victim: int) -> None:
        with paused(self.pool, victim, fault.pause):
            if not fault.press:
                cluster.run(self.pool, body, timeout=fault.timeout)
                return
            with interrupt.deferred(), cluster.stop_button(after):
                cluster.run(self.pool, body, timeout=fault.timeout)
                if fault.may:
                    time.sleep(1.0)  # here the press comes when the cell is over

    def _go_on(self, fault: Fault, this: Round) -> None:
        begun = time.perf_counter()
        try:
            found = cluster.run(self.pool, ALL_REDUCE, timeout=30)
        except (Exception, KeyboardInterrupt) as problem:
            this.wrong.append(f"the next cell fails: {problem!r}")
            return
        this.next_seconds = time.perf_counter() - begun
        total = RANKS * (RANKS + 1) / 2
        kept = [None if fault.lost and rank == this.victim else word for rank, word in enumerate(self.keepsakes)]
        if found != [(total, word) for word in kept]:
            this.wrong.append(f"the next cell finds {found}, not {[(total, word) for word in kept]}")


@contextmanager
def paused(pool: Pool, rank: int, seconds: float) -> Iterator[None]:
    """SIGSTOP for a rank, and SIGCONT after so many seconds, while the block goes on."""
    pid = pool.agents.ranks[rank].pid
    if not seconds or pid is None:
        yield
        return
    signals = [
        threading.Timer(0.1, os.kill, (pid, signal.SIGSTOP)),
        threading.Timer(0.1 + seconds, os.kill, (pid, signal.SIGCONT)),
    ]
    for each in signals:
        each.start()
    try:
        yield
    finally:
        for each in signals:
            each.join()


# ------------------------------------------------------------------------------------------------ what is left


@dataclass(frozen=True)
class Inventory:
    """What a soak has open at one time."""

    counts: dict[str, int]
    nbytes: int
    """Memory of the notebook's own (unique set size)."""


def take(pool: Pool) -> Inventory:
    """Count, after a cell that leaves every rank with the same things open."""
    cluster.run(pool, TRAIN + "step()", timeout=60)
    gc.collect()
    me = psutil.Process()
    ranks = [psutil.Process(rank.pid) for rank in pool.agents.ranks.values() if rank.pid is not None]
    others = [one for one in processes() if one.pid not in {rank.pid for rank in ranks}]
    counts = {
        "processes": len(ranks) + len(others),
        "notebook: descriptors": me.num_fds(),
        "notebook: threads": me.num_threads(),
        "any rank: descriptors": max(rank.num_fds() for rank in ranks),
        "any rank: threads": max(rank.num_threads() for rank in ranks),
        "agent, forkserver, controller: descriptors": sum(one.num_fds() for one in others),
        "agent, forkserver, controller: threads": sum(one.num_threads() for one in others),
        "/dev/shm: files": len(shared_memory(pool)),
    }
    return Inventory(counts, me.memory_full_info().uss)


def processes() -> list[psutil.Process]:
    """All processes that this soak has started, orphans too."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                one.pid != os.getpid()
                and one.status() != psutil.STATUS_ZOMBIE
                and one.environ().get(MARK) == os.environ[MARK]
            ):
                found.append(one)
    return found


def shared_memory(pool: Pool) -> list[Path]:
    """Files of this pool in shared memory."""
    return [
        path for folder in Path("/dev/shm").glob(f"*{pool.job_id}*") for path in folder.rglob("*") if path.is_file()
    ]


SLACK = {
    "processes": 0,
    "notebook: descriptors": 2,
    "notebook: threads": 2,
    "any rank: descriptors": 4,
    "any rank: threads": 3,
    "agent, forkserver, controller: descriptors": 4,
    "agent, forkserver, controller: threads": 2,
    "/dev/shm: files": 0,
}
"""How much more may be there in the end: what is open for a moment at any time."""
GROWTH = 4 << 20
"""Bytes that the notebook may hold more in the end."""


def compare(pool: Pool, before: Inventory) -> list[str]:
    """What has grown, in words; what is on its way out has some seconds to go."""
    end = time.monotonic() + GONE
    while True:
        now = take(pool)
        grown = [
            f"{what}: {now.counts[what]}, after {WARM} rounds {count}"
            for what, count in before.counts.items()
            if now.counts[what] > count + SLACK[what]
        ]
        if not grown or time.monotonic() > end:
            break
        time.sleep(0.5)  # there is no event for what ends somewhere else
    for what, count in before.counts.items():
        print(f"  {what:<45} {count:>6} → {now.counts[what]}")
    print(f"  {'notebook: memory':<45} {before.nbytes / 2**20:>6.1f} → {now.nbytes / 2**20:.1f} MiB")
    if now.nbytes > before.nbytes + GROWTH:
        grown.append(f"the notebook's memory: {before.nbytes / 2**20:.1f} → {now.nbytes / 2**20:.1f} MiB")
    return grown


def left_over(pool: Pool) -> list[str]:
    """What is there after the pool's end."""
    _, alive = psutil.wait_procs(processes(), timeout=GONE)
    folders = [*Path("/dev/shm").glob(f"*{pool.job_id}*"), *Path("/tmp").glob(f"*{pool.job_id}*")]
    return [f"process {one.pid} is left: {' '.join(one.cmdline())}" for one in alive] + [
        f"{path} is left" for path in folders
    ]


# ------------------------------------------------------------------------------------------------ all rounds


def summary(rounds: list[Round]) -> Iterator[str]:
    """A line for each fault."""
    for name in FAULTS:
        mine = [one for one in rounds if one.fault == name]
        if mine:
            ends, nexts = [one.seconds for one in mine], [one.next_seconds for one in mine]
            yield (
                f"  {name:<28} {len(mine):>3} ×   ended after {statistics.median(ends):5.2f} s, worst {max(ends):5.2f}   "
                f"next cell {statistics.median(nexts):5.2f} s, worst {max(nexts):5.2f}"
            )


def watch_for_hang() -> None:
    """From now on a round has `HANG` seconds."""
    faulthandler.dump_traceback_later(HANG, exit=True)


def soak(rounds: int, seed: int, names: list[str]) -> int:
    """All rounds; the exit code."""
    chance = random.Random(seed)
    done: list[Round] = []
    before: Inventory | None = None
    wrong: list[str] = []
    with cluster.started(RANKS, "torch") as pool:
        one = Soak(pool, chance)
        for number in range(1, rounds + 1):
            watch_for_hang()
            done.append(one.round(chance.choice(names)))
            print(f"{number:>4}  {done[-1]}", flush=True)
            if number == min(WARM, rounds):
                before = take(pool)
        if before is not None:
            watch_for_hang()
            wrong += compare(pool, before)
    faulthandler.cancel_dump_traceback_later()
    wrong += left_over(pool)
    bad = [each for each in done if each.wrong]
    print("\n".join(summary(done)))
    print(
        "\n".join(
            [
                f"{len(bad)} of {rounds} rounds went wrong (seed {seed})"
                if bad
                else f"{rounds} rounds, all well (seed {seed})",
                *wrong,
            ]
        )
    )
    return 1 if bad or wrong else 0


def main(choose: Callable[[], int] = lambda: random.randrange(10**6)) -> int:
    """Read the environment, and soak."""
    os.environ[MARK] = uuid.uuid4().hex
    seed = int(os.environ.get("SEED") or choose())
    rounds = int(os.environ.get("ROUNDS") or 200)
    wanted = os.environ.get("FAULTS")
    names = [name for name in FAULTS if not wanted or wanted in name]
    print(f"{rounds} rounds with seed {seed}: SEED={seed} repeats them", flush=True)
    return soak(rounds, seed, names)


if __name__ == "__main__":
    sys.exit(main())
