"""Rounds of random faults (`benchmarks/faults.py`) in one pool: after each the pool works, and in the end nothing is left over.

    python benchmarks/soak.py --seeds 7,8 --rounds 200 --faults "kill -9,stop at once"

Ends with 1 when a fault is not told as it should be, when the next cell does not work within 10 s, when a rank loses variables that
it should keep, or when processes, descriptors, threads, shared memory or the notebook's memory have grown. Where users may have
mounts of their own, /dev/shm is one of 256 MB, which a fault fills.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks import cluster
from benchmarks.faults import FAULTS, TRAIN, Fault
from skymagic.errors import RankDied, RankError, SkyError
from skymagic.pool import Pool
from skymagic.run import interrupt

RANKS = 4
WARM = 20
"""Rounds after which what there is counts as normal."""
HANG = 90.0
"""Seconds after which a round counts as hanging: every thread's stack is printed, and the soak ends."""
NEXT_CELL = 10.0
"""Seconds within which the next cell works."""
GONE = 10.0
"""Seconds that what was ended may take to go."""
MARK = "SKYMAGIC_SOAK"
"""In the environment of all processes of this soak, however far down."""
REMEDY = "%sky_restart"

ALL_REDUCE = """\
import torch, torch.distributed as dist
_t = torch.full((1,), dist.get_rank() + 1.0); dist.all_reduce(_t)
_t.item(), globals().get("keepsake")
"""
FORGET = "if 'planted' in globals(): del planted"
"""What a fault has left under its name is no leak: a pool of processes has three threads and nine pipes."""


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
    notes: list[str] = field(default_factory=list)
    """What the user is told with the next cell."""

    def __str__(self) -> str:
        words = f"{self.fault:<28} rank {self.victim}  {self.seconds:6.2f} s  next cell {self.next_seconds:5.2f} s"
        return "\n      ".join([words, *self.wrong, *(self.notes if self.wrong else ())])


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
        cluster.run(
            self.pool,
            f"import os\nkeepsake = f'{self.number} of rank {{os.environ[\"RANK\"]}}'",
            timeout=60,
        )
        self.keepsakes = [f"{self.number} of rank {rank}" for rank in range(RANKS)]

    def round(self, name: str) -> Round:
        """One fault, and whether the pool works after it."""
        fault = FAULTS[name]
        this = Round(name, self.chance.randrange(RANKS))
        self.keep()
        cluster.run(self.pool, fault.before, timeout=60)
        self._fail(fault, this)
        if fault.fatal:
            self._repair(this)
        self._go_on(fault, this)
        if fault.poisoned:
            self.pool.restart([this.victim])
        return this

    def _fail(self, fault: Fault, this: Round) -> None:
        body = fault.body.replace("{victim}", str(this.victim)).replace(
            "{other}", str((this.victim + 1) % RANKS)
        )
        after = self.chance.uniform(*fault.press) if fault.press else 0.0
        begun = time.perf_counter()
        problem = cluster.problem_of(lambda: self._run(fault, body, after, this.victim))
        this.seconds = time.perf_counter() - begun - after
        if problem is None and (fault.expect is None or fault.may):
            return
        if fault.expect is None or not isinstance(problem, fault.expect):
            this.wrong.append(f"raised {problem!r}, not {fault.expect and fault.expect.__name__}")
        elif fault.status is not None and isinstance(problem, RankDied):
            if (problem.rank, problem.status) != (this.victim, fault.status):
                this.wrong.append(
                    f"names rank {problem.rank} with status {problem.status}, not {fault.status}"
                )
        elif fault.expect is RankError and "planted" not in str(problem):
            this.wrong.append(f"hides the cause: {problem}")

    def _run(self, fault: Fault, body: str, after: float, victim: int) -> None:
        with signalled(self.pool, fault, victim):
            if not fault.press:
                cluster.run(self.pool, body, timeout=fault.timeout)
                return
            with interrupt.deferred(), ExitStack() as buttons:
                for number in range(fault.presses):
                    buttons.enter_context(
                        cluster.stop_button(after + number * self.chance.uniform(0.0, 0.3))
                    )
                cluster.run(self.pool, body, timeout=fault.timeout)
                if fault.may:
                    time.sleep(1.0)  # here the press comes when the cell is over

    def _repair(self, this: Round) -> None:
        """The pool is lost: that is said with the remedy, which works."""
        problem = cluster.problem_of(lambda: cluster.run(self.pool, "1", timeout=30))
        if not isinstance(problem, SkyError) or REMEDY not in str(problem):
            this.wrong.append(f"a lost pool says {problem!r}")
        begun = time.perf_counter()
        self.pool.restart()
        this.seconds = time.perf_counter() - begun
        self.keepsakes = [None] * RANKS

    def _go_on(self, fault: Fault, this: Round) -> None:
        begun, screen = time.perf_counter(), cluster.Quiet()
        try:
            found = cluster.run(self.pool, ALL_REDUCE, timeout=30, screen=screen)
        except (Exception, KeyboardInterrupt) as problem:
            this.wrong.append(f"the next cell fails: {problem!r}")
            return
        this.notes = screen.notes
        this.next_seconds = time.perf_counter() - begun
        if this.next_seconds > NEXT_CELL:
            this.wrong.append(f"the next cell takes {this.next_seconds:.0f} s")
        total = RANKS * (RANKS + 1) / 2
        for rank, (sum_, kept) in enumerate(found):
            if sum_ != total:
                this.wrong.append(f"rank {rank} finds the sum {sum_}, not {total}")
            if kept not in self._may_find(fault, this.victim, rank):
                this.wrong.append(f"rank {rank} has {kept!r}, not {self.keepsakes[rank]!r}")

    def _may_find(self, fault: Fault, victim: int, rank: int) -> tuple[str | None, ...]:
        if fault.everyone or (rank == victim and fault.lost is None):
            return (self.keepsakes[rank], None)
        return (None if rank == victim and fault.lost else self.keepsakes[rank],)


def process_of(pool: Pool, whom: str, rank: int) -> int:
    """The number of a process of a local pool: of the agent, the forkserver or a rank."""
    pid = pool.agents.ranks[rank].pid
    assert pid is not None
    if whom == "rank":
        return pid
    forkserver = psutil.Process(psutil.Process(pid).ppid())
    agent = psutil.Process(forkserver.ppid())
    return {"forkserver": forkserver, "agent": agent}[whom].pid


@contextmanager
def signalled(pool: Pool, fault: Fault, rank: int) -> Iterator[None]:
    """The fault's signal from outside, and SIGCONT after it, while the block goes on."""
    if not fault.whom:
        yield
        return
    pid = process_of(pool, fault.whom, rank)
    signals = [threading.Timer(0.1, os.kill, (pid, fault.signum))]
    if fault.pause:
        signals.append(threading.Timer(0.1 + fault.pause, os.kill, (pid, signal.SIGCONT)))
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
    """Memory that the notebook has in use (`in_use`)."""
    others: list[str]
    """The processes beside notebook and ranks, each with its descriptors and threads."""


class Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` tells of all arenas: bytes that are mapped by themselves, and bytes in use."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "blocks",
            "small",
            "maps",
            "mapped",
            "_1",
            "_2",
            "used",
            "free",
            "top",
        ]
    )


def in_use() -> int:
    """Bytes that Python and the C library have given out in this process and not taken back. What a process has of the system's memory
    says less: both keep pages in which a little is still in use."""
    gc.collect()
    told = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if told is None:
        return psutil.Process().memory_full_info().uss
    told.restype = Mallinfo
    found = told()
    return found.used + found.mapped + sys.getallocatedblocks() * BLOCK


def take(pool: Pool) -> Inventory:
    """Count, after cells that leave every rank with the same things open."""
    cluster.run(pool, FORGET, timeout=60)
    cluster.run(
        pool, TRAIN + "step(); print('x' * 200_000)", timeout=60
    )  # a first large message starts a thread of ZeroMQ's
    me = psutil.Process()
    ranks = [
        psutil.Process(rank.pid) for rank in pool.agents.ranks.values() if rank.pid is not None
    ]
    of_cells = {each.pid for rank in ranks for each in (rank, *rank.children(recursive=True))}
    others = [one for one in processes() if one.pid not in of_cells and not of_a_cell(one)]
    counts = {
        "processes": len(ranks) + len(others),
        "notebook: descriptors": me.num_fds(),
        "notebook: threads": me.num_threads(),
        "any rank: descriptors": max(rank.num_fds() for rank in ranks),
        "any rank: threads": max(rank.num_threads() for rank in ranks),
        "agent, forkserver: descriptors": sum(one.num_fds() for one in others),
        "agent, forkserver: threads": sum(one.num_threads() for one in others),
        "/dev/shm: files": len(shared_memory(pool)),
    }
    return Inventory(counts, in_use(), sorted(map(described, others)))


def of_a_cell(one: psutil.Process) -> bool:
    """Whether a cell has started it: it has the rank's environment, may live as long as the rank, and is looked for in the end."""
    with suppress(psutil.Error):
        return "RANK" in one.environ()
    return True


def described(one: psutil.Process) -> str:
    """A process in a line: the end of its command, its descriptors and its threads."""
    with suppress(psutil.Error):
        return f"{' '.join(one.cmdline())[-70:]}: {one.num_fds()} descriptors, {one.num_threads()} threads"
    return "a process that has ended"


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
        path
        for folder in Path("/dev/shm").glob(f"*{pool.job_id}*")
        for path in folder.rglob("*")
        if path.is_file()
    ]


SLACK = {
    "processes": 0,
    "notebook: descriptors": 2,
    "notebook: threads": 2,
    "any rank: descriptors": 4,
    "any rank: threads": 3,
    "agent, forkserver: descriptors": 4,
    "agent, forkserver: threads": 2,
    "/dev/shm: files": 0,
}
"""How much more may be there in the end: what is open for a moment at any time."""
GROWTH = 2 << 20
"""Bytes that the notebook may hold more in the end than after half of the rounds."""
BLOCK = 80
"""Bytes of one of Python's small objects, about."""


def compare(pool: Pool, before: Inventory, halfway: Inventory) -> list[str]:
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
    memory = " → ".join(f"{each.nbytes / 2**20:.1f}" for each in (before, halfway, now))
    print(f"  {'notebook: memory, halfway and in the end':<45} {memory} MiB")
    if grown:
        print("\n".join(["  then:", *before.others, "  now:", *now.others]))
    if now.nbytes > halfway.nbytes + GROWTH:
        grown.append(f"the notebook's memory: {memory} MiB")
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


def soak(rounds: int, seed: int, names: Sequence[str]) -> int:
    """All rounds, each fault before one comes again; the exit code."""
    print(f"{rounds} rounds with seed {seed}", flush=True)
    chance = random.Random(seed)
    done: list[Round] = []
    before: Inventory | None = None
    halfway: Inventory | None = None
    wrong: list[str] = []
    with cluster.started(RANKS, "torch") as pool:
        one = Soak(pool, chance)
        waiting: list[str] = []
        for number in range(1, rounds + 1):
            waiting = waiting or chance.sample(names, len(names))
            watch_for_hang()
            done.append(one.round(waiting.pop()))
            print(f"{number:>4}  {done[-1]}", flush=True)
            if number == min(WARM, rounds):
                before = take(pool)
            if number == max(min(WARM, rounds), rounds // 2):
                halfway = take(pool)
        if before is not None and halfway is not None:
            watch_for_hang()
            wrong += compare(pool, before, halfway)
    faulthandler.cancel_dump_traceback_later()
    wrong += left_over(pool)
    bad = [each for each in done if each.wrong]
    print("\n".join([*summary(done), *wrong]))
    print(
        f"{len(bad)} of {rounds} rounds went wrong (seed {seed})"
        if bad
        else f"{rounds} rounds, all well (seed {seed})",
        flush=True,
    )
    return 1 if bad or wrong else 0


def own_shared_memory() -> None:
    """Go on in a process whose /dev/shm is small and its own, where the system lets us."""
    if (
        os.environ.get(MARK)
        or subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode
    ):
        return
    os.environ[MARK] = uuid.uuid4().hex
    mount = 'mount -t tmpfs -o size=256m none /dev/shm && exec "$@"'
    os.execvp(
        "unshare", ["unshare", "-Urm", "sh", "-c", mount, "sh", sys.executable, *sys.orig_argv[1:]]
    )


def main() -> int:
    """Read the arguments, and soak."""
    parser = argparse.ArgumentParser(description="Random faults in one pool.")
    parser.add_argument(
        "--seeds",
        default=str(random.randrange(10**6)),
        help="each makes a pool and rounds of its own: 7,8,9",
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--faults", default="", help=f"some of: {', '.join(FAULTS)}")
    given = parser.parse_args()
    names = given.faults.split(",") if given.faults else list(FAULTS)
    for number in (
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGHUP,
    ):  # nohup and a shell's & ignore them, which ranks would inherit
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    own_shared_memory()
    os.environ.setdefault(MARK, uuid.uuid4().hex)
    return max(soak(given.rounds, int(seed), names) for seed in given.seeds.split(","))


if __name__ == "__main__":
    sys.exit(main())
