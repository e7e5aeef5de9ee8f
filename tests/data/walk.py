"""A random walk through variables on both sides, beside a second interpreter that follows the rule of state by its words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.data.far import Notebook

MAKE: list[Callable[[random.Random], str]] = [
    lambda r: f"{r.randrange(100)}",
    lambda r: f"'t{r.randrange(5)}'",
    lambda r: f"[{r.randrange(5)}, {{'k': {r.randrange(5)}}}]",
    lambda r: f"np.full(40000, {r.randrange(3)}.0)",
    lambda r: f"np.arange({r.randrange(3) + 150000}.0)",
    lambda r: f"Box({r.randrange(3)})",
    lambda r: f"{{'box': Box(1), 'a': np.full(3000, {r.randrange(3)})}}",
]
TOUCH = """
def touch(value, n):
    if isinstance(value, np.ndarray): value[n % len(value)] += n
    elif isinstance(value, list): value.append(n)
    elif isinstance(value, dict): value[n] = n
    elif isinstance(value, Box): value.n += n
def show(value):
    if isinstance(value, np.ndarray): return [len(value), float(value.sum()), float((value * np.arange(len(value))).sum())]
    if isinstance(value, list): return [show(each) for each in value]
    if isinstance(value, dict): return [[str(key), show(each)] for key, each in value.items()]
    if isinstance(value, Box): return ["box", value.n]
    return value
class Box:
    def __init__(self, n): self.n = n
import numpy as np
"""


def walk(notebook: Notebook, seed: int, steps: int) -> None:
    """Change variables on both sides at random, and compare the ranks with a model of the rule."""
    rand = random.Random(seed)
    names = ["p", "q", "r", "s"]
    notebook.here(TOUCH)
    notebook.there("touch, show, Box, np")
    model: dict[str, Any] = {}  # a second interpreter that follows the rule by its words
    exec(compile(TOUCH, "<model>", "exec", dont_inherit=True), model)
    seen: dict[str, Any] = {}  # what the notebook's value was when the rank's binding was made

    def load(name: str) -> None:
        """The rule: bind the notebook's value when it differs from the one that was bound last."""
        if name in notebook.namespace:
            now = model["show"](as_model(notebook.namespace[name]))
            if seen.get(name, load) != now:
                seen[name] = now
                model[name] = as_model(notebook.namespace[name])

    def as_model(value: Any) -> Any:
        if type(value).__name__ == "Box":
            return model["Box"](value.n)
        if isinstance(value, dict):
            return {key: as_model(each) for key, each in value.items()}
        return value.copy() if hasattr(value, "copy") else value

    for step in range(steps):
        name, other = rand.sample(names, 2)
        action = rand.randrange(8)
        if action == 0 or name not in notebook.namespace:
            notebook.here(f"{name} = {rand.choice(MAKE)(rand)}")
        elif action == 1:
            notebook.here(f"touch({name}, {step})")
        elif action == 2:
            notebook.here(f"del {name}")
        elif action == 3 and name in notebook.namespace:
            notebook.here(f"import copy\n{other} = copy.deepcopy({name})")
        elif action in (4, 5):
            load(name)
            notebook.there(f"touch({name}, {step})")
            model["touch"](model[name], step)
        elif action == 6:
            text = rand.choice(MAKE)(rand)
            if name in notebook.namespace:
                seen[name] = model["show"](as_model(notebook.namespace[name]))
            notebook.there(f"{name} = {text}")
            exec(f"{name} = {text}", model)
        else:
            load(name)
            notebook.there(f"shown = show({name})" if name in model else "shown = None")
            if name in model:
                expected = json.loads(json.dumps(model["show"](model[name])))
                assert notebook.values("shown") == [expected] * 2, (seed, step, name)
