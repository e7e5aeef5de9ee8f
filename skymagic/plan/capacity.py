"""How many ranks a machine has room for, before any of them is started: processes, memory, descriptors, cores; pure.

The costs are those of ranks that have run nothing yet, measured: what their cells take comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from skymagic.plan.units import agreeing, count, size

RANK_TASKS = 12
"""Processes and threads of a rank, as the kernel counts both."""
RANK_BYTES = 20_000_000
"""Memory that a rank shares with no other."""
RANK_DESCRIPTORS, AGENT_DESCRIPTORS = 7, 5
"""What the controller, which has most, has open for each rank of a pool; and an agent for each of its node."""
MOST_DESCRIPTORS = 1 << 16
"""Up to so many an agent raises the limit of what it starts, where the system lets it."""
OWN_TASKS, OWN_DESCRIPTORS, OWN_DESCRIPTORS_OF_NODE = 20, 130, 40
"""Of agent, controller and forkserver; on nodes other than the head there is no controller."""
RANKS_PER_CORE = 32
"""Beyond so many the user is asked whether that was meant."""


@dataclass(frozen=True)
class Room:
    """What a machine has left for more processes; None where it does not tell.

    Attributes:
        tasks: processes and threads. nbytes: memory. descriptors: open files of one process, once the limit is raised.
    """

    tasks: int | None = None
    nbytes: int | None = None
    descriptors: int | None = None


def refusals_of_node(ranks: int, world_size: int, room: Room, host: str, *, head: bool) -> list[str]:
    """Why a host cannot be a node of a pool, a sentence for each reason.

    Args:
        ranks: those of this node. world_size: those of the pool, to all of which the head's controller is connected.
    """
    if head:
        return refusals(world_size, room, f"in a pool whose head is {host}")
    files = ranks * AGENT_DESCRIPTORS + OWN_DESCRIPTORS_OF_NODE
    if room.descriptors is None or files <= room.descriptors:
        return []
    return [f"{_need(ranks, f'on {host}')} {_files(files, room)}"]


def refusals(ranks: int, room: Room, where: str = "on this machine") -> list[str]:
    """Why so many ranks cannot start, a sentence for each reason, with how many could."""
    memory = None if room.nbytes is None else room.nbytes // RANK_BYTES
    tasks = None if room.tasks is None else (room.tasks - OWN_TASKS) // RANK_TASKS
    files = None if room.descriptors is None else (room.descriptors - OWN_DESCRIPTORS) // RANK_DESCRIPTORS
    limits = (
        (memory, f"{size(ranks * RANK_BYTES)} of memory to start, and {size(room.nbytes or 0)} are free"),
        (
            tasks,
            f"{ranks * RANK_TASKS + OWN_TASKS} processes and threads, and {max(0, room.tasks or 0)} more are allowed "
            "(ulimit -u, pids.max)",
        ),
        (files, _files(ranks * RANK_DESCRIPTORS + OWN_DESCRIPTORS, room)),
    )
    return [
        f"{_need(ranks, where)} {what}: there is room for {max(0, most)}"
        for most, what in limits
        if most is not None and most < ranks
    ]


def _need(ranks: int, where: str) -> str:
    return f"{count(ranks, 'rank')} {where} {agreeing(ranks, 'needs', 'need')}"


def _files(needed: int, room: Room) -> str:
    return f"{needed} open files in one process, and {room.descriptors} are allowed (ulimit -Hn)"


def question(ranks: int, cpus: int) -> str:
    """What to ask before so many ranks start on so many cores; "" where it is not out of the ordinary."""
    if ranks <= RANKS_PER_CORE * cpus:
        return ""
    return (
        f"{ranks} ranks on {count(cpus, 'CPU core')} are {ranks // cpus} for each, and need {size(ranks * RANK_BYTES)} of memory "
        "before they do anything"
    )
