"""Stacks of a pool's ranks, read while another notebook has the pool, even if its cell hangs.

Used by ``skymagic stacks`` and the MCP server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from skymagic.api import logs
from skymagic.display import inspection as display
from skymagic.jobs.inspection import TIMEOUT
from skymagic.plan.units import Selection
from skymagic.run import stall
from skymagic.wire.queries import Stack


@dataclass(frozen=True)
class Positions:
    """Stacks by rank, None for ranks that do not answer, and the states of ranks that are gone."""

    stacks: Mapping[int, Stack | None]
    states: Mapping[int, str]

    def text(self) -> str:
        """Return them as ``%sky_stacks`` shows them."""
        return display.stacks(self.stacks, self.states)

    def plain(self) -> dict[str, object]:
        """Return them as plain values for programs; the fields are stable across versions."""
        ranks: dict[str, object] = {
            str(rank): {"state": "does not answer"}
            if stack is None
            else {
                "state": "running" if stack.busy else "idle",
                "frames": [
                    {
                        "function": frame.name,
                        "line": frame.line,
                        "file": frame.file,
                        "cell": frame.cell,
                        "code": frame.code,
                    }
                    for frame in stack.frames
                ],
            }
            for rank, stack in self.stacks.items()
        }
        gone_ranks = {str(rank): {"state": state} for rank, state in self.states.items()}
        return {"ranks": ranks | gone_ranks}


def positions(name: str, ranks: Selection | None = None) -> Positions:
    """Read the stacks of a pool's ranks.

    Args:
        name: name or job id of the pool.
        ranks: ranks to ask; None for all.

    Raises:
        RequestError: the pool lacks these ranks.
        PoolError: no pool has this name, or a node cannot be reached.
    """
    with contextlib.closing(logs.open_reader(name)) as reader:
        selected = (
            tuple(range(reader.world_size)) if ranks is None else ranks.ranks(reader.world_size)
        )
        # the reader has waited for the states of all ranks: those that have ended cannot answer
        states = {rank: "gone" for rank in selected if reader.agents.ranks[rank].exited is not None}
        live_ranks = [rank for rank in selected if rank not in states]
        return Positions(stall.stacks_of(reader.agents, live_ranks, TIMEOUT), states)
