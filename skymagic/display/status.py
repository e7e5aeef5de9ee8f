"""How pools are as an object: text as ``%sky_status`` prints it, HTML with a panel for each, and what is known of each rank; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

from skymagic.display import text
from skymagic.display.keyed import Keyed
from skymagic.display.panel import folded
from skymagic.display.use import RankUse, words


@dataclass(frozen=True)
class RankStatus:
    """How a rank is.

    Attributes:
        node: its number; host: that node's name; pid: of its process there.
        state: in a word: "ready", "running", "gone".
        use: what it uses; None where nobody has measured it.
    """

    rank: int
    node: object
    host: str
    pid: object
    state: str
    use: RankUse | None = None

    @property
    def row(self) -> tuple[object, ...]:
        """For a table: rank, node, host, process id, state."""
        return self.rank, self.node, self.host, self.pid, self.state


@dataclass(frozen=True, repr=False)
class PoolStatus(Keyed[int, RankStatus]):
    """How a pool is, by rank: ``status["main"][3].state``.

    Attributes:
        about: the pool in a line.
        ranks: all of them.
        panel: its HTML; "" where there is none.
    """

    about: str
    ranks: Mapping[int, RankStatus] = field(default_factory=dict)
    panel: str = ""

    @property
    def _held(self) -> Mapping[int, RankStatus]:
        return self.ranks

    @property
    def table(self) -> str:
        """Its ranks as text; of many, those of a node together."""
        use = {rank: words(one.use) for rank, one in self.ranks.items() if one.use is not None}
        return text.status([one.row for one in self.ranks.values()], use)

    def __repr__(self) -> str:
        return f"{self.about}\n{self.table}"

    def _repr_html_(self) -> str | None:
        return self.panel + folded("processes", self.table) if self.panel else None


@dataclass(frozen=True, repr=False)
class Status(Keyed[str, PoolStatus]):
    """How pools are, by name: ``%sky_status -o status``, ``status["main"]``.

    Attributes:
        notes: lines on pools that are no more, or are elsewhere.
    """

    pools: Mapping[str, PoolStatus] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def _held(self) -> Mapping[str, PoolStatus]:
        return self.pools

    def __repr__(self) -> str:
        return "\n\n".join([*map(repr, self.pools.values()), *self.notes])

    def _repr_html_(self) -> str | None:
        parts = [(repr(one), one._repr_html_()) for one in self.pools.values()]
        if not any(html for _, html in parts):
            return None
        return "".join(
            html or f"<div>{escape(words)}</div>" for words, html in [*parts, *((one, "") for one in self.notes)]
        )
