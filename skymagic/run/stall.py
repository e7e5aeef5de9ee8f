"""Stall detection: ranks whose stacks do not change between samples, some of them behind others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skymagic.display import text
from skymagic.plan.units import rank_words

BUSY_SHARE = 0.01
"""Share of the time between two samples which, on the processor, counts as work."""


class Stall:
    """A stall detector: samples stacks, and reports once that ranks make no progress. Pure: the caller brings stacks and time.

    Args:
        after: seconds without progress until it is told, once.
        now: monotonic seconds.
    """

    SAMPLES = 3
    """Samples in the time that must pass."""

    def __init__(self, after: float, now: float) -> None:
        self._after = after
        self._last: Mapping[int, Mapping[str, Any] | None] = {}
        self._since = now
        self._reported = False
        self.due: float | None = None
        self.schedule(now)

    def schedule(self, now: float) -> None:
        """Set the time of the next sample."""
        self.due = None if self._reported else now + self._after / self.SAMPLES

    def observe(self, ended: Sequence[int], stacks: Mapping[int, Mapping[str, Any] | None], now: float) -> str | None:
        """Take one sample; a line for the user when ranks have stood still for long enough.

        Args:
            ended: ranks whose cell is over.
            stacks: of all others, as ranks tell them: frames, and the number of collectives begun.
        """
        before, self._last = self._last, stacks
        if not before or not stand_still(before, stacks, BUSY_SHARE * self._after / self.SAMPLES):
            self._since = now
            return None
        begun = {rank: (stack or {}).get("collectives") for rank, stack in stacks.items()}
        counts = {count for count in begun.values() if count is not None}
        if now - self._since < self._after * (1 - 1 / self.SAMPLES) or not (ended or len(counts) > 1):
            return None
        self._reported = True
        behind = [rank for rank, count in begun.items() if counts and count == min(counts)] if len(counts) > 1 else []
        how = "ended" if ended else "is behind" if len(behind) == 1 else "are behind"
        first = f"[no progress for {now - self._since:.0f} s: {rank_words(ended or behind)} {how}]\n"
        return first + "".join(f"[  {line}]\n" for line in text.stacks(stacks).splitlines())


def stand_still(
    before: Mapping[int, Mapping[str, Any] | None], now: Mapping[int, Mapping[str, Any] | None], working: float
) -> bool:
    """Whether no rank got on between two samples: the same frames, and no time on the processor but for waiting in a collective.

    Args:
        working: seconds on the processor that count.
    """

    def same(one: Mapping[str, Any] | None, two: Mapping[str, Any] | None) -> bool:
        if one is None or two is None:
            return one is two
        if (one["frames"], one["collectives"]) != (two["frames"], two["collectives"]):
            return False
        waits = any("distributed" in str(frame.get("file")) for frame in two["frames"])
        return waits or two["cpu"] - one["cpu"] < working

    return before.keys() == now.keys() and all(same(before[rank], now[rank]) for rank in now)
