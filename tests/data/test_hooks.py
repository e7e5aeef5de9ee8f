"""Hooks of tensors, modules and optimizers travel with them, both ways."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook, seen
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", "import torch, functools")

TENSORS = {
    "a leaf": ("x = torch.ones(3, requires_grad=True)", "x.register_hook(lambda g: g * mask)"),
    "a parameter": ("x = torch.nn.Parameter(torch.ones(3))", "x.register_hook(lambda g: g * mask)"),
    "a view of a larger memory": (
        "whole = torch.ones(9000)\nx = whole[3:6].requires_grad_()",
        "x.register_hook(lambda g: g * mask)",
    ),
    "a partial": (
        "x = torch.ones(3, requires_grad=True)\ndef times(m, g): return g * m",
        "x.register_hook(functools.partial(times, mask))",
    ),
    "a method of an object": (
        "class Masked:\n    def __init__(self): self.mask = mask\n    def apply(self, g): return g * self.mask\n"
        "x = torch.nn.Parameter(torch.ones(3))",
        "x.register_hook(Masked().apply)",
    ),
    "a closure that holds its tensor": (
        "def hooked(p): p.register_hook(lambda g: g * mask * p.numel() / 3)\n"
        "x = torch.nn.Parameter(torch.ones(3))",
        "hooked(x)",
    ),
    "a tensor with an attribute": (
        "x = torch.nn.Parameter(torch.ones(3)); x.tag = 'a'",
        "x.register_hook(lambda g: g * mask)",
    ),
    "of a double": (
        "x = torch.ones(3, dtype=torch.float64, requires_grad=True)",
        "x.register_hook(lambda g: g * mask)",
    ),
    "after accumulation": (
        "x = torch.nn.Parameter(torch.ones(3))\ndef masked(p): p.grad.mul_(mask)",
        "x.register_post_accumulate_grad_hook(masked)",
    ),
    "large": (
        "x = torch.nn.Parameter(torch.ones(30_000)); mask = torch.arange(30_000.0)",
        "x.register_hook(lambda g: g * mask)",
    ),
}
CHECK = "x.grad = None\nx.sum().backward()\nbool((x.grad == mask).all())"


@pytest.mark.parametrize("kind", TENSORS)
def test_tensor_hooks_travel(notebook: Notebook, kind: str) -> None:
    tensor, hook = TENSORS[kind]
    notebook.run(f"mask = torch.tensor([1.0, 0.0, 2.0])\n{tensor}\n{hook}")
    sent = notebook.run(f"%%sky_broadcast -o seen\n{CHECK}")
    assert notebook.value("seen") == [True] * 2
    assert "hook" not in sent.stderr, "torch warns of hooks that it loses"
    notebook.run("%%sky_broadcast -o back\nx.grad = None\nx")
    for rank in range(2):
        notebook.run(f"x = back[{rank}]\n{CHECK.rpartition(chr(10))[0]}")
        assert notebook.value("bool((x.grad == mask).all())")


@pytest.mark.parametrize("kind", ["a parameter", "after accumulation", "large"])
def test_tensor_hooks_of_a_rank_arrive(notebook: Notebook, kind: str) -> None:
    tensor, hook = TENSORS[kind]
    cell = f"import torch\nmask = torch.tensor([1.0, 0.0, 2.0])\n{tensor}\n{hook}\nx, mask"
    notebook.run(f"%%sky_broadcast -o back\n{cell}")
    notebook.run("x, mask = back[1]\nx.sum().backward()")
    assert notebook.value("bool((x.grad == mask).all())")


def test_added_or_removed_hook_is_a_change(notebook: Notebook) -> None:
    notebook.run("x = torch.nn.Parameter(torch.ones(2))")
    assert seen(notebook, "x.sum().backward()\nx.grad.tolist()") == [[1, 1]] * 2
    notebook.run("handle = x.register_hook(lambda g: g * 3)")
    assert seen(notebook, "x.grad = None\nx.sum().backward()\nx.grad.tolist()") == [[3, 3]] * 2
    notebook.run("handle.remove()")
    assert seen(notebook, "x.grad = None\nx.sum().backward()\nx.grad.tolist()") == [[1, 1]] * 2


def test_handle_removes_the_hook_on_a_rank(notebook: Notebook) -> None:
    notebook.run(
        "x = torch.nn.Parameter(torch.ones(2))\nhandle = x.register_hook(lambda g: g * 3)\n"
        "net = torch.nn.Linear(1, 1)\nofnet = net.register_forward_hook(lambda m, i, o: o * 0 + 7)"
    )
    cell = (
        "import torch\nhandle.remove()\nofnet.remove()\nx.sum().backward()\n"
        "x.grad.tolist(), float(net(torch.ones(1))) == 7"
    )
    assert seen(notebook, cell) == [([1, 1], False)] * 2


def test_new_hooks_on_a_rank_keep_those_sent(notebook: Notebook) -> None:
    notebook.run(
        "x = torch.nn.Parameter(torch.ones(2))\nnet = torch.nn.Linear(1, 1)\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\nfor _ in range(9):\n"
        "    x.register_hook(lambda g: g + 1)\n    net.register_forward_hook(lambda m, i, o: o + 1)\n"
        "    opt.register_step_post_hook(lambda o, a, k: None)"
    )
    cell = (
        "for _ in range(9):\n    x.register_hook(lambda g: g + 1)\n"
        "    net.register_forward_hook(lambda m, i, o: o + 1)\n"
        "    opt.register_step_post_hook(lambda o, a, k: None)\n"
        "x.sum().backward()\n"
        "len(x._backward_hooks), len(net._forward_hooks), len(opt._optimizer_step_post_hooks), x.grad.tolist()"
    )
    assert seen(notebook, cell) == [(18, 18, 18, [19, 19])] * 2


MODULE_HOOKS = {
    "forward": "net.body[0].register_forward_hook(lambda m, i, o: log.append('hook'))",
    "forward with kwargs": "net.body[0].register_forward_hook(lambda m, i, k, o: log.append('hook'), with_kwargs=True)",
    "forward pre": "net.body[0].register_forward_pre_hook(lambda m, i: log.append('hook'))",
    "full backward": "net.body[0].register_full_backward_hook(lambda m, i, o: log.append('hook'))",
    "full backward pre": "net.body[0].register_full_backward_pre_hook(lambda m, o: log.append('hook'))",
    "state dict": "net.body.register_state_dict_post_hook(lambda *a: log.append('hook'))",
    "state dict pre": "net.body.register_state_dict_pre_hook(lambda *a: log.append('hook'))",
    "load pre": "net.body.register_load_state_dict_pre_hook(lambda *a: log.append('hook'))",
    "load post": "net.register_load_state_dict_post_hook(lambda *a: log.append('hook'))",
    "gradient": "net.body[0].weight.register_hook(lambda g: log.append('hook'))",
    "accumulated gradient": "net.body[0].weight.register_post_accumulate_grad_hook(lambda p: log.append('hook'))",
    "step pre": "opt.register_step_pre_hook(lambda o, a, k: log.append('hook'))",
    "step post": "opt.register_step_post_hook(lambda o, a, k: log.append('hook'))",
    "optimizer's state dict": "opt.register_state_dict_post_hook(lambda o, s: log.append('hook'))",
    "optimizer's state dict pre": "opt.register_state_dict_pre_hook(lambda o: log.append('hook'))",
    "optimizer's load": "opt.register_load_state_dict_post_hook(lambda o: log.append('hook'))",
    "optimizer's load pre": "opt.register_load_state_dict_pre_hook(lambda o, s: log.append('hook'))",
}
NET = """
import torch
log = []
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    def forward(self, x): return self.body(x)
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=0.01)
sched = torch.optim.lr_scheduler.StepLR(opt, 1)
"""
USE = """
import torch
log.clear()
net(torch.ones(1, 2, requires_grad=True)).sum().backward()
opt.step(); sched.step()
net.load_state_dict(net.state_dict()); opt.load_state_dict(opt.state_dict())
"""


@pytest.mark.parametrize("kind", MODULE_HOOKS)
def test_hooks_of_modules_and_optimizers_travel(notebook: Notebook, kind: str) -> None:
    notebook.run(f"{NET}{MODULE_HOOKS[kind]}")
    assert seen(notebook, f"{USE}log") == [["hook"]] * 2
    notebook.run(f"%%sky_broadcast -o back\n{NET}{MODULE_HOOKS[kind]}\nnet, opt, sched, log")
    notebook.run(f"net, opt, sched, log = back[0]\n{USE}")
    assert notebook.value("log") == ["hook"]


def test_hooks_go_from_rank_to_rank(notebook: Notebook) -> None:
    hooks = "\n".join(MODULE_HOOKS[kind] for kind in ("forward", "gradient", "step post"))
    notebook.run(f"%%sky_broadcast -t 0\n{NET}{hooks}")
    notebook.run("%sky_clone 1 --from 0 net,opt,sched,log")
    assert seen(notebook, f"{USE}log") == [["hook"] * 3] * 2


def test_hook_that_cannot_travel_is_named(notebook: Notebook) -> None:
    notebook.run(
        "import threading\nlock = threading.Lock()\ndef locked(g, lock=lock): return g\n"
        "weight = torch.nn.Parameter(torch.ones(2))\nweight.register_hook(locked)"
    )
    error = notebook.fail("%%sky_broadcast\nweight.sum().backward()", "capture")
    assert "weight._backward_hooks[" in error.text
    assert notebook.fields()["names"] == ("weight",)


def test_hook_that_asks_to_stay_stays(notebook: Notebook) -> None:
    notebook.run(
        "@torch.utils.hooks.unserializable_hook\ndef mine(g): return g * 5\n"
        "x = torch.nn.Parameter(torch.ones(2))\nx.register_hook(mine)\nx.register_hook(lambda g: g * 2)"
    )
    assert seen(notebook, "x.sum().backward()\nx.grad.tolist()") == [[2, 2]] * 2
