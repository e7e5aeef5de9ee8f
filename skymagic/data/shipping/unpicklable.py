"""Explain why a value cannot be sent: the innermost part that cannot be pickled, and a remedy."""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

from skymagic.data.values import hooks, worlds
from skymagic.data.values.kinds import is_a, type_name
from skymagic.plan.suggest import did_you_mean

T = TypeVar("T")
_REMEDY_CLOSURE = "make it inside the function, or make {name} in the cell"
_REMEDY_ATTRIBUTE = (
    "leave it out of its owner's state with __getstate__, or make {name} in the cell"
)
_REMEDY_DETACH = "pass {name}{path}.detach()"
_PICKLERS = ("skymagic", "cloudpickle", "pickle", "copyreg")
_MAX_PARTS = 300
"""Maximum number of parts to pickle when searching for the one that cannot be pickled."""


@dataclass(frozen=True)
class Refusal:
    """A variable that cannot be sent, and what to do about it."""

    name: str
    type: str
    used_by: str
    """Reason why it is needed: `"the cell"` or `"used by train"`."""
    problem: str
    """The problem, including the part that causes it."""
    remedy: str

    @classmethod
    def missing(cls, name: str, names: Collection[str]) -> Refusal:
        """Describe an unknown name given with `--push`; `names` are the existing ones."""
        remedy = did_you_mean(name, names).removeprefix("; ") or "check the spelling"
        return cls(name, "no value", "--push", "nothing in this notebook has this name", remedy)

    def __str__(self) -> str:
        location = f"used in {self.used_by}" if self.used_by == "the cell" else self.used_by
        return f"{self.name} ({self.type}, {location}): {self.problem}; {self.remedy}"


def explain_refusal(
    name: str,
    value: object,
    used_by: str,
    problem: BaseException,
    pickle: Callable[[object], object],
) -> Refusal:
    """Describe why `value` could not be pickled.

    Args:
        pickle: called with parts of the value; raises if it cannot pickle a part.
    """
    # Name the innermost part that fails, instead of the whole variable.
    path, culprit = find_unpicklable_part(value, pickle)
    named = type_name(culprit) if culprit is not value else ""
    # cloudpickle turns a RecursionError into another error.
    if "recursion" in str(problem) and (code := _own_code(problem.__cause__ or problem)):
        reason = f"its {code} recurses without end"
        return Refusal(
            name,
            type_name(value),
            used_by,
            reason,
            "let it raise AttributeError for names it does not know",
        )
    if isinstance(problem, RecursionError) or "recursion" in str(problem):
        return Refusal(
            name,
            type_name(value),
            used_by,
            "it is nested too deep to pickle",
            "flatten it, or make it in the cell",
        )
    reason, remedy = _reason_and_remedy(culprit, problem)
    if path:
        reason = f"{name}{path} ({named}) {reason}"
        if not isinstance(problem, worlds.WorldError):
            # `<` marks a closure variable or a default argument (see `_parts`).
            remedy = (
                _REMEDY_DETACH
                if _creating_operation(culprit)
                else _REMEDY_CLOSURE
                if "<" in path
                else _REMEDY_ATTRIBUTE
            )
    return Refusal(name, type_name(value), used_by, reason, remedy.format(name=name, path=path))


def was_raised_by_value(problem: BaseException) -> bool:
    """Return True if a value's own code raised this, rather than a signal handler.

    A `KeyboardInterrupt` may come from either.
    """
    return bool(_own_code(problem))


def _own_code(problem: BaseException) -> str:
    """Return the name of the value's function that raised this, or "" if the pickler raised it."""
    # The innermost frame decides: the value's own code is called by the pickler.
    frames = [frame for frame, _ in traceback.walk_tb(problem.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__")) if frames else "skymagic"
    return "" if module.partition(".")[0] in _PICKLERS else frames[-1].f_code.co_name


def refusal_message(refusals: list[Refusal]) -> str:
    """Return all refusals as one text, one per line."""
    count = "1 variable" if len(refusals) == 1 else f"{len(refusals)} variables"
    lines = "\n".join(f"  {refusal}" for refusal in refusals)
    return f"{count} cannot be sent to the ranks; nothing was run:\n{lines}"


_KINDS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("socket.socket", "ssl.SSLSocket"), "is a connection of this process", "connect in the cell"),
    (
        (
            "thread.lock",
            "thread.RLock",
            "threading.Condition",
            "threading.Event",
            "threading.Semaphore",
            "asyncio.locks.Lock",
        ),
        "is a lock of this process",
        "make it in the cell",
    ),
    (
        ("generator", "async_generator"),
        "is a generator, whose progress stays in this process",
        "pass list({name}), or make it in the cell",
    ),
    (("coroutine",), "is a coroutine", "await it here, or call its function in the cell"),
    (
        (
            "io.TextIOWrapper",
            "io.BufferedReader",
            "io.BufferedWriter",
            "io.BufferedRandom",
            "io.FileIO",
        ),
        "is an open file",
        "open it in the cell, or pass its contents",
    ),
    (("sqlite3.Connection", "sqlite3.Cursor"), "is a database connection", "connect in the cell"),
    (
        ("threading.Thread", "multiprocessing.context.Process", "subprocess.Popen"),
        "runs in this process",
        "start it in the cell",
    ),
    (("mmap.mmap",), "is a mapping of this process", "map the file in the cell, or pass bytes"),
    (
        ("frame", "traceback"),
        "belongs to a running program",
        "keep its text instead: traceback.format_exc()",
    ),
    (
        (
            "ctypes.Structure",
            "ctypes.Union",
            "ctypes.PyCStructType",
            "ctypes.UnionType",
            "ctypes.Array",
        ),
        "is a C structure, or an array of them, whose layout this process has made",
        "define it in the cell, and pass bytes({name})",
    ),
    (
        (
            "ctypes._Pointer",
            "ctypes.CFuncPtr",
            "ctypes.CDLL",
            "ctypes.PyCPointerType",
            "ctypes.PyCFuncPtrType",
        ),
        "is an address in this process",
        "make it in the cell",
    ),
    (
        ("tqdm.notebook.tqdm_notebook",),
        "is a progress bar of this page",
        "make it in the cell, or pass what it iterates over",
    ),
    (
        ("ipywidgets.widgets.widget.Widget",),
        "is a widget of this page",
        "make it in the cell, or pass its value",
    ),
    (("weakref", "weakref.ReferenceType"), "is a weak reference", "pass what it refers to"),
    (
        ("contextvars.ContextVar", "contextvars.Context"),
        "is state of this thread",
        "make it in the cell",
    ),
)


def _reason_and_remedy(culprit: object, problem: BaseException) -> tuple[str, str]:
    """Return reason and remedy; `{name}` in the remedy stands for the variable."""
    explanation = _known_kind(culprit)
    if explanation is not None:
        return explanation
    if isinstance(problem, worlds.WorldError):
        return f"holds a {problem.type}, which {worlds.REASON}", worlds.REMEDY
    if made_by := _creating_operation(culprit):
        return f"is part of a computation ({made_by}), which cannot be sent", _REMEDY_DETACH
    text = (
        f"{type(problem).__name__}: {problem}".strip().splitlines()[0]
        if str(problem)
        else type(problem).__name__
    )
    return (
        f"cannot be pickled: {text}",
        "make it in the cell, or leave it out with --no-push {name}",
    )


def _creating_operation(value: object) -> str:
    """Return the operation that created a non-leaf tensor, or "" for anything else."""
    made_by = getattr(value, "grad_fn", None) if is_a(type(value), "torch", "Tensor") else None
    return "" if made_by is None else type(made_by).__name__


def _known_kind(value: object) -> tuple[str, str] | None:
    """Return reason and remedy for kinds of objects that can never be sent, or None."""
    if worlds.holds_rank(value):
        return worlds.REASON, worlds.REMEDY
    # `_KINDS` lists types of C modules without the underscore: `thread.lock`.
    names = {
        type_name(value),
        *(f"{kind.__module__.lstrip('_')}.{kind.__qualname__}" for kind in type(value).__mro__),
    }
    return next(
        ((reason, remedy) for kinds, reason, remedy in _KINDS if not names.isdisjoint(kinds)), None
    )


def find_unpicklable_part(value: object, pickle: Callable[[object], object]) -> tuple[str, object]:
    """Find the innermost part of a value that cannot be pickled by itself.

    Returns:
        Path to the part (`.model.lock`, `['a'][0]`), and the part.
    """
    path, budget = "", _MAX_PARTS
    # Values may be cyclic.
    visited = {id(value)}
    while _known_kind(value) is None:
        for step, part in _parts(value):
            if id(part) in visited:
                continue
            budget -= 1
            if budget < 0:
                return path, value
            try:
                pickle(part)
            except BaseException as problem:
                if isinstance(problem, KeyboardInterrupt) and not was_raised_by_value(problem):
                    raise
                visited.add(id(part))
                path, value = path + step, part
                break
        else:
            break
    return path, value


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Iterate over the parts of a value, each with the path that leads to it."""
    if _has_type(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in list(value.items())[:_MAX_PARTS])
    elif (
        _has_type(value, list)
        or _has_type(value, tuple)
        or _has_type(value, set)
        or _has_type(value, frozenset)
    ):
        yield from ((f"[{index}]", item) for index, item in enumerate(list(value)[:_MAX_PARTS]))
    elif _has_type(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                yield f".<closure>.{name}", cell.cell_contents
            except ValueError:
                continue
        yield from ((".<default>", item) for item in value.__defaults__ or ())
        yield from (
            (f".<default>.{key}", item) for key, item in (value.__kwdefaults__ or {}).items()
        )
        yield from ((f".{key}", item) for key, item in vars(value).items())
    elif _has_type(value, types.MethodType):
        yield ".__self__", value.__self__
    elif _has_type(value, type):
        hidden = (types.GetSetDescriptorType, types.MemberDescriptorType)
        yield from (
            (f".{key}", item) for key, item in vars(value).items() if not isinstance(item, hidden)
        )
    elif is_a(type(value), "torch", "Tensor"):
        for attribute, registered in hooks.tensor_hooks(value).items():
            yield from ((f".{attribute}[{key}]", hook) for key, hook in registered.items())
    elif (
        not hasattr(type(value), "__getstate__") or type(value).__getstate__ is object.__getstate__
    ):
        yield from ((f".{key}", item) for key, item in _attributes(value).items())


def _has_type(value: object, kind: type[T]) -> TypeGuard[T]:
    """Return True if a value has this type, ignoring its `__class__`, which proxies override."""
    return issubclass(type(value), kind)


def _attributes(value: object) -> dict[str, object]:
    """Return an object's attributes without running code of its class."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:  # the class uses slots
        return {}
    return attributes if type(attributes) is dict else {}
