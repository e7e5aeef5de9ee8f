"""A rank's output on its way through an agent, without the agent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from skymagic.kernels.agent.logs import RankLog, Spans
from skymagic.kernels.agent.output import OutputFilter, RankScreen
from skymagic.wire.output import Output


def output_filter(
    rank: int,
    log: Path,
    pipes: dict[str, int],
    send: Callable[[Output], None] = lambda output: None,
    *,
    tell: Callable[[str], None] = print,
    spans: Spans | None = None,
    limit: int | None = None,
) -> OutputFilter:
    """From these pipes to this log and to what `send` does with output; `tell` gets sentences for the user."""
    return OutputFilter(
        RankLog(rank, log, spans or Spans(), limit, tell), RankScreen(rank, send), pipes
    )
