"""Output and resource use of ranks, as reported by their nodes."""

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
"""Seconds that a node has to send each megabyte of a log."""


def last_lines(agents: Agents, rank: int, lines: int) -> tuple[str, int]:
    """Return the last lines of a rank's log and the log's size in bytes.

    This also works for a rank that has ended.

    Raises:
        PoolError: its node did not answer. The functions below raise it too.
    """
    reply = _answer(agents, rank, lines=lines)
    return reply["text"], reply["end"]


def output_since(agents: Agents, rank: int, start: int, timeout: float) -> tuple[str, int]:
    """Return a rank's log from byte `start` on and where it ends.

    Wait for new output up to `timeout` seconds.
    """
    reply = agents.read_log(rank, timeout, start=start)
    return ("", start) if reply is None else (reply["text"], reply["end"])


def output_of_run(agents: Agents, rank: int, run: int) -> str | None:
    """Return a rank's output in a run, also while it runs; None if its node no longer knows the
    run.
    """
    replies = list(pieces(agents, rank, run))
    return "".join(piece["text"] for piece in replies) if replies[0]["known"] else None


def pieces(
    agents: Agents, rank: int, run: int, start: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a rank's output in a run, from byte `start`, in pieces of at most a megabyte.

    Each piece has ``text``, ``end``, ``known`` and ``over``.
    """
    more = True
    while more:
        reply = _answer(agents, rank, run=run, start=start)
        start, more = reply["end"], reply["more"]
        yield reply


def runs(agents: Agents, ranks: Sequence[int]) -> dict[int, int]:
    """Return run → its cell's number in its notebook; each rank's log has its last 1,000 runs."""
    cells = {run: cell for rank in ranks for run, cell in _answer(agents, rank, runs=True)["runs"]}
    return dict(sorted(cells.items()))


def _answer(agents: Agents, rank: int, **what: Any) -> dict[str, Any]:
    reply = agents.read_log(rank, TIMEOUT, **what)
    if reply is None:
        host = agents.ranks[rank].hostname
        raise PoolError(
            f"{host} did not send the log of rank {rank}: no answer within {TIMEOUT:.0f} s",
            code="no-log",
            rank=rank,
            host=host,
        )
    return reply


ANSWER_TIMEOUT = 1.0
"""Seconds that nodes have to answer; those that do not are left out."""
OLDEST = 60.0
"""Longest interval in seconds between two measurements whose mean still counts as a current
rate.
"""


class Meter:
    """Resource measurements of a pool's ranks.

    Args:
        agents: returns the current agents of the pool.
        devices: rank → the UUIDs of its GPUs, or their numbers on the machine.
    """

    def __init__(
        self, agents: Callable[[], Agents], devices: Callable[[int], Sequence[str]]
    ) -> None:
        self._agents, self._devices = agents, devices
        self._before: dict[int, tuple[float, float]] = {}
        """Rank → time of its last measurement (its node's clock), and its processor seconds
        then.
        """
        self._lock = threading.Lock()
        self.count = 0  # number of measurements made

    def measure(self) -> dict[int, RankUse]:
        """Return the resource use of each running rank whose node answers.

        Raises:
            PoolStateError: the pool has no agents.
        """
        with self._lock:
            self.count += 1
            agents = self._agents()
            devices = {rank: tuple(self._devices(rank)) for rank in agents.ranks}

            def message(ranks: tuple[int, ...], number: int) -> wire.AgentMessage:
                return wire.Measure(
                    ranks, {str(rank): devices[rank] for rank in ranks if devices[rank]}, number
                )

            uses: dict[int, RankUse] = {}
            for reply in agents.ask_nodes([*agents.ranks], message, ANSWER_TIMEOUT).values():
                uses |= self._uses(reply)
            return uses

    def _uses(self, reply: Mapping[str, Any]) -> dict[int, RankUse]:
        uses = {}
        for text, (seconds, memory, *gpu) in reply["ranks"].items():
            rank, now = int(text), (reply["at"], seconds)
            uses[rank] = RankUse(
                rate(self._before.get(rank), now), memory, reply["memory"] or math.nan, *gpu
            )
            self._before[rank] = now
        return uses


def rate(before: tuple[float, float] | None, now: tuple[float, float]) -> float:
    """Return the processors in use between two measurements.

    NaN without an earlier measurement, or if the rank's process was replaced in between.
    """
    if before is None or not 0 < now[0] - before[0] <= OLDEST or now[1] < before[1]:
        return math.nan
    return (now[1] - before[1]) / (now[0] - before[0])
