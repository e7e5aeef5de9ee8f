"""Output and resource use of ranks, as reported by their nodes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from skymagic.cluster.agents import Agents
from skymagic.display.panel import RankUse
from skymagic.errors import PoolError
from skymagic.wire import agent as wire

T = TypeVar("T")
TIMEOUT = 20.0
"""Seconds to wait for each megabyte of a log."""


def last_lines(agents: Agents, rank: int, lines: int) -> tuple[str, int]:
    """Return the last lines of a rank's log and the log's size in bytes.

    This also works for a rank that has ended.

    Raises:
        PoolError: its node did not answer. The functions below raise it too.
    """
    piece = _require_reply(
        agents, rank, agents.read_log(wire.ReadLog(rank, 0, lines=lines), TIMEOUT)
    )
    return piece.text, piece.end


def output_since(agents: Agents, rank: int, start: int, timeout: float) -> tuple[str, int]:
    """Return a rank's log from byte `start`, and the offset of its end.

    Wait for new output up to `timeout` seconds.
    """
    piece = agents.read_log(wire.ReadLog(rank, 0, start=start), timeout)
    return ("", start) if piece is None else (piece.text, piece.end)


def output_of_run(agents: Agents, rank: int, run: int) -> str | None:
    """Return a rank's output in a run, also while it runs; None if its node no longer knows the
    run.
    """
    replies = list(pieces(agents, rank, run))
    return "".join(piece.text for piece in replies) if replies[0].known else None


def pieces(
    agents: Agents, rank: int, run: int, start: int | None = None
) -> Iterator[wire.LogPiece]:
    """Yield a rank's output in a run, from byte `start`, in pieces of at most a megabyte."""
    more = True
    while more:
        request = wire.ReadLog(rank, 0, run=run, start=start)
        piece = _require_reply(agents, rank, agents.read_log(request, TIMEOUT))
        start, more = piece.end, piece.more
        yield piece


def runs(agents: Agents, ranks: Sequence[int]) -> dict[int, int]:
    """Return the cell number of each logged run, by run; a rank's log has its last 1,000 runs."""
    cells = {
        run: cell
        for rank in ranks
        for run, cell in _require_reply(agents, rank, agents.logged_runs(rank, TIMEOUT))
    }
    return dict(sorted(cells.items()))


def _require_reply(agents: Agents, rank: int, reply: T | None) -> T:
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
"""Seconds to wait for measurements; nodes that do not answer are left out."""
LONGEST_INTERVAL = 60.0
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
        self._previous: dict[int, tuple[float, float]] = {}
        """By rank: time of the last measurement on its node's clock, and CPU seconds then."""
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
                    ranks, {rank: devices[rank] for rank in ranks if devices[rank]}, number
                )

            uses: dict[int, RankUse] = {}
            for reply in agents.ask_nodes([*agents.ranks], message, ANSWER_TIMEOUT).values():
                uses |= self._uses(reply)
            return uses

    def _uses(self, reply: wire.Measurement) -> dict[int, RankUse]:
        uses = {}
        for rank, usage in reply.ranks.items():
            now = reply.at, usage.cpu_seconds
            uses[rank] = RankUse(
                rate(self._previous.get(rank), now),
                usage.memory,
                reply.memory or math.nan,
                *usage.gpu,
            )
            self._previous[rank] = now
        return uses


def rate(before: tuple[float, float] | None, now: tuple[float, float]) -> float:
    """Return the mean number of CPUs in use between two measurements.

    NaN without an earlier measurement, or if the rank's process was replaced in between.
    """
    if before is None or not 0 < now[0] - before[0] <= LONGEST_INTERVAL or now[1] < before[1]:
        return math.nan
    return (now[1] - before[1]) / (now[0] - before[0])
