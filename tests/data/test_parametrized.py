"""torch's constants, and modules whose parameters are computed from others: they travel both ways and stay what they are."""

from __future__ import annotations

import warnings

import pytest

from tests.lab.notebook import Notebook, seen
from tests.lab.pools import borrowed

notebook = borrowed(
    "--ranks 2",
    "import torch, warnings\nfrom torch import nn\nfrom torch.nn.utils import parametrize, parametrizations, prune\n"
    "warnings.simplefilter('ignore', FutureWarning)",
)

CONSTANTS = [
    "torch.channels_last",
    "torch.channels_last_3d",
    "torch.contiguous_format",
    "torch.strided",
    "torch.sparse_coo",
    "torch.jagged",
    "torch.bfloat16",
    "torch.float8_e4m3fn",
    "torch.per_tensor_affine",
    "torch.default_generator",
]


@pytest.mark.parametrize("constant", CONSTANTS)
def test_constants_of_torch(notebook: Notebook, constant: str) -> None:
    # without a name torch in the cell, which a constant's own pickle needs
    notebook.run(f"constant = {constant}\nnested = {{'a': [constant]}}")
    cell = f"import sys\n_torch = sys.modules['torch']\nown = _{constant}\n"
    assert seen(notebook, f"{cell}constant is own, nested['a'][0] is own") == [(True, True)] * 2
    notebook.run("%%sky_broadcast -o back\nconstant")
    assert notebook.value("[each is constant for each in back]") == [True, True]


def test_constant_needs_no_module_of_the_notebook(notebook: Notebook) -> None:
    """pickle finds `torch.channels_last` in the module that first imported torch."""
    (notebook.folder / "first_with_torch.py").write_text("import torch\n")
    notebook.run(
        "import sys, first_with_torch\n"
        "for name in [name for name in sys.modules if name != 'first_with_torch']:\n"
        "    sys.modules[name] = sys.modules.pop(name)  # behind it\n"
        "layout = [torch.channels_last]"
    )
    notebook.run("%%sky_broadcast -o back\nlayout")
    assert notebook.value("[each == layout for each in back]") == [True, True]


def test_limits_and_use_of_a_memory_format(notebook: Notebook) -> None:
    notebook.run(
        "f, i, fmt = torch.finfo(torch.float16), torch.iinfo(torch.int8), torch.channels_last"
    )
    cell = "import torch\nf.max, i.max, torch.ones(1, 2, 3, 3).to(memory_format=fmt).is_contiguous(memory_format=fmt)"
    assert seen(notebook, cell) == [(65504.0, 127, True)] * 2


MODELS = {
    "weight_norm": "net = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)))",
    "spectral_norm": "net = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3)))",
    "both parameters of a convolution": (
        "net = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.utils.weight_norm(nn.Conv1d(1, 2, 2)))"
    ),
    "a recurrent layer": (
        "class Last(nn.Module):\n    def forward(self, x): return x[0]\n"
        "net = nn.Sequential(nn.utils.weight_norm(nn.LSTM(3, 3), 'weight_hh_l0'), Last())"
    ),
    "parametrizations.weight_norm": "net = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)))",
    "parametrizations.spectral_norm": "net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 3)))",
    "parametrizations.orthogonal": "net = nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3)))",
    "a parametrization of the notebook": (
        "class Doubled(nn.Module):\n    def forward(self, w): return 2 * w\n    def right_inverse(self, w): return w / 2\n"
        "class Own(nn.Linear): pass\n"
        "net = nn.Sequential(Own(3, 3), nn.Linear(3, 3))\n"
        "for each in net: parametrize.register_parametrization(each, 'weight', Doubled())\n"
        "parametrize.register_parametrization(net[0], 'weight', Doubled())\n"
        "parametrize.register_parametrization(net[0], 'bias', Doubled())"
    ),
    "pruned": "net = nn.Sequential(nn.Linear(3, 3)); prune.l1_unstructured(net[0], 'weight', 0.4)",
    "pruned twice, and the bias": (
        "net = nn.Sequential(nn.Linear(3, 3)); prune.random_unstructured(net[0], 'weight', 0.3)\n"
        "prune.ln_structured(net[0], 'weight', 0.3, n=2, dim=0); prune.l1_unstructured(net[0], 'bias', 1)"
    ),
    "pruned by a method of the notebook": (
        "class Every(prune.BasePruningMethod):\n    PRUNING_TYPE = 'unstructured'\n"
        "    def compute_mask(self, t, default_mask):\n"
        "        mask = default_mask.clone(); mask.view(-1)[::2] = 0; return mask\n"
        "net = nn.Sequential(nn.Linear(3, 3)); Every.apply(net[0], 'weight')"
    ),
}
ROUND = """
import torch
def trained(net, opt):
    torch.manual_seed(3)
    for _ in range(2):
        opt.zero_grad()
        net(torch.rand(4, 3)).square().sum().backward()
        opt.step()
    values = [p.grad for p in net.parameters()] + list(net.state_dict().values())
    return torch.cat([value.detach().flatten() for value in values])
def alike(*values):  # the notebook may use more threads than a rank, which add in another order
    return all(torch.allclose(each, values[0], atol=1e-5) for each in values)
"""


@pytest.mark.parametrize("used", ["new", "used"])
@pytest.mark.parametrize("kind", MODELS)
def test_models_with_computed_parameters(notebook: Notebook, kind: str, used: str) -> None:
    notebook.run(
        f"import copy\n{ROUND}torch.manual_seed(0)\n{MODELS[kind]}\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)"
    )
    if used == "used":
        notebook.run("trained(net, opt);")
    notebook.run("%%sky_broadcast -o back\nnet, opt")
    notebook.run("%%sky_broadcast -o there\ntrained(net, opt)")
    notebook.run("%%sky_broadcast -o later\nnet, opt")
    notebook.run("copies = back\nhere = trained(net, opt)")
    assert notebook.value("alike(here, *there)")
    assert notebook.value("alike(here, *(trained(*each) for each in copies))")
    # what comes back goes on as the notebook's own does
    assert notebook.value("alike(trained(*later[1]), trained(net, opt))")
    assert notebook.value("list(net.state_dict()) == list(later[0][0].state_dict())")
    assert notebook.value("isinstance(later[0][0][-1], net[-1].__class__.__mro__[1])")


def test_computed_parameter_has_its_graph_at_once(notebook: Notebook) -> None:
    notebook.run("layer = nn.Linear(3, 3); prune.l1_unstructured(layer, 'weight', 0.4)")
    cell = (
        "layer.weight.sum().backward()\nbool((layer.weight_orig.grad == layer.weight_mask).all())"
    )
    assert seen(notebook, cell) == [True] * 2


def test_they_can_be_removed_on_a_rank(notebook: Notebook) -> None:
    with warnings.catch_warnings():
        notebook.run(
            "a = nn.utils.weight_norm(nn.Linear(2, 2)); b = parametrizations.weight_norm(nn.Linear(2, 2))\n"
            "c = nn.Linear(2, 2); prune.l1_unstructured(c, 'weight', 0.5)\nx = torch.ones(2)\n"
            "values = [each(x).tolist() for each in (a, b, c)]"
        )
    cell = (
        "from torch import nn\nfrom torch.nn.utils import parametrize, prune\n"
        "nn.utils.remove_weight_norm(a); parametrize.remove_parametrizations(b, 'weight'); prune.remove(c, 'weight')\n"
        "[each(x).tolist() for each in (a, b, c)] == values, {type(each).__name__ for each in (a, b, c)}, "
        "[sorted(dict(each.named_parameters())) for each in (a, b, c)]"
    )
    assert seen(notebook, cell) == [(True, {"Linear"}, [["bias", "weight"]] * 3)] * 2
