"""Where ranks are, and what their names hold: asked of their control threads, also while their cells run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skymagic.cluster import Agents

Stacks = dict[int, Mapping[str, Any] | None]


def stacks(agents: Agents, ranks: Sequence[int], timeout: float) -> Stacks:
    """Stacks of ranks: as their control threads tell, else as a signal handler does; None of those that do neither.

    Args:
        timeout: seconds for each of the two.
    """
    answers = agents.ask(ranks, "stacks", timeout=timeout)
    if silent := [rank for rank in ranks if answers.get(rank) is None]:
        answers |= agents.ask(silent, "native", timeout=timeout)
    return {rank: answers.get(rank) for rank in ranks}


def variables(agents: Agents, ranks: Sequence[int], timeout: float) -> dict[int, Mapping[str, Mapping[str, str]]]:
    """By rank and name what it holds: its type, size or shape, checksum; without ranks that did not answer in time."""
    answers = agents.ask(ranks, "variables", timeout=timeout)
    return {rank: names for rank, names in sorted(answers.items()) if names is not None}
