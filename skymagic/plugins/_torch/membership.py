"""Verify the members of a process group before user code uses it, and form subgroups again.

Members exchange tensors, never pickles. torch's store has no password: any process that reaches its
port can register as a rank. The ranks of a pool share a secret from the control channel, and each
proves that it knows it before anything is sent through a new group.

Groups other than the default one are formed again, under their names, if all their members are
alive. A `DeviceMesh`, and what is sharded over one, finds its groups by name.
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
    """Check that each member of the default group knows the secret of this pool's ranks.

    Args:
        secret: secret of the pool's ranks, new for each group.
        rank: rank of this process.

    Raises:
        RuntimeError: other processes have joined in place of ranks. Names the ranks.
    """
    proofs = gather_rows(_proof(secret, rank), "uint8")
    strangers = [number for number, proof in enumerate(proofs) if proof != _proof(secret, number)]
    if strangers:
        raise RuntimeError(
            "the process group has an unknown process in place of rank "
            f"{', '.join(map(str, strangers))}: it joined through torch's store, which has no "
            "password; the group is not used. Try %sky_restart, and check who else uses this "
            "machine"
        )


def all_gather_pairs(pairs: Sequence[tuple[str, str]]) -> list[dict[int, int]]:
    """Exchange name-value pairs among all ranks of the default group.

    All ranks must call it, even without pairs.

    Returns:
        The pairs of each rank, in rank order. Names and values are digests.
    """
    numbers = [number for name, value in pairs for number in (digest(name), digest(value))]
    # All rows must have equal length. Digests are not negative, so -1 marks the padding.
    rows = gather_rows(numbers + [-1] * (2 * highest(len(pairs)) - len(numbers)))
    return [
        {name: value for name, value in zip(row[::2], row[1::2], strict=True) if name >= 0}
        for row in rows
    ]


def gather_rows(row: list[int], dtype: str = "int64") -> list[list[int]]:
    """Gather a row of numbers of this type from each rank, in rank order.

    The rows have equal length, and all ranks must call it.
    """
    import torch
    import torch.distributed as dist

    all_gather, _ = _collectives()
    own = torch.tensor(row, dtype=getattr(torch, dtype), device=device_of_collectives())
    received = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    if row:
        all_gather(received, own)
    return [tensor.tolist() for tensor in received]


def highest(value: int) -> int:
    """Return the highest value of all ranks, which must all call it."""
    import torch
    import torch.distributed as dist

    _, all_reduce = _collectives()
    maximum = torch.tensor([value], device=device_of_collectives())
    all_reduce(maximum, dist.ReduceOp.MAX)
    return int(maximum.item())


@cache
def _collectives() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return torch's all_gather and all_reduce as they were at the first call.

    The default group is usually verified before the first cell, which may replace them.
    """
    import torch.distributed as dist

    return _marked_as_waiting(dist.all_gather), _marked_as_waiting(dist.all_reduce)


def _marked_as_waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with rendezvous.waiting():
            return collective(*args)

    return call


def digest(text: str) -> int:
    """Return a digest of a text that is the same in every process."""
    # 63 bits are never negative as an int64, the type in which ranks exchange digests.
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _proof(secret: str, rank: int) -> list[int]:
    return list(
        # blake2b refuses keys of more than 64 bytes.
        blake2b(f"rank {rank}".encode(), key=secret.encode()[:64], digest_size=PROOF_BYTES).digest()
    )


def device_of_collectives() -> Any:
    """Return the device for tensors of the default group's collectives.

    Every group must have one: without a collective, a stranger would pass without a proof.
    ``get_backend()`` returns ``"cpu:gloo,cuda:nccl"`` or ``"undefined"``, so the backend of each
    device is taken from the configuration.
    """
    import torch
    import torch.distributed as dist

    return torch.device(
        backends.device_for_control_messages(
            backends.backend_by_device(str(dist.get_backend_config()))
        )
    )


SURVIVOR_KEY = "survivor"
"""Name that ranks which were not restarted send to the others, without a value."""


@dataclass(frozen=True)
class Subgroup:
    """A group that this rank is a member of."""

    group: Any
    name: str
    ranks: tuple[int, ...]
    backend: str
    description: str

    @property
    def key(self) -> str:
        """Text that is equal on all members and differs from other groups'."""
        return f"{self.name} {self.ranks} {self.backend}"


@dataclass(frozen=True)
class ReformedGroups:
    """The groups after the default group was formed again."""

    groups: dict[int, Any]
    """Replacement of each destroyed group, by its ``id``."""
    alive: frozenset[int]
    """Ranks that were not restarted."""


def existing_subgroups() -> list[Subgroup]:
    """Return the groups of this rank other than the default one."""
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
) -> ReformedGroups:
    """Form the groups again that were destroyed together with the default group.

    All ranks must call it, even without any group.

    Args:
        before: this rank's groups before the default group was destroyed.
        alive: whether this rank was not restarted and still holds its values.
        timeout: timeout of their collectives; None for torch's default.
    """
    from torch.distributed import distributed_c10d as c10d

    tables = all_gather_pairs(
        [(SURVIVOR_KEY, ""), *((subgroup.key, "") for subgroup in before)] if alive else []
    )
    living = frozenset(rank for rank, table in enumerate(tables) if digest(SURVIVOR_KEY) in table)
    # torch names a new group by the number of groups created so far, which must be the same on all
    # ranks.
    group_count = highest(
        max([c10d._world.group_count, *(int(g.name) + 1 for g in before if g.name.isdigit())])
    )
    replacements = {}
    # All ranks use the same order, because the members of a group wait for each other.
    for subgroup in sorted(before, key=lambda group: group.key):
        key = digest(subgroup.key)
        if all(rank in living and key in tables[rank] for rank in subgroup.ranks):
            with contextlib.suppress(Exception):  # a failure is reported as a lost group
                replacements[id(subgroup.group)] = _make(subgroup, timeout)
    c10d._world.group_count = group_count
    return ReformedGroups(replacements, living)


def _make(subgroup: Subgroup, timeout: timedelta | None) -> Any:
    from torch.distributed import distributed_c10d as c10d

    default = c10d._get_default_group()
    with rendezvous.waiting():
        group, _ = c10d._new_process_group_helper(
            len(subgroup.ranks),
            subgroup.ranks.index(default.rank()),
            list(subgroup.ranks),
            c10d.Backend(subgroup.backend),
            c10d._world.pg_map[default][1],
            subgroup.name,
            timeout=timeout or c10d._get_default_timeout(c10d.Backend(subgroup.backend)),
            group_desc=subgroup.description,
        )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(subgroup.ranks)}
    return group
