"""Process groups beside the default one: made again, under their names, by members that all live.

A `DeviceMesh`, and what is sharded over one (FSDP2, DTensor), finds its groups by their names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from skymagic.plugins._torch import membership
from skymagic.runtime import rendezvous

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
        """The same on all members, and no other group's."""
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
        Subgroup(group, world.pg_names[group], tuple(world.pg_group_ranks[group]), str(backend), group.group_desc)
        for group, (backend, _) in world.pg_map.items()
        if group is not c10d.GroupMember.WORLD and group in world.pg_group_ranks
    ]


def form_again(before: Sequence[Subgroup], *, alive: bool, timeout: timedelta | None = None) -> Formed:
    """Make groups again that the default group's end has taken along; each rank takes part, also one without any.

    Args:
        alive: whether this rank holds what it had, and was not started anew.
        timeout: of their collectives; None for torch's.
    """
    from torch.distributed import distributed_c10d as c10d

    told = membership.tell_all([(LIVES, ""), *((one.key, "") for one in before)] if alive else [])
    living = frozenset(rank for rank, table in enumerate(told) if membership.digest(LIVES) in table)
    # a default group's number of groups made so far names the next one, and must be the same on all ranks
    count = membership.highest(max([c10d._world.group_count, *(int(g.name) + 1 for g in before if g.name.isdigit())]))
    made = {}
    for one in sorted(
        before, key=lambda one: one.key
    ):  # in one order on all ranks, for its members wait for each other
        key = membership.digest(one.key)
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
