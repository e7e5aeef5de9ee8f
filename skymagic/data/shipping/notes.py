"""What the user is told about the values of a run, each thing once; why a value cannot travel, and what to do instead."""

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
    """A value that has something in common with that of another name, of which a rank has its own."""

    name: str
    other: str


class Notes:
    """Sentences about names and values, and which of them were said."""

    def __init__(self) -> None:
        self._said: defaultdict[str, set[Any]] = defaultdict(
            set
        )  # by kind of sentence, what it was said of

    def _new(self, kind: str, found: Iterable[T]) -> list[T]:
        """What this was not said of, sorted; it counts as said from now on."""
        new = sorted(set(found) - self._said[kind])  # type: ignore[type-var]
        self._said[kind].update(new)
        return new

    def deleted(self, names: Iterable[str], note: Note) -> None:
        """Say which names are gone from the notebook while some rank holds them."""
        for name in self._new("deleted", names):
            note(f"{name} is deleted here, the ranks still hold it")

    def set_on_modules(
        self,
        attributes: Mapping[str, str],
        used: Iterable[str],
        repeated: Collection[str],
        note: Note,
    ) -> None:
        """Name attributes of modules that the notebook has set, where the cell uses the modules.

        Args:
            attributes: attribute → module.
            used: the modules that the cell uses.
            repeated: attributes that the cell sets itself.
        """
        self._said["set"].update(repeated)
        modules = frozenset(used)
        packages = frozenset(module.partition(".")[0] for module in modules)
        prefixes = tuple(f"{module}." for module in modules)
        reached = (
            name
            for name, module in attributes.items()
            if module in packages or f"{module}.".startswith(prefixes)
        )
        if names := self._new("set", reached):
            listed = ", ".join(names)
            note(
                f"{listed}: set in the notebook only, because modules are sent without later changes; set it in a broadcast cell too"
            )

    def settings(
        self,
        made: Iterable[Setting],
        packages: Collection[str],
        repeated: Iterable[Setting],
        note: Note,
    ) -> None:
        """Name settings that the notebook has made of packages which the cell uses.

        Args:
            repeated: those that the cell makes itself.
        """
        said = self._said["settings"]
        said.update(setting.topic for setting in repeated)
        new = {
            setting for setting in made if setting.topic not in said and setting.concerns(packages)
        }
        said.update(setting.topic for setting in new)
        if new:
            listed = ", ".join(sorted({setting.text for setting in new}))
            note(
                f"{listed}: set in the notebook only, because each rank has its own settings; set it in a broadcast cell too"
            )

    def registered(
        self,
        calls: Mapping[str, str],
        packages: Container[str],
        repeated: Collection[str],
        note: Note,
    ) -> None:
        """Name registrations of the notebook with packages that the cell uses.

        Args:
            calls: call → module.
            repeated: the calls that the cell makes itself.
        """
        self._said["registered"].update(repeated)
        used = (c for c, module in calls.items() if module.partition(".")[0] in packages)
        if names := self._new("registered", used):
            note(
                f"{', '.join(names)}: called in the notebook only, and the ranks have not got what it has registered; "
                "call it in a broadcast cell too"
            )

    def set_on_classes(
        self,
        attributes: Iterable[ClassAttribute],
        packages: Container[str],
        repeated: Collection[ClassAttribute],
        note: Note,
    ) -> None:
        """Name attributes that the notebook has set on classes of packages which the cell uses.

        Args:
            repeated: those that the cell sets itself.
        """
        self._said["classes"].update(repeated)
        used = (each for each in attributes if each.package in packages)
        if found := self._new("classes", used):
            note(
                f"{', '.join(map(str, found))}: set in the notebook only, because the ranks import the class; "
                "set it in a broadcast cell too"
            )

    def secret(self, names: Iterable[str], note: Note) -> None:
        """Say which variables of the environment stay here."""
        for name in self._new("secret", names):
            note(
                f"{name} is set in the notebook's environment and stays here, because it looks like a secret: %sky_pool --secret {name}"
            )

    def unstable(self, names: Iterable[str], note: Note) -> None:
        """The values of these names look different each time."""
        for name in self._new("unstable", names):
            note(
                f"{name} pickles differently each time, so changes cannot be detected: the ranks keep "
                f"their own; --push {name} sends the notebook's"
            )

    def apart(self, found: Iterable[SplitReference], note: Note) -> None:
        """The first name of each refers to a value of the second that the ranks have not got."""
        for each in self._new("apart", found):
            note(
                f"{each.name} refers to the notebook's {each.other}, and the ranks have their own {each.other}: make "
                f"{each.name} in a broadcast cell, or send both with --fresh"
            )

    def maps(
        self, values: Mapping[str, Variable], lacking: Mapping[str, Sequence[int]], note: Note
    ) -> None:
        """Say which values that travel are maps of files, and arrive as something else."""
        for name, value in values.items():
            if lacking[name] and (why := arrays.why_as_array(value.value)):
                note(f"{name}: its contents are sent as an array, because {why}")

    def heavy(self, bundles: Iterable[Bundle], index: ContentIndex, large: int, warn: Note) -> None:
        """Say of which values more than `large` bytes are about to travel to other machines."""
        for bundle in bundles:
            parts = index.to_send(bundle.parts)
            value = frozenset(parts)
            if sum(part.nbytes for part in parts.values()) <= large or value in self._said["heavy"]:
                continue
            if (nbytes := sum(index.store.unsent(part.data) for part in parts.values())) > large:
                self._said["heavy"].add(value)
                warn(heavy(", ".join(bundle.names), nbytes))

    def forget_names(self, namespace: Container[str]) -> None:
        """Forget what was said of names that have come, or gone."""
        self._said["deleted"] = {name for name in self._said["deleted"] if name not in namespace}
        self._said["unstable"] = {name for name in self._said["unstable"] if name in namespace}


# -- why a value cannot travel ---------------------------------------------------------------------


_INSIDE = "make it inside the function, or make {name} in the cell"
_NESTED = "leave it out of its owner's state with __getstate__, or make {name} in the cell"
_LEAF = "pass {name}{path}.detach()"
_PICKLERS = ("skymagic", "cloudpickle", "pickle", "copyreg")
_BUDGET = 300
"""Parts tried while looking for the one that cannot be pickled."""


@dataclass(frozen=True)
class Refusal:
    """A name that cannot travel."""

    name: str
    type: str
    why: str
    """Where it is used: ``"the cell"`` or ``"used by train"``."""
    reason: str
    """The problem, with the part that has it."""
    remedy: str

    @classmethod
    def missing(cls, name: str, names: Collection[str]) -> Refusal:
        """A name given with ``--push`` that the notebook has not; `names` are those that it has."""
        remedy = did_you_mean(name, names).removeprefix("; ") or "check the spelling"
        return cls(name, "no value", "--push", "nothing in this notebook has this name", remedy)

    def __str__(self) -> str:
        place = f"used in {self.why}" if self.why == "the cell" else self.why
        return f"{self.name} ({self.type}, {place}): {self.reason}; {self.remedy}"


def refusal(
    name: str, value: object, why: str, problem: BaseException, attempt: Callable[[object], object]
) -> Refusal:
    """Describe why ``value`` could not be pickled.

    Args:
        attempt: pickles a value and raises when it cannot; called for the value's parts.
    """
    path, culprit = find(value, attempt)
    named = type_name(culprit) if culprit is not value else ""
    # cloudpickle raises its own of it
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
            remedy = _LEAF if _computation(culprit) else _INSIDE if "<" in path else _NESTED
    return Refusal(name, type_name(value), why, reason, remedy.format(name=name, path=path))


def raised_by_value(problem: BaseException) -> bool:
    """Whether a value's own code raised this, and no signal handler: ``KeyboardInterrupt`` may be either."""
    return bool(_own_code(problem))


def _own_code(problem: BaseException) -> str:
    """The function that raised this, where it is the value's own; empty where it is the pickler's."""
    frames = [frame for frame, _ in traceback.walk_tb(problem.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__")) if frames else "skymagic"
    return "" if module.partition(".")[0] in _PICKLERS else frames[-1].f_code.co_name


def no_room(problem: OSError, sizes: list[tuple[str, int]]) -> str:
    """What to say when the store is full: the largest variables, in bytes, and the remedy."""
    largest = sorted(sizes, key=lambda each: -each[1])[:3]
    listed = ", ".join(f"{name} ({nbytes / 1e6:,.0f} MB)" for name, nbytes in largest)
    return (
        f"the cell's variables do not fit in the node store: {problem.strerror or problem}; the largest are {listed}; "
        "free memory or disk, or leave variables out with --no-push NAMES"
    )


def heavy(name: str, nbytes: int) -> str:
    """What to say of a variable that is long on its way to other machines, in bytes."""
    return (
        f"{name}: {nbytes / 1e6:,.0f} MB must travel over this connection; what a cell reads or makes on the nodes "
        f"need not, and --no-push {name} leaves it out"
    )


def message(refusals: list[Refusal]) -> str:
    """All refusals as one text, a line each."""
    count = "1 variable" if len(refusals) == 1 else f"{len(refusals)} variables"
    lines = "\n".join(f"  {each}" for each in refusals)
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
    """Reason and remedy; ``{name}`` in the remedy stands for the variable."""
    known = _known(culprit)
    if known is not None:
        return known
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
    """What a tensor that is no leaf was made by; empty for everything else."""
    made_by = getattr(value, "grad_fn", None) if is_a(type(value), "torch", "Tensor") else None
    return "" if made_by is None else type(made_by).__name__


def _known(value: object) -> tuple[str, str] | None:
    """Reason and remedy for the kinds of objects that never travel."""
    if worlds.knows_world(value):
        return worlds.REASON, worlds.REMEDY
    names = {
        type_name(value),
        *(f"{kind.__module__.lstrip('_')}.{kind.__qualname__}" for kind in type(value).__mro__),
    }
    return next(
        ((reason, remedy) for kinds, reason, remedy in _KINDS if not names.isdisjoint(kinds)), None
    )


def find(value: object, attempt: Callable[[object], object]) -> tuple[str, object]:
    """Path (``.model.lock``, ``['a'][0]``) to the innermost part that cannot be pickled by itself, and that part."""
    path, budget = "", _BUDGET
    seen = {id(value)}
    while _known(value) is None:
        for step, part in parts(value):
            if id(part) in seen:
                continue
            budget -= 1
            if budget < 0:
                return path, value
            try:
                attempt(part)
            except BaseException as problem:
                if isinstance(problem, KeyboardInterrupt) and not raised_by_value(problem):
                    raise
                seen.add(id(part))
                path, value = path + step, part
                break
        else:
            break
    return path, value


def parts(value: object) -> Iterator[tuple[str, object]]:
    """What a value consists of, each with how to get there from it."""
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
    """Return True if a value is of this type, whatever its ``__class__`` says, as that of a proxy does."""
    return issubclass(type(value), kind)


def _attributes(value: object) -> dict[str, object]:
    """Return an object's attributes without a call of its class's own code."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:  # slots
        return {}
    return found if type(found) is dict else {}
