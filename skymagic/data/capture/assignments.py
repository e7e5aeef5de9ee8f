"""What the notebook's cells change: names, modules and environment variables.

A statement that runs again is a change, even where it makes an equal value. A name counts as assigned where it has another object after
the cell, or where the cell binds it on every path to its end: small numbers, True and None are one object each, however often they are
assigned. Ranks find in the same way what their cells bind. Environment variables count from the time when skymagic was loaded: ranks
began with what there was before.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from skymagic.data.capture.class_attributes import ClassAttribute, class_attributes
from skymagic.data.capture.executed import executed, function_body, notebook_functions
from skymagic.data.capture.loaded import remember_reloads
from skymagic.data.capture.modules import in_packages, remember_relative_entries
from skymagic.data.capture.names import CellNames, cell_names, interactive, is_output
from skymagic.data.capture.registrations import registrations
from skymagic.data.capture.settings import Setting, is_settings_object, settings


class Assignments:
    """Counts the assignments to the global names of one notebook.

    Values are compared by identity and never held: what a cell deletes is free at once.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.watched = False  # whether somebody asks; nothing is read before
        self.now = 0  # the number of the last assignment
        self._last: dict[str, int] = {}
        self._typed: dict[str, int] = {}
        self.on_modules: dict[
            str, str
        ] = {}  # what cells have set in modules: ``"cfg.lr"`` → the module
        self.on_classes: set[ClassAttribute] = set()
        """What cells have set in classes of packages."""
        self.registered: dict[str, str] = {}
        """What cells have registered with installed packages: the call → the module."""
        self.settings: set[Setting] = set()
        """What cells have set in packages for the whole process, by calls or in objects that hold a package's options."""
        self._before: dict[str, int] | None = None
        self._looked = False

    def last(self, name: str) -> int:
        """The number of the last assignment to a name; 0 where there was none."""
        return self._last.get(name, 0)

    def typed_since(self, name: str, number: int) -> bool:
        """Whether a later cell has assigned the name without reading it: ``n = 3``, not ``n = n[0]``."""
        return self._typed.get(name, 0) > number

    def begin(self) -> None:
        """A cell of the notebook begins."""
        self._before = self._identities()
        self._looked = False

    def look(self) -> None:
        """Something is about to run on ranks in the middle of a cell: what the cell has assigned so far comes before it."""
        self._looked = True
        self._note(self._rebound(), frozenset())

    def end(self, source: Callable[[], str], *, completed: bool) -> None:
        """The cell is over.

        Args:
            source: makes the cell's plain Python.
            completed: whether it came to its end.
        """
        remember_relative_entries()
        remember_reloads()
        if self.watched and self._before is not None:
            names, tree = CellNames(), ast.Module([], [])
            with contextlib.suppress(SyntaxError, ValueError, RecursionError):
                text = source()
                names, tree = cell_names(text), ast.parse(text)
            self._read_changes(tree)
            if completed:
                self.settings |= settings(tree, self.namespace)
            rebound = self._rebound()
            # of these nobody can say whether they came before what has run on the ranks meanwhile, or after it
            certain = names.certain if completed and not self._looked else frozenset()
            read = {
                each.id
                for each in ast.walk(tree)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
            }
            self._note(
                {*rebound, *(certain & self.namespace.keys())}, names.certain - (names.loads & read)
            )
        self._before = None

    def watch(self) -> None:
        """Somebody asks from now on; cells that have run before are read again for what they have set."""
        if self.watched:
            return
        self.watched = True
        history = self.namespace.get("_ih")  # IPython's: plain Python, the present cell last
        for text in history[1:-1] if isinstance(history, list) else ():
            with contextlib.suppress(SyntaxError, ValueError, RecursionError):
                tree = ast.parse(text)
                self._read_changes(tree)
                self.settings |= settings(tree, self.namespace)

    def _read_changes(self, tree: ast.Module) -> None:
        self.on_modules.update(set_on_modules(tree, self.namespace))
        self.on_classes |= class_attributes(tree, self.namespace)
        self.registered.update(registrations(tree, self.namespace))

    def brought(self, names: Iterable[str]) -> None:
        """These names have just been bound to values of the ranks: the cell itself has not assigned them."""
        if self._before is not None:
            self._before.update(
                {name: id(self.namespace[name]) for name in names if name in self.namespace}
            )

    def _identities(self) -> dict[str, int]:
        """Name → identity of its object, of all names; threads of the notebook may bind others meanwhile."""
        names = self.namespace.copy()
        return dict(zip(names, map(id, names.values()), strict=True))

    def _rebound(self) -> list[str]:
        """Names that have other objects than at the last look."""
        before, now = self._before, self._identities()
        if before is None or before == now:  # which is so nearly always, and seen at once
            return []
        self._before = now
        return [name for name, identity in now.items() if before.get(name) != identity]

    def _note(self, assigned: Iterable[str], typed: frozenset[str]) -> None:
        for name in assigned:
            if not is_output(name) and not interactive(name, self.namespace[name]):
                self.now += 1
                self._last[name] = self.now
                if name in typed:
                    self._typed[name] = self.now


def set_on_modules(
    tree: ast.AST, namespace: Mapping[str, object], *, has_run: bool = True
) -> dict[str, str]:
    """Attributes of modules that a cell assigns or changes an item of: ``"cfg.lr"`` → the module.

    Statements in a function count where the cell calls the function by its name, or calls one that does.

    Args:
        has_run: whether the cell has run in the notebook, so that the modules show which statements it has reached.
    """
    found: dict[str, str] = {}
    followed: set[types.CodeType] = set()
    todo: list[tuple[ast.AST, Mapping[str, object]]] = [(tree, namespace)]
    while todo:
        tree, names = todo.pop()
        for node in executed(tree):
            found.update(_set_by(node, names, has_run))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                for function in notebook_functions(names.get(node.func.id), namespace):
                    if function.__code__ not in followed:
                        followed.add(function.__code__)
                        todo += function_body(function, namespace)
    return found


def _set_by(node: ast.AST, names: Mapping[str, object], has_run: bool) -> Iterator[tuple[str, str]]:
    """Yield the attributes of modules that one statement sets, each with its module."""
    if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        path = _path(target)
        module, depth = names.get(path[0]) if path else None, 1
        while depth < len(path) and isinstance(
            inner := getattr(module, path[depth], None), types.ModuleType
        ):
            module, depth = inner, depth + 1
        if isinstance(module, types.ModuleType) and depth < len(path):
            of_class = isinstance(inner, type) and depth + 1 < len(path)
            if of_class and in_packages(getattr(module, "__file__", None) or ""):
                continue  # `class_attributes`
            if inner is os.environ:
                continue  # the ranks get its changes
            if is_settings_object(inner):
                continue  # `settings`
            whole = isinstance(target, ast.Attribute) and depth + 1 == len(path)
            if has_run and whole and _was_skipped(node, module, path[depth]):
                continue
            yield f"{module.__name__}.{path[depth]}", module.__name__


def _was_skipped(
    node: ast.Assign | ast.AugAssign | ast.AnnAssign, module: types.ModuleType, name: str
) -> bool:
    """Return True if a module's attribute shows that an assignment to it has not run, as in a branch that was not taken."""
    try:
        value = getattr(module, name)
    except AttributeError:
        return True
    if isinstance(node, ast.AugAssign) or not isinstance(node.value, ast.Constant):
        return False
    constant = node.value.value
    plain = type(value) in (bool, int, float, str, bytes, type(None))
    return plain and (type(value), value) != (type(constant), constant)


def _path(target: ast.expr) -> list[str]:
    """``["cfg", "lr"]`` for ``cfg.lr`` and for ``cfg.lr[0].x``; nothing for what does not begin with a name."""
    names: list[str] = []
    while isinstance(target, ast.Attribute | ast.Subscript):
        names = (
            [target.attr, *names] if isinstance(target, ast.Attribute) else []
        )  # of an item: in what it is
        target = target.value
    return [target.id, *names] if isinstance(target, ast.Name) else []


_watched: dict[int, Assignments] = {}
"""By the identity of the namespace."""


def watch(namespace: dict[str, Any]) -> Assignments:
    """The assignments of a notebook whose cells are reported; twice is safe."""
    return _watched.setdefault(id(namespace), Assignments(namespace))


def of(namespace: dict[str, Any]) -> Assignments:
    """The assignments to these names; none are counted where no cells are reported."""
    found = _watched.get(id(namespace))
    if found is None or found.namespace is not namespace:
        return Assignments(namespace)
    found.watch()
    return found


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = re.compile(
    r"KEYS?|TOKENS?|SECRETS?|PASS|PASSPHRASE|PAT|CREDS|O?AUTH|AUTHORIZATION|AUTHENTICATION|BEARER"
)
_SECRET_PARTS = re.compile(r"PASSW|CREDENTIAL|OAUTH|(?:KEY|TOKEN|SECRET|AUTH)\d*$")
"""In words without separators: OPENAIKEY, PGPASSWORD, GITHUBTOKEN."""
_ORDINARY_WORDS = frozenset({"MONKEY", "TURKEY", "DONKEY", "HOCKEY", "JOCKEY", "WHISKEY"})
_COUNTING_WORDS = re.compile(
    r"MAX|MIN|NUM|N|NUMBER|COUNT|LIMIT|TOTAL|PER|NEW|LENGTH|LEN|SIZE|BUDGET|CONTEXT|PROMPT|OUTPUT|INPUT|BATCH|TRAIN"
)
"""Beside one of these, TOKENS and KEYS are a number: MAX_TOKENS, NUM_KEYS."""
_SYMBOL_WORDS = re.compile(r"PAD|EOS|BOS|UNK|SEP|CLS|MASK|SORT|DISABLE|IMPLICIT")
"""Beside one of these, TOKEN and KEY are a symbol of a vocabulary, a column, or a switch: PAD_TOKEN, SORT_KEY."""
_OF_THE_MACHINE = re.compile(
    r"PATH|HOME|PWD|OLDPWD|TMPDIR|USER|SHELL|TERM|COLUMNS|LINES|LD_\w+|PYTHON\w*|VIRTUAL_ENV|CONDA_\w+|SSH_\w+|DISPLAY|PYTEST_\w+"
    r"|(?:JPY|IPYTHON|JUPYTER|SKYMAGIC|SKYPILOT|COMPUTE_POOL|TORCHELASTIC|SLURM|RAY)\w*"
    r"|(?:LOCAL_|GROUP_|ROLE_|NODE_)?(?:RANK|WORLD_SIZE)|MASTER_\w+|CUDA_VISIBLE_DEVICES|\w+_SOCKET_IFNAME"
)
"""Where the notebook runs, and what each rank has of its own."""
_environment_before: dict[str, str] = {}
"""As it was when skymagic was loaded."""


def remember_environment() -> None:
    """What is changed from now on is the notebook's change; later calls do nothing."""
    if not _environment_before:
        _environment_before.update(os.environ)


def changed_environment() -> dict[str, str | None]:
    """What the notebook has changed; nothing where skymagic was not loaded into one."""
    return environment_changes(os.environ, _environment_before) if _environment_before else {}


def environment_changes(now: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str | None]:
    """Variables that are new, differ, or are gone (None); not those of the machine."""
    names = {*now, *before}
    differ = {name: now.get(name) for name in sorted(names) if now.get(name) != before.get(name)}
    return {name: value for name, value in differ.items() if not _OF_THE_MACHINE.fullmatch(name)}


def is_secret_variable(name: str) -> bool:
    """Return True if a variable's name says that its value is confidential.

    Whole words of the name count: HF_TOKEN is a secret, TOKENIZERS_PARALLELISM, KEYBOARD and AUTHOR are not.
    """
    words = {word.upper() for word in _WORD.findall(name)}
    found = {
        word
        for word in words - _ORDINARY_WORDS
        if _SECRET_WORDS.fullmatch(word) or _SECRET_PARTS.search(word)
    }
    if any(_COUNTING_WORDS.fullmatch(word) for word in words):
        found -= {"TOKENS", "KEYS"}
    if any(_SYMBOL_WORDS.fullmatch(word) for word in words):
        found -= {"TOKEN", "KEY"}
    return bool(found)
