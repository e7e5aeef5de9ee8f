"""Changes made by the notebook's cells: names, modules and environment variables.

A statement that runs again is a change, even if it produces an equal value. A name counts as
assigned if it has another object after the cell, or if the cell binds it on every path to its end:
small numbers, True and None are the same object however often they are assigned. Ranks determine in
the same way what their cells bind. Environment variables count from the time when skymagic was
loaded, because ranks start with everything that was set before.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping

from skymagic.data.capture.class_attributes import ClassAttribute, class_attributes
from skymagic.data.capture.executed import called_bodies, executed
from skymagic.data.capture.loaded import remember_reloads
from skymagic.data.capture.modules import in_packages, remember_relative_entries
from skymagic.data.capture.names import CellNames, cell_names, is_interactive_name, is_output
from skymagic.data.capture.registrations import registrations
from skymagic.data.capture.settings import Setting, is_settings_object, settings
from skymagic.data.namespace import Namespace


class Assignments:
    """Counts the assignments to the global names of one notebook.

    Values are compared by identity and never referenced, so that a value deleted by a cell is freed
    at once.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.watched = False  # True once a caller is interested; cells are not analyzed before
        self.now = 0  # number of the last assignment
        self._last: dict[str, int] = {}
        self._typed: dict[str, int] = {}
        self.on_modules: dict[str, str] = {}
        """Attributes that cells have set on modules: `"cfg.lr"` → the module."""
        self.on_classes: set[ClassAttribute] = set()
        """Attributes that cells have set on classes of packages."""
        self.registered: dict[str, str] = {}
        """Registrations that cells have made with installed packages: the call → the module."""
        self.settings: set[Setting] = set()
        """Process-wide settings that cells have made, by calls or in a package's options object."""
        self._before: dict[str, int] | None = None
        self._looked = False

    def last(self, name: str) -> int:
        """Return the number of the last assignment to a name, or 0."""
        return self._last.get(name, 0)

    def typed_since(self, name: str, number: int) -> bool:
        """Return True if a later cell has assigned the name without reading it.

        `n = 3` counts, `n = n[0]` does not.
        """
        return self._typed.get(name, 0) > number

    def begin(self) -> None:
        """Record the names at the start of a cell."""
        self._before = self._identities()
        self._looked = False

    def record_so_far(self) -> None:
        """Record the cell's assignments so far, before something runs on the ranks in mid-cell."""
        self._looked = True
        self._note(self._rebound_names(), frozenset())

    def end(self, source: Callable[[], str], *, completed: bool) -> None:
        """Record the cell's assignments at its end.

        Args:
            source: returns the cell's plain Python.
            completed: True if the cell ran to its end.
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
            rebound = self._rebound_names()
            # If something ran on the ranks in mid-cell, it is unknown what was bound before that.
            certain = names.certain if completed and not self._looked else frozenset()
            read = {
                node.id
                for node in ast.walk(tree)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
            }
            self._note(
                {*rebound, *(certain & self.namespace.keys())}, names.certain - (names.loads & read)
            )
        self._before = None

    def watch(self) -> None:
        """Start to analyze cells; those that ran before are analyzed now for their settings."""
        if self.watched:
            return
        self.watched = True
        history = self.namespace.get("_ih")  # IPython's history: plain Python, current cell last
        for text in history[1:-1] if isinstance(history, list) else ():
            with contextlib.suppress(SyntaxError, ValueError, RecursionError):
                tree = ast.parse(text)
                self._read_changes(tree)
                self.settings |= settings(tree, self.namespace)

    def _read_changes(self, tree: ast.Module) -> None:
        self.on_modules.update(set_on_modules(tree, self.namespace))
        self.on_classes |= class_attributes(tree, self.namespace)
        self.registered.update(registrations(tree, self.namespace))

    def record_received(self, names: Iterable[str]) -> None:
        """Record that these names were bound to values of the ranks, not by the cell itself."""
        if self._before is not None:
            self._before.update(
                {name: id(self.namespace[name]) for name in names if name in self.namespace}
            )

    def _identities(self) -> dict[str, int]:
        """Return the identity of each name's object; other threads may bind names meanwhile."""
        # A copy, because other threads may bind names during the iteration.
        names = self.namespace.copy()
        return dict(zip(names, map(id, names.values()), strict=True))

    def _rebound_names(self) -> list[str]:
        """Return the names with other objects than at the last call."""
        before, now = self._before, self._identities()
        if before is None or before == now:  # the common case, and quick to check
            return []
        self._before = now
        return [name for name, identity in now.items() if before.get(name) != identity]

    def _note(self, assigned: Iterable[str], typed: frozenset[str]) -> None:
        for name in assigned:
            # IPython's own names change with every cell.
            if not is_output(name) and not is_interactive_name(name, self.namespace[name]):
                self.now += 1
                self._last[name] = self.now
                if name in typed:
                    self._typed[name] = self.now


def set_on_modules(
    tree: ast.AST, namespace: Mapping[str, object], *, has_run: bool = True
) -> dict[str, str]:
    """Return attributes of modules that a cell assigns or modifies: `"cfg.lr"` → the module.

    Statements in a function count if the cell calls the function by name, or calls another one that
    does.

    Args:
        has_run: True if the cell has run in the notebook, so that the modules show which statements
            were reached.
    """
    attributes: dict[str, str] = {}
    followed: set[types.CodeType] = set()
    pending: list[tuple[ast.AST, Mapping[str, object]]] = [(tree, namespace)]
    while pending:
        tree, names = pending.pop()
        for node in executed(tree):
            attributes.update(_set_by(node, names, has_run))
            pending += called_bodies(node, names, namespace, followed)
    return attributes


def _set_by(node: ast.AST, names: Mapping[str, object], has_run: bool) -> Iterator[tuple[str, str]]:
    """Yield the module attributes that one statement sets, each with its module."""
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
            if module.__name__ not in sys.modules:
                continue  # no import finds it: it is a value, which travels with its attributes
            of_class = isinstance(inner, type) and depth + 1 < len(path)
            if of_class and in_packages(getattr(module, "__file__", None) or ""):
                continue  # handled by `class_attributes`
            if inner is os.environ:
                continue  # its changes are sent to the ranks
            if is_settings_object(inner):
                continue  # handled by `settings`
            is_direct_assignment = isinstance(target, ast.Attribute) and depth + 1 == len(path)
            # After the run, the module shows whether a constant was really assigned.
            if has_run and is_direct_assignment and _is_skipped(node, module, path[depth]):
                continue
            yield f"{module.__name__}.{path[depth]}", module.__name__


def _is_skipped(
    node: ast.Assign | ast.AugAssign | ast.AnnAssign, module: types.ModuleType, name: str
) -> bool:
    """Return True if a module's attribute shows that an assignment to it did not run.

    For example, because it is in a branch that was not taken.
    """
    try:
        value = getattr(module, name)
    except AttributeError:
        return True
    if isinstance(node, ast.AugAssign) or not isinstance(node.value, ast.Constant):
        return False
    constant = node.value.value
    plain = type(value) in (bool, int, float, str, bytes, type(None))
    # With the types, because True equals 1.
    return plain and (type(value), value) != (type(constant), constant)


def _path(target: ast.expr) -> list[str]:
    """Return `["cfg", "lr"]` for `cfg.lr` and for `cfg.lr[0].x`.

    Return an empty list if the expression does not start with a name.
    """
    names: list[str] = []
    while isinstance(target, ast.Attribute | ast.Subscript):
        # A change in an item counts as a change of the container.
        names = [target.attr, *names] if isinstance(target, ast.Attribute) else []
        target = target.value
    return [target.id, *names] if isinstance(target, ast.Name) else []


_watched: dict[int, Assignments] = {}
"""By the id of the namespace."""


def watch(namespace: Namespace) -> Assignments:
    """Return the assignments of a notebook whose cells are reported; safe to call twice."""
    return _watched.setdefault(id(namespace), Assignments(namespace))


def assignments_of(namespace: Namespace) -> Assignments:
    """Return the assignments to these names; none are counted if no cells are reported."""
    assignments = _watched.get(id(namespace))
    if assignments is None or assignments.namespace is not namespace:
        return Assignments(namespace)
    assignments.watch()
    return assignments


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = re.compile(
    r"KEYS?|TOKENS?|SECRETS?|PASS|PASSPHRASE|PAT|CREDS|O?AUTH|AUTHORIZATION|AUTHENTICATION|BEARER"
)
_SECRET_PARTS = re.compile(r"PASSW|CREDENTIAL|OAUTH|(?:KEY|TOKEN|SECRET|AUTH)\d*$")
"""For words without separators: OPENAIKEY, PGPASSWORD, GITHUBTOKEN."""
_ORDINARY_WORDS = frozenset({"MONKEY", "TURKEY", "DONKEY", "HOCKEY", "JOCKEY", "WHISKEY"})
_COUNTING_WORDS = re.compile(
    r"MAX|MIN|NUM|N|NUMBER|COUNT|LIMIT|TOTAL|PER|NEW|LENGTH|LEN|SIZE|BUDGET|CONTEXT|PROMPT"
    r"|OUTPUT|INPUT|BATCH|TRAIN"
)
"""Next to one of these, TOKENS and KEYS stand for a number: MAX_TOKENS, NUM_KEYS."""
_SYMBOL_WORDS = re.compile(r"PAD|EOS|BOS|UNK|SEP|CLS|MASK|SORT|DISABLE|IMPLICIT")
"""Next to one of these, TOKEN and KEY stand for a vocabulary symbol, a column or a switch:
PAD_TOKEN, SORT_KEY.
"""
_OF_THE_MACHINE = re.compile(
    r"PATH|HOME|PWD|OLDPWD|TMPDIR|USER|SHELL|TERM|COLUMNS|LINES|LD_\w+|PYTHON\w*"
    r"|VIRTUAL_ENV|CONDA_\w+|SSH_\w+|DISPLAY|PYTEST_\w+"
    r"|(?:JPY|IPYTHON|JUPYTER|SKYMAGIC|SKYPILOT|COMPUTE_POOL|TORCHELASTIC|SLURM|RAY)\w*"
    r"|(?:LOCAL_|GROUP_|ROLE_|NODE_)?(?:RANK|WORLD_SIZE)|MASTER_\w+|CUDA_VISIBLE_DEVICES"
    r"|\w+_SOCKET_IFNAME"
)
"""Variables that describe where the notebook runs, or that differ between ranks."""
_environment_before: dict[str, str] = {}
"""Environment at the time when skymagic was loaded."""


def remember_environment() -> None:
    """Record the environment, to detect the notebook's changes; later calls do nothing."""
    if not _environment_before:
        _environment_before.update(os.environ)


def changed_environment() -> dict[str, str | None]:
    """Return the notebook's changes; empty if skymagic was not loaded in a notebook."""
    return environment_changes(os.environ, _environment_before) if _environment_before else {}


def environment_changes(now: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str | None]:
    """Return variables that are new, changed or deleted (None).

    Variables that describe the machine are left out.
    """
    names = {*now, *before}
    differ = {name: now.get(name) for name in sorted(names) if now.get(name) != before.get(name)}
    return {name: value for name, value in differ.items() if not _OF_THE_MACHINE.fullmatch(name)}


def is_secret_variable(name: str) -> bool:
    """Return True if a variable's name suggests that its value is confidential.

    Only whole words of the name count: HF_TOKEN is a secret; TOKENIZERS_PARALLELISM, KEYBOARD and
    AUTHOR are not.
    """
    name_words = {word.upper() for word in _WORD.findall(name)}
    secret_words = {
        word
        for word in name_words - _ORDINARY_WORDS
        if _SECRET_WORDS.fullmatch(word) or _SECRET_PARTS.search(word)
    }
    if any(_COUNTING_WORDS.fullmatch(word) for word in name_words):
        secret_words -= {"TOKENS", "KEYS"}
    if any(_SYMBOL_WORDS.fullmatch(word) for word in name_words):
        secret_words -= {"TOKEN", "KEY"}
    return bool(secret_words)
