"""Who is in a process group, and what its members tell each other before user code uses it: tensors, never pickles.

torch's store knows no secret: whoever reaches its port can register as a rank. The ranks of a pool have one, from the control channel, and
each shows that it knows it before anything is sent through a new group. Groups beside the default one are made again, under their names,
by members that all live: a `DeviceMesh`, and what is sharded over one, finds its groups by their names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from typing import Any

from skymagic.plugins._torch import backends
from skymagic.runtime import rendezvous

PROOF_BYTES = 32


def verify(secret: str, rank: int) -> None:
    """Compare what each member of the default group sends with what a rank of this pool must send.

    Args:
        secret: known to the ranks of this pool, new for each group.
        rank: of this process.

    Raises:
        RuntimeError: names the ranks in whose place somebody else has joined.
    """
    proofs = gathered(_proof(secret, rank), "uint8")
    strangers = [number for number, proof in enumerate(proofs) if proof != _proof(secret, number)]
    if strangers:
        raise RuntimeError(
            f"the process group has an unknown process in place of rank {', '.join(map(str, strangers))}: it joined "
            "through torch's store, which has no password; the group is not used. Try %sky_restart, and check who else uses this machine"
        )


def tell_all(pairs: Sequence[tuple[str, str]]) -> list[dict[int, int]]:
    """What each rank of the default group tells: name → value, both as digests. Each rank takes part, also with no pairs."""
    numbers = [number for name, value in pairs for number in (digest(name), digest(value))]
    rows = gathered(numbers + [-1] * (2 * highest(len(pairs)) - len(numbers)))
    return [
        {name: value for name, value in zip(row[::2], row[1::2], strict=True) if name >= 0}
        for row in rows
    ]


def gathered(row: list[int], dtype: str = "int64") -> list[list[int]]:
    """All ranks' rows of numbers of this type, by rank; they are equally long, and each rank takes part."""
    import torch
    import torch.distributed as dist

    all_gather, _ = _collectives()
    mine = torch.tensor(row, dtype=getattr(torch, dtype), device=device_of_collectives())
    received = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    if row:
        all_gather(received, mine)
    return [each.tolist() for each in received]


def highest(value: int) -> int:
    """The highest of all ranks' values; each rank takes part."""
    import torch
    import torch.distributed as dist

    _, all_reduce = _collectives()
    found = torch.tensor([value], device=device_of_collectives())
    all_reduce(found, dist.ReduceOp.MAX)
    return int(found.item())


@cache
def _collectives() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """torch's all_gather and all_reduce as they were at the rank's start: a cell may put others in their place."""
    import torch.distributed as dist

    return _waiting(dist.all_gather), _waiting(dist.all_reduce)


def _waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with rendezvous.waiting():
            return collective(*args)

    return call


def digest(text: str) -> int:
    """63 bits that stand for a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _proof(secret: str, rank: int) -> list[int]:
    return list(
        blake2b(f"rank {rank}".encode(), key=secret.encode()[:64], digest_size=PROOF_BYTES).digest()
    )


def device_of_collectives() -> Any:
    """Where the tensors of the default group's collectives lie: always somewhere, or a stranger would pass without a proof.

    ``get_backend()`` answers ``"cpu:gloo,cuda:nccl"``, or ``"undefined"``; what serves which device is in the configuration.
    """
    import torch
    import torch.distributed as dist

    return torch.device(backends.device_for_talk(backends.legs(str(dist.get_backend_config()))))


LIVES = "holds what it had"
"""What ranks tell each other that were not started anew."""


@dataclass(frozen=True)
class Subgroup:
    """A group of which this rank is a member."""

    group: Any
    name: str
    ranks: tuple[int, ...]
    backend: str
    description: str

    @property
    def key(self) -> str:
        """A text that is equal on all members, and no other group's."""
        return f"{self.name} {self.ranks} {self.backend}"


@dataclass(frozen=True)
class Formed:
    """What has become of groups when the default one was formed anew."""

    made: dict[int, Any]
    """By the ``id`` of the group that is gone: the one in its place."""
    alive: frozenset[int]
    """Ranks that were not started anew."""


def existing() -> list[Subgroup]:
    """The groups of this rank but for the default one."""
    from torch.distributed import distributed_c10d as c10d

    world = c10d._world
    return [
        Subgroup(
            group,
            world.pg_names[group],
            tuple(world.pg_group_ranks[group]),
            str(backend),
            group.group_desc,
        )
        for group, (backend, _) in world.pg_map.items()
        if group is not c10d.GroupMember.WORLD and group in world.pg_group_ranks
    ]


def form_again(
    before: Sequence[Subgroup], *, alive: bool, timeout: timedelta | None = None
) -> Formed:
    """Make groups again that the default group's end has taken along; each rank takes part, also one without any.

    Args:
        alive: whether this rank holds what it had, and was not started anew.
        timeout: of their collectives; None for torch's.
    """
    from torch.distributed import distributed_c10d as c10d

    told = tell_all([(LIVES, ""), *((one.key, "") for one in before)] if alive else [])
    living = frozenset(rank for rank, table in enumerate(told) if digest(LIVES) in table)
    # a default group's number of groups made so far names the next one, and must be the same on all ranks
    count = highest(
        max([c10d._world.group_count, *(int(g.name) + 1 for g in before if g.name.isdigit())])
    )
    made = {}
    # in one order on all ranks, for its members wait for each other
    for one in sorted(before, key=lambda one: one.key):
        key = digest(one.key)
        if all(rank in living and key in told[rank] for rank in one.ranks):
            with contextlib.suppress(Exception):  # it is named as lost
                made[id(one.group)] = _make(one, timeout)
    c10d._world.group_count = count
    return Formed(made, living)


def _make(one: Subgroup, timeout: timedelta | None) -> Any:
    from torch.distributed import distributed_c10d as c10d

    default = c10d._get_default_group()
    with rendezvous.waiting():
        group, _ = c10d._new_process_group_helper(
            len(one.ranks),
            one.ranks.index(default.rank()),
            list(one.ranks),
            c10d.Backend(one.backend),
            c10d._world.pg_map[default][1],
            one.name,
            timeout=timeout or c10d._get_default_timeout(c10d.Backend(one.backend)),
            group_desc=one.description,
        )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(one.ranks)}
    return group
