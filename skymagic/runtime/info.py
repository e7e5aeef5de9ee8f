"""API for code on a rank: `instance_info`, the participants of a run, and output control by rank.

Safe inside and outside a pool: it uses the standard library only, starts nothing and stores
nothing. Outside a pool the answers are those of rank 0 of 1.
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
from skymagic.wire.typed import read

VARIABLE = "COMPUTE_POOL"
"""Environment variable with the InstanceInfo of a rank, as JSON."""

F = TypeVar("F", bound=Callable[..., Any])
Only = Literal["head", "all"] | int | Iterable[int] | Callable[["InstanceInfo"], bool]
"""Ranks whose output is shown: rank 0, all ranks, one rank, several ranks, or those that satisfy a
predicate.
"""


# -- place in the pool -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """A node of the pool, and the address that other nodes use for it."""

    node: int
    addr: str
    hostname: str = ""


@dataclass(frozen=True)
class InstanceInfo:
    """A rank's place in its pool.

    Attributes:
        node: number of this machine, from 0.
        total_nodes: number of machines in the pool.
        head_addr: private address of node 0.
        head_port: a port of the head that was free when the pool was created, for a framework
            without a skymagic plugin. It is the same on all ranks, for the lifetime of the pool.
        accelerators: number of the pool's GPUs on this node.
        peers: all nodes, including this one, in order.
        rank: number of this process over all nodes, from 0; equal to `node` with one process per
            node.
        world_size: number of processes in the pool.
        local_rank: number of this process on its node, from 0.
        local_world_size: number of processes on this node.
        hostname: the machine's own host name.
        job_id: identifies this incarnation of the pool.
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
        """True on the head node (node 0).

        With several ranks per node it is True on all ranks of that node; ``rank == 0`` holds on one
        only.
        """
        return self.node == 0

    def gpus_of_rank(self, visible: int = 0) -> range:
        """Return the numbers of this rank's GPUs as CUDA counts them in its process.

        They are an equal share of the node's GPUs, or one GPU that several ranks share.
        ``set_device``, JAX's ``local_device_ids``, Lightning and the usage meter all use this
        numbering.

        Args:
            visible: number of GPUs that CUDA shows, used if the pool has no information about GPUs.
        """
        gpu_count = self.accelerators or visible
        if not gpu_count:
            return range(0)
        # CUDA shows a process only one MIG slice, even if it has several.
        if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
            return range(1)
        first = first_gpu(self.local_rank, self.local_world_size, gpu_count)
        return range(first, first + max(1, gpu_count // self.local_world_size))

    def plain(self) -> dict[str, object]:
        """Return JSON-serializable values, including ``is_head`` for readers in other languages."""
        return {
            **asdict(self),
            "peers": [asdict(peer) for peer in self.peers],
            "is_head": self.is_head,
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, object]) -> InstanceInfo:
        """Restore the values of `plain`, which a codec may have changed to lists; ignore others.

        Raises:
            ValueError: the values do not fit the fields.
        """
        names = {field.name for field in fields(cls)}
        return read(cls, {name: value for name, value in values.items() if name in names})

    def to_json(self) -> str:
        """Return one line of JSON for the variable COMPUTE_POOL."""
        return json.dumps(self.plain())

    @classmethod
    def from_json(cls, text: str) -> InstanceInfo:
        """Parse the output of `to_json`. Raises SkyError for any other text."""
        try:
            return cls.from_plain(json.loads(text))
        except (ValueError, TypeError, AttributeError) as problem:
            raise SkyError(
                f"the variable {VARIABLE} does not describe a rank ({problem}); "
                "unset it outside a pool",
                code="environment",
                names=[VARIABLE],
            ) from None


def enter(info: InstanceInfo) -> None:
    """Make this process, and its child processes, the rank that `info` describes.

    Called by the rank's kernel. Safe to call twice.
    """
    os.environ[VARIABLE] = info.to_json()


def instance_info() -> InstanceInfo:
    """Return this process's place in the pool, or rank 0 of 1 outside a pool.

    Also correct in processes that a rank has started, because they inherit COMPUTE_POOL.

    Raises:
        SkyError: COMPUTE_POOL does not describe a rank.
    """
    text = os.environ.get(VARIABLE)
    return _parsed(text) if text else InstanceInfo(hostname=socket.gethostname())


def on_a_rank() -> bool:
    """Return True if this process is a rank of a pool, or was started by one."""
    return bool(os.environ.get(VARIABLE))


_parsed = functools.lru_cache(maxsize=4)(InstanceInfo.from_json)


# -- participants of a run -------------------------------------------------------------------------

_taking_part: tuple[int, ...] | None = None
_everyone = True
_run = 0


@contextlib.contextmanager
def participation(ranks: Iterable[int] | None, run: int = 0) -> Iterator[None]:
    """Set the ranks that execute the current run (None for all) and its number, while it lasts.

    Called by a rank's kernel. The setting belongs to the process, not to a context, so that threads
    started by the cell take part too.
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


def all_ranks_take_part() -> bool:
    """Return True if all ranks of the pool take part in the current run.

    It is called at each training step.
    """
    return _everyone


def run_number() -> int:
    """Return the number of the current run, the same on all its ranks; 0 between runs."""
    return _run


def participants() -> tuple[int, ...]:
    """Return the ranks that take part in the current run, ascending; all ranks between runs."""
    return tuple(range(instance_info().world_size)) if _taking_part is None else _taking_part


# -- output control --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Silence:
    """Output control by rank: a reusable and nestable decorator and context manager.

    The decorator accepts functions and methods; generators and asynchronous functions need a `with`
    block inside instead. The choice of ranks is evaluated at each call. `skymagic.runtime.silence`
    describes what is silenced.
    """

    name: str
    streams: tuple[str, ...]
    audible_ranks: (
        frozenset[int] | Literal["head", "all", "nobody"] | Callable[[InstanceInfo], bool]
    )

    def applies(self) -> bool:
        """Return True if this rank is to be silent."""
        info = instance_info()
        if callable(self.audible_ranks):
            return not self.audible_ranks(info)
        if isinstance(self.audible_ranks, frozenset):
            return info.rank not in self.audible_ranks
        return self.audible_ranks == "nobody" or (self.audible_ranks == "head" and info.rank != 0)

    def redirection(self) -> silence.Redirection:
        """Return the redirection for one call: of these streams, or of none if this rank's output
        is shown.
        """
        return silence.Redirection(self.streams if self.applies() else ())

    def __enter__(self) -> None:
        block = self.redirection()
        block.__enter__()
        _open_blocks().append((self, block))

    def __exit__(self, *error: object) -> None:
        blocks = _open_blocks()
        index = max(i for i, (control, _) in enumerate(blocks) if control is self)
        blocks.pop(index)[1].__exit__()

    def __call__(self, function: F) -> F:
        """Return `function`, silenced on the ranks whose output is not shown.

        Raises:
            TypeError: it is a class, not callable, a generator or an asynchronous function, or
                @sky.function has already made it lazy.
        """
        if getattr(function, "__sky_lazy__", False):
            raise TypeError(
                f"@sky.function must be outermost: write it above @sky.{self.name}, not below"
            )
        if inspect.isclass(function) or not callable(function):
            raise TypeError(
                f"sky.{self.name} decorates a function or stands in a `with`; "
                f"it was given {function!r}"
            )
        suspending_kinds = (
            inspect.iscoroutinefunction,
            inspect.isasyncgenfunction,
            inspect.isgeneratorfunction,
        )
        if any(kind(function) for kind in suspending_kinds):
            raise TypeError(
                f"sky.{self.name} cannot decorate what pauses: "
                f"write `with sky.{self.name}:` in {function.__name__}"
            )

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self.redirection():
                return function(*args, **kwargs)

        return cast("F", wrapper)


_local = threading.local()


def _open_blocks() -> list[tuple[Silence, silence.Redirection]]:
    """Return the `with` blocks open on this thread.

    They are not stored in a Silence, because it is shared between threads and pickled.
    """
    blocks: list[tuple[Silence, silence.Redirection]] = _local.__dict__.setdefault("blocks", [])
    return blocks


def stdout(function: F | None = None, /, *, only: Only = "head") -> Any:
    """Show standard output from some ranks only: ``@sky.stdout(only="head")`` or ``with
    sky.stdout(only=0):``.

    Standard error is left alone. Output silenced on a rank of a pool still goes to that rank's log.

    Args:
        only: ``"head"`` (rank 0), ``"all"``, a rank, several ranks, or a predicate of the
            InstanceInfo.

    Raises:
        TypeError, ValueError: `only` is none of these; raised where the decorator is applied.
    """
    return _control("stdout", function, only)


def stderr(function: F | None = None, /, *, only: Only = "head") -> Any:
    """Show standard error from some ranks only, as `stdout`.

    Warnings, logging and progress bars use it.
    """
    return _control("stderr", function, only)


silent = Silence("silent", ("stdout", "stderr"), "nobody")
"""``@sky.silent`` or ``with sky.silent:``: show neither stream from any rank."""


def _control(name: str, function: F | None, only: Only) -> Any:
    if function is not None and not callable(function):
        raise TypeError(f"write @sky.{name}(only={function!r}), with the name `only`")
    control = Silence(name, (name,), _ranks_to_show(name, only))
    return control if function is None else control(function)


def _ranks_to_show(
    name: str, only: Any
) -> frozenset[int] | Literal["head", "all"] | Callable[[InstanceInfo], bool]:
    usage = 'write "head", "all", a rank, several ranks, or a function of the InstanceInfo'
    if isinstance(only, str):
        if only not in ("head", "all"):
            raise ValueError(f"sky.{name}(only={only!r}): {usage}")
        return only  # type: ignore[return-value]
    if callable(only):
        _check_predicate(name, only)
        return only  # type: ignore[no-any-return]
    if isinstance(only, bytes | bytearray | Mapping):
        raise TypeError(f"sky.{name}(only={only!r}): {usage}")
    ranks = frozenset(
        _rank(name, item, usage) for item in (only if isinstance(only, Iterable) else [only])
    )
    if not ranks:
        raise ValueError(
            f"sky.{name}(only={only!r}) names no rank; to silence all of them use sky.silent"
        )
    return ranks


def _rank(name: str, item: Any, text: str) -> int:
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise TypeError(f"sky.{name}(only=…): {item!r} is not a rank; {text}")
    rank = operator.index(item)
    if rank < 0:
        raise ValueError(f"sky.{name}(only=…): ranks count from 0, and {rank} is below")
    return rank


def _check_predicate(name: str, only: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(only)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(InstanceInfo())
    except TypeError:
        raise TypeError(
            f"sky.{name}(only=…): the function is called with one InstanceInfo, "
            f"and {only!r} does not take that"
        ) from None
