"""A value that refers to what a rank holds under another name refers to it there too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data.far import Far, moved, ranks
from tests.data.far import Notebook as FarNotebook
from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.small, self.big = nn.Linear(3, 3), nn.Linear(3, 20_000)
    def forward(self, x): return self.big(self.small(x)).mean()
def train(model, opt):
    before = [p.detach().clone() for p in model.parameters()]
    opt.zero_grad(); model(torch.ones(2, 3)).backward(); opt.step()
    return [not torch.equal(a, b) for a, b in zip(before, model.parameters())]
def linked(model, opt): return all(a is b for a, b in zip(model.parameters(), opt.param_groups[0]['params'], strict=True))
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""

notebook = borrowed("--ranks 2 --plugin torch")


def seen(notebook: Notebook, cell: str) -> Any:
    """The values by rank of a cell's last expression; nothing was said."""
    shown = notebook.run(f"%%sky_broadcast -o seen\n{cell}")
    assert "refers to" not in shown.text
    return notebook.value("seen")


# ----------------------------------------------------------------------------------------------- models and optimizers


def test_an_optimizer_trains_the_model_that_the_ranks_hold(notebook: Notebook) -> None:
    notebook.run(MODEL)
    alone = "train(model, torch.optim.SGD(model.parameters(), lr=1.0)), float(model.small.weight.detach().sum())"
    [(trained, total), _] = seen(notebook, alone)
    assert trained == [True] * 4
    cell = "linked(model, opt), float(model.small.weight.detach().sum()), train(model, opt)"
    assert seen(notebook, cell) == [(True, total, [True] * 4)] * 2


def test_a_scheduler_sets_the_optimizer_that_the_ranks_hold(notebook: Notebook) -> None:
    notebook.run(MODEL + "plain = torch.optim.SGD(model.parameters(), lr=0.5)")
    seen(notebook, "plain.param_groups[0]['initial_lr'] = 0.5")
    notebook.run("schedule = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)")
    assert (
        seen(
            notebook,
            "plain.step(); schedule.step(); schedule.optimizer is plain, plain.param_groups[0]['lr']",
        )
        == [(True, 0.25)] * 2
    )


def test_an_optimizer_trains_through_ddp(notebook: Notebook) -> None:
    notebook.run(MODEL)
    seen(notebook, "model.small.bias.data += 1; None")
    seen(notebook, "model = nn.parallel.DistributedDataParallel(model)")
    assert seen(notebook, "linked(model, opt), train(model, opt)") == [(True, [True] * 4)] * 2
    sums = seen(
        notebook,
        "float(model.module.small.weight.sum()), float(model.module.small.bias.mean()) > 0.3",
    )
    assert sums[0] == sums[1]
    assert sums[0][1] is True


IN_THE_NOTEBOOK = {
    "nothing": "pass",
    "eval": "net[0].eval()",
    "a forward pass": "with torch.no_grad(): net[0](torch.ones(4, 3))",
    "one of them": "net = net[0]",
}


@pytest.mark.parametrize("what", IN_THE_NOTEBOOK)
def test_model_from_the_ranks_does_not_replace_theirs(notebook: Notebook, what: str) -> None:
    notebook.run(
        f"{MODEL}class Normed(Net):\n    def __init__(self):\n        super().__init__()\n"
        "        self.norm = nn.BatchNorm1d(3)\n    def forward(self, x): return self.big(self.norm(self.small(x))).mean()"
    )
    notebook.run(
        "%%sky_broadcast -g net\nnet = nn.parallel.DistributedDataParallel(Normed())\n"
        "sgd = torch.optim.SGD(net.parameters(), lr=0.1)\ntrain(net, sgd)"
    )
    notebook.run(IN_THE_NOTEBOOK[what])
    cell = "linked(net, sgd), net.training, type(net).__name__, any(train(net, sgd))"
    shown = notebook.run(f"%%sky_broadcast -o seen\n{cell}")
    assert notebook.value("seen") == [(True, True, "DistributedDataParallel", True)] * 2
    said = "[net: the ranks keep their own (DistributedDataParallel); --push net sends the notebook's]\n"
    assert shown.text == ("" if what == "nothing" else said)
    assert notebook.run("%%sky_broadcast\nnet.training").text == ""


def test_a_model_that_was_moved_under_its_name_stays_linked(notebook: Notebook) -> None:
    notebook.run(MODEL)
    seen(notebook, "model = model.to('cpu').train()")
    assert seen(notebook, "linked(model, opt)") == [True] * 2


def test_model_recreated_on_the_ranks_is_named(golden: Golden, notebook: Notebook) -> None:
    notebook.run(MODEL + "late = torch.optim.SGD(model.parameters(), lr=0.2)")
    seen(notebook, "model; None")
    seen(notebook, "model = Net(1)")
    said = notebook.run("%%sky_broadcast -o seen\nlinked(model, late)").text
    golden.line(said, "[late ")
    assert notebook.value("seen") == [False] * 2
    assert "[late " not in notebook.run("%%sky_broadcast\nlate, model;").text
    notebook.run("%%sky_broadcast --fresh -o seen\nlinked(model, late)")
    assert notebook.value("seen") == [True] * 2


def test_flag_set_here_keeps_weights_trained_there(notebook: Notebook) -> None:
    notebook.run(MODEL)
    seen(notebook, "linked(model, opt), train(model, opt)")
    notebook.run("model.eval()")
    assert (
        seen(notebook, "linked(model, opt), model.training, len(opt.state)")
        == [(True, False, 4)] * 2
    )


@pytest.mark.parametrize("cell", ["opt", "model", "model, opt"])
def test_weights_set_here_reach_both(notebook: Notebook, cell: str) -> None:
    notebook.run(MODEL)
    seen(notebook, "train(model, opt)")
    notebook.run("nn.init.constant_(model.small.weight, 5.0);")
    seen(notebook, f"{cell}; None")
    assert (
        seen(notebook, "linked(model, opt), float(model.small.weight.detach()[0, 0])")
        == [(True, 5.0)] * 2
    )


def test_an_optimizer_of_a_part_that_the_ranks_have_replaced(notebook: Notebook) -> None:
    notebook.run(MODEL)
    seen(notebook, "model.small = nn.Linear(3, 3); None")
    mine = "[a is b for a, b in zip(model.parameters(), opt.param_groups[0]['params'])]"
    assert seen(notebook, mine) == [[False, False, True, True]] * 2


# ------------------------------------------------------------------------------------------------ everything else

KINDS = {
    "a loader and its data": (
        "class Data:\n    def __init__(self): self.rows = [[0.0]] * 4\n    def __len__(self): return 4\n"
        "    def __getitem__(self, index): return self.rows[index][0]\n"
        "from torch.utils.data import DataLoader\ndata = Data()",
        "data.rows[0] = [7.0]",
        "loader = DataLoader(data, batch_size=4)",
        "loader.dataset is data, next(iter(loader)).tolist()",
        (True, [7.0, 0.0, 0.0, 0.0]),
    ),
    "a bound method": (
        "class Counter:\n    def __init__(self): self.n = 0\n    def up(self): self.n += 1\ncounter = Counter()",
        "counter.up()",
        "up = counter.up",
        "up(); up.__self__ is counter, counter.n",
        (True, 2),
    ),
    "a partial": (
        "from functools import partial\nrows = [[1], [2]]\ndef append(where, what): where.append(what)",
        "rows.append([3])",
        "add = partial(append, rows[0])",
        "add(5); rows, add.func is append",
        ([[1, 5], [2], [3]], True),
    ),
    "a closure": (
        "totals = {'x': 1}\ndef adder(where):\n    def add(name): where[name] = where.get(name, 0) + 1\n    return add",
        "totals['y'] = 1",
        "add = adder(totals)",
        "add('x'); add('y'); totals",
        {"x": 2, "y": 2},
    ),
    "functions of one closure": (
        "def pair():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n    def get(): return n\n    return up, get\n"
        "up, get = pair()",
        "up()",
        "",
        "up(); get()",
        2,
    ),
    "a container": (
        "import numpy as np\nframe = np.zeros(3)\nnames = ['a']",
        "frame[0] = 1; names.append('b')",
        "both = {'frame': frame, 'names': (names,)}",
        "both['frame'][1] = 2; both['frame'] is frame, frame.tolist(), both['names'][0] is names, names",
        (True, [1.0, 2.0, 0.0], True, ["a", "b"]),
    ),
    "an item": (
        "import pandas as pd\nboth = {'frame': pd.DataFrame({'x': [1, 2]}), 'steps': [{'n': 1}], 'some': {1}}",
        "both['frame'].loc[0, 'x'] = 5; both['steps'][0]['n'] = 2",
        "frame, step, some = both['frame'], both['steps'][0], both['some']",
        "some.add(2); frame is both['frame'], frame.x.tolist(), step is both['steps'][0], step, both['some']",
        (True, [5, 2], True, {"n": 2}, {1, 2}),
    ),
    "a view of an array": (
        "import numpy as np\nbase = np.arange(12.0).reshape(3, 4)",
        "base[0] = 5",
        "row, column, flat = base[1], base[:, 0], base.ravel()",
        "row[0] = 50; column[2] = 60; flat[0] = 70; base[:, 0].tolist()",
        [70.0, 50.0, 60.0],
    ),
    "a view of a tensor": (
        "import torch\nbase = torch.zeros(3, 20_000)",
        "base[0, 0] = 5",
        "row, flat, storage = base[1], base.view(-1), base.untyped_storage()",
        "row[0] = 50; flat[1] = 60; base[:2, :2].tolist(), storage.data_ptr() == base.data_ptr()",
        ([[5.0, 60.0], [50.0, 0.0]], True),
    ),
    "a weight of a model": (
        "import torch\nnet = torch.nn.Linear(2, 2)\ntorch.nn.init.ones_(net.weight)",
        "net.weight.data[0, 0] = 5",
        "weight, head, column = net.weight, net.weight.data, net.weight.detach()[:, 0]",
        "head[0, 1] = 6; column[1] = 7; weight is net.weight, weight.tolist()",
        (True, [[5.0, 6.0], [7.0, 1.0]]),
    ),
    "the same object under another name": (
        "one = [1]", "one.append(2)", "other = one", "other.append(3); other is one, one", (True, [1, 2, 3]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_links(notebook: Notebook, kind: str) -> None:
    made, changed, refers, cell, expected = KINDS[kind]
    notebook.run(made)
    seen(notebook, f"{changed}\nNone")
    notebook.run(refers)
    assert seen(notebook, cell) == [expected] * 2


def test_displayed_outputs_are_not_linked(notebook: Notebook) -> None:
    """Both sides have their own `_`; the notebook's is part of the value that is sent."""
    notebook.run("whole = {'part': [1]}\nwhole")
    seen(notebook, "whole['part'].append(2)\n5")
    notebook.run("part = whole['part']")
    shown = notebook.run("%%sky_broadcast -o seen\npart.append(3)\npart is whole['part'], part")
    assert notebook.value("seen") == [(True, [1, 2, 3])] * 2
    assert shown.text == ""


def test_values_of_one_class_are_not_linked(notebook: Notebook) -> None:
    notebook.run(
        "from dataclasses import dataclass, field\n@dataclass\nclass Config:\n    known = []\n    sizes: list = field(default_factory=list)"
    )
    notebook.run("one = Config([1])")
    assert seen(notebook, "one.sizes.append(2); one.sizes") == [[1, 2]] * 2
    notebook.run("one.sizes.append(3)\nother = Config([5])")
    assert seen(notebook, "other.sizes") == [[5]] * 2
    shown = notebook.run("%%sky_broadcast --dry-run\none")
    assert "travels" in next(line for line in shown.lines if line.startswith("one"))


# ------------------------------------------------------------------------------------------- gradients, computations


def test_gradients_travel_in_both_directions(notebook: Notebook) -> None:
    notebook.run(
        MODEL + "model(torch.ones(2, 3)).backward()\nwanted = model.small.weight.grad.tolist()"
    )
    assert (
        seen(notebook, "model.small.weight.grad.tolist() == wanted, model.big.bias.grad is None")
        == [(True, False)] * 2
    )
    notebook.run("%%sky_broadcast -g model\nmodel.small.weight.grad += 1")
    assert (
        notebook.value("torch.allclose(model[0].small.weight.grad, torch.tensor(wanted) + 1)")
        is True
    )


def test_a_gradient_that_is_set_here_is_a_change(golden: Golden, notebook: Notebook) -> None:
    notebook.run("import torch\nw = torch.ones(2, requires_grad=True)")
    assert seen(notebook, "w.grad is None") == [True] * 2
    notebook.run("(w * 3).sum().backward()")
    assert seen(notebook, "w.grad.tolist()") == [[3.0, 3.0]] * 2
    shown = notebook.run("%%sky_broadcast --dry-run\nw")
    golden.line(shown.stdout, "w  ")


def test_a_tensor_that_is_no_leaf_is_refused_by_name(notebook: Notebook) -> None:
    notebook.run(
        "import torch\nx = torch.ones(2, requires_grad=True)\nloss = (x * 2).sum()\nkept = {'last': [x * 2]}"
    )
    said = notebook.fail("%%sky_broadcast\nloss, kept").text
    assert {*notebook.fields()["names"]} == {"loss", "kept"}
    assert "(SumBackward0)" in said
    assert "pass loss.detach()" in said
    assert "pass kept['last'][0].detach()" in said
    notebook.run("loss = loss.detach()")
    assert seen(notebook, "float(loss)") == [4.0] * 2


def test_tensor_from_a_rank_arrives_without_its_graph(notebook: Notebook) -> None:
    notebook.run("import torch")
    notebook.run("%%sky_broadcast -g error\nerror = (torch.ones(2, requires_grad=True) * 2).sum()")
    assert (
        notebook.value("[(each.item(), each.requires_grad) for each in error]")
        == [(4.0, False)] * 2
    )


# ------------------------------------------------------------------------------------------------- ranks that differ


far = ranks()


def test_replaced_rank_gets_both_values_and_others_keep_theirs(far: FarNotebook) -> None:
    far.here("inner = [0]; config = {'inner': inner}")
    far.there("inner.append(1)")
    far.ranks[1].kill()
    far.ranks[1] = Far(far.directory, 1)
    far.shipper.forget([1])
    assert moved(far.there("config; same = config['inner'] is inner, inner")) == ["config", "inner"]
    assert far.values("same") == [[True, [0, 1]], [True, [0]]]


def test_links_of_links(far: FarNotebook) -> None:
    far.here("a = [0]; b = [a, [1]]; c = {'a': a, 'b': b, 'deep': b[1]}")
    for name in "abc":
        far.there(f"{name}; a.append('x')")
    assert (
        far.values("c['a'] is a and b[0] is a and c['b'] is b and c['deep'] is b[1], a")
        == [[True, [0, *"xxx"]]] * 2
    )


def test_objects_released_by_a_rank_are_freed(far: FarNotebook) -> None:
    far.here(
        "class Big:\n  pass\nbox = {'big': [Big()], 'own': Big()}; box['own'].parts = [[Big()]]"
    )
    far.there(
        "import weakref\nrefs = [weakref.ref(box['big'][0]), weakref.ref(box['own'].parts[0][0])]"
    )
    far.there(
        "box['big'] = None; first = refs[0]() is None; box['own'].parts.clear(); second = refs[1]() is None"
    )
    far.there("import gc")
    assert far.values("[each() for each in refs]") == [[None, None]] * 2
    far.here("old = box['big']; part = box['own'].parts")
    far.there("x = type(old[0]).__name__, part is box['own'].parts, part")
    assert far.values("x[1:]") == [[True, []]] * 2


def test_a_value_of_the_run_alone_is_never_linked(far: FarNotebook) -> None:
    far.here("data = [1]")
    far.there("data.append(2)")
    far.there("got = given, given is data", extra={"given": far.namespace["data"]})
    assert far.values("got") == [[[1], False]] * 2
