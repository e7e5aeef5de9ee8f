"""What can go wrong in a pool, by name: what a cell does to its own rank, what comes from outside, and the stop button."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from textwrap import indent

from skymagic.errors import RankDied, RankError, RunInterrupted, RunTimeout

ANYTHING = BaseException
"""Expected of a cell that may raise whatever it will: what counts is what comes after it."""


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
    lost: bool | None = False
    """Whether the victim loses its variables; None if it may."""
    press: tuple[float, float] | None = None
    """When the stop button is pressed: seconds after the start, somewhere in between."""
    presses: int = 1
    timeout: float | None = None
    whom: str = ""
    """Who gets a signal 0.1 s after the cell's start: rank, forkserver or agent."""
    signum: int = 0
    pause: float = 0.0
    """Seconds after which SIGCONT follows."""
    may: bool = False
    """Whether the cell may also end before the fault comes."""
    status: int | None = None
    """How a dead victim ended."""
    poisoned: bool = False
    """Whether the victim's process is not fit for what follows, and is started anew after the round."""
    everyone: bool = False
    """Whether all ranks may lose their variables."""
    fatal: bool = False
    """Whether the pool is lost: the next cell names the remedy, which works."""


ME = "import torch, torch.distributed as dist\nme = dist.get_rank()\n"
COLLECTIVE = "t = torch.ones(9); dist.all_reduce(t)\n"
PLANTED = "raise ValueError('planted')\n"
SLEEP = "import time\ntime.sleep(60)\n"
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


def on_victim(code: str, then: str = COLLECTIVE) -> str:
    """A cell in which the victim does this, and then all ranks do that."""
    return (
        ME
        + "if me == {victim}:\n"
        + indent(code, "    ")
        + ("" if code.endswith("\n") else "\n")
        + then
    )


def raises(code: str, expect: type[BaseException] = ANYTHING) -> Fault:
    """The victim raises while the others wait for it."""
    return Fault(on_victim(code), expect)


def dies(code: str, status: int) -> Fault:
    """The victim's process ends while the others wait for it."""
    return Fault(on_victim(code), RankDied, lost=True, status=status)


def poison(code: str) -> Fault:
    """The victim spoils its own process, and then raises: it must form the group again, with what is left of it, or be replaced."""
    return Fault(on_victim(code + "\n" + PLANTED), ANYTHING, may=True, lost=None, poisoned=True)


def leaves(code: str) -> Fault:
    """The victim leaves something behind, and all goes well."""
    return Fault(on_victim(code))


def outside(
    whom: str, signum: int, *, fatal: bool = False, pause: float = 0.0, lost: bool | None = False
) -> Fault:
    """A signal from outside while a cell runs, or, where that is short, after it."""
    body = (
        ME
        + "import time\nfor _ in range(40):\n    t = torch.ones(9); dist.all_reduce(t); time.sleep(0.01)"
    )
    return Fault(
        body, ANYTHING, may=True, whom=whom, signum=signum, pause=pause, fatal=fatal, lost=lost
    )


def stopped(
    body: str, *, before: str = "", presses: int = 1, press: tuple[float, float] = (0.1, 0.4)
) -> Fault:
    """The user presses stop; pressed again, it kills who has not stopped by then."""
    return Fault(
        body, RunInterrupted, before=before, press=press, presses=presses, everyone=presses > 1
    )


HANGING = (
    ME
    + "t = torch.ones(9)\nif me != {victim}: dist.all_reduce(t)\nelse:\n    import time; time.sleep(60)"
)

RAISING = {
    "raise before a collective": replace(raises(PLANTED), expect=RankError),
    "raise in DDP backward": Fault(
        TRAIN + "def planted(grad): raise ValueError('planted')\n"
        "handle = next(model.parameters()).register_hook(planted) if dist.get_rank() == {victim} else None\n"
        "try:\n    step()\nfinally:\n    handle and handle.remove()",
        RankError,
    ),
    "raise on all ranks": Fault(ME + PLANTED, RankError),
    "raise while the GIL is held": Fault(
        ME + "if me == {victim}: sum(range(10**12))\nif me == {other}: raise ValueError('planted')", RankError, lost=True
    ),
    "collectives out of step": Fault(
        ME + "if me == {victim}: raise ValueError('planted')\nw = dist.all_reduce(torch.ones(9), async_op=True); del w", RankError
    ),
    "sys.exit(3)": raises("import sys; sys.exit(3)"),
    "KeyboardInterrupt": raises("raise KeyboardInterrupt"),
    "a BaseException": raises("class Planted(BaseException): pass\nraise Planted('planted')"),
    "an exception group": raises("raise ExceptionGroup('planted', [ValueError('planted'), KeyError(1)])"),
    "an exception that cannot be pickled": raises("import threading\nraise ValueError('planted', threading.Lock())"),
    "an exception that cannot be printed": raises(
        "class Planted(Exception):\n    def __str__(self): raise RuntimeError('planted')\nraise Planted"
    ),
    "endless recursion": raises("def planted(): return planted()\nplanted()"),
    "no memory": raises("planted = bytearray(1 << 60)"),
    "raise in a thread": leaves("import threading\none = threading.Thread(target=lambda: 1 / 0); one.start(); one.join()"),
    "raise in __del__": leaves("class Planted:\n    def __del__(self): raise ValueError('planted')\nplanted = Planted(); del planted"),
    "asyncio: a task that fails": leaves("import asyncio\nasync def planted(): raise ValueError('planted')\nawait asyncio.gather(planted(), return_exceptions=True)"),
    "destroy_process_group": Fault("import torch.distributed as dist\ndist.destroy_process_group()"),
    "init_process_group again": replace(raises("dist.init_process_group('gloo')"), may=True),
    "timeout": Fault(HANGING, RunTimeout, timeout=0.5),
    "the GIL held for 5 s": Fault(
        ME + "import ctypes\nif me == {victim}: ctypes.PyDLL(None).sleep(5)\n" + COLLECTIVE
    ),
}  # fmt: skip

DYING = {
    "kill -9": dies("import os; os.kill(os.getpid(), 9)", -9),
    "segfault": dies("import ctypes; ctypes.string_at(0)", -11),
    "os.abort()": dies("import os; os.abort()", -6),
    "SIGBUS": dies("import os; os.kill(os.getpid(), 7)", -7),
    "SIGQUIT": dies("import os; os.kill(os.getpid(), 3)", -3),
    "os._exit(3)": dies("import os; os._exit(3)", 3),
    "os._exit(0)": dies("import os; os._exit(0)", 0),
    "SIGTERM to itself": Fault(on_victim("import os; os.kill(os.getpid(), 15)"), ANYTHING, may=True, lost=None),
    "SIGINT to itself": Fault(on_victim("import os; os.kill(os.getpid(), 2)"), ANYTHING, may=True, lost=None),
    "SIGHUP to itself": Fault(on_victim("import os; os.kill(os.getpid(), 1)"), ANYTHING, may=True, lost=None),
    "two ranks die": Fault(
        ME + "import os\nif me in ({victim}, {other}): os.kill(os.getpid(), 9)\n" + COLLECTIVE, ANYTHING, lost=None, everyone=True
    ),
    "all ranks die": Fault("import os; os.kill(os.getpid(), 9)", ANYTHING, lost=True, everyone=True),
}  # fmt: skip

STOPPING = {
    "stop in a collective": stopped(HANGING),
    "stop in time.sleep": stopped(SLEEP),
    "stop in a loop": stopped("while True: pass"),
    "stop in training": stopped("while True: step()", before=TRAIN),
    "stop in an await": stopped("import asyncio\nawait asyncio.sleep(60)"),
    "stop in a subprocess": stopped("import subprocess\nsubprocess.run(['sleep', '60'])"),
    "stop in output": stopped("while True: print('x' * 100)"),
    "stop at once": stopped(HANGING, press=(0.0, 0.02)),
    "stop at the end": replace(stopped("import time\ntime.sleep(0.1)", press=(0.095, 0.13)), may=True),
    "stop twice": stopped(HANGING, presses=2),
    "stop five times": stopped(SLEEP, presses=5),
    "stop twice in a loop": stopped("while True: pass", presses=2),
    "stop where SIGINT is ignored": replace(
        stopped(ME + "import signal, time\nif me == {victim}: signal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)"),
        lost=None, poisoned=True,
    ),
    "stop that is caught": replace(
        stopped(ME + "import time\nwhile True:\n    try: time.sleep(60)\n    except KeyboardInterrupt:\n        if me != {victim}: raise"),
        lost=None,
    ),
}  # fmt: skip

POISONED = {
    "stdout and stderr closed": poison("import os; os.close(1); os.close(2)"),
    "all descriptors closed": poison("import os; os.closerange(3, 4096)"),
    "stdin closed": poison("import os; os.close(0)"),
    "no descriptor is free": poison("import os\ntry:\n    while True: os.dup(0)\nexcept OSError: pass"),
    "the limit of descriptors": poison("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))"),
    "the limit of memory": poison("import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))"),
    "builtins.open": poison("import builtins; builtins.open = None"),
    "builtins.print": poison("import builtins; builtins.print = None"),
    "builtins.len": poison("import builtins; builtins.len = None"),
    "builtins.isinstance": poison("import builtins; builtins.isinstance = None"),
    "builtins.__import__": poison("import builtins; builtins.__import__ = None"),
    "names of builtins": poison("list = dict = str = len = print = range = Exception = None"),
    "sys.modules cleared": poison("import sys; sys.modules.clear()"),
    "torch removed": poison("import sys\nfor each in [name for name in sys.modules if name.startswith('torch')]: del sys.modules[each]"),
    "json is None": poison("import sys; sys.modules['json'] = None"),
    "sys.path cleared": poison("import sys; sys.path.clear()"),
    "sys.stdout is None": poison("import sys; sys.stdout = sys.stderr = None"),
    "sys.stdout is another": poison("import io, sys; sys.stdout = io.StringIO()"),
    "sys.stdout is closed": poison("import sys; sys.stdout.close()"),
    "environment cleared": poison("import os; os.environ.clear()"),
    "signal handlers": poison("import signal\nfor each in range(1, 32):\n    try: signal.signal(each, signal.SIG_IGN)\n    except OSError: pass"),
    "signals blocked": poison("import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))"),
    "time.time and time.sleep": poison("import time; time.time = time.monotonic = time.sleep = None"),
    "threading.Thread": poison("import threading; threading.Thread = None"),
    "socket.socket": poison("import socket; socket.socket = None"),
    "the event loop closed": poison("import asyncio; asyncio.get_event_loop().stop()"),
    "sys.settrace": poison("import sys\ndef planted(*_): raise RuntimeError('planted')\nsys.settrace(planted)"),
    "sys.excepthook": poison("import sys; sys.excepthook = sys.unraisablehook = None"),
    "the recursion limit": poison("import sys; sys.setrecursionlimit(120)"),
    "all_gather replaced": poison("dist.all_gather = dist.all_gather_object = dist.broadcast = dist.barrier = None"),
    "nice 19": poison("import os; os.nice(19)"),
    "cwd deleted": poison("import os, tempfile\nplanted = tempfile.mkdtemp(); os.chdir(planted); os.rmdir(planted)"),
    "umask": poison("import os; os.umask(0o777)"),
}  # fmt: skip

LEAVING = {
    "own log deleted": raises("import os\nfrom skymagic.kernels.rank.context import current\nos.remove(current().log)\n" + PLANTED),
    "all logs deleted": raises(
        "import os, glob\nfrom skymagic.kernels.rank.context import current\n"
        "for each in glob.glob(os.path.dirname(current().log) + '/*.log'): os.remove(each)\n" + PLANTED
    ),
    "/dev/shm full": raises(
        "import os\nplanted = open('/dev/shm/planted', 'wb')\ntry:\n    while True: planted.write(bytes(1 << 20))\n"
        "except OSError: pass\nfinally:\n    os.remove('/dev/shm/planted'); planted.close()\n" + PLANTED
    ),
    "a child is left": leaves("import subprocess; subprocess.Popen(['sleep', '1000'])"),
    "a child in a session of its own": leaves("import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"),
    "a child, and a death": dies(
        "import os, subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True); os.kill(os.getpid(), 9)", -9
    ),
    "a daemon": leaves("import subprocess; subprocess.run(['sh', '-c', 'setsid sleep 1000 </dev/null >/dev/null 2>&1 &'])"),
    "a fork that sleeps": leaves("import os, time\nif not os.fork():\n    time.sleep(1000); os._exit(0)"),
    "a pool of processes": leaves("import multiprocessing\nplanted = multiprocessing.get_context('spawn').Pool(1); planted.map(abs, [1])"),
    "a thread is left": leaves("import threading, time\nthreading.Thread(target=time.sleep, args=(1,), daemon=True).start()"),
    "a flood of output": leaves("print('x' * 20_000_000)"),
    "bytes that are no text": leaves("import os; os.write(1, bytes(range(256)) * 1000)"),
}  # fmt: skip

OUTSIDE = {
    "SIGKILL to a rank": outside("rank", signal.SIGKILL, lost=True),
    "SIGTERM to a rank": outside("rank", signal.SIGTERM, lost=None),
    "SIGINT to a rank": outside("rank", signal.SIGINT, lost=None),
    "SIGSTOP for 3 s": Fault(outside("rank", 0).body, whom="rank", signum=signal.SIGSTOP, pause=3.0),
    "SIGSTOP to the forkserver for 2 s": outside("forkserver", signal.SIGSTOP, pause=2.0),
    "SIGSTOP to the agent for 2 s": outside("agent", signal.SIGSTOP, pause=2.0),
    "SIGTERM to the forkserver": outside("forkserver", signal.SIGTERM),
    "SIGINT to the agent": outside("agent", signal.SIGINT),
    "SIGKILL to the forkserver": outside("forkserver", signal.SIGKILL, fatal=True),
    "SIGKILL to the agent": outside("agent", signal.SIGKILL, fatal=True),
    "SIGTERM to the agent": outside("agent", signal.SIGTERM, fatal=True),
    "SIGHUP to the agent": outside("agent", signal.SIGHUP, fatal=True),
}  # fmt: skip

FAULTS: dict[str, Fault] = {**RAISING, **DYING, **STOPPING, **POISONED, **LEAVING, **OUTSIDE}
