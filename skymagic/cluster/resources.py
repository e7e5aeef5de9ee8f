"""What ranks use, asked of their nodes: one message to each node, and processor time as a rate between two of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skymagic.cluster.agents import Agents
from skymagic.display.use import RankUse
from skymagic.wire import agent as wire

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

    def __init__(self, agents: Callable[[], Agents], devices: Callable[[int], Sequence[str]]) -> None:
        self._agents, self._devices = agents, devices
        self._before: dict[int, tuple[float, float]] = {}
        """By rank: when it was measured (its node's clock), and its processor seconds then."""
        self._lock = threading.Lock()
        self.count = 0
        """How many measurements were made."""

    def measure(self) -> dict[int, RankUse]:
        """What each rank uses that runs, and whose node answers. Raises PoolStateError where there are no agents."""
        with self._lock:
            self.count += 1
            agents = self._agents()
            devices = {rank: tuple(self._devices(rank)) for rank in agents.ranks}

            def message(ranks: tuple[int, ...], number: int) -> wire.AgentMessage:
                return wire.Measure(ranks, {str(rank): devices[rank] for rank in ranks if devices[rank]}, number)

            found: dict[int, RankUse] = {}
            for reply in agents.ask_nodes([*agents.ranks], message, ANSWER_TIMEOUT).values():
                found |= self._uses(reply)
            return found

    def _uses(self, reply: Mapping[str, Any]) -> dict[int, RankUse]:
        found = {}
        for text, (seconds, memory, *gpu) in reply["ranks"].items():
            rank, now = int(text), (reply["at"], seconds)
            found[rank] = RankUse(rate(self._before.get(rank), now), memory, reply["memory"] or math.nan, *gpu)
            self._before[rank] = now
        return found


def rate(before: tuple[float, float] | None, now: tuple[float, float]) -> float:
    """Processors in use between two measurements; NaN where there was none, or another process had the rank."""
    if before is None or not 0 < now[0] - before[0] <= OLDEST or now[1] < before[1]:
        return math.nan
    return (now[1] - before[1]) / (now[0] - before[0])
