"""The checks of `make gpu`: each a function in a process of its own that yields rows, of what was seen and what was expected.

Cells are written as a user writes them, and run in an IPython shell. ``GPU_CHECK_DEVICE=cpu`` runs them on the CPU with small sizes, for
those who write them: what they say about GPUs is then worth nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DEVICE = os.environ.get("GPU_CHECK_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
GB = 1_000_000_000


@dataclass(frozen=True)
class Row:
    """One line of the table; plain values, for it travels as JSON."""

    what: str
    seen: str
    expected: str
    good: bool


Rows = Iterator[Row]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        gpus: how many it needs.
        needs: modules without which it is skipped.
        seconds: its deadline.
    """

    name: str
    run: Callable[[], Rows]
    gpus: int = 1
    needs: tuple[str, ...] = ("torch",)
    seconds: float = 120.0

    def absent(self, gpus: int) -> str:
        """Why it is skipped here; empty when it is not."""
        if lacking := [name for name in self.needs if find_spec(name) is None]:
            return f"not installed: {', '.join(lacking)}"
        return "" if gpus >= self.gpus else f"needs {self.gpus} GPU{'s' * (self.gpus > 1)}"


CHECKS: list[Check] = []


def check(name: str, **options: Any) -> Callable[[Callable[[], Rows]], Callable[[], Rows]]:
    """Put a function into the table of checks."""

    def add(run: Callable[[], Rows]) -> Callable[[], Rows]:
        CHECKS.append(Check(name, run, **options))
        return run

    return add


class Notebook:
    """An IPython shell with skymagic in it."""

    def __init__(self, *cells: str) -> None:
        from IPython.core.interactiveshell import InteractiveShell

        self.shell = InteractiveShell.instance()
        for cell in ("%load_ext skymagic", *cells):
            self.run(cell)

    def run(self, cell: str) -> float:
        """Run a cell that ends well; seconds."""
        print(f">>> {cell}", flush=True)
        begun = time.perf_counter()
        self.shell.run_cell(cell).raise_error()
        return time.perf_counter() - begun

    def fail(self, cell: str) -> str:
        """Run a cell that fails; the text of its error."""
        print(f">>> {cell}", flush=True)
        result = self.shell.run_cell(cell)
        problem = result.error_in_exec or result.error_before_exec
        if problem is None:
            return "no error"
        render = getattr(
            problem, "_render_traceback_", lambda: [f"{type(problem).__name__}: {problem}"]
        )
        return "\n".join(map(str, render()))

    def values(self, expression: str, before: str = "") -> list[Any]:
        """What an expression gives on each rank."""
        self.run(f"%%sky_broadcast -o found\n{before}\n{expression}")
        return list(self.shell.user_ns["found"])


def pool(ranks: int = 2, options: str = "--plugin torch") -> str:
    """The line that makes a pool."""
    return f"%sky_pool check --ranks {ranks} {options}"


TORCH = "import torch, torch.distributed as dist, time, os"
REDUCES = "x = torch.ones(1); dist.all_reduce(x); int(x)"


def row(what: str, seen: object, expected: object) -> Row:
    """What is seen must be what is expected."""
    return Row(what, str(seen), str(expected), seen == expected)


def most(what: str, seen: float, limit: float, unit: str) -> Row:
    """What is seen may be so much."""
    return Row(what, f"{seen:.3g} {unit}", f"≤ {limit:g} {unit}", seen <= limit)


def has(what: str, text: str, *words: str) -> Row:
    """A text must hold these words."""
    missing = [word for word in words if word not in text]
    last = text.strip().splitlines()[-1] if text.strip() else "nothing"
    return Row(what, last[:100] if missing else ", ".join(words), ", ".join(words), not missing)


# -- one GPU -------------------------------------------------------------------------------------------------------------


@check("bare pool")
def bare_pool() -> Rows:
    notebook = Notebook("%sky_pool check --ranks 1")
    there = notebook.values(f"torch.ones(3, device={DEVICE!r}).sum().item()", "import torch")
    yield row("a rank without plugins uses the GPU", there, [3.0])
    notebook.run("%sky_restart")
    there = notebook.values(f"torch.ones(3, device={DEVICE!r}).sum().item()", "import torch")
    yield row("and so does the rank that replaces it", there, [3.0])


@check("two ranks on one GPU")
def readme() -> Rows:
    notebook = Notebook(
        pool(), "from torch import nn\nimport torch\nNet = lambda: nn.Linear(10, 1)"
    )
    body = f"""%%sky_broadcast -o losses
{TORCH}
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(Net().to({DEVICE!r}))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    loss = model(torch.randn(8, 10, device={DEVICE!r})).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    dist.all_reduce(mean := loss.detach() / dist.get_world_size())
[each.sum().item() for each in model.parameters()]"""
    notebook.run(body)
    one, two = notebook.shell.user_ns["losses"]
    yield row("the README's loop: models alike on both ranks", one == two, True)
    yield row("CPU tensors are reduced, too", notebook.values(REDUCES), [2, 2])
    yield row("DDP of a model on the CPU", notebook.values("DDP(Net()) is not None"), [True, True])


@check("what NCCL says of two ranks on one GPU")
def duplicate() -> Rows:
    script = """
import os, torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl")
dist.all_reduce(torch.ones(1, device="cuda"))
"""
    yield has("plain torchrun", torchrun(script, 2, NCCL_DEBUG="WARN")[1], "Duplicate GPU detected")
    text = Notebook().fail(pool(2, "--plugin torch:backend=nccl"))
    yield has("skymagic refuses before, in words", text, "NCCL", "share")


@check("what is preloaded leaves the GPU to forked ranks")
def preloads() -> Rows:
    for name in ("torch", "huggingface", "accelerate", "keras:backend=torch", "jax"):
        module = {"huggingface": "transformers"}.get(name, name.partition(":")[0])
        if find_spec(module) is None:
            continue
        notebook = Notebook(f"%sky_pool {module} --ranks 1 --plugin {name}")
        expression = (
            "jax.devices()[0].platform != 'cpu'"
            if name == "jax"
            else "torch.ones(1, device='cuda').item() == 1"
        )
        seen = notebook.values(expression, "import jax" if name == "jax" else "import torch")
        yield row(f"--plugin {name}", seen, [True])
        notebook.run(f"%sky_down {module}")


@check("out of memory")
def out_of_memory() -> Rows:
    notebook = Notebook(pool(1))
    before = notebook.values(
        "torch.cuda.memory_allocated()", f"{TORCH}\nkept = torch.ones(1000, device='cuda')"
    )
    text = notebook.fail(
        "%%sky_broadcast\ndef fill():\n    mine = [torch.empty(1 << 30, dtype=torch.uint8, device='cuda')]\n"
        "    while True: mine.append(torch.empty_like(mine[0]))\nfill()"
    )
    yield has(
        "the error says whose memory it is",
        text,
        "OutOfMemoryError",
        "this rank's tensors have",
        "are free",
    )
    after = notebook.values("torch.cuda.memory_allocated()")
    yield row("memory_allocated in the next cell", after, before)


@check("a failed cell with a 14 GB model", seconds=180)
def large_model() -> Rows:
    elements = 3_500_000_000 if ON_GPU else 2_000_000
    notebook = Notebook(pool())
    notebook.run(f"""%%sky_broadcast
{TORCH}
from torch.nn.parallel import DistributedDataParallel as DDP
class Big(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros({elements}, dtype=torch.bfloat16, device={DEVICE!r}))
    def forward(self, x): return self.weight[:10].sum() * x
model = DDP(Big(), init_sync=False)
{"torch.cuda.reset_peak_memory_stats()" if ON_GPU else ""}
base = torch.cuda.memory_allocated()""")
    notebook.fail(
        "%%sky_broadcast\nif dist.get_rank() == 1: raise ValueError('planted')\ndist.all_reduce(torch.ones(1))"
    )
    extra = notebook.values("(torch.cuda.max_memory_allocated() - base) / 1e6")
    yield most("extra peak of memory while groups are formed again", max(extra), 100, "MB")
    yield row("the model is there", notebook.values("model.module.weight.numel()"), [elements] * 2)


BAD_KERNEL = 'extern "C" __global__ void bad(float* x) { x[1L << 40] = 1; }'


@check("errors that end a CUDA context", seconds=180)
def context_lost() -> Rows:
    notebook = Notebook(pool())
    faults = {"device assert": "torch.zeros(3, device='cuda')[torch.tensor([7], device='cuda')]"}
    if hasattr(__import__("torch").cuda, "_compile_kernel"):
        faults["illegal access"] = f"torch.cuda._compile_kernel({BAD_KERNEL!r}, 'bad')(args=[held])"
    for name, fault in faults.items():
        notebook.run(
            f"%%sky_broadcast\n{TORCH}\nmine = dist.get_rank()\nheld = torch.ones(5, device='cuda')"
        )
        text = notebook.fail(
            f"%%sky_broadcast\nif dist.get_rank() == 1:\n    {fault}\ndist.all_reduce(torch.ones(1))"
        )
        yield has(
            f"{name} on rank 1: its own cell says so", text, "CUDA error", "the rank is replaced"
        )
        seen = notebook.values("globals().get('mine')", TORCH)
        yield row("rank 0 keeps its variables", seen, [0, None])
        yield row(
            "the next cell", notebook.values("int(torch.ones(5, device='cuda').sum())"), [5, 5]
        )


SIX_SECONDS = (
    "torch.cuda._sleep(int(6 * 1.5e9)); torch.cuda.synchronize()" if ON_GPU else "time.sleep(6)"
)


@check("a failure and a stop during 6 s of work on the GPU")
def native_work() -> Rows:
    import signal
    import threading

    notebook = Notebook(pool())
    notebook.run(
        f"%%sky_broadcast\n{TORCH}\nmine = torch.full((3,), float(dist.get_rank()), device={DEVICE!r})"
    )
    text = notebook.fail(
        f"%%sky_broadcast\nif dist.get_rank() == 1: raise ValueError('planted')\n{SIX_SECONDS}"
    )
    yield has("rank 1 fails while rank 0 works", text, "planted")
    yield row("variables", notebook.values("mine.sum().item()"), [0.0, 3.0])
    timer = threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    notebook.fail(f"%%sky_broadcast\n{SIX_SECONDS}")
    yield row("variables after a stop", notebook.values("mine.sum().item()"), [0.0, 3.0])


@check("abort of NCCL's groups with work pending", seconds=180)
def aborts() -> Rows:
    notebook = Notebook(pool(1))
    notebook.run(f"%%sky_broadcast\n{TORCH}\npid = os.getpid()\nfree0 = None")
    pid = notebook.values("pid")
    cell = """%%sky_broadcast
torch.cuda._sleep(int(3e9)); work = dist.all_reduce(torch.ones(1 << 20, device='cuda'), async_op=True)
raise ValueError('planted')"""
    used: list[float] = []
    for _ in range(20):
        notebook.fail(cell)
        used += notebook.values(
            "torch.cuda.mem_get_info()[0] / 1e6", "dist.all_reduce(torch.ones(1, device='cuda'))"
        )
    yield row("the rank lives", notebook.values("pid"), pid)
    yield most("memory lost by an abort", (used[1] - used[-1]) / (len(used) - 2), 10, "MB")


@check("a pull of 10 GB", seconds=180)
def pull() -> Rows:
    nbytes = 10 * GB if ON_GPU else 100_000_000
    count = 20
    notebook = Notebook(pool())
    notebook.run(
        f"%%sky_broadcast\n{TORCH}\nimport resource\n"
        f"weights = {{f'w{{i}}': torch.full(({nbytes // count // 4},), float(i), device={DEVICE!r}) for i in range({count})}}\n"
        "base = torch.cuda.memory_allocated()"
    )
    notebook.run("%%sky_broadcast -o part --head\nweights['w1'][:10]")  # pinned buffers are made
    seconds = notebook.run("%%sky_broadcast -o pulled --head\nweights;")
    print(f"{nbytes / 1e9 / seconds:.2f} GB/s")
    good = all(
        bool((value == float(name[1:])).all())
        for name, value in notebook.shell.user_ns["pulled"].items()
    )
    yield row("values", good, True)
    yield most("time, per GB", seconds / nbytes * GB, 1.0, "s")
    if ON_GPU:
        extra = notebook.values("(torch.cuda.max_memory_allocated() - base) / 1e6")
        yield most("extra memory of both GPUs' ranks", max(extra), 1, "MB")
        host = notebook.values(
            "int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1e3"
        )
        yield most(
            "host memory of the rank that sends nothing, beside the other's",
            host[1] - host[0],
            0,
            "MB",
        )
    import torch

    yield row("the notebook has no CUDA context", torch.cuda.is_initialized(), False)


@check("a view of a large storage")
def view() -> Rows:
    notebook = Notebook(pool(1))
    elements = 500_000_000 if ON_GPU else 5_000_000
    notebook.run(f"%%sky_broadcast\n{TORCH}\nflat = torch.ones({elements}, device={DEVICE!r})")
    notebook.run("%%sky_broadcast -o part --head\nflat[10:20];")  # pinned buffers are made
    seconds = notebook.run("%%sky_broadcast -o part --head\nflat[1000:2000];")
    yield row("elements", int(notebook.shell.user_ns["part"].sum()), 1000)
    yield most("1000 elements of 2 GB", seconds, 0.2, "s")


@check("the notebook's own model on the GPU")
def own_model() -> Rows:
    elements = 500_000_000 if ON_GPU else 5_000_000
    notebook = Notebook(pool(1), f"import torch\nbig = torch.ones({elements}, device={DEVICE!r})")
    total = f"{float(elements)}"
    notebook.run("%%sky_broadcast\nbig.double().sum().item()")
    unchanged = min(notebook.run("%%sky_broadcast\nlen(big)") for _ in range(5))
    yield most("a cell that uses 2 GB which have not changed", unchanged, 0.1, "s")
    notebook.run("big.data[7] = 3")
    seen = notebook.values("big.double().sum().item()")
    yield row("a change in place is seen", seen, [float(total) + 2])


@check("jax", needs=("jax",))
def jax() -> Rows:
    notebook = Notebook("%sky_pool check --ranks 1 --plugin jax")
    before = "import jax, jax.numpy as jnp"
    yield row(
        "devices",
        notebook.values("jax.devices()[0].platform", before),
        ["gpu" if ON_GPU else "cpu"],
    )
    yield row("a sum", notebook.values("float(jnp.ones(10).sum())"), [10.0])
    if find_spec("torch") and ON_GPU:
        notebook.run("%sky_down check")
        notebook.run("%sky_pool both --ranks 1 --plugin torch --plugin jax")
        text = "float(jnp.ones(10).sum()) + torch.ones(5, device='cuda').sum().item()"
        yield row("beside torch", notebook.values(text, f"{before}\nimport torch"), [15.0])


@check("Trainer", needs=("torch", "transformers", "accelerate"), seconds=180)
def trainer() -> Rows:
    notebook = Notebook(pool(2, "--plugin huggingface --plugin torch"))
    notebook.run("""%%sky_broadcast -o places
import torch, tempfile, torch.distributed as dist
from transformers import Trainer, TrainingArguments
class Net(torch.nn.Module):
    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, labels): return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}
data = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(64)]
trainer = Trainer(Net(), TrainingArguments(tempfile.mkdtemp(), max_steps=5, report_to=[], save_strategy="no"), train_dataset=data)
trainer.train()
str(next(trainer.model.parameters()).device.type), round(sum(p.sum().item() for p in trainer.model.parameters()), 5)""")
    one, two = notebook.shell.user_ns["places"]
    yield row("device, and models alike", (one[0], one == two), (DEVICE, True))


@check("accelerate", needs=("torch", "accelerate"))
def accelerate() -> Rows:
    notebook = Notebook(pool(2, "--plugin torch --plugin accelerate"))
    before = "from accelerate import Accelerator\naccelerator = Accelerator()"
    seen = notebook.values("accelerator.device.type, accelerator.num_processes", before)
    yield row("device and processes", seen, [(DEVICE, 2)] * 2)


@check("Lightning", needs=("torch", "lightning"))
def lightning() -> Rows:
    notebook = Notebook(pool(1))
    seen = notebook.values(
        "trainer.strategy.root_device.type",
        "import lightning\ntrainer = lightning.Trainer(logger=False, enable_checkpointing=False, barebones=True)",
    )
    yield row("device", seen, [DEVICE])


@check("FSDP2")
def fsdp2() -> Rows:
    notebook = Notebook(pool())
    notebook.run(f"""%%sky_broadcast
{TORCH}
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).to({DEVICE!r})
whole = [each.detach().sum().item() for each in net.parameters()]
for layer in net: fully_shard(layer)
fully_shard(net)
net(torch.randn(8, 512, device={DEVICE!r})).sum().backward()""")
    notebook.run("%%sky_broadcast -o gathered --head\nnet")
    sums = [each.detach().sum().item() for each in notebook.shell.user_ns["gathered"].parameters()]
    close = all(abs(a - b) < 1e-2 for a, b in zip(sums, notebook.values("whole")[0], strict=True))
    yield row("comes to the notebook whole", close, True)


@check("compile caches", seconds=180)
def compile_caches() -> Rows:
    notebook = Notebook(pool(1))
    body = f"""%%sky_broadcast
{TORCH}
def f(x): return (x.sin() * x.cos() + x).relu().sum()
torch.compile(f)(torch.randn(1000, device={DEVICE!r}))"""
    first = notebook.run(body)
    notebook.run("%sky_restart")
    yield most(
        "torch.compile in a new rank, of the first time", notebook.run(body) / first, 0.8, "×"
    )


GPT = """
import time, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.a, self.b, self.h = nn.LayerNorm(d), nn.LayerNorm(d), h
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (each.view(b, t, self.h, d // self.h).transpose(1, 2) for each in self.qkv(self.a(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.b(x))
class GPT(nn.Module):
    def __init__(self, layers=12, d=768, h=12, vocabulary=50304, length=1024):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, d), nn.Embedding(length, d)
        self.blocks, self.norm = nn.Sequential(*[Block(d, h) for _ in range(layers)]), nn.LayerNorm(d)
    def forward(self, x):
        x = self.tokens(x) + self.places.weight[: x.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.T
def steps(count=20, warm=5, batch=24, length=1024):
    torch.manual_seed(0)
    model = DDP(GPT().cuda())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randint(0, 50304, (batch, length + 1), device="cuda")
    for step in range(warm + count):
        if step == warm:
            torch.cuda.synchronize(); begun = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count
"""
ALONE = """
import os, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
"""


@check("GPT-124M, a step in bf16", seconds=240)
def gpt() -> Rows:
    # The batch keeps the GPU busy: with 8 sequences an H100 waits for kernel launches, and either side
    # varies by 7 % from run to run.
    ours: list[float] = []
    theirs: list[float] = []
    notebook = Notebook(pool(1))
    for _ in range(3):
        ours += notebook.values("steps()", GPT)
        notebook.run("%%sky_broadcast\nimport gc; gc.collect(); torch.cuda.empty_cache()")
        _, text = torchrun(f"{ALONE}{GPT}\nprint('seconds', steps())", 1)
        theirs.append(float(re.findall(r"seconds ([\d.e-]+)", text)[-1]))
    yield most(
        f"a step ({min(ours) * 1000:.1f} ms), of torchrun's", min(ours) / min(theirs), 1.01, "×"
    )


# -- two GPUs and more ---------------------------------------------------------------------------------------------------

BANDWIDTH = """
import time, torch, torch.distributed as dist
def bandwidth(nbytes=1 << 30, count=20):
    x = torch.ones(nbytes // 4, device="cuda")
    for step in range(5 + count):
        if step == 5:
            torch.cuda.synchronize(); begun = time.perf_counter()
        dist.all_reduce(x)
    torch.cuda.synchronize()
    n = dist.get_world_size()
    return 2 * (n - 1) / n * nbytes * count / (time.perf_counter() - begun) / 1e9
"""


def gpu_count() -> int:
    """GPUs that torch shows, asked in a process of its own: this one must not touch CUDA."""
    found = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        capture_output=True,
        text=True,
    )
    return int(found.stdout.split()[-1]) if found.returncode == 0 and found.stdout.split() else 0


def torchrun(script: str, ranks: int, **env: str) -> tuple[int, str]:
    """A script under torchrun; how it ended, and what it printed."""
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"gpu-check-{os.getpid()}.py"
    path.write_text(script)
    try:
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            str(path),
        ]
        done = subprocess.run(
            words, capture_output=True, text=True, env={**os.environ, **env}, timeout=150
        )
    finally:
        path.unlink()
    return done.returncode, done.stdout + done.stderr


@check("NCCL's bandwidth", gpus=2, seconds=240)
def bandwidth() -> Rows:
    count = gpu_count()
    notebook = Notebook(pool(count))
    ours = max(notebook.values("bandwidth()", BANDWIDTH)[0] for _ in range(3))
    notebook.run("%sky_down check")
    texts = [
        torchrun(f"{ALONE}{BANDWIDTH}\nprint('bandwidth', bandwidth())", count)[1] for _ in range(3)
    ]
    theirs = max(float(each) for text in texts for each in re.findall(r"bandwidth ([\d.]+)", text))
    yield Row(
        f"all_reduce of 1 GB on {count} GPUs",
        f"{ours:.0f} GB/s, {ours / theirs:.3f} ×",
        "≥ 0.98 ×",
        ours >= 0.98 * theirs,
    )


@check("death of a rank", gpus=2)
def death() -> Rows:
    notebook = Notebook(pool())
    notebook.run(
        f"%%sky_broadcast\n{TORCH}\nmine = torch.ones(3, device='cuda'); dist.all_reduce(mine)"
    )
    begun = time.perf_counter()
    text = notebook.fail(
        "%%sky_broadcast\nif dist.get_rank() == 1: os.kill(os.getpid(), 9)\ndist.all_reduce(torch.ones(1 << 20, device='cuda')); torch.cuda.synchronize()"
    )
    yield has("the error names the rank", text, "rank 1")
    yield most("until the error", time.perf_counter() - begun, 40, "s")
    yield row(
        "rank 0 keeps its variables", notebook.values("'mine' in globals()", TORCH), [True, False]
    )
    yield row(
        "the next all_reduce",
        notebook.values("x = torch.ones(1, device='cuda'); dist.all_reduce(x); int(x)"),
        [2, 2],
    )


@check("abort of stuck kernels", gpus=2)
def stuck() -> Rows:
    notebook = Notebook(pool())
    notebook.run(f"%%sky_broadcast\n{TORCH}\nmine = dist.get_rank()\npid = os.getpid()")
    pids = notebook.values("pid")
    text = notebook.fail(
        "%%sky_broadcast\nif dist.get_rank() == 1: time.sleep(1); raise ValueError('planted')\n"
        "dist.all_reduce(torch.ones(1 << 20, device='cuda')); torch.cuda.synchronize()"
    )
    yield has("a rank raises while the other's kernel waits", text, "planted")
    yield row("both ranks live", notebook.values("pid"), pids)
    yield row(
        "the next all_reduce",
        notebook.values("x = torch.ones(1, device='cuda'); dist.all_reduce(x); int(x)"),
        [2, 2],
    )


@check("memory of a sharded model that is pulled", gpus=2)
def sharded_memory() -> Rows:
    notebook = Notebook(pool())
    notebook.run(f"""%%sky_broadcast
{TORCH}
from torch.distributed.fsdp import fully_shard
net = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192, bias=False) for _ in range(16)]).cuda()
for layer in net: fully_shard(layer)
fully_shard(net); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats(); base = torch.cuda.memory_allocated()""")
    notebook.run("%%sky_broadcast -o pulled --head\nnet")
    extra = max(notebook.values("(torch.cuda.max_memory_allocated() - base) / 1e6"))
    yield most("extra peak, of 4.3 GB (a layer has 268 MB)", extra, 900, "MB")
