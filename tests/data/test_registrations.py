"""What the notebook has registered of its classes is registered on the ranks too."""

from __future__ import annotations

import importlib.util

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", scope="function")

CASES = {
    # name: (package, definition, expression that is True on both sides)
    "jax class": (
        "jax",
        """
import jax
@jax.tree_util.register_pytree_node_class
class C:
    def __init__(self, x): self.x = x
    def tree_flatten(self): return (self.x,), None
    @classmethod
    def tree_unflatten(cls, aux, children): return cls(*children)
""",
        "jax.tree.map(lambda v: v + 1, C(1)).x == 2",
    ),
    "jax dataclass": (
        "jax",
        """
import dataclasses, jax
@jax.tree_util.register_dataclass
@dataclasses.dataclass
class C:
    x: float
    name: str = dataclasses.field(metadata=dict(static=True), default="n")
""",
        "jax.tree.leaves(C(2.0)) == [2.0] and jax.tree.map(lambda v: v + 1, C(1.0)).x == 2.0",
    ),
    "jax node": (
        "jax",
        """
import jax
class C:
    def __init__(self, x): self.x = x
jax.tree_util.register_pytree_node(C, lambda c: ((c.x,), None), lambda aux, xs: C(*xs))
""",
        "jax.tree.leaves(C(5)) == [5]",
    ),
    "torch pytree": (
        "torch",
        """
import torch.utils._pytree as pytree
class C:
    def __init__(self, x): self.x = x
pytree.register_pytree_node(C, lambda c: ([c.x], None), lambda xs, _: C(*xs), serialized_type_name="C")
""",
        "pytree.tree_map(lambda v: v + 1, C(1)).x == 2",
    ),
    "torch safe globals": (
        "torch",
        "import torch\nclass C: pass\ntorch.serialization.add_safe_globals([C])",
        "C in torch.serialization.get_safe_globals()",
    ),
    "keras": (
        "keras",
        """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras
@keras.saving.register_keras_serializable("mine", "Thing")
class C(keras.layers.Layer): pass
""",
        "keras.saving.get_registered_object('mine>Thing') is C",
    ),
    "abstract class": (
        "abc",
        "import collections.abc, numbers\nclass C: pass\ncollections.abc.Sequence.register(C)",
        "isinstance(C(), collections.abc.Sequence) and not isinstance(C(), numbers.Number)",
    ),
    "copyreg": (
        "copyreg",
        "import copy, copyreg\nclass C:\n    def __init__(self, x): self.x = x\ncopyreg.pickle(C, lambda c: (C, (c.x * 2,)))",
        "copy.copy(C(2)).x == 4",
    ),
    "auto classes": (
        "transformers",
        """
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
class MyConfig(PretrainedConfig):
    model_type = "sky-mine"
class C(PreTrainedModel):
    config_class = MyConfig
    def __init__(self, config): super().__init__(config)
AutoConfig.register("sky-mine", MyConfig)
AutoModel.register(MyConfig, C)
""",
        "type(AutoModel.from_config(AutoConfig.for_model('sky-mine'))) is C",
    ),
    "single dispatch of the notebook": (
        "functools",
        """
import functools
class C: pass
@functools.singledispatch
def show(x): return "any"
@show.register
def _(x: C): return "C"
""",
        "show(C()) == 'C' and show(1) == 'any'",
    ),
    "custom operator": (
        "torch",
        """
import torch
from torch import library
@library.custom_op("skytest::double", mutates_args=())
def C(x: torch.Tensor) -> torch.Tensor: return x * 2
@C.register_fake
def _(x): return torch.empty_like(x)
C.register_autograd(lambda ctx, grad: grad * 2)
def grad(x):
    x = torch.tensor(x, requires_grad=True)
    C(x).backward()
    return x.grad.item()
""",
        "C(torch.ones(2)).tolist() == [2, 2] and grad(3.0) == 2 and torch.ops.skytest.double is not None",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_registration_arrives(notebook: Notebook, case: str) -> None:
    package, definition, expression = CASES[case]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    notebook.run(definition)
    assert notebook.value(expression), "the test's expression is wrong"
    notebook.run(f"%%sky_broadcast -g got\nC\ngot = {expression}")
    assert notebook.value("got") == [True, True]
    notebook.run(f"%%sky_broadcast -g got\ngot = {expression}")  # a second time is no error
    assert notebook.value("got") == [True, True]


def test_registration_after_the_class_has_travelled(notebook: Notebook) -> None:
    notebook.run("import collections.abc\nclass C: pass")
    notebook.run("%%sky_broadcast\nC")
    notebook.run("collections.abc.Sized.register(C);")
    notebook.run("%%sky_broadcast -g got\ngot = issubclass(C, collections.abc.Sized)")
    assert notebook.value("got") == [True, True]


def test_registration_on_ranks_reaches_the_notebook(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast -g made\nimport collections.abc\nclass C: pass\n"
        "collections.abc.Sized.register(C)\nmade = C()"
    )
    assert notebook.value("isinstance(made[0], __import__('collections').abc.Sized)")


def test_registration_that_stays_is_named_once(notebook: Notebook) -> None:
    notebook.run("import numpy as np, pandas as pd, atexit, math")
    notebook.run("""from pathlib import Path
Path("registry.py").write_text("known = {}\\ndef register_thing(name, f): known[name] = f")
import registry
registry.register_thing("x", print); atexit.register(print)""")
    said = notebook.run("%%sky_broadcast\nregistry.known;").text
    assert "registry.register_thing" in said
    assert "broadcast cell" in said
    assert "atexit" not in said
    assert "register_thing" not in notebook.run("%%sky_broadcast\nregistry.known;").text
    assert "register_thing" not in notebook.run("%%sky_broadcast\nmath.pi;").text


def test_registration_with_a_class_of_a_package_is_named(notebook: Notebook) -> None:
    """As with OmegaConf: the cell names the class, not its module."""
    notebook.run("""from pathlib import Path
Path("conf.py").write_text("class Conf:\\n known = {}\\n @classmethod\\n def register_resolver(cls, n, f): cls.known[n] = f")
from conf import Conf
Conf.register_resolver("x", print)""")
    notebook.run("other = Conf()")
    assert "Conf.register_resolver" in notebook.run("%%sky_broadcast\nother.known;").text
    own = notebook.run("%%sky_broadcast\nConf.register_resolver('x', print); Conf.known;").text
    assert "notebook only" not in own
