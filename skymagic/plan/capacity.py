"""How many ranks a machine has room for, before any of them is started: processes, memory, descriptors, cores; pure.

The costs are those of ranks that have run nothing yet, measured: what their cells take comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from skymagic.plan.units import count, size

RANK_TASKS = 14
"""Processes and threads of a rank, as the kernel counts both."""
RANK_BYTES = 40_000_000
"""Memory that a rank shares with no other."""
RANK_DESCRIPTORS = 7
"""What the controller, which has most, has open for each rank."""
MOST_DESCRIPTORS = 1 << 16
"""Up to so many an agent raises the limit of what it starts, where the system lets it."""
OWN_TASKS, OWN_DESCRIPTORS = 20, 130
"""Of agent, controller and forkserver."""
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


def refusals(ranks: int, room: Room) -> list[str]:
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
        (
            files,
            f"{ranks * RANK_DESCRIPTORS + OWN_DESCRIPTORS} open files in one process, and {room.descriptors} are allowed "
            "(ulimit -Hn)",
        ),
    )
    return [
        f"{count(ranks, 'rank')} on this machine need {what}: there is room for {max(0, most)}"
        for most, what in limits
        if most is not None and most < ranks
    ]


def question(ranks: int, cpus: int) -> str:
    """What to ask before so many ranks start on so many cores; "" where it is not out of the ordinary."""
    if ranks <= RANKS_PER_CORE * cpus:
        return ""
    return (
        f"{ranks} ranks on {count(cpus, 'CPU core')} are {ranks // cpus} for each, and need {size(ranks * RANK_BYTES)} of memory "
        "before they do anything"
    )
