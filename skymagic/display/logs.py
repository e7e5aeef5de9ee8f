"""What ranks wrote as an object: text as ``%sky_logs`` prints it, and HTML with a part for each rank; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skymagic.display.keyed import Keyed
from skymagic.display.panel import folded
from skymagic.plan.units import count


@dataclass(frozen=True, repr=False)
class Logs(Keyed[int, str]):
    """By rank the lines that were asked for, a bar as it was last: ``logs[3]`` is rank 3's text.

    Attributes:
        lines: of each rank.
    """

    lines: Mapping[int, Sequence[str]] = field(default_factory=dict)

    @property
    def _held(self) -> Mapping[int, Sequence[str]]:
        return self.lines

    def __getitem__(self, rank: int) -> str:
        return "\n".join(self.lines[rank])

    def _repr_html_(self) -> str:
        return "".join(
            folded(f"rank {rank} · {count(len(some), 'line')}", self[rank], opened=len(self) == 1)
            for rank, some in self.lines.items()
        )

    def __repr__(self) -> str:
        many = len(self) > 1
        return "\n".join(f"[{rank}] {line}" if many else line for rank, some in self.lines.items() for line in some)
