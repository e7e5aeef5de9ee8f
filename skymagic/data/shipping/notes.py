"""Messages about the values of a run, each shown once, and why a value cannot travel."""

from __future__ import annotations

import traceback
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard, TypeVar

from skymagic.data.capture.class_attributes import ClassAttribute
from skymagic.data.capture.settings import Setting
from skymagic.data.shipping.bundles import Bundle, Variable
from skymagic.data.store.bundle import ContentIndex
from skymagic.data.values import arrays, hooks, worlds
from skymagic.data.values.kinds import is_a, type_name
from skymagic.plan.suggest import did_you_mean

T = TypeVar("T")
Note = Callable[[str], None]
"""Called with a sentence."""


class SplitReference(NamedTuple):
    """Value that shares objects with the notebook's value of a name that a rank binds itself."""

    name: str
    other: str


class Notes:
    """Sentences about names and values, and a record of those already shown."""

    def __init__(self) -> None:
        self._said: defaultdict[str, set[Any]] = defaultdict(set)
        """By kind of sentence: the subjects that it was already shown for."""

    def _new(self, kind: str, items: Iterable[T]) -> list[T]:
        """Return the subjects that this sentence was not shown for yet, sorted, and record them."""
        new = sorted(set(items) - self._said[kind])  # type: ignore[type-var]
        self._said[kind].update(new)
        return new

    def deleted(self, names: Iterable[str], note: Note) -> None:
        """Report names that the notebook deleted while some rank still holds them."""
        for name in self._new("deleted", names):
            note(f"{name} is deleted here, the ranks still hold it")

    def set_on_modules(
        self,
        attributes: Mapping[str, str],
        used: Iterable[str],
        repeated: Collection[str],
        note: Note,
    ) -> None:
        """Report attributes that the notebook set on modules which the cell uses.

        Args:
            attributes: maps each attribute to its module.
            used: modules that the cell uses.
            repeated: attributes that the cell sets itself.
        """
        # Set on the ranks by the cell: no message for these, now or later.
        self._said["set"].update(repeated)
        modules = frozenset(used)
        packages = frozenset(module.partition(".")[0] for module in modules)
        prefixes = tuple(f"{module}." for module in modules)
        # What was set on a package itself concerns the code of all its modules.
        reached = (
            name
            for name, module in attributes.items()
            if module in packages or f"{module}.".startswith(prefixes)
        )
        if names := self._new("set", reached):
            listed = ", ".join(names)
            note(
                f"{listed}: set in the notebook only, because modules are sent without later "
                "changes; set it in a broadcast cell too"
            )

    def settings(
        self,
        settings: Iterable[Setting],
        packages: Collection[str],
        repeated: Iterable[Setting],
        note: Note,
    ) -> None:
        """Report settings that the notebook made in packages which the cell uses.

        Args:
            repeated: settings that the cell makes itself.
        """
        shown_topics = self._said["settings"]
        shown_topics.update(setting.topic for setting in repeated)
        new = {
            setting
            for setting in settings
            if setting.topic not in shown_topics and setting.concerns(packages)
        }
        shown_topics.update(setting.topic for setting in new)
        if new:
            listed = ", ".join(sorted({setting.text for setting in new}))
            note(
                f"{listed}: set in the notebook only, because each rank has its own settings; "
                "set it in a broadcast cell too"
            )

    def registered(
        self,
        calls: Mapping[str, str],
        packages: Container[str],
        repeated: Collection[str],
        note: Note,
    ) -> None:
        """Report registrations that the notebook made with packages which the cell uses.

        Args:
            calls: maps each call to its module.
            repeated: calls that the cell makes itself.
        """
        self._said["registered"].update(repeated)
        used = (call for call, module in calls.items() if module.partition(".")[0] in packages)
        if names := self._new("registered", used):
            note(
                f"{', '.join(names)}: called in the notebook only, "
                "and the ranks have not got what it has registered; call it in a broadcast cell too"
            )

    def set_on_classes(
        self,
        attributes: Iterable[ClassAttribute],
        packages: Container[str],
        repeated: Collection[ClassAttribute],
        note: Note,
    ) -> None:
        """Report attributes that the notebook set on classes of packages which the cell uses.

        Args:
            repeated: attributes that the cell sets itself.
        """
        self._said["classes"].update(repeated)
        used = (attribute for attribute in attributes if attribute.package in packages)
        if new := self._new("classes", used):
            note(
                f"{', '.join(map(str, new))}: set in the notebook only, "
                "because the ranks import the class; set it in a broadcast cell too"
            )

    def secret(self, names: Iterable[str], note: Note) -> None:
        """Report environment variables that are not sent."""
        for name in self._new("secret", names):
            note(
                f"{name} is set in the notebook's environment and stays here, "
                f"because it looks like a secret: %sky_pool --secret {name}"
            )

    def unstable(self, names: Iterable[str], note: Note) -> None:
        """Report names whose values pickle differently each time."""
        for name in self._new("unstable", names):
            note(
                f"{name} pickles differently each time, so changes cannot be detected: "
                f"the ranks keep their own; --push {name} sends the notebook's"
            )

    def split_references(self, references: Iterable[SplitReference], note: Note) -> None:
        """Report values that refer to another name's value that the ranks do not have."""
        for reference in self._new("apart", references):
            note(
                f"{reference.name} refers to the notebook's {reference.other}, "
                f"and the ranks have their own {reference.other}: "
                f"make {reference.name} in a broadcast cell, or send both with --fresh"
            )

    def maps(
        self, values: Mapping[str, Variable], lacking: Mapping[str, Sequence[int]], note: Note
    ) -> None:
        """Report memory-mapped files that travel and arrive as plain arrays."""
        for name, value in values.items():
            if lacking[name] and (why := arrays.why_as_array(value.value)):
                note(f"{name}: its contents are sent as an array, because {why}")

    def heavy(self, bundles: Iterable[Bundle], index: ContentIndex, large: int, warn: Note) -> None:
        """Warn about values with more than `large` bytes to send to other machines."""
        for bundle in bundles:
            parts = index.to_send(bundle.parts)
            # Identified by contents, so that a changed value is reported again.
            value = frozenset(parts)
            if sum(part.nbytes for part in parts.values()) <= large or value in self._said["heavy"]:
                continue
            if (nbytes := sum(index.store.unsent(part.data) for part in parts.values())) > large:
                self._said["heavy"].add(value)
                warn(large_value_warning(", ".join(bundle.names), nbytes))

    def forget_names(self, namespace: Container[str]) -> None:
        """Forget messages about names that were created again, or deleted."""
        # A name that was created again may be deleted again, and then deserves a new message.
        self._said["deleted"] = {name for name in self._said["deleted"] if name not in namespace}
        self._said["unstable"] = {name for name in self._said["unstable"] if name in namespace}


# -- why a value cannot travel ---------------------------------------------------------------------


_INSIDE = "make it inside the function, or make {name} in the cell"
_NESTED = "leave it out of its owner's state with __getstate__, or make {name} in the cell"
_LEAF = "pass {name}{path}.detach()"
_PICKLERS = ("skymagic", "cloudpickle", "pickle", "copyreg")
_BUDGET = 300
"""Limit of parts to try when searching for the one that cannot be pickled."""


@dataclass(frozen=True)
class Refusal:
    """Name that cannot travel."""

    name: str
    type: str
    why: str
    """Reason for the use: `"the cell"` or `"used by train"`."""
    reason: str
    """The problem, including the part that causes it."""
    remedy: str

    @classmethod
    def missing(cls, name: str, names: Collection[str]) -> Refusal:
        """Describe an unknown name given with `--push`; `names` are the existing ones."""
        remedy = did_you_mean(name, names).removeprefix("; ") or "check the spelling"
        return cls(name, "no value", "--push", "nothing in this notebook has this name", remedy)

    def __str__(self) -> str:
        location = f"used in {self.why}" if self.why == "the cell" else self.why
        return f"{self.name} ({self.type}, {location}): {self.reason}; {self.remedy}"


def refusal(
    name: str, value: object, why: str, problem: BaseException, attempt: Callable[[object], object]
) -> Refusal:
    """Describe why `value` could not be pickled.

    Args:
        attempt: pickles a value, and raises if it cannot; called for the value's parts.
    """
    # Name the innermost part that fails, instead of the whole variable.
    path, culprit = find(value, attempt)
    named = type_name(culprit) if culprit is not value else ""
    # cloudpickle turns a RecursionError into an error of its own.
    if "recursion" in str(problem) and (code := _own_code(problem.__cause__ or problem)):
        reason = f"its {code} recurses without end"
        return Refusal(
            name,
            type_name(value),
            why,
            reason,
            "let it raise AttributeError for names it does not know",
        )
    if isinstance(problem, RecursionError) or "recursion" in str(problem):
        return Refusal(
            name,
            type_name(value),
            why,
            "it is nested too deep to pickle",
            "flatten it, or make it in the cell",
        )
    reason, remedy = explain(culprit, problem)
    if path:
        reason = f"{name}{path} ({named}) {reason}"
        if not isinstance(problem, worlds.WorldError):
            # `<` marks a closure variable or a default argument.
            remedy = _LEAF if _computation(culprit) else _INSIDE if "<" in path else _NESTED
    return Refusal(name, type_name(value), why, reason, remedy.format(name=name, path=path))


def raised_by_value(problem: BaseException) -> bool:
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


def explain_full_store(problem: OSError, sizes: list[tuple[str, int]]) -> str:
    """Return the message for a full store: the largest variables, and what to do."""
    largest = sorted(sizes, key=lambda entry: -entry[1])[:3]
    listed = ", ".join(f"{name} ({nbytes / 1e6:,.0f} MB)" for name, nbytes in largest)
    return (
        f"the cell's variables do not fit in the node store: {problem.strerror or problem}; "
        f"the largest are {listed}; "
        "free memory or disk, or leave variables out with --no-push NAMES"
    )


def large_value_warning(name: str, nbytes: int) -> str:
    """Return the warning for a variable of many bytes that must travel to other machines."""
    return (
        f"{name}: {nbytes / 1e6:,.0f} MB must travel over this connection; "
        f"what a cell reads or makes on the nodes need not, and --no-push {name} leaves it out"
    )


def message(refusals: list[Refusal]) -> str:
    """Return all refusals as one text, one per line."""
    count = "1 variable" if len(refusals) == 1 else f"{len(refusals)} variables"
    lines = "\n".join(f"  {refusal}" for refusal in refusals)
    return f"{count} cannot travel to the ranks; nothing was run:\n{lines}"


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


def explain(culprit: object, problem: BaseException) -> tuple[str, str]:
    """Return reason and remedy; `{name}` in the remedy stands for the variable."""
    explanation = _known(culprit)
    if explanation is not None:
        return explanation
    if isinstance(problem, worlds.WorldError):
        return f"holds a {problem.type}, which {worlds.REASON}", worlds.REMEDY
    if made_by := _computation(culprit):
        return f"is part of a computation ({made_by}), which does not travel", _LEAF
    text = (
        f"{type(problem).__name__}: {problem}".strip().splitlines()[0]
        if str(problem)
        else type(problem).__name__
    )
    return (
        f"cannot be pickled: {text}",
        "make it in the cell, or leave it out with --no-push {name}",
    )


def _computation(value: object) -> str:
    """Return the operation that created a non-leaf tensor, or "" for anything else."""
    made_by = getattr(value, "grad_fn", None) if is_a(type(value), "torch", "Tensor") else None
    return "" if made_by is None else type(made_by).__name__


def _known(value: object) -> tuple[str, str] | None:
    """Return reason and remedy for kinds of objects that never travel, or None."""
    if worlds.knows_world(value):
        return worlds.REASON, worlds.REMEDY
    # `_KINDS` lists types of C modules without the underscore: `thread.lock`.
    names = {
        type_name(value),
        *(f"{kind.__module__.lstrip('_')}.{kind.__qualname__}" for kind in type(value).__mro__),
    }
    return next(
        ((reason, remedy) for kinds, reason, remedy in _KINDS if not names.isdisjoint(kinds)), None
    )


def find(value: object, attempt: Callable[[object], object]) -> tuple[str, object]:
    """Find the innermost part of a value that cannot be pickled by itself.

    Returns:
        Path to the part (`.model.lock`, `['a'][0]`), and the part.
    """
    path, budget = "", _BUDGET
    # Values may be cyclic.
    visited = {id(value)}
    while _known(value) is None:
        for step, part in parts(value):
            if id(part) in visited:
                continue
            budget -= 1
            if budget < 0:
                return path, value
            try:
                attempt(part)
            except BaseException as problem:
                if isinstance(problem, KeyboardInterrupt) and not raised_by_value(problem):
                    raise
                visited.add(id(part))
                path, value = path + step, part
                break
        else:
            break
    return path, value


def parts(value: object) -> Iterator[tuple[str, object]]:
    """Iterate over the parts of a value, each with the path that leads to it."""
    if _is(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in list(value.items())[:_BUDGET])
    elif _is(value, list) or _is(value, tuple) or _is(value, set) or _is(value, frozenset):
        yield from ((f"[{index}]", item) for index, item in enumerate(list(value)[:_BUDGET]))
    elif _is(value, types.FunctionType):
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
    elif _is(value, types.MethodType):
        yield ".__self__", value.__self__
    elif _is(value, type):
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


def _is(value: object, kind: type[T]) -> TypeGuard[T]:
    """Return True if a value has this type, ignoring its `__class__`, which proxies override."""
    return issubclass(type(value), kind)


def _attributes(value: object) -> dict[str, object]:
    """Return an object's attributes without running code of its class."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:  # the class uses slots
        return {}
    return attributes if type(attributes) is dict else {}
