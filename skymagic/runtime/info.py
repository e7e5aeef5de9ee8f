"""What code on a rank calls: `instance_info`, who takes part in a run, and output control by rank.

Safe on a node and outside one: standard library only, nothing is started, nothing is kept. Outside a pool the answers
are those of rank 0 of 1.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import operator
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar, cast

from skymagic.errors import SkyError
from skymagic.plan.limits import first_gpu
from skymagic.runtime import silence
from skymagic.runtime.on_import import wraps

VARIABLE = "COMPUTE_POOL"
"""Environment variable that holds the InstanceInfo of a rank, as JSON."""

F = TypeVar("F", bound=Callable[..., Any])
Only = Literal["head", "all"] | int | Iterable[int] | Callable[["InstanceInfo"], bool]
"""Who is heard: rank 0, everyone, a rank, some ranks, or those for whom a predicate holds."""


# ------------------------------------------------------------------------------------------ where am I


@dataclass(frozen=True)
class Peer:
    """One node of the pool as the other nodes reach it."""

    node: int
    addr: str
    hostname: str = ""


@dataclass(frozen=True)
class InstanceInfo:
    """A rank's place in its pool.

    Attributes:
        node: number of this machine, from 0.
        total_nodes: machines in the pool.
        head_addr: private address of node 0.
        head_port: a port of the head that was free when the pool was made, for a framework that skymagic has no plugin for: the
            same on all ranks, as long as the pool lives.
        accelerators: GPUs of the pool on this node.
        peers: all nodes, this one too, in order.
        rank: number of this process over all nodes, from 0; equal to `node` with one process per node.
        world_size: processes in the pool.
        local_rank: number of this process on its node, from 0.
        local_world_size: processes on this node.
        hostname: the machine's own name.
        job_id: identifies this life of the pool.
    """

    node: int = 0
    total_nodes: int = 1
    head_addr: str = "127.0.0.1"
    head_port: int = 0
    accelerators: int = 0
    peers: tuple[Peer, ...] = ()
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    hostname: str = ""
    job_id: str = ""

    @property
    def is_head(self) -> bool:
        """Whether this is the head node (node 0). With several ranks per node all of its ranks say so; ``rank == 0`` is one."""
        return self.node == 0

    def gpus_of_rank(self, visible: int = 0) -> range:
        """Numbers of this rank's GPUs as CUDA counts them in its process: an equal share of its node's, or one that ranks share.

        One number for ``set_device``, JAX's ``local_device_ids``, Lightning and the usage meter.

        Args:
            visible: how many CUDA shows, where the pool says nothing of GPUs.
        """
        there = self.accelerators or visible
        if not there:
            return range(0)
        # of parts of GPUs CUDA shows a process one alone
        if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
            return range(1)
        first = first_gpu(self.local_rank, self.local_world_size, there)
        return range(first, first + max(1, there // self.local_world_size))

    def plain(self) -> dict[str, Any]:
        """As JSON-able values, ``is_head`` among them for readers in other languages."""
        return {
            **asdict(self),
            "peers": [asdict(peer) for peer in self.peers],
            "is_head": self.is_head,
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> InstanceInfo:
        """What `plain` gave; keys that are not known here are left out. Raises TypeError for other values."""
        known = {
            key: value for key, value in values.items() if key in {f.name for f in fields(cls)}
        }
        return cls(**{**known, "peers": tuple(Peer(**peer) for peer in known.get("peers", ()))})

    def to_json(self) -> str:
        """One line for the variable COMPUTE_POOL."""
        return json.dumps(self.plain())

    @classmethod
    def from_json(cls, text: str) -> InstanceInfo:
        """Read what `to_json` wrote. Raises SkyError for any other text."""
        try:
            return cls.from_plain(json.loads(text))
        except (ValueError, TypeError, AttributeError) as problem:
            raise SkyError(
                f"the variable {VARIABLE} does not describe a rank ({problem}); unset it outside a pool"
            ) from None


def enter(info: InstanceInfo) -> None:
    """Make this process, and what it starts, the rank that `info` describes; its kernel calls it. Twice is safe."""
    os.environ[VARIABLE] = info.to_json()


def instance_info() -> InstanceInfo:
    """This process's place in the pool; rank 0 of 1 outside one.

    Also right in processes that a rank has started, for they inherit COMPUTE_POOL.

    Raises:
        SkyError: COMPUTE_POOL holds something else than a rank's place.
    """
    text = os.environ.get(VARIABLE)
    return _parsed(text) if text else InstanceInfo(hostname=socket.gethostname())


def on_a_rank() -> bool:
    """Whether this process is a rank of a pool, or was started by one."""
    return bool(os.environ.get(VARIABLE))


_parsed = functools.lru_cache(maxsize=4)(InstanceInfo.from_json)


# ------------------------------------------------------------------------------------- who takes part

_taking_part: tuple[int, ...] | None = None
_everyone = True
_run = 0


@contextlib.contextmanager
def taking_part(ranks: Iterable[int] | None, run: int = 0) -> Iterator[None]:
    """For the length of a run: the ranks that carry it out, None for all; and its number. A rank's kernel calls it.

    Held for the process, not for a context: threads that the cell starts take part too.
    """
    global _taking_part, _everyone, _run
    before = _taking_part, _everyone, _run
    _taking_part = None if ranks is None else tuple(sorted(set(ranks)))
    _everyone = _taking_part is None or len(_taking_part) == instance_info().world_size
    _run = run
    try:
        yield
    finally:
        _taking_part, _everyone, _run = before


def everyone() -> bool:
    """Whether all ranks of the pool take part in the present run; asked at each step of a training."""
    return _everyone


def run_number() -> int:
    """The number of the present run, the same on all ranks that take part; 0 between runs."""
    return _run


def participants() -> tuple[int, ...]:
    """The ranks that take part in the present run, ascending; all ranks of the pool between runs."""
    return tuple(range(instance_info().world_size)) if _taking_part is None else _taking_part


# ------------------------------------------------------------------------------------- whose output is heard


@dataclass(frozen=True)
class Silence:
    """Output control: a decorator and a context manager, used as often and as nested as you like.

    As a decorator it takes functions and methods; a generator or an asynchronous function has a `with` block in it instead. The choice of ranks is evaluated at each call.
    `skymagic.runtime.silence` says what a silence covers.
    """

    name: str
    streams: tuple[str, ...]
    heard: frozenset[int] | Literal["head", "all", "nobody"] | Callable[[InstanceInfo], bool]

    def applies(self) -> bool:
        """Whether this rank is to be silent."""
        info = instance_info()
        if callable(self.heard):
            return not self.heard(info)
        if isinstance(self.heard, frozenset):
            return info.rank not in self.heard
        return self.heard == "nobody" or (self.heard == "head" and info.rank != 0)

    def redirection(self) -> silence.Redirection:
        """The redirection of one call: of our streams, or of none where this rank is heard."""
        return silence.Redirection(self.streams if self.applies() else ())

    def __enter__(self) -> None:
        block = self.redirection()
        block.__enter__()
        _open_blocks().append((self, block))

    def __exit__(self, *error: object) -> None:
        opened = _open_blocks()
        place = max(i for i, (control, _) in enumerate(opened) if control is self)
        opened.pop(place)[1].__exit__()

    def __call__(self, function: F) -> F:
        """`function`, silent on the ranks that are not to be heard.

        Raises:
            TypeError: not a function, a generator or an asynchronous function, or one that @sky.function has already made lazy.
        """
        if getattr(function, "__sky_lazy__", False):
            raise TypeError(
                f"@sky.function must be outermost: write it above @sky.{self.name}, not below"
            )
        if inspect.isclass(function) or not callable(function):
            raise TypeError(
                f"sky.{self.name} decorates a function or stands in a `with`; it was given {function!r}"
            )
        pauses = (
            inspect.iscoroutinefunction,
            inspect.isasyncgenfunction,
            inspect.isgeneratorfunction,
        )
        if any(kind(function) for kind in pauses):
            raise TypeError(
                f"sky.{self.name} cannot decorate what pauses: write `with sky.{self.name}:` in {function.__name__}"
            )

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self.redirection():
                return function(*args, **kwargs)

        return cast("F", wrapper)


_local = threading.local()


def _open_blocks() -> list[tuple[Silence, silence.Redirection]]:
    """The `with` blocks open on this thread. Not kept in a Silence, for it is shared and travels by pickle."""
    blocks: list[tuple[Silence, silence.Redirection]] = _local.__dict__.setdefault("blocks", [])
    return blocks


def stdout(function: F | None = None, /, *, only: Only = "head") -> Any:
    """Let standard output be heard from some ranks only: ``@sky.stdout(only="head")`` or ``with sky.stdout(only=0):``.

    Standard error is left alone. What is silenced on a rank of a pool is still in that rank's log.

    Args:
        only: ``"head"`` (rank 0), ``"all"``, a rank, several ranks, or a predicate of the InstanceInfo.

    Raises:
        TypeError, ValueError: `only` is none of these; raised where the decorator is written.
    """
    return _control("stdout", function, only)


def stderr(function: F | None = None, /, *, only: Only = "head") -> Any:
    """`stdout` for standard error, which warnings, logging and progress bars use."""
    return _control("stderr", function, only)


silent = Silence("silent", ("stdout", "stderr"), "nobody")
"""``@sky.silent`` or ``with sky.silent:``: neither stream is heard from any rank."""


def _control(name: str, function: F | None, only: Only) -> Any:
    if function is not None and not callable(function):
        raise TypeError(f"write @sky.{name}(only={function!r}), with the name `only`")
    control = Silence(name, (name,), _heard(name, only))
    return control if function is None else control(function)


def _heard(
    name: str, only: Any
) -> frozenset[int] | Literal["head", "all"] | Callable[[InstanceInfo], bool]:
    wanted = 'write "head", "all", a rank, several ranks, or a function of the InstanceInfo'
    if isinstance(only, str):
        if only not in ("head", "all"):
            raise ValueError(f"sky.{name}(only={only!r}): {wanted}")
        return only  # type: ignore[return-value]
    if callable(only):
        _check_predicate(name, only)
        return only  # type: ignore[no-any-return]
    if isinstance(only, bytes | bytearray | Mapping):
        raise TypeError(f"sky.{name}(only={only!r}): {wanted}")
    ranks = frozenset(
        _rank(name, item, wanted) for item in (only if isinstance(only, Iterable) else [only])
    )
    if not ranks:
        raise ValueError(
            f"sky.{name}(only={only!r}) names no rank; to silence all of them use sky.silent"
        )
    return ranks


def _rank(name: str, item: Any, wanted: str) -> int:
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise TypeError(f"sky.{name}(only=…): {item!r} is not a rank; {wanted}")
    rank = operator.index(item)
    if rank < 0:
        raise ValueError(f"sky.{name}(only=…): ranks count from 0, and {rank} is below")
    return rank


def _check_predicate(name: str, only: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(only)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(InstanceInfo())
    except TypeError:
        raise TypeError(
            f"sky.{name}(only=…): the function is called with one InstanceInfo, and {only!r} does not take that"
        ) from None
