"""What ranks wrote and what they use, as their nodes tell it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from skymagic.cluster.agents import Agents
from skymagic.display.panel import RankUse
from skymagic.errors import PoolError
from skymagic.wire import agent as wire

TIMEOUT = 20.0
"""Seconds in which a node must tell each megabyte of a log."""


def last(agents: Agents, rank: int, lines: int) -> tuple[str, int]:
    """The last lines of a rank's log, and where it ended, in bytes; a rank that has ended has one too.

    Raises:
        PoolError: its node did not answer, as in all that follow.
    """
    found = _answer(agents, rank, lines=lines)
    return found["text"], found["end"]


def since(agents: Agents, rank: int, start: int, timeout: float) -> tuple[str, int]:
    """What a rank's log holds from byte `start` on, and where that ends; waits up to `timeout` seconds for it."""
    found = agents.read_log(rank, timeout, start=start)
    return ("", start) if found is None else (found["text"], found["end"])


def of_run(agents: Agents, rank: int, run: int) -> str | None:
    """What a rank wrote in a run, as its log has it, also while the run goes on; None where its node knows the run no more."""
    found = list(pieces(agents, rank, run))
    return "".join(piece["text"] for piece in found) if found[0]["known"] else None


def pieces(
    agents: Agents, rank: int, run: int, start: int | None = None
) -> Iterator[dict[str, Any]]:
    """What a rank wrote in a run, in pieces of a megabyte at most, from byte `start` on: each with ``text``, ``end``, ``known`` and ``over``."""
    more = True
    while more:
        found = _answer(agents, rank, run=run, start=start)
        start, more = found["end"], found["more"]
        yield found


def runs(agents: Agents, ranks: Sequence[int]) -> dict[int, int]:
    """Run → its cell's number in its notebook, of the runs that the logs of these ranks have; the last 1,000 of each."""
    found = {run: cell for rank in ranks for run, cell in _answer(agents, rank, runs=True)["runs"]}
    return dict(sorted(found.items()))


def _answer(agents: Agents, rank: int, **what: Any) -> dict[str, Any]:
    found = agents.read_log(rank, TIMEOUT, **what)
    if found is None:
        host = agents.ranks[rank].hostname
        raise PoolError(
            f"{host} did not send the log of rank {rank}: no answer within {TIMEOUT:.0f} s"
        )
    return found


ANSWER_TIMEOUT = 1.0
"""Seconds that nodes have to answer; those that do not are left out."""
OLDEST = 60.0
"""Seconds between two measurements beyond which their mean is no rate of now."""


class Meter:
    """The measurements of a pool's ranks.

    Args:
        agents: of the pool, as they are then.
        devices: by rank the UUIDs of the GPUs that it has, or their numbers as the machine counts them.
    """

    def __init__(
        self, agents: Callable[[], Agents], devices: Callable[[int], Sequence[str]]
    ) -> None:
        self._agents, self._devices = agents, devices
        self._before: dict[int, tuple[float, float]] = {}
        """By rank: when it was measured (its node's clock), and its processor seconds then."""
        self._lock = threading.Lock()
        self.count = 0  # how many measurements were made

    def measure(self) -> dict[int, RankUse]:
        """What each rank uses that runs, and whose node answers. Raises PoolStateError where there are no agents."""
        with self._lock:
            self.count += 1
            agents = self._agents()
            devices = {rank: tuple(self._devices(rank)) for rank in agents.ranks}

            def message(ranks: tuple[int, ...], number: int) -> wire.AgentMessage:
                return wire.Measure(
                    ranks, {str(rank): devices[rank] for rank in ranks if devices[rank]}, number
                )

            found: dict[int, RankUse] = {}
            for reply in agents.ask_nodes([*agents.ranks], message, ANSWER_TIMEOUT).values():
                found |= self._uses(reply)
            return found

    def _uses(self, reply: Mapping[str, Any]) -> dict[int, RankUse]:
        found = {}
        for text, (seconds, memory, *gpu) in reply["ranks"].items():
            rank, now = int(text), (reply["at"], seconds)
            found[rank] = RankUse(
                rate(self._before.get(rank), now), memory, reply["memory"] or math.nan, *gpu
            )
            self._before[rank] = now
        return found


def rate(before: tuple[float, float] | None, now: tuple[float, float]) -> float:
    """Processors in use between two measurements; NaN where there was none, or another process had the rank."""
    if before is None or not 0 < now[0] - before[0] <= OLDEST or now[1] < before[1]:
        return math.nan
    return (now[1] - before[1]) / (now[0] - before[0])
