"""Why a run is slow, in words: data loading that eats the steps, a memory near its limit, a GPU at rest. Pure.

What ranks say of themselves each second (`runtime.usage`) is held against limits; each reason is said once, with its ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from skymagic.plan.units import agreeing, rank_words

WINDOW_SECONDS = 10.0
"""Over which shares are taken while a run goes on."""
LOADING_SHARE = 0.2
"""Of a step, from which waiting for its batch is worth a word."""
LEAST_SECONDS = 1.0
"""Of steps that must be known for that."""
FULL = 0.95
"""Share of a memory in use that is near its limit."""
AT_REST = 0.1
"""Share of the time in which a GPU computes, below which it is at rest."""
REST_SECONDS = 10.0
"""For which it must be so: a step may begin with work on the processor."""


@dataclass(frozen=True)
class Usage:
    """What one rank says of itself at one moment.

    Attributes:
        seconds: since the cell began on that rank.
        node: where it is.
        waited, stepped: seconds of waiting for batches, of the seconds of the steps that took them, since the cell began.
        memory: share in use of its node's memory. held: the share that this rank's process has.
        gpu_memory, gpu_use: shares of its GPU's memory and time in use; NaN where there is none.
    """

    seconds: float
    node: float = 0.0
    waited: float = 0.0
    stepped: float = 0.0
    memory: float = 0.0
    held: float = 0.0
    gpu_memory: float = math.nan
    gpu_use: float = math.nan


Told = Mapping[int, Sequence[Usage]]
"""By rank what it has said, oldest first."""


def now(told: Told, ended: Iterable[int] = ()) -> list[str]:
    """Why a run is slow that goes on.

    Args:
        ended: ranks whose cell is over.
    """
    over = set(ended)
    recent = {rank: _recent(samples) for rank, samples in told.items() if samples and rank not in over}
    words = [_loading({rank: _share(samples[0], samples[-1]) for rank, samples in recent.items()}, "spends", "spend")]
    words.append(_full({rank: samples[-1] for rank, samples in recent.items()}, "is"))
    resting = [rank for rank, samples in told.items() if rank in recent and _rests(samples)]
    words.append(_gpus(resting, "is at rest", "are at rest"))
    words.append(_gpus([rank for rank, samples in recent.items() if samples[-1].gpu_memory >= FULL], *GPU_FULL))
    return [each for each in words if each]


GPU_FULL = ("has its memory full", "have their memory full")


def over(told: Told) -> list[str]:
    """Why a run was slow that has ended: over all of it."""
    all_of_it = {rank: samples for rank, samples in told.items() if samples}
    shares = {rank: _share(Usage(0.0), samples[-1]) for rank, samples in all_of_it.items()}
    peaks = {rank: max(samples, key=lambda one: one.memory) for rank, samples in all_of_it.items()}
    return [each for each in (_loading(shares, "spent", "spent"), _full(peaks, "was")) if each]


def _recent(samples: Sequence[Usage]) -> list[Usage]:
    """Those of the last seconds, with the one before them."""
    since = samples[-1].seconds - WINDOW_SECONDS
    first = next(index for index, one in enumerate(samples) if one.seconds >= since)
    before = samples[first - 1] if first else Usage(0.0)
    return [before, *samples[first:]]


def _share(first: Usage, last: Usage) -> float:
    """Of the steps between two samples, what was waiting for batches; 0 where too little is known."""
    seconds = last.stepped - first.stepped
    return (last.waited - first.waited) / seconds if seconds >= LEAST_SECONDS else 0.0


def _loading(shares: Mapping[int, float], one: str, several: str) -> str:
    slow = {rank: share for rank, share in shares.items() if share > LOADING_SHARE}
    if not slow:
        return ""
    low, high = round(100 * min(slow.values())), round(100 * max(slow.values()))
    verb = agreeing(len(slow), one, several)
    whose = agreeing(len(slow), "its", "their")
    return f"{rank_words(sorted(slow))} {verb} {low if low == high else f'{low}–{high}'}% of {whose} steps loading data"


def _full(newest: Mapping[int, Usage], verb: str) -> str:
    """Of the node that is fullest."""
    fullest = max((one.memory for one in newest.values()), default=0.0)
    if fullest < FULL:
        return ""
    node = next(one.node for one in newest.values() if one.memory == fullest)
    there = {rank: one for rank, one in newest.items() if one.node == node}
    most = max(there, key=lambda rank: there[rank].held)
    where = "memory" if len({one.node for one in newest.values()}) == 1 else f"memory of node {node:.0f}"
    return f"{where} {verb} {fullest:.0%} full, rank {most} holds the most ({there[most].held:.0%})"


def _rests(samples: Sequence[Usage]) -> bool:
    """Whether a GPU has not computed for a while, though its rank's cell goes on."""
    last = samples[-1].seconds
    recent = [one for one in samples if one.seconds >= last - REST_SECONDS]
    long_enough = last - samples[0].seconds >= REST_SECONDS and len(recent) > 1
    return long_enough and all(one.gpu_use < AT_REST for one in recent)


def _gpus(ranks: Sequence[int], one: str, several: str) -> str:
    if not ranks:
        return ""
    return f"{agreeing(len(ranks), 'the GPU', 'the GPUs')} of {rank_words(sorted(ranks))} {agreeing(len(ranks), one, several)}"
