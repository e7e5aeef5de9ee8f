"""A random walk through variables on both sides, beside a second interpreter that follows the rule of state by its words."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Make = Callable[[random.Random], str]
FRESH: list[Make] = [
    lambda r: f"[{r.randrange(5)}, {{'k': {r.randrange(5)}}}]",
    lambda r: f"np.full(40000, {r.randrange(3)}.0)",
    lambda r: f"np.arange({r.randrange(3) + 150000}.0)",
    lambda r: f"Box({r.randrange(3)})",
    lambda r: f"{{'box': Box(1), 'a': np.full(3000, {r.randrange(3)})}}",
    lambda r: f"{{'a': np.full(3, {r.randrange(3)}.0), 'b': np.full(3, {r.randrange(3)}.0)}}",
]
"""Values that are new objects each time: a rank sees that it has bound one."""
MAKE: list[Make] = [lambda r: f"{r.randrange(100)}", lambda r: f"'t{r.randrange(5)}'", *FRESH]
TOUCH = """
def touch(value, n):
    if isinstance(value, np.ndarray): value[n % len(value)] += n
    elif isinstance(value, dict) and all(isinstance(each, np.ndarray) for each in value.values()):
        value[sorted(value)[n % len(value)]][n % 3] += n
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
import numpy as np, copy, contextlib
"""
SHADOWED = ("hash", "bin")
NAMES = ("p", "q", "r", *SHADOWED)

BINDING = {
    "plain": "{name} = {value}",
    "walrus": "({name} := {value})",
    "for": "for {name} in [{value}]: pass",
    "with": "with contextlib.nullcontext({value}) as {name}: pass",
    "match": "match {value}:\n    case {name}: pass",
    "unpacked": "[{name}] = [{value}]",
    "except": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {name} = {value}",
    "finally": "try:\n    pass\nfinally:\n    {name} = {value}",
    "branch": "if 1:\n    {name} = {value}",
    "global": "def change():\n    global {name}\n    {name} = {value}\nchange()",
    "globals": "globals().update({name}={value})",
    "exec": "exec({assignment!r})",
    "star": "from {module} import *",
    "before it fails": "{name} = {value}\n1 / 0",
}
"""Cells that bind a name to a fresh value."""
IPYTHON = {
    "%%time": "%%time\n{name} = {value}",
    "%time": "%time {name} = {value}",
    "%%capture": "%%capture\n{name} = {value}",
    "%run": "%run {module}.py",
    "setattr": "import sys\nsetattr(sys.modules['__main__'], {name!r}, {value})",
    "push": "get_ipython().push({{{name!r}: {value}}})",
}
"""Those that need IPython on the ranks."""
NOT_BINDING = {
    "not taken": "if 0:\n    {name} = {value}",
    "empty loop": "for {name} in []: pass",
    "no exception": "try:\n    pass\nexcept ValueError:\n    {name} = {value}",
    "not called": "def change():\n    global {name}\n    {name} = {value}",
    "short circuit": "0 and ({name} := {value})",
    "after it failed": "1 / 0\n{name} = {value}",
    "import failed": "from nowhere_at_all import loader\n{name} = loader()",
}
"""Cells with a store that never runs."""


DEFINING = {
    "function": "def read_{name}(): return show({name})",
    "lambda": "read_{name} = [lambda: show({name})]",
    "class": "class Read_{name}:\n    def __call__(self): return show({name})\nread_{name} = Read_{name}()",
    "nested": "def make():\n    def inner(): return show({name})\n    return lambda: inner()\nread_{name} = (make(),)\ndel make",
    "exec": "exec('def read_{name}(): return show({name})')",
}
"""Cells that make a function which reads a name."""
NAMED = {"function", "exec"}
"""Those whose function has the name that the cell uses: what it reads comes with the cell though it has never been there."""
CALLING = {
    "function": "read_{name}()",
    "lambda": "read_{name}[0]()",
    "class": "read_{name}()",
    "nested": "read_{name}[0]()",
    "exec": "read_{name}()",
}
"""How it is called."""


class Sides(Protocol):
    """A notebook with ranks: `far.Notebook`, or a real one."""

    folder: Path
    namespace: dict[str, Any]

    def here(self, source: str) -> None:
        """Run a plain cell."""

    def there(self, source: str) -> object:
        """Broadcast a cell; raises when it fails."""

    def values(self, expression: str) -> list[Any]:
        """An expression's values by rank; nothing is shipped."""

    def pull(self, name: str) -> None:
        """Bring a name here, as the first rank has it."""


class Model:
    """One rank, as the words of the rule say."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.names: dict[str, Any] = {}
        exec(compile(TOUCH, "<model>", "exec", dont_inherit=True), self.names)
        self.seen: dict[str, Any] = {}
        """What the notebook's value was when the rank's binding was made, and which assignment had made it."""
        self.assigned: dict[str, int] = {}
        """How often the notebook has assigned a name."""
        self.typed: set[str] = set()
        """Names that were typed anew since they came from the ranks."""
        self.read: set[str] = set()
        """Names that functions on the rank read."""
        self.own: set[str] = set()
        """Names that the rank has bound since it got them."""
        self.pulled: dict[str, list[Any]] = {}
        """What came from the ranks under a name, and its items."""

    def copied(self, value: Any) -> Any:
        """The notebook's value as it arrives."""
        if type(value).__name__ == "Box":
            return self.names["Box"](value.n)
        if isinstance(value, dict):
            return {key: self.copied(each) for key, each in value.items()}
        return value.copy() if hasattr(value, "copy") else value

    def shown(self, name: str) -> Any:
        """The notebook's value of a name, in plain words."""
        return self.names["show"](self.copied(self.namespace[name]))

    def looked_at(self, name: str) -> tuple[Any, int]:
        """What the rule compares of a name."""
        return self.shown(name), self.assigned.get(name, 0)

    def assign(self, name: str, *, reads: bool) -> None:
        """The notebook has assigned a name; whether the cell read it."""
        self.assigned[name] = self.assigned.get(name, 0) + 1
        if not reads:
            self.typed.add(name)

    def begin(self, *used: str, runs: bool = True) -> None:
        """A cell begins: what shadowed a name of Python's own goes where the notebook has it no more.

        A cell that runs something may run the rank's functions: what these read comes again where it has changed. Large values are
        looked at where the cell uses something that the rank has bound, or where they were assigned again. In such a cell names
        that the rank never had come too: what it has bound may hold any function.
        """
        for name in SHADOWED:
            if name not in self.namespace and name in self.seen and name not in self.own:
                del self.seen[name]
                self.names.pop(name, None)
        reached = bool(self.own.intersection(used))
        for name in sorted(
            self.read & (self.read if reached else self.seen.keys()) if runs else ()
        ):
            large = getattr(self.namespace.get(name), "nbytes", 0) >= 1 << 20
            if reached or not large or self.seen[name][1] != self.assigned.get(name, 0):
                self.use(name)

    def use(self, name: str) -> bool:
        """A cell uses a name: the notebook's value comes when it differs from the one that came last. Whether there is one now."""
        if name in self.namespace and not self._came_from_there(name):
            now = self.looked_at(name)
            if self.seen.get(name, self) != now:
                self.seen[name] = now
                self.names[name] = self.copied(self.namespace[name])
                self.own.discard(name)
        return name in self.names

    def _came_from_there(self, name: str) -> bool:
        value = self.namespace[name]
        typed = isinstance(value, (int, float, str)) and name in self.typed
        if typed or not any(value is each for each in self.pulled.get(name, ())):
            self.pulled.pop(name, None)
            return False
        if value is not self.pulled[name][0]:
            self.pulled[name] = [value]
        return True

    def bind(self, name: str, value: Any) -> None:
        """A cell has bound a name."""
        self.names[name] = value
        self.own.add(name)
        if name in self.namespace:
            self.seen[name] = self.looked_at(name)

    def delete(self, name: str) -> None:
        """A cell has deleted a name."""
        del self.names[name]
        self.seen.pop(name, None)
        self.own.discard(name)

    def pull(self, name: str) -> None:
        """A name has come to the notebook."""
        value = self.namespace[name]
        self.pulled[name] = [value, *(value if isinstance(value, list) else ())]
        self.typed.discard(name)
        self.seen[name] = self.looked_at(name)


class Walk:
    """Changes variables on both sides at random, and compares the ranks with the model."""

    def __init__(self, sides: Sides, seed: int, *, ipython: bool = False) -> None:
        self.sides, self.seed, self.rand, self.step = sides, seed, random.Random(seed), 0
        self.forms = {**BINDING, **(IPYTHON if ipython else {})}
        sides.here(TOUCH)
        sides.there("touch, show, Box, np, copy, contextlib")
        self.model = Model(sides.namespace)
        self.last = ""
        self.statements: dict[str, str] = {}
        """The last assignment to each name."""
        self.made: dict[str, str] = {}
        """How the function was made that reads a name."""
        self.named: set[str] = set()
        """Names that a function was made for which had the name that the cell uses."""

    def run(self, steps: int) -> None:
        """Take so many steps."""
        here = (
            self.assign, self.assign, self.again, self.change, self.forget, self.copy, self.copy_itself, self.itself,
        )  # fmt: skip
        there = (
            self.touch, self.touch, self.bind, self.bind, self.bind, self.store_that_never_runs, self.rebind,
            self.alias, self.define, self.call, self.call,
        )  # fmt: skip
        both = (
            self.pull,
            self.take_away,
            self.delete,
            self.fail,
            self.compare,
            self.compare,
            self.compare,
        )
        name, other = NAMES[:2]
        for self.step in range(steps):
            if self.step % 8 == 0:  # what surprises takes several steps with one name
                name, other = self.rand.sample(NAMES, 2)
            self.rand.choice((*here, *there, *both))(name, other)

    # -- in the notebook ---------------------------------------------------------------------------------------------

    def assign(self, name: str, _: str) -> None:
        self.statements[name] = f"{name} = {self.rand.choice(MAKE)(self.rand)}"
        self.again(name, _)

    def again(self, name: str, _: str) -> None:
        """Run a cell again, or for the first time."""
        if name in self.statements:
            self.sides.here(self.statements[name])
            self.model.assign(name, reads=False)

    def itself(self, name: str, _: str) -> None:
        """Assign what it is, or its first item."""
        if name in self.sides.namespace:
            value = self.sides.namespace[name]
            self.sides.here(
                f"{name} = {name}[0]" if isinstance(value, list) else f"{name} = {name}"
            )
            self.model.assign(name, reads=True)

    def change(self, name: str, _: str) -> None:
        if name in self.sides.namespace:
            self.sides.here(f"touch({name}, {self.step})")

    def forget(self, name: str, _: str) -> None:
        if name in self.sides.namespace:
            self.sides.here(f"del {name}")

    def copy(self, name: str, other: str) -> None:
        if name in self.sides.namespace:
            self.sides.here(f"{other} = copy.deepcopy({name})")
            self.model.assign(other, reads=name == other)

    def copy_itself(self, name: str, _: str) -> None:
        self.copy(name, name)

    # -- on the ranks ------------------------------------------------------------------------------------------------

    def there(self, source: str, *, fails: bool = False) -> None:
        """Broadcast a cell; the model has been told before."""
        self.last = source
        try:
            self.sides.there(source)
        except Exception:
            assert fails, (self.seed, self.step, source)
            return
        assert not fails, (self.seed, self.step, source)

    def uses(self, name: str) -> bool:
        """Whether the ranks have a name in the cell that comes now; where they have not, a cell that uses it fails."""
        self.model.begin(name)
        there = self.model.use(name)
        if not there and name not in SHADOWED:
            self.there(name, fails=True)
        return there

    def touch(self, name: str, _: str) -> None:
        if self.uses(name):
            self.model.names["touch"](self.model.names[name], self.step)
            self.there(f"touch({name}, {self.step})")

    def bind(self, name: str, _: str) -> None:
        form = self.rand.choice(list(self.forms))
        self.model.begin()
        value = (
            self.rand.choice(
                MAKE if form == "plain" else FRESH[:1] if form in ("star", "%run") else FRESH
            )
        )(self.rand)
        made = eval(value, self.model.names)
        self.there(self.written(self.forms[form], name, value), fails=form == "before it fails")
        self.model.bind(name, made)

    def store_that_never_runs(self, name: str, _: str) -> None:
        form = self.rand.choice(list(NOT_BINDING))
        self.model.begin()
        cell = self.written(NOT_BINDING[form], name, self.rand.choice(FRESH)(self.rand))
        self.there(cell, fails=form in ("after it failed", "import failed"))

    def written(self, form: str, name: str, value: str) -> str:
        module = f"walked_{self.seed}_{self.step}"
        if "{module}" in form:
            (self.sides.folder / f"{module}.py").write_text(f"{name} = {value}\n")
        return form.format(name=name, value=value, assignment=f"{name} = {value}", module=module)

    def rebind(self, name: str, _: str) -> None:
        if self.uses(name):
            self.model.bind(name, [self.model.names["show"](self.model.names[name])])
            self.there(f"{name} = [show({name})]")

    def alias(self, name: str, other: str) -> None:
        if self.uses(name):
            self.model.bind(other, self.model.names[name])
            self.there(f"{other} = {name}")

    def define(self, name: str, _: str) -> None:
        """Make a function on the ranks, somewhere, which reads a name."""
        form = self.rand.choice(list(DEFINING))
        if form == "exec":  # the name is in a text alone
            self.model.begin()
        else:
            self.model.begin(name)
            self.model.use(name)
        self.model.read.add(name)
        self.model.own.add(f"read_{name}")
        self.there(DEFINING[form].format(name=name))
        self.made[name] = form
        self.named |= {name} if form in NAMED else set()

    def call(self, name: str, _: str) -> None:
        """Call a function that reads a name, in a cell whose text does not say which."""
        if name not in self.made:
            return
        form = self.made[name]
        if form not in NAMED and name in self.named and name not in self.model.seen:
            return  # an earlier function of this name may wait for the collector, and what it reads comes until then
        self.model.begin(f"read_{name}")
        if form in NAMED:
            self.model.use(name)
        there = name in self.model.names
        if there or name not in SHADOWED:
            self.there(f"shown = {CALLING[form].format(name=name)}", fails=not there)
        if there:
            expected = json.loads(json.dumps(self.model.names["show"](self.model.names[name])))
            found = json.loads(json.dumps(self.sides.values("shown")))
            assert found == [expected] * 2, (self.seed, self.step, name, self.made[name])

    def fail(self, name: str, _: str) -> None:
        if self.uses(name):
            self.model.names["touch"](self.model.names[name], self.step)
            self.there(f"touch({name}, {self.step})\n1 / 0", fails=True)

    def delete(self, name: str, _: str) -> None:
        if self.uses(name):
            self.there(f"del {name}" if self.rand.randrange(2) else f"globals().pop('{name}')")
            self.model.delete(name)

    def pull(self, name: str, _: str) -> None:
        self.model.begin(runs=False)
        if name in self.model.names:
            self.there("pass")  # what shadowed a name is gone there too
            self.sides.pull(name)
            self.model.pull(name)

    def take_away(self, name: str, other: str) -> None:
        """Bring a name here, and free the ranks' memory."""
        self.pull(name, other)
        self.delete(name, other)

    def compare(self, name: str, _: str) -> None:
        if self.uses(name):
            self.there(f"shown = show({name})")
            expected = json.loads(json.dumps(self.model.names["show"](self.model.names[name])))
            found = json.loads(json.dumps(self.sides.values("shown")))
            assert found == [expected] * 2, (self.seed, self.step, name)


def walk(sides: Sides, seed: int, steps: int, *, ipython: bool = False) -> None:
    """Change variables on both sides at random, and compare the ranks with a model of the rule."""
    sys.path.insert(0, str(sides.folder))
    try:
        Walk(sides, seed, ipython=ipython).run(steps)
    finally:
        sys.path.remove(str(sides.folder))
