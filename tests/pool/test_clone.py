"""A rank that was replaced gets its names from another one, and a training goes on there as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import Pools

needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install torch"
)

SETUP = """%%sky_broadcast
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 700), torch.nn.ReLU(), torch.nn.Linear(700, 700), torch.nn.ReLU())
        self.head = torch.nn.Linear(700, 1)
    def forward(self, x):
        return self.head(self.inner(x))

torch.manual_seed(0)
model = DDP(Net(), bucket_cap_mb=1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
done = 0

def step():
    global done
    torch.manual_seed(100 * done + dist.get_rank())
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
    optimizer.step()
    scheduler.step()
    done += 1

def weights():
    return [p.double().sum().item() for p in model.parameters()] + [optimizer.param_groups[0]["lr"]]
"""
TRAIN = "%%sky_broadcast -o found\nfor _ in range(3):\n    step()\nweights()"


@pytest.fixture(scope="module")
def notebook(shared_pools: Pools) -> Iterator[Notebook]:
    plugin = " --plugin torch" if find_spec("torch") else ""
    with shared_pools.lent(f"--ranks 3{plugin}") as one:
        yield one


def kill(notebook: Notebook, rank: int) -> None:
    """``kill -9`` amidst a cell."""
    dies = f"import os\nif int(os.environ['RANK']) == {rank}:\n    os.kill(os.getpid(), 9)"
    assert notebook.fail(f"%%sky_broadcast\n{dies}").ename == "RankDied"


@needs_torch
def test_training_continues(notebook: Notebook) -> None:
    undisturbed = []
    notebook.run(SETUP)
    for _ in range(3):
        notebook.run(TRAIN)
        undisturbed.append(notebook.value("found"))
    notebook.run(SETUP)
    notebook.run(TRAIN)
    assert notebook.value("found") == undisturbed[0]
    kill(notebook, 2)
    error = notebook.fail("%%sky_broadcast -o found\nfor _ in range(3):\n    step()\nweights()")
    assert "rank 2 was replaced and has no step: %sky_clone 2 --from 0 step weights" in error.text
    shown = notebook.run("%sky_clone 2 --from 0 step weights done")
    assert shown.text.startswith("step, weights, done, ")
    for rest in (1, 2):  # the buckets are made anew after the first backward pass
        notebook.run(TRAIN)
        found = notebook.value("found")
        assert found[0] == found[1] == found[2]
        assert found[0] == pytest.approx(undisturbed[rest][0], rel=1e-9)


@needs_torch
def test_model_and_optimizer_by_name(golden: Golden, notebook: Notebook) -> None:
    notebook.run(SETUP)
    kill(notebook, 1)
    cell = "%%sky_broadcast -o found\nmodel(torch.ones(2, 8)).sum().backward()\noptimizer.step()\noptimizer.zero_grad()"
    error = notebook.fail(cell)
    assert (
        "rank 1 was replaced and has no model: %sky_clone 1 --from 0 model torch optimizer"
        in error.text
    )
    shown = notebook.run("%sky_clone 1 --from 0 model torch optimizer")
    golden(shown.text, hide=[r"\([\d.]+ .?B\b[^)]*\)"])
    notebook.run(cell)
    notebook.run(
        "%%sky_broadcast -o found\noptimizer.param_groups[0]['params'][0] is next(model.parameters()), "
        "sum(p.double().sum().item() for p in model.parameters()), type(model).__name__"
    )
    found = notebook.value("found")
    assert found == [found[0]] * 3
    assert found[0][0] is True
    assert found[0][2] == "DistributedDataParallel"


def test_non_torch_values_and_their_dependencies(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast\nimport numpy as np\nrank = int(os.environ['RANK']) if 'os' in globals() else -1\n"
        "big = np.full(300_000, 7.0)\nview = big[:10]\nclass Box:\n    def __init__(self, n): self.n = n\n"
        "box = Box(5)\ndef use():\n    return view.sum() + box.n"
    )
    kill(notebook, 0)
    error = notebook.fail("%%sky_broadcast\nuse()")
    assert "rank 0 was replaced and has no use: %sky_clone 0 --from 1 use" in error.text
    notebook.run("%sky_clone 0 --from 1 use, big np")
    notebook.run(
        "%%sky_broadcast -o found\nbig[0] = 1.0\nfloat(use()), np.shares_memory(view, big)"
    )
    assert notebook.value("found") == [(69.0, True)] * 3


def test_modules_are_no_older_values(notebook: Notebook) -> None:
    notebook.run("import json as parser")
    notebook.run("%%sky_broadcast\nimport json as parser")
    kill(notebook, 1)
    shown = notebook.run("%%sky_broadcast -o found\nparser.dumps(1)")
    assert "was replaced" not in shown.text, shown.text
    assert notebook.value("found") == ["1", "1", "1"]


def test_a_name_of_which_the_notebook_has_an_older_value(
    golden: Golden, notebook: Notebook
) -> None:
    notebook.run("counter = {'steps': 0}")
    notebook.run("%%sky_broadcast\ncounter = {'steps': counter['steps'] + 5}")
    kill(notebook, 1)
    shown = notebook.run("%%sky_broadcast -o found\ncounter['steps']")
    golden.line(shown.text, "%sky_clone 1 --from 0 counter")
    notebook.run("%sky_clone 1 --from 0 counter")
    notebook.run("%%sky_broadcast -o found\ncounter['steps']")
    assert notebook.value("found") == [5, 5, 5]
    notebook.run("counter = {'steps': 9}")
    notebook.run("%%sky_broadcast -o found\ncounter['steps']")
    assert notebook.value("found") == [9, 9, 9]


def test_class_of_a_local_module(notebook: Notebook) -> None:
    (notebook.folder / "shapes.py").write_text(
        "class Square:\n    def __init__(self, a): self.a = a\n"
    )
    notebook.run("%%sky_broadcast\nimport shapes\nsquare = shapes.Square(3)")
    kill(notebook, 2)
    notebook.run("%sky_clone 2 --from 1 square")
    notebook.run("%%sky_broadcast -o found\nsquare.a")
    assert notebook.value("found") == [3] * 3


BAD = {
    "%sky_clone 7 --from 0 x": "there is no rank 7: this pool has 3 ranks (0 to 2)",
    "%sky_clone 1 --from 7 x": "has ranks 0 to 2, not rank 7",
    "%sky_clone 1 --from 1 x": "rank 1 cannot get names from itself",
    "%sky_clone 1 --from 0 kept, keptt": "rank 0 has no keptt; did you mean 'kept'?",
    "%sky_clone 1 --from 0 kept stream": "stream cannot be sent from rank 0: TypeError: cannot pickle 'generator' object",
    "%sky_clone 1 --from 0 kept fussy": "kept, fussy cannot be rebuilt on this rank: ValueError: invalid literal for int()",
}
"""The last: what cannot be made again from what has travelled."""


def test_refused_requests_change_nothing(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast\nimport os\nkept = [int(os.environ['RANK'])]\nstream = (i for i in range(3))\nclass Fussy:\n"
        "    def __reduce__(self):\n        return int, ('no number',)\nfussy = Fussy()"
    )
    for line, said in BAD.items():
        error = notebook.fail(line)
        assert said in error.text
        assert "Traceback" not in error.text or "fussy" in line
        notebook.run("%%sky_broadcast -o found\nkept")
        assert notebook.value("found") == [[0], [1], [2]], line


def test_a_name_that_one_rank_alone_has(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nimport os\nif os.environ['RANK'] != '1':\n    only_there = 5")
    error = notebook.fail("%%sky_broadcast\nonly_there")
    assert (
        "rank 1 has no only_there, which rank 0 has: %sky_clone 1 --from 0 only_there" in error.text
        or ("rank 1 was replaced and has no only_there" in error.text)
    )
    notebook.run("%sky_clone 1 --from 0 only_there")
    notebook.run("%%sky_broadcast -o found\nonly_there")
    assert notebook.value("found") == [5, 5, 5]


def test_a_name_that_no_rank_has_is_a_plain_error(notebook: Notebook) -> None:
    assert "sky_clone" not in notebook.fail("%%sky_broadcast\nnobody_has_this").text


def test_as_python(golden: Golden, notebook: Notebook) -> None:
    notebook.run("import skymagic as sky\npool = sky.find('main')")
    notebook.run(
        "%%sky_broadcast\nimport os\nshared = [int(os.environ['RANK'])]\nother = {'same': shared}"
    )
    assert notebook.value("pool.clone('1:', ['shared', 'other'], source=0)") == ("shared", "other")
    notebook.run("%%sky_broadcast -o found\nshared, other['same'] is shared")
    assert notebook.value("found") == [([0], True)] * 3
    golden(notebook.fail("pool.clone(0, 'shared', source=0)").text)
    golden(notebook.fail("pool.clone(5, 'shared', source=0)").text)
